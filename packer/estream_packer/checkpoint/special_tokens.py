"""The special and added tokens that a checkpoint names beside its tokenizer, and a tokenizer completed by them.

Tokens are known from up to three documents: `tokenizer_config.json`, and where that has no `added_tokens_decoder`, as
in older checkpoints, also `special_tokens_map.json` and `added_tokens.json`. Rules are those of transformers 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from estream_loader.tokenizing import LONGEST_TOKEN, tokenizer_faults
from estream_spec.errors import PackError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of the special tokens that have a name, which chat templates use as well."""
_FLAGS: Final = {"special": False, "lstrip": False, "rstrip": False, "single_word": False}
"""Properties of an added token, with what they are where nothing is said."""
_MOST: Final = 1 << 18
"""Added tokens; models of speech have tens of thousands."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_DIGITS: Final = 10
"""Of an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What the documents say.

    Attributes:
        named: the text of the special tokens that have a name, such as `bos_token`.
        added: tokens that the tokenizer must have, by id.
        settings: `tokenizer_config.json`, with what else it says.
    """

    named: Mapping[str, str]
    added: Mapping[int, AddedToken]
    settings: Mapping[str, object]


def read_special_tokens(
    settings: Mapping[str, object], special: Mapping[str, object], added: Mapping[str, object], path: str
) -> SpecialTokens:
    """What three documents say together.

    Args:
        settings: `tokenizer_config.json`; empty where there is none.
        special: `special_tokens_map.json`; likewise.
        added: `added_tokens.json`; likewise.
        path: the checkpoint's folder.

    Raises:
        PackError: a value is not of the kind it must be.
    """
    place = f"{path}: {TOKENIZER_CONFIG}"
    decoder = settings.get("added_tokens_decoder")
    given = settings if decoder is not None else {**settings, **special}
    named = {name: text for name in NAMES if (text := _text(given.get(name), name, place)) is not None}
    return SpecialTokens(
        named=named,
        added=_decoder(decoder, place) if decoder is not None else _older(added, {*named.values()}, path),
        settings=settings,
    )


def add_missing(tokenizer: Tokenizer, tokens: SpecialTokens, path: str) -> bool:
    """Give a tokenizer the tokens it lacks; those that have a name and are in its vocabulary become special.

    Returns:
        Whether it lacked any.

    Raises:
        PackError: a token cannot have the id it must have.
    """
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    size = tokenizer.get_vocab_size()
    new: dict[str, int] = {}
    lacked = []
    for number, token in sorted(tokens.added.items()):
        found = new.get(token.content, tokenizer.token_to_id(token.content))
        expected = size + len(new) if found is None else found
        if number != expected:
            what = f"would have id {expected}" if found is None else f"has id {found} in the tokenizer"
            raise PackError(f"added token {shown(token.content)} has id {number}, but {what}", path=path)
        if found is None:
            new[token.content] = number
        if token.content not in known:
            lacked.append(token)
    # All at once: the library goes through all it has whenever it is given some.
    tokenizer.add_tokens(lacked)
    known |= {token.content for token in tokens.added.values()}
    named = [text for text in tokens.named.values() if text not in known and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in named])
    return bool(lacked or named)


def put_around(tokenizer: Tokenizer, before: str | None, after: str | None, path: str) -> None:
    """Let a tokenizer begin and end each text with a token; None leaves one out.

    Raises:
        PackError: it knows no such token.
    """
    from tokenizers.processors import TemplateProcessing

    first, last = ([] if text is None else [text] for text in (before, after))
    numbers = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((*first, *last))]
    for text, number in numbers:
        if number is None:
            raise PackError(f"token {shown(text)} is to be added to texts and is not known to the tokenizer", path=path)
    single, second = [*first, "$A", *last], [f"{text}:1" for text in (*first, "$B", *last)]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=[*single, *second], special_tokens=numbers)


def _decoder(found: object, place: str) -> dict[int, AddedToken]:
    """The tokens of `added_tokens_decoder`."""
    from tokenizers import AddedToken

    place = f"{place}: added_tokens_decoder"
    if not isinstance(found, dict):
        raise PackError(f"found {type(found).__name__}, expected an object", path=place)
    _check_count(found, place)
    tokens = {}
    for number, token in found.items():
        content = _text(token, number, place)
        is_id = number.isascii() and number.isdigit() and len(number) <= _DIGITS
        if content is None or not isinstance(token, dict) or not is_id:
            what = f"entry {shown(number)} is {shown(token)}, expected an id of at most {_DIGITS} digits and its token"
            raise PackError(what, path=place)
        flags: dict[str, Any] = {name: bool(token.get(name, default)) for name, default in _FLAGS.items()}
        normalized = bool(token.get("normalized", not flags["special"]))
        with tokenizer_faults(place, PackError):
            tokens[int(number)] = AddedToken(content, **flags, normalized=normalized)
    return tokens


def _older(added: Mapping[str, object], special: set[str], path: str) -> dict[int, AddedToken]:
    """The tokens of `added_tokens.json`; those that have a name are special."""
    from tokenizers import AddedToken

    place = f"{path}: added_tokens.json"
    _check_count(added, place)
    tokens = {}
    for text, number in added.items():
        if type(number) is not int or not 0 <= number < 10**_DIGITS:
            what = f"token {shown(text)} is {shown(number)}, expected an id of at most {_DIGITS} digits"
            raise PackError(what, path=place)
        _text(text, "a token", place)
        with tokenizer_faults(place, PackError):
            tokens[number] = AddedToken(text, special=text in special, normalized=text not in special)
    return tokens


def _check_count(tokens: Mapping[str, object], place: str) -> None:
    if len(tokens) > _MOST:
        raise PackError(f"found {len(tokens)} added tokens, expected at most {_MOST}", path=place)


def _text(value: object, name: str, place: str) -> str | None:
    """The text of a token that is written as such, or as an object with its properties."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is None:
        return None
    # A surrogate is no character: it cannot be written as UTF-8.
    if isinstance(content, str) and 0 < len(content) <= LONGEST_TOKEN and not _SURROGATE.search(content):
        return content
    what = f"the text of a token, 1 to {LONGEST_TOKEN} characters without surrogates"
    raise PackError(f"{name[:32]} is {shown(value)}, expected {what}", path=place)


def shown(value: object) -> str:
    """A value as Python writes it, in a message: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
