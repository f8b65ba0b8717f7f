"""A checkpoint that has only a SentencePiece model is packed with a tokenizer that gives SentencePiece's own ids."""

from __future__ import annotations

import io
import json
import math
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.checkpoint import open_checkpoint, sentencepiece_model
from estream_packer.checkpoint.sentencepiece_conversion import convert_sentencepiece
from estream_packer.checkpoint.sentencepiece_model import read_model
from estream_packer.sample import sample_files
from estream_runtime.text import encode_prompt
from estream_spec.errors import PackError
from fixtures.olmoe import write_checkpoint
from fixtures.texts import ODD, of_all_categories

LLAMA: Final[dict[str, Any]] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "remove_extra_whitespaces": False,
}
"""How the models of Llama and Mixtral were trained."""
KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama": LLAMA,
    "without a prefix": {**LLAMA, "add_dummy_prefix": False},
    "pieces of users": {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["\u2581\u2581", "<|x|>", "then"]},
    "without bytes": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "required_chars": "<>0123456789xABCDEF"},
}
WORDS: Final = ("the", " ", "  ", " of", "then", "e", "a", "\n", "\u2581", "<|x|>", "<0x41>", "7")
SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def train(**options: Any) -> bytes:
    """A model file."""
    lines = (sample_files() / "held-out.txt").read_text(encoding="utf-8").splitlines()[:500]
    written = io.BytesIO()
    given = {"vocab_size": 400, "normalization_rule_name": "identity", "num_threads": 1, "minloglevel": 2, **options}
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **given)
    return written.getvalue()


@pytest.fixture(scope="module")
def llama() -> bytes:
    return train(**LLAMA)


def checkpoint(folder: Path, model: bytes, **documents: Mapping[str, object]) -> Path:
    """A checkpoint without `tokenizer.json`."""
    write_checkpoint(folder, "base")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def tokenizer_of(folder: Path) -> Tokenizer:
    with open_checkpoint(folder) as opened:
        assert opened.tokenizer is not None
        return Tokenizer.from_str(opened.tokenizer.decode())


def refusal(folder: Path) -> PackError:
    with pytest.raises(PackError) as caught, open_checkpoint(folder):
        pass
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(kind: str) -> None:
    model = train(**KINDS[kind])
    original, converted = (
        SentencePieceProcessor(model_proto=model),
        convert_sentencepiece(model, kind, prefix_once=False),
    )
    texts = [*ODD, *of_all_categories(WORDS, 500)]
    assert len(texts) > 500
    for text in texts:
        ids = converted.encode(text).ids
        assert ids == original.encode(text), text
        if original.unk_id() not in ids:
            assert converted.decode(ids) == original.decode(ids)


def test_a_prefix_before_the_first_token_only(llama: bytes) -> None:
    original, converted = SentencePieceProcessor(model_proto=llama), convert_sentencepiece(llama, "", prefix_once=True)
    always = convert_sentencepiece(llama, "", prefix_once=False)
    for text in of_all_categories(WORDS, 100):
        assert converted.encode(text).ids == original.encode(text), text
    end = original.eos_id()
    assert always.encode("a</s>a").ids == [*original.encode("a"), end, *original.encode("a")]
    assert converted.encode("a</s>a").ids == [*original.encode("a"), end, original.piece_to_id("a")]


