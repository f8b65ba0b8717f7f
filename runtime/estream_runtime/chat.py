"""Conversations as the text a model was trained on, by the chat template of a package.

with open_package("model.emoe") as package:
    prompt = chat_template_of(package).render([{"role": "user", "content": "Hello!"}])
    token_ids = encode_continuation(package, prompt)  # begin and end tokens are the template's business
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError

from estream_loader.package import Package
from estream_runtime.budget import Budget
from estream_runtime.sandbox import MAX_MESSAGE, Sandbox
from estream_spec.errors import LinkError, TrapError

Message = Mapping[str, Any]
"""One message: at least `role` and `content`; what else it may have is up to the template."""
MAX_LENGTH: Final = 1 << 16
"""Characters of a template. Published ones have less than half."""
_TOKENS_SET: Final = re.compile(r"(\{% set [a-z]+_token = '[^\n]*' %\})+\n")
"""The line that a packer puts before a template; faults are told by the lines of the template as it was published."""


class ChatTemplate:
    """A Jinja template as transformers renders it, in a sandbox and with a limit to its steps.

    Not for several threads at a time.

    Args:
        text: the template; the special tokens it names are set in it, or given to `render`.

    Raises:
        LinkError: it cannot be understood.
    """

    def __init__(self, text: str):
        if len(text) > MAX_LENGTH:
            raise LinkError(f"the chat template has {len(text)} characters, expected at most {MAX_LENGTH}")
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(text)
        except TrapError:
            raise
        except Exception as error:
            before = 1 if _TOKENS_SET.match(text) else 0
            line = f" (line {error.lineno - before})" if isinstance(error, TemplateSyntaxError) else ""
            raise LinkError(f"the chat template cannot be used: {_said(error)}{line}") from None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that stands for a conversation.

        Encode it without adding begin and end tokens, since those are part of it.

        Args:
            messages: the conversation, oldest first, of plain values as JSON has them.
            add_generation_prompt: end with what comes before an answer.
            tools: functions the model may call, each as a JSON schema.
            variables: what else this template knows, such as `enable_thinking`.

        Raises:
            TrapError: the template does not take the conversation, fails, or takes too many steps.
        """
        self._sandbox.budget = Budget()
        given = {"messages": messages, "tools": tools, "documents": None, **variables}
        try:
            return self._template.render(**given, add_generation_prompt=add_generation_prompt)
        except TrapError:
            raise
        except RecursionError:
            raise TrapError("the chat template nests too deeply") from None
        except Exception as error:
            raise TrapError(f"the chat template cannot be rendered: {_said(error)}") from None


def chat_template_of(package: Package) -> ChatTemplate:
    """The chat template of a package.

    Raises:
        LinkError: it has none, or one that cannot be understood.
    """
    if package.chat_template is None:
        hint = "the model was not trained to chat, or its checkpoint says no word about how; see 'estream-run generate'"
        raise LinkError("the package has no chat template", path=package.source.name, hint=hint)
    return ChatTemplate(package.chat_template.decode())


def _said(error: Exception) -> str:
    """What the library says of a fault, and what kind it is where that is not clear."""
    text = (
        error.message if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    ) or "no reason given"
    return text[:MAX_MESSAGE].rstrip(".")
