"""The one place where the packer runs a model, to see how far a package is from another, or asks what could run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from estream_loader import Package
from estream_loader.progress import Progress, open_progress
from estream_runtime.chat import ChatTemplate
from estream_runtime.device import facts_here, facts_of_chip, weights_memory
from estream_runtime.evaluation import Comparison, compare, read_text, token_log_likelihoods
from estream_runtime.interpreter import OnLayer
from estream_runtime.observing import Observe, open_observed
from estream_runtime.routing import preferences
from estream_runtime.session import Session
from estream_runtime.text import encode_prompt
from estream_spec.errors import EmoeError

__all__ = [
    "Comparison",
    "chat_template_fault",
    "encode_prompt",
    "facts_here",
    "facts_of_chip",
    "measure_quality",
    "observe_layers",
    "observe_text",
    "preferences",
    "read_text",
    "weights_memory",
]

PROBE = [{"role": "user", "content": "Hello!"}]
"""A conversation that every chat template must be able to say."""
WINDOW = 512
"""Tokens in a window, at most."""


def chat_template_fault(text: str) -> str | None:
    """Why a chat template cannot be used; None where it can."""
    try:
        ChatTemplate(text).render(PROBE)
    except EmoeError as error:
        return error.message
    return None


def measure_quality(reference: Package, packages: Sequence[Package], text: str, tokens: int) -> list[Comparison]:
    """Run packages of one model over a text; a progress bar shows on a terminal.

    Args:
        reference: the unquantised package.
        packages: the packages to be judged.
        text: what all predict.
        tokens: how much of the text is used, at most.

    Raises:
        LinkError: the reference has no tokenizer.
        TrapError: a text of fewer than two tokens, or a value that is not finite.
    """
    token_ids = encode_prompt(reference, text)[:tokens]
    window = min(WINDOW, reference.manifest.model.context_length)
    with ExitStack() as stack:
        expected, *found = (stack.enter_context(Session(each)) for each in (reference, *packages))
        progress = stack.enter_context(open_progress("tokens"))
        progress.begin("comparing", len(packages) * max(len(token_ids) - 1, 0))
        return compare(expected, found, token_ids, window, progress.advance)


def observe_text(package: Package, text: str, tokens: int, observe: Observe, progress: Progress) -> int:
    """Run a package over a text and tell what enters each product with a matrix.

    Args:
        package: a package with f32 activations.
        text: what it reads.
        tokens: how much of the text is used, at most.
        observe: told of each graph that ran.
        progress: told how far it is, in bytes of the text.

    Returns:
        Tokens used, of which the last is only predicted.

    Raises:
        LinkError: the package has no tokenizer.
        TrapError: a text of fewer than two tokens, or a value that is not finite.
    """
    token_ids = encode_prompt(package, text)[:tokens]
    window, length = min(WINDOW, package.manifest.model.context_length), len(text.encode())
    progress.begin("calibrating", length)
    with open_observed(package, observe) as session:
        token_log_likelihoods(
            session, token_ids, window, lambda count: progress.advance(count * length // len(token_ids))
        )
    return len(token_ids)


def observe_layers(
    package: Package, windows: Sequence[Sequence[int]], observe: OnLayer, advance: Callable[[int], None]
) -> None:
    """Run a package over windows of tokens and tell what enters each layer, and what its router says.

    Args:
        package: an open package.
        windows: token ids, each window with nothing before it.
        observe: told of each layer that is routed; disregard it if this raises.
        advance: told of the tokens of each window.

    Raises:
        TrapError: a value that is not finite.
        FormatError: the package is faulty.
    """
    with Session(package) as session:
        session.interpreter.on_layer = observe
        for window in windows:
            session.hidden_rows(window)
            advance(len(window))
