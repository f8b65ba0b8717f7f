"""A tokenizer whose tokens the library could not take without overflowing its stack is refused before it sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from estream_loader.tokenizing import LONGEST_TOKEN, tokenizer_faults, tokenizer_text
from estream_packer.checkpoint import open_checkpoint
from estream_packer.families.weights import tokenizer_size
from estream_spec.errors import LinkError, PackError
from fixtures.olmoe import write_checkpoint

LONG = "\U0001f642" * LONGEST_TOKEN


def read_tokenizer(data: bytes) -> Tokenizer:
    with tokenizer_faults("p"):
        return Tokenizer.from_str(tokenizer_text(data, "p"))


def unigram(piece: str) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], [piece, -2.0]]}


def document(model: dict[str, Any], *added: str) -> str:
    tokens = [{"id": number, "content": text} for number, text in enumerate(added, 2)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return json.dumps({"version": "1.0", "added_tokens": [token | flags for token in tokens], "model": model})


def test_the_longest_token_is_read() -> None:
    tokenizer = read_tokenizer(document(unigram(LONG)).encode())
    assert tokenizer.encode(LONG).ids == [1]
    assert read_tokenizer(document(unigram("a"), LONG).encode()).encode(LONG).ids == [2]


def test_merges_of_long_tokens_are_read() -> None:
    half = LONG[: LONGEST_TOKEN // 2]
    model = {"type": "BPE", "vocab": {half: 0, LONG: 1}, "merges": [f"{half} {half}"]}
    assert read_tokenizer(document(model).encode()).get_vocab_size() == 2


@pytest.mark.parametrize(
    "text",
    [
        document(unigram(LONG + "a")),
        document(unigram("a"), LONG + "a"),
        document({"type": "WordLevel", "vocab": {LONG + "a": 0}, "unk_token": "a"}),
        document(unigram("a")).replace('"model"', f'"model": {json.dumps(unigram(LONG + "a"))}, "model"'),
        document(unigram("a")).replace('"vocab"', f'"vocab": [["{LONG}a", 0]], "vocab"'),
        document(unigram(LONG + "a")).replace("vocab", "voca\\u0062"),
        f'["{LONG}a"]',
    ],
)
def test_longer_tokens_are_refused(text: str) -> None:
    with pytest.raises(LinkError, match="has 4097 characters, expected at most 4096") as caught:
        read_tokenizer(text.encode())
    assert len(str(caught.value)) < 200
    with pytest.raises(PackError, match="has 4097 characters, expected at most 4096"):
        tokenizer_size(text.encode())


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "7", '{"model": ' + "9" * 5000 + "}", "{}"])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(LinkError, match="the tokenizer cannot be used"):
        read_tokenizer(text.encode())


def test_a_checkpoint_with_longer_tokens_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "base")
    (tmp_path / "tokenizer.json").write_text(document(unigram(LONG + "a")))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(PackError, match="has 4097 characters"), open_checkpoint(tmp_path):
        pass
