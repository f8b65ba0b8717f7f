"""Canonical MessagePack documents. FORMAT.md section 6.1.

A value has exactly one encoding: a reader decodes it, encodes the result again and compares.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from estream_spec.rulebook import refusal

Document = TypeVar("Document", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_any_value = msgspec.msgpack.Decoder(msgspec.Raw)

_LENGTHS: Final = {
    **{0xC4 + index: (width, 0, "bytes") for index, width in enumerate((1, 2, 4))},  # bin
    **{0xC7 + index: (width, 1, "bytes") for index, width in enumerate((1, 2, 4))},  # ext, with a byte for its type
    **{0xD9 + index: (width, 0, "bytes") for index, width in enumerate((1, 2, 4))},  # str
    **{0xDC + index: (width, 1, "values") for index, width in enumerate((2, 4))},  # array
    **{0xDE + index: (width, 2, "values") for index, width in enumerate((2, 4))},  # map
}
"""Tags with a length behind them: its bytes; bytes more, or values for each; what it counts."""
_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),  # nil, false, true
    0xCA: 4,
    0xCB: 8,  # floats
    **{0xCC + index: 1 << index for index in range(4)},  # unsigned integers
    **{0xD0 + index: 1 << index for index in range(4)},  # signed integers
    **{0xD4 + index: 1 + (1 << index) for index in range(5)},  # ext of fixed length
}
"""Tags of values of fixed length: bytes behind the tag."""


def encode(value: object) -> bytes:
    """The canonical bytes of a struct, or of an array of them."""
    return _encoder.encode(value)


def decode_canonical(decoder: msgspec.msgpack.Decoder[Document], data: bytes, path: str) -> Document:
    """Parse a document and prove that its bytes are the canonical ones.

    Args:
        decoder: of the struct the document is.
        data: its bytes.
        path: what messages call it.

    Raises:
        MalformedError: not MessagePack.
        InvalidError: another structure, a value outside its range, or not canonical.
    """
    try:
        document = decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        # The decoder stops at the first value of a wrong type; bytes that are not MessagePack at all come first.
        if (fault := _syntax_fault(data)) is not None:
            raise refusal("EMOE-MAN-001", f"not MessagePack: {fault}", path=path) from None
        text = str(error).replace(" - at `key` in `$", " as a key - at `$").replace("`", "'")
        message, _, place = text.partition(" - at '$")
        place = f"{path}{place.removesuffix(chr(39))}"
        raise refusal("EMOE-MAN-002", message[0].lower() + message[1:], path=place) from None
    if (expected := encode(document)) != data:
        at = next(
            (at for at, pair in enumerate(zip(expected, data, strict=False)) if pair[0] != pair[1]), len(expected)
        )
        message = f"not in canonical encoding: byte {at} is {_at(data, at)}, expected {_at(expected, at)}"
        raise refusal("EMOE-MAN-003", message, path=path)
    return document


def _at(data: bytes, at: int) -> str:
    return f"{data[at]:#04x}" if at < len(data) else "missing"


def _syntax_fault(data: bytes) -> str | None:
    """Why bytes are not exactly one MessagePack value, whatever it means; None where they are."""
    try:
        _any_value.decode(data)
    except RecursionError:
        return _deep_syntax_fault(data)
    except msgspec.DecodeError as error:
        return str(error).removeprefix("MessagePack data is malformed: ").lower()
    return None


def _deep_syntax_fault(data: bytes) -> str | None:
    """The same for values nested as deep as they like, for which the decoder is slower but needs no stack."""
    at, pending = 0, 1
    while pending:
        if at >= len(data):
            return f"{pending} values are missing at the end"
        tag = data[at]
        at += 1
        pending -= 1
        if tag < 0x80 or tag >= 0xE0:
            continue
        if tag < 0x90:
            pending += 2 * (tag & 15)
        elif tag < 0xA0:
            pending += tag & 15
        elif tag < 0xC0:
            at += tag & 31
        elif tag in _FIXED:
            at += _FIXED[tag]
        elif tag in _LENGTHS:
            width, extra, counted = _LENGTHS[tag]
            length = int.from_bytes(data[at : at + width], "big")
            at += width
            if counted == "bytes":
                at += length + extra
            else:
                pending += length * extra
        else:
            return f"byte {at - 1} is {tag:#04x}, which begins no value"
    if at > len(data):
        return f"the last value ends {at - len(data)} bytes behind the end"
    if at < len(data):
        return f"{len(data) - at} bytes follow the value"
    return None
