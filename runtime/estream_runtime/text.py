"""Text to tokens and back, the way a terminal needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from estream_loader.package import Package
from estream_loader.tokenizing import tokenizer_faults
from estream_spec.errors import TrapError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_REPLACEMENT: Final = "\ufffd"
"""What bytes decode to that are not, or not yet, a character."""
_UNFINISHED: Final = 3
"""Replacement characters that the bytes of an unfinished character decode to, at most."""


def encode_prompt(package: Package, text: str) -> list[int]:
    """A text as the model wants it at the start of its context.

    Raises:
        LinkError: the package has no tokenizer, or it fails.
        TrapError: the text cannot be written as UTF-8.
    """
    return _prompt(package, text)[0]


def encode_scored(package: Package, text: str) -> tuple[list[int], int]:
    """A text as a prompt, and the bytes of UTF-8 that all of its tokens but the first stand for.

    Of a character that the first and the second token share, all bytes are counted. Raises as `encode_prompt` does.
    """
    token_ids, spans = _prompt(package, text)
    return token_ids, len(text[min(spans[0][1], spans[1][0]) :].encode()) if len(spans) > 1 else 0


def encode_continuation(package: Package, text: str) -> list[int]:
    """A text that follows another one; nothing is put before it. Raises as `encode_prompt` does."""
    return list(_encode(package, text, add_special_tokens=False).ids)


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
        with tokenizer_faults("tokenizer"):
            before = self._tokenizer.decode(self._context)
            text: str = self._tokenizer.decode(self._context + self._held)
        return text[len(before) :]


def _prompt(package: Package, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and for each the characters it stands for, first and last plus one."""
    encoding = _encode(package, text)
    token_ids, spans = list(encoding.ids), list(encoding.offsets)
    begin = package.manifest.model.begin_token
    if begin is None or token_ids[:1] == [begin]:
        return token_ids, spans
    return [begin, *token_ids], [(0, 0), *spans]


def _encode(package: Package, text: str, *, add_special_tokens: bool = True) -> Encoding:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TrapError(f"text is not valid UTF-8 from character {error.start} on") from None
    tokenizer = package.tokenizer
    with tokenizer_faults(package.source.name):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
