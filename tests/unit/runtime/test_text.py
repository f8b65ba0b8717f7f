from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from estream_loader import open_package
from estream_runtime.text import TextStream, encode_continuation, encode_prompt, encode_scored
from estream_spec.constants import SectionType
from estream_spec.errors import LinkError, TrapError
from fixtures.olmoe import CheckpointFactory
from fixtures.packages import Draft
from fixtures.packed import PackageFactory


@pytest.fixture
def tokenizer(olmoe_checkpoint: CheckpointFactory) -> Tokenizer:
    """A token for each byte, and three more."""
    return Tokenizer.from_file(str(olmoe_checkpoint() / "tokenizer.json"))


def byte_tokens(data: bytes) -> list[int]:
    return [byte + 1 for byte in data]


@pytest.mark.parametrize("text", ["in the beginning", "naïve 🙂 — 漢字\n\t\0", "", "é", "🙂🙂"])
def test_characters_come_whole(text: str, tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, tokenizer.encode("the").ids)
    pieces = [stream.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) >= len(text.replace("the", "t")) - 1


def test_a_character_cut_off_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in byte_tokens("a🙂".encode()[:-1])] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    "data",
    [
        b"a\xff\xff\xff\xff\xffb\xffc",
        b"\xff\xff\xff\xc3\xa9!",
        b"\xf0\x9f\xf0\x9f\x99\x82",
        b"\xc3\xc3\xc3",
        b"\x80" * 9,
    ],
)
def test_bytes_that_are_no_text_hold_up_little_and_change_nothing(data: bytes, tokenizer: Tokenizer) -> None:
    stream, shown = TextStream(tokenizer), ""
    for count, token in enumerate(byte_tokens(data), start=1):
        shown += stream.push(token)
        assert len(tokenizer.decode(byte_tokens(data[:count]))) - len(shown) <= 3
    assert shown + stream.finish() == tokenizer.decode(byte_tokens(data))


def test_a_begin_token_is_put_before_a_prompt_once() -> None:
    draft = Draft()
    draft.change_model(begin_token=1)
    with open_package(draft.seal()) as package:
        assert encode_prompt(package, "a") == [1, 0]
        assert encode_prompt(package, "b") == [1]
        assert encode_continuation(package, "a") == [0]


def test_a_package_without_a_begin_token_adds_none(packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        assert encode_prompt(package, "the") == package.tokenizer.encode("the").ids
        assert encode_prompt(package, "") == []


def test_text_that_is_no_text_is_refused(packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        for encode in (encode_prompt, encode_continuation, encode_scored):
            with pytest.raises(TrapError, match="text is not valid UTF-8 from character 2 on"):
                encode(package, "ab\udcff")


@pytest.mark.parametrize(
    ("text", "scored"), [("", 0), ("a", 0), ("ab", 1), ("é", 2), ("🙂b", 5), ("b🙂", 4), (" a", 1), ("the", 0)]
)
def test_bytes_of_all_but_the_first_token(text: str, scored: int, packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        assert encode_scored(package, text) == (encode_prompt(package, text), scored)


def test_a_begin_token_stands_for_no_bytes() -> None:
    draft = Draft()
    draft.change_model(begin_token=1)
    with open_package(draft.seal()) as package:
        assert encode_scored(package, "a") == ([1, 0], 1)


def test_a_tokenizer_that_fails_is_refused() -> None:
    draft = Draft()
    section = draft.section(SectionType.TOKENIZER)
    section.data = section.data.replace(b'"unk_token":"a"', b'"unk_token":"?"')  # which the vocabulary lacks
    with open_package(draft.seal()) as package:
        for encode in (encode_prompt, encode_continuation, encode_scored):
            with pytest.raises(LinkError, match=r"the tokenizer cannot be used: .*UNK"):
                encode(package, "elsewhere")


class Panic(BaseException):
    """What native code raises when it panics: no `Exception`."""


class PanickingTokenizer:
    def decode(self, token_ids: list[int]) -> str:
        raise Panic("index out of bounds")


def test_a_tokenizer_that_panics_is_refused() -> None:
    with pytest.raises(LinkError, match="the tokenizer cannot be used: index out of bounds"):
        TextStream(PanickingTokenizer()).push(1)  # type: ignore[arg-type]
