"""Documents have one encoding; other bytes are refused by the first of three rules that they break."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from estream_spec.errors import EmoeError, InvalidError, MalformedError
from estream_spec.limits import MAX_MANIFEST_LENGTH
from estream_spec.messagepack import decode_canonical, encode
from estream_spec.model import Described


class Document(Described, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=300)]
    ratio: Annotated[float, Meta(ge=0)]
    count: int = 0
    data: bytes = b""
    sizes: tuple[int, ...] = ()
    inner: Document | None = None
    extra: Annotated[dict[str, bytes], Meta(max_length=4)] = msgspec.field(default_factory=dict)


DECODER = msgspec.msgpack.Decoder(Document)
ONE = b"\xcb\x3f\xf0\0\0\0\0\0\0"
NAME, RATIO = b"\xa4name\xa1a", b"\xa5ratio" + ONE


def decode(data: bytes) -> Document:
    return decode_canonical(DECODER, data, "document")


def refused(data: bytes, kind: type[EmoeError], rule: str) -> EmoeError:
    with pytest.raises(kind) as caught:
        decode(data)
    error = caught.value
    assert (type(error), error.rule) == (kind, rule)
    assert error.path is not None
    assert error.path.startswith("document")
    assert len(str(error)) < 300
    return error


def document(*pairs: bytes) -> bytes:
    """A map of up to 15 pairs, each given as key and value together."""
    return bytes([0x80 + len(pairs)]) + b"".join(pairs)


def test_a_document_survives_encoding() -> None:
    assert decode(document(NAME, RATIO)) == Document(name="a", ratio=1.0)
    full = Document(
        name="ä" * 200,
        ratio=0.1,
        count=-(2**63),
        data=bytes(70_000),
        sizes=(0, 127, 128, -1, -32, -33, 2**16, 2**32, 2**64 - 1),
        inner=Document(name="", ratio=0.0),
        extra={"b": b"1", "a": b""},
    )
    assert decode(encode(full)) == full


NESTED = 100_000
MALFORMED = {
    "empty": b"",
    "cut in a value": document(NAME, RATIO)[:-1],
    "cut behind a key": document(NAME, b"\xa5ratio"),
    "cut behind a tag": document(NAME, b"\xa5ratio\xcb"),
    "cut in a length": document(NAME, RATIO, b"\xa4data\xc6\0\0"),
    "trailing nil": document(NAME, RATIO) + b"\xc0",
    "two documents": document(NAME, RATIO) * 2,
    "unused tag": b"\xc1",
    "unused tag in a value": document(NAME, b"\xa5ratio\xc1"),
    "text of 4 billion": document(b"\xa4name\xdb\xff\xff\xff\xff", RATIO),
    "bytes of 4 billion": document(NAME, RATIO, b"\xa4data\xc6\xff\xff\xff\xff"),
    "array of 4 billion": document(NAME, RATIO, b"\xa5sizes\xdd\xff\xff\xff\xff"),
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "ext of 4 billion": document(NAME, RATIO, b"\xa5count\xc9\xff\xff\xff\xff\x01"),
    "nesting that does not end": document(NAME, RATIO, b"\xa5inner" + b"\x91" * NESTED),
    "ill-typed and cut": document(b"\xa4name\x05", RATIO)[:-1],
    "ill-typed and longer": document(b"\xa4name\x05", RATIO) + b"\xc0",
    "unknown key and cut": document(b"\xa5other\xc0", NAME, RATIO)[:-1],
    "unknown key and unused tag": document(b"\xa5other\xc1", NAME, RATIO),
    "not UTF-8 and cut": document(b"\xa4name\xa1\xff", RATIO)[:-1],
    "not canonical and cut": document(b"\xa4name\xd9\x01a", RATIO)[:-1],
    "nil, 4 million times": b"\xc0" * MAX_MANIFEST_LENGTH,
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_one_value(data: bytes) -> None:
    error = refused(data, MalformedError, "EMOE-MAN-001")
    assert error.message.startswith("not MessagePack: ")
    assert error.path == "document"


INVALID = {
    "array": (b"\x92\xa1a" + ONE, ""),
    "nil": (b"\xc0", ""),
    "unknown key": (document(NAME, RATIO, b"\xa5other\xc0"), ""),
    "missing key": (document(NAME), ""),
    "no key": (document(), ""),
    "key of another type": (document(NAME, RATIO, b"\x01\x01"), ""),
    "key as bytes": (document(b"\xc4\x04name\xa1a", RATIO), ""),
    "integer for text": (document(b"\xa4name\x05", RATIO), ".name"),
    "bytes for text": (document(b"\xa4name\xc4\x01a", RATIO), ".name"),
    "text for bytes": (document(NAME, RATIO, b"\xa4data\xa4YWJj"), ".data"),
    "whole float for an integer": (document(NAME, RATIO, b"\xa5count" + ONE), ".count"),
    "true for an integer": (document(NAME, RATIO, b"\xa5count\xc3"), ".count"),
    "true for a float": (document(NAME, b"\xa5ratio\xc3"), ".ratio"),
    "text for an integer": (document(NAME, RATIO, b"\xa5count\xa11"), ".count"),
    "nil for an integer": (document(NAME, RATIO, b"\xa5count\xc0"), ".count"),
    "below its range": (document(NAME, b"\xa5ratio\xcb\xbf\xf0\0\0\0\0\0\0"), ".ratio"),
    "not a number": (document(NAME, b"\xa5ratio\xcb\x7f\xf8\0\0\0\0\0\0"), ".ratio"),
    "above its range": (document(b"\xa4name\xda\x01\x2d" + b"a" * 301, RATIO), ".name"),
    "too many keys": (
        document(NAME, RATIO, b"\xa5extra\x85" + b"".join(b"\xa1%c\xc4\0" % each for each in b"abcde")),
        ".extra",
    ),
    "ext": (document(NAME, RATIO, b"\xa5count\xd4\x01a"), ".count"),
    "timestamp": (document(NAME, RATIO, b"\xa5count\xd6\xff\0\0\0\0"), ".count"),
    "ext of any length": (document(NAME, RATIO, b"\xa5count\xc7\x03\x01abc"), ".count"),
    "in a list": (document(NAME, RATIO, b"\xa5sizes\x92\x01\xa11"), ".sizes[1]"),
    "nested": (document(NAME, RATIO, b"\xa5inner" + document(NAME, b"\xa5ratio\xc0")), ".inner.ratio"),
    "text that is not UTF-8": (document(b"\xa4name\xa1\xff", RATIO), ""),
    "text with a surrogate": (document(b"\xa4name\xa3\xed\xa0\x80", RATIO), ""),
    "key that is not UTF-8": (document(NAME, RATIO, b"\xa1\xff\x01"), ""),
    "deep": (document(NAME, RATIO, b"\xa5inner" + b"\x91" * NESTED + b"\xc0"), ".inner"),
    "deep under an unknown key": (document(NAME, RATIO, b"\xa5other" + b"\x91" * NESTED + b"\xc0"), ""),
    "ill-typed and not canonical": (document(b"\xa4name\x05", b"\xa5ratio\x01"), ".name"),
    "ill-typed at first, then given again": (document(b"\xa4name\x05", NAME, RATIO), ".name"),
}


@pytest.mark.parametrize(("data", "place"), INVALID.values(), ids=INVALID)
def test_what_has_another_structure(data: bytes, place: str) -> None:
    assert refused(data, InvalidError, "EMOE-MAN-002").path == f"document{place}"


def test_structs_nested_too_deeply() -> None:
    """Each level of the right type · an answer, and no overflow of the stack."""
    level = b"\x83" + NAME + RATIO + b"\xa5inner"
    refused(level * NESTED + document(NAME, RATIO), InvalidError, "EMOE-MAN-002")


NOT_CANONICAL = {
    "other order": document(RATIO, NAME),
    "key twice": document(NAME, NAME, RATIO),
    "key twice, values that differ": document(b"\xa4name\xa1b", NAME, RATIO),
    "default given": document(NAME, RATIO, b"\xa5count\0"),
    "default nil given": document(NAME, RATIO, b"\xa5inner\xc0"),
    "empty default given": document(NAME, RATIO, b"\xa5extra\x80"),
    "longer integer": document(NAME, RATIO, b"\xa5count\xcc\x01"),
    "longest integer": document(NAME, RATIO, b"\xa5count\xcf\0\0\0\0\0\0\0\x01"),
    "signed integer above 0": document(NAME, RATIO, b"\xa5count\xd0\x01"),
    "longer negative integer": document(NAME, RATIO, b"\xa5count\xd0\xff"),
    "32-bit float": document(NAME, b"\xa5ratio\xca\x3f\x80\0\0"),
    "integer for a float": document(NAME, b"\xa5ratio\x01"),
    "large integer for a float": document(NAME, b"\xa5ratio\xcf\xff\xff\xff\xff\xff\xff\xff\xff"),
    "longer text": document(b"\xa4name\xd9\x01a", RATIO),
    "longer key": document(b"\xd9\x04name\xa1a", RATIO),
    "longer bytes": document(NAME, RATIO, b"\xa4data\xc5\0\x01a"),
    "longer array": document(NAME, RATIO, b"\xa5sizes\xdc\0\x01\x01"),
    "longer map": b"\xde\0\x02" + NAME + RATIO,
    "keys out of order": document(NAME, RATIO, b"\xa5extra\x82\xa1b\xc4\0\xa1a\xc4\0"),
    "keys twice": document(NAME, RATIO, b"\xa5extra\x82\xa1a\xc4\0\xa1a\xc4\0"),
    "nested": document(NAME, RATIO, b"\xa5inner" + document(RATIO, NAME)),
}


@pytest.mark.parametrize("data", NOT_CANONICAL.values(), ids=NOT_CANONICAL)
def test_what_is_spelled_otherwise(data: bytes) -> None:
    error = refused(data, InvalidError, "EMOE-MAN-003")
    assert error.message.startswith("not in canonical encoding: byte ")
    assert error.path == "document"


def test_the_first_byte_that_differs_is_told() -> None:
    longer = refused(document(b"\xa4name\xd9\x01a", RATIO), InvalidError, "EMOE-MAN-003")
    assert longer.message == "not in canonical encoding: byte 6 is 0xd9, expected 0xa1"


SCALARS = (
    st.sampled_from([None, False, 0.5, "", "a" * 40, bytes(300)])
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=9)
)
VALUES = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3),
    max_leaves=8,
)


@given(value=VALUES, change=st.tuples(st.integers(0, 1 << 20), st.integers(0, 2), st.binary(max_size=2)))
@settings(max_examples=300, deadline=None)
def test_the_first_rule_is_that_of_another_decoder(value: object, change: tuple[int, int, bytes]) -> None:
    """Some bytes of a value replaced, dropped or added · not one value exactly where a decoder of anything says so."""
    data = msgspec.msgpack.encode(value)
    at, dropped, added = change[0] % (len(data) + 1), change[1], change[2]
    data = data[:at] + added + data[at + dropped :]
    try:
        msgspec.msgpack.decode(data, type=msgspec.Raw)
    except msgspec.DecodeError:
        rule = "EMOE-MAN-001"
    else:
        rule = "EMOE-MAN-002"
    with pytest.raises(EmoeError) as caught:
        decode(data)
    assert caught.value.rule == rule
