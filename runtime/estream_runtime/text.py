"""Text to tokens and back, the way a terminal needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from estream_loader.package import Package
from estream_spec.errors import TrapError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT: Final = "\ufffd"
"""What bytes decode to that are not, or not yet, a character."""
_UNFINISHED: Final = 3
"""Replacement characters that the bytes of an unfinished character decode to, at most."""


def encode_prompt(package: Package, text: str) -> list[int]:
    """A text as the model wants it at the start of its context.

    Raises:
        LinkError: the package has no tokenizer.
        TrapError: the text cannot be written as UTF-8.
    """
    _check_encodable(text)
    token_ids = list(package.tokenizer.encode(text).ids)
    begin = package.manifest.model.begin_token
    return token_ids if begin is None or token_ids[:1] == [begin] else [begin, *token_ids]


def encode_continuation(package: Package, text: str) -> list[int]:
    """A text that follows another one; nothing is put before it. Raises as `encode_prompt` does."""
    _check_encodable(text)
    return list(package.tokenizer.encode(text, add_special_tokens=False).ids)


class TextStream:
    """Turns tokens into text as they come, a character only when all of its bytes are there.

    Args:
        tokenizer: the tokenizer.
        before: tokens before the first one; some tokenizers write a token differently where a text begins.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context, self._held = list(before[-1:]), list[int]()
        self._shown = 0
        """Characters of the held tokens that have been given out."""

    def push(self, token: int) -> str:
        """What can be shown after one more token."""
        self._held.append(token)
        text = self._text()
        begin, end = self._shown, len(text)
        while end > begin and text[end - 1] == _REPLACEMENT and len(text) - end < _UNFINISHED:
            end -= 1
        self._shown = end
        if not text.endswith(_REPLACEMENT):
            self._context, self._held, self._shown = self._held, [], 0
        return text[begin:end]

    def finish(self) -> str:
        """What is left at the end."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        """The held tokens decoded where they stand."""
        decode = self._tokenizer.decode
        return decode(self._context + self._held)[len(decode(self._context)) :]


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TrapError(f"text is not valid UTF-8 from character {error.start} on") from None