def test_a_checkpoint_is_packed_with_it(tmp_path: Path) -> None:
    model = train(model_type="bpe", vocab_size=200, remove_extra_whitespaces=False)
    folder = checkpoint(tmp_path / "checkpoint", model, tokenizer_config={"add_bos_token": True, **SPECIAL})
    build(folder, tmp_path / "model.emoe")
    with open_package(tmp_path / "model.emoe") as package:
        original = SentencePieceProcessor(model_proto=model)
        assert encode_prompt(package, "in the end") == [original.bos_id(), *original.encode("in the end")]
        assert "tokenizer.model" in {source.name for source in package.manifest.provenance.sources}


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, ["<s>"], []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, [], []),
        ({"add_eos_token": True}, ["<s>"], ["</s>"]),
        ({"bos_token": {"content": "</s>"}, "add_bos_token": None}, ["</s>"], []),
    ],
)
def test_tokens_around_a_text(
    settings: dict[str, object], before: list[str], after: list[str], llama: bytes, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(checkpoint(tmp_path, llama, tokenizer_config=settings))
    assert tokenizer.encode("").tokens == [*before, *after]
    assert tokenizer.encode("the").tokens == [*before, "\u2581the", *after]


def test_added_tokens_of_the_configuration(llama: bytes, tmp_path: Path) -> None:
    size = SentencePieceProcessor(model_proto=llama).get_piece_size()
    added = {
        "1": {"content": "<s>", "special": True, "normalized": False},
        str(size): {"content": "<|end|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "wort", "single_word": True},
    }
    tokenizer = tokenizer_of(checkpoint(tmp_path, llama, tokenizer_config={"added_tokens_decoder": added}))
    assert tokenizer.encode("<|end|>  wort", add_special_tokens=False).ids == [size, size + 1]
    assert size + 1 not in tokenizer.encode("worte").ids
    assert tokenizer.decode([size]) == ""


def test_added_tokens_of_older_checkpoints(llama: bytes, tmp_path: Path) -> None:
    size = SentencePieceProcessor(model_proto=llama).get_piece_size()
    documents: dict[str, Mapping[str, object]] = {
        "added_tokens": {"<|end|>": size, "wort": size + 1},
        "special_tokens_map": {"eos_token": {"content": "<|end|>"}},
        "tokenizer_config": {"add_eos_token": True},
    }
    tokenizer = tokenizer_of(checkpoint(tmp_path, llama, **documents))
    assert tokenizer.encode("a").tokens == ["<s>", "\u2581a", "<|end|>"]
    assert tokenizer.decode([size, size + 1]) == "wort"


def test_special_tokens_of_a_tokenizer_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "base")
    plain = (tmp_path / "tokenizer.json").read_bytes()
    known = {"eos_token": "<|endoftext|>", "bos_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    with open_checkpoint(tmp_path) as opened:
        assert opened.tokenizer == plain
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    assert tokenizer_of(tmp_path).encode("thethe").tokens == ["the", "the"]
    assert tokenizer_of(tmp_path).decode(tokenizer_of(tmp_path).encode("the").ids) == ""
    added = {"260": {"content": "<|end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert tokenizer_of(tmp_path).encode("<|end|>").ids == [260]


def test_tokenizer_json_comes_before_a_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "base")
    (tmp_path / "tokenizer.model").write_bytes(b"never read")
    with open_checkpoint(tmp_path) as opened:
        assert opened.tokenizer == (tmp_path / "tokenizer.json").read_bytes()
        assert "tokenizer.model" not in {source.name for source in opened.sources()}


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"model_type": "char"}, {}, "splits by CHAR"),
        ({"model_type": "word"}, {}, "splits by WORD"),
        ({"normalization_rule_name": "nmt_nfkc"}, {}, "replaces characters by the rules 'nmt_nfkc'"),
        ({"treat_whitespace_as_suffix": True}, {}, "words end with their space"),
        ({**LLAMA, "user_defined_symbols": ["<|x|>"]}, {}, "has pieces of users, and puts a space before texts"),
        ({}, {}, "drops spaces, and puts one before the first token only"),
        ({"model_type": "unigram", "byte_fallback": True}, {"legacy": True}, "'<0x00>' would be split differently"),
        (LLAMA, {"tokenizer_class": "T5Tokenizer"}, "tokenizer_class 'T5Tokenizer' is not known to use"),
        (LLAMA, {"auto_map": {"AutoTokenizer": ["a.B", None]}}, "a tokenizer with code of its own is not known to use"),
        (LLAMA, {"add_prefix_space": False}, "add_prefix_space is false"),
        (LLAMA, {"bos_token": "<none>"}, "token '<none>' is to be added to texts and is not known"),
        (LLAMA, {"bos_token": 7}, "bos_token is 7, expected the text of a token"),
        (LLAMA, {"added_tokens_decoder": {"999": {"content": "<|x|>"}}}, "'<|x|>' has id 999, but would have id 400"),
        (LLAMA, {"added_tokens_decoder": {"5": {"content": "<s>"}}}, "'<s>' has id 5, but has id 1 in the tokenizer"),
        (LLAMA, {"added_tokens_decoder": {"x": {"content": "<s>"}}}, "entry 'x' is"),
        (LLAMA, {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "an id of at most 10 digits and its token"),
        (LLAMA, {"added_tokens_decoder": {"5": {"content": "\ud800"}}}, "'\\ud800'}, expected the text of a token"),
        (LLAMA, {"added_tokens_decoder": {"5": {"content": "x" * 4097}}}, "1 to 4096 characters"),
        (LLAMA, {"eos_token": "\ud800"}, "eos_token is '\\ud800', expected the text of a token"),
        (LLAMA, {"eos_token": ["x"] * 100_000}, "eos_token is ['x', 'x'"),
        (LLAMA, {"tokenizer_class": "x" * 100_000}, "is not known to use"),
        (LLAMA, {"added_tokens_decoder": dict.fromkeys(map(str, range(1 << 18 | 1)), 0)}, "expected at most 262144"),
        (LLAMA, {"added_tokens_decoder": ["<s>"]}, "found list, expected an object"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    options: dict[str, Any], settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    found = refusal(checkpoint(tmp_path, train(**options), tokenizer_config=settings))
    assert message in found.message
    assert len(found.message) < 300


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"<|x|>": True}, "'<|x|>' is True, expected an id"),
        ({"x" * 100_000: "y" * 100_000}, "expected an id"),
        ({"x": 10**10}, "'x' is 10000000000, expected an id of at most 10 digits"),
        ({"\ud800": 5}, "'\\ud800', expected the text of a token"),
        ({"": 5}, "a token is '', expected the text of a token"),
    ],
)
def test_added_tokens_that_are_none_are_refused(
    added: dict[str, object], message: str, llama: bytes, tmp_path: Path
) -> None:
    found = refusal(checkpoint(tmp_path, llama, added_tokens=added))
    assert message in found.message
    assert len(found.message) < 300


