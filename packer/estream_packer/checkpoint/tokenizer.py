"""The tokenizer of a checkpoint as one `tokenizer.json`, which gives the ids that transformers gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from estream_loader.tokenizing import tokenizer_faults, tokenizer_text
from estream_packer.checkpoint.sentencepiece_conversion import HINT, convert_sentencepiece
from estream_packer.checkpoint.special_tokens import NAMES, SpecialTokens, add_missing, put_around, shown
from estream_spec.errors import PackError

_CLASSES: Final = (None, "LlamaTokenizer", "LlamaTokenizerFast")
"""Values of `tokenizer_class` that say how a `tokenizer.model` is used."""
_NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""What these classes take where nothing is said."""


def completed_json(data: bytes, tokens: SpecialTokens, path: str) -> bytes:
    """A `tokenizer.json` with the tokens that other documents add.

    Where it has them already it stays as it is to the last byte. What begins and ends a text is its own business, which
    `add_bos_token` and `add_eos_token` change nothing of.

    Raises:
        PackError: the tokenizer cannot be read, or they do not fit it.
    """
    if not tokens.added and not tokens.named:
        return data
    from tokenizers import Tokenizer

    with tokenizer_faults(path, PackError):
        tokenizer = Tokenizer.from_str(tokenizer_text(data, path, PackError))
        return tokenizer.to_str().encode() if add_missing(tokenizer, tokens, path) else data


def converted_json(data: bytes, tokens: SpecialTokens, path: str) -> bytes:
    """A SentencePiece model as `tokenizer.json`, see `convert_sentencepiece`.

    Texts begin with the begin token unless `add_bos_token` is false, and end with the end token if `add_eos_token` is
    true.

    Raises:
        PackError: it cannot be converted exactly, or the other documents do not fit it.
    """
    settings = tokens.settings
    name = settings.get("tokenizer_class")
    if name not in _CLASSES or settings.get("auto_map") is not None:
        found = f"tokenizer_class {shown(name)}" if name not in _CLASSES else "a tokenizer with code of its own"
        raise PackError(f"{found} is not known to use a SentencePiece model as it is", path=path, hint=HINT)
    if settings.get("add_prefix_space") is False:
        raise PackError("add_prefix_space is false, which the model itself must say", path=path, hint=HINT)
    tokens = replace(tokens, named=_NAMED | dict(tokens.named))
    before = None if settings.get("add_bos_token") is False else tokens.named["bos_token"]
    after = tokens.named["eos_token"] if settings.get("add_eos_token") is True else None
    tokenizer = convert_sentencepiece(data, path, prefix_once=settings.get("legacy") is not True)
    with tokenizer_faults(path, PackError):
        add_missing(tokenizer, tokens, path)
        put_around(tokenizer, before, after, path)
        return tokenizer.to_str().encode()


def with_tokens_set(template: str, tokens: SpecialTokens) -> str:
    """A chat template that itself sets the special tokens it names, so that a package needs nothing beside it.

    The line this puts before it leaves no trace in what is rendered: the line break behind a block is dropped.
    """
    named = {name: text for name, text in tokens.named.items() if name in NAMES and name in template}
    blocks = (f"{{% set {name} = {_literal(text)} %}}" for name, text in named.items())
    return f"{''.join(blocks)}\n{template}" if named else template


def _literal(text: str) -> str:
    """A text as Jinja writes it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"
