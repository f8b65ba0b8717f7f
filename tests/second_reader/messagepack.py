"""MessagePack as far as FORMAT.md section 6.1 asks for it: heads of values, syntax, shortest forms."""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from second_reader.rules import require

Number = int | float | bool | None


class Head(NamedTuple):
    """The beginning of a value."""

    kind: str
    """nil, bool, int, float, str, bin, ext, array or map."""
    value: Number
    """Of the first four kinds the value itself."""
    size: int
    """Bytes of a str, bin or ext that follow, elements of an array, pairs of a map; otherwise 0."""
    end: int
    """Where the head ends."""


UNDEFINED: Final = 0xC1
SIZED: Final = {
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xC7: ("ext", 1),
    0xC8: ("ext", 2),
    0xC9: ("ext", 4),
    0xD9: ("str", 1),
    0xDA: ("str", 2),
    0xDB: ("str", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
"""Kinds whose size follows the tag, in so many bytes."""
NUMBERS: Final = {
    0xCA: ("float", Struct(">f")),
    0xCB: ("float", Struct(">d")),
    0xCC: ("int", Struct(">B")),
    0xCD: ("int", Struct(">H")),
    0xCE: ("int", Struct(">I")),
    0xCF: ("int", Struct(">Q")),
    0xD0: ("int", Struct(">b")),
    0xD1: ("int", Struct(">h")),
    0xD2: ("int", Struct(">i")),
    0xD3: ("int", Struct(">q")),
}


def _short_head(tag: int, end: int) -> Head:
    """The head that is only its tag."""
    if tag < 0x80:
        return Head("int", tag, 0, end)
    if tag < 0x90:
        return Head("map", None, tag & 15, end)
    if tag < 0xA0:
        return Head("array", None, tag & 15, end)
    if tag < 0xC0:
        return Head("str", None, tag & 31, end)
    if tag >= 0xE0:
        return Head("int", tag - 256, 0, end)
    if 0xD4 <= tag <= 0xD8:
        return Head("ext", None, (1 << tag - 0xD4) + 1, end)
    require(tag != UNDEFINED, "MAN-001")
    return Head("nil", None, 0, end) if tag == 0xC0 else Head("bool", tag == 0xC3, 0, end)


def read_head(data: bytes, at: int) -> Head:
    """The head at an offset; refuses by EMOE-MAN-001 what is undefined or cut off."""
    require(at < len(data), "MAN-001")
    tag = data[at]
    if tag in SIZED:
        kind, width = SIZED[tag]
        end = at + 1 + width
        require(end <= len(data), "MAN-001")
        # The type byte of an extension is not in its size.
        return Head(kind, None, int.from_bytes(data[at + 1 : end], "big") + (kind == "ext"), end)
    if tag in NUMBERS:
        kind, form = NUMBERS[tag]
        end = at + 1 + form.size
        require(end <= len(data), "MAN-001")
        return Head(kind, form.unpack_from(data, at + 1)[0], 0, end)
    return _short_head(tag, at + 1)


def _step(tag: int) -> tuple[int, int] | None:
    """How many values more are due behind a value's tag, and how far on; None where the tag does not say so alone."""
    if tag in SIZED or tag == UNDEFINED:
        return None
    if tag in NUMBERS:
        return -1, 1 + NUMBERS[tag][1].size
    kind, _, size, _ = _short_head(tag, 0)
    if kind == "array":
        return size - 1, 1
    if kind == "map":
        return 2 * size - 1, 1
    return -1, 1 + size


STEPS: Final = [_step(tag) for tag in range(256)]


def check_syntax(data: bytes) -> None:
    """EMOE-MAN-001: the bytes are one value, however deep."""
    due, at = 1, 0
    while due:
        require(at < len(data), "MAN-001")
        step = STEPS[data[at]]
        if step is not None:
            due += step[0]
            at += step[1]
            continue
        kind, _, size, at = read_head(data, at)
        due -= 1
        if kind == "array":
            due += size
        elif kind == "map":
            due += 2 * size
        else:
            at += size
    require(at == len(data), "MAN-001")


def _sized(number: int, forms: tuple[tuple[int, int, int], ...]) -> bytes:
    """The first form (largest number, tag, bytes) that holds the number. With no bytes the number is in the tag."""
    for largest, tag, width in forms:
        if number <= largest:
            return bytes([tag]) + number.to_bytes(width, "big") if width else bytes([tag + number])
    raise AssertionError("no schema lets such a number through")


def encode_unsigned(value: int) -> bytes:
    return _sized(
        value, ((0x7F, 0, 0), (0xFF, 0xCC, 1), (0xFFFF, 0xCD, 2), (0xFFFFFFFF, 0xCE, 4), (2**64 - 1, 0xCF, 8))
    )


def encode_float(value: float) -> bytes:
    return b"\xcb" + Struct(">d").pack(value)


def encode_bool(value: bool) -> bytes:
    return b"\xc3" if value else b"\xc2"


def encode_str(value: str) -> bytes:
    data = value.encode()
    return _sized(len(data), ((31, 0xA0, 0), (0xFF, 0xD9, 1), (0xFFFF, 0xDA, 2), (0xFFFFFFFF, 0xDB, 4))) + data


def encode_bin(value: bytes) -> bytes:
    return _sized(len(value), ((0xFF, 0xC4, 1), (0xFFFF, 0xC5, 2), (0xFFFFFFFF, 0xC6, 4))) + value


def encode_array(items: list[bytes]) -> bytes:
    """An array of encoded values."""
    return _sized(len(items), ((15, 0x90, 0), (0xFFFF, 0xDC, 2), (0xFFFFFFFF, 0xDD, 4))) + b"".join(items)


def encode_map(pairs: list[tuple[str, bytes]]) -> bytes:
    """A map of strings to encoded values."""
    head = _sized(len(pairs), ((15, 0x80, 0), (0xFFFF, 0xDE, 2), (0xFFFFFFFF, 0xDF, 4)))
    return head + b"".join(encode_str(key) + value for key, value in pairs)