def test_many_added_tokens(llama: bytes, tmp_path: Path) -> None:
    size = SentencePieceProcessor(model_proto=llama).get_piece_size()
    added = {f"<{number}>": number for number in range(size, size + 5000)}
    tokenizer = tokenizer_of(checkpoint(tmp_path, llama, added_tokens=added))
    assert tokenizer.encode(f"<{size}><{size + 4999}>", add_special_tokens=False).ids == [size, size + 4999]


@pytest.mark.parametrize(
    "data", [b"", b"\x0a\xff", b"no model at all", b"\xff" * 20, b"\x0a\x02\x0a\x05", b"\x0b", b"\x08\x01"]
)
def test_what_is_no_model_is_refused(data: bytes) -> None:
    with pytest.raises(PackError, match="not a SentencePiece model"):
        read_model(data, "tokenizer.model")


def field(number: int, value: bytes) -> bytes:
    """A field of bytes as a protocol buffer has it; its number is below 16."""
    length, written = len(value), bytearray([number << 3 | 2])
    while length > 0x7F:
        written.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes(written) + bytes([length]) + value


def piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    fields = field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind])
    return field(1, fields)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (piece("a" * 4097), "a piece of 4097 characters, expected 1 to 4096"),
        (piece(""), "a piece of 0 characters, expected 1 to 4096"),
        (piece("a" * 4096) * 17, "the squares of the lengths of all pieces sum up to over 268435456"),
        (b"\x58\x01" * 70_000, "over 65536 fields that are no pieces"),
        (field(1, b"\x58\x01" * 70_000), "a message of over 65536 fields"),
        (field(2, b"\x58\x01" * 70_000), "a message of over 65536 fields"),
        (piece("a", math.nan), "piece 'a' has the score nan"),
        (piece("a", -math.inf), "piece 'a' has the score -inf"),
        (b"\x58" + b"\x80" * 10, "a number is longer than 64 bits"),
        (b"\x58" + b"\x80" * 9, "a number ends after the file"),
    ],
)
def test_what_takes_too_long_or_means_nothing_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PackError, match=f"not a SentencePiece model: .*{message}"):
        read_model(data, "tokenizer.model")


def test_more_pieces_than_can_be_handled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece_model, "_MOST_PIECES", 2)
    assert len(read_model(piece("a") * 2, "tokenizer.model").pieces) == 2
    with pytest.raises(PackError, match="found over 2 pieces"):
        read_model(piece("a") * 3, "tokenizer.model")


@pytest.mark.parametrize("algorithm", [1, 2])
def test_a_model_that_splits_into_nothing_is_refused(algorithm: int) -> None:
    data = piece("<unk>", kind=2) + field(2, bytes([3 << 3, algorithm]))
    with pytest.raises(PackError, match="none of its pieces is one that texts are split into"):
        convert_sentencepiece(data, "tokenizer.model", prefix_once=False)


def test_a_cut_model_is_refused(llama: bytes, tmp_path: Path) -> None:
    assert refusal(checkpoint(tmp_path, llama[: len(llama) // 2])).path == str(tmp_path / "tokenizer.model")


def test_without_sentencepiece_the_way_out_is_told(
    llama: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    found = refusal(checkpoint(tmp_path, llama))
    assert "needs the package sentencepiece" in found.message
    assert found.hint is not None
    assert "estream-pack[sentencepiece]" in found.hint
    assert "save_pretrained" in found.hint
