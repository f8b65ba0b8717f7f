"""MessagePack for files that may be wrong: values as they stand, keys in the order given, twice if asked."""

from __future__ import annotations

import struct
from typing import Any


class Raw(bytes):
    """Bytes that stand for a whole value, right or wrong."""


class Pairs(list[tuple[Any, Any]]):
    """A map whose keys may be of any type and come more than once."""


def encode(value: Any) -> bytes:
    """The shortest MessagePack form of a value; dictionaries and `Pairs` in their order."""
    match value:
        case Raw():
            return bytes(value)
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _integer(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            short = bytes([0xA0 | len(data)]) if len(data) < 32 else _sized(len(data), 0xD9, 0xDA, 0xDB)
            return short + data
        case bytes():
            return _sized(len(value), 0xC4, 0xC5, 0xC6) + value
        case Pairs():
            return map_head(len(value)) + b"".join(encode(key) + encode(each) for key, each in value)
        case dict():
            return encode(Pairs(value.items()))
        case list() | tuple():
            head = bytes([0x90 | len(value)]) if len(value) < 16 else _sized(len(value), None, 0xDC, 0xDD)
            return head + b"".join(encode(each) for each in value)
    raise TypeError(type(value))


def map_head(count: int) -> bytes:
    """What a map of so many pairs begins with."""
    return bytes([0x80 | count]) if count < 16 else _sized(count, None, 0xDE, 0xDF)


def _sized(length: int, short: int | None, medium: int, long: int) -> bytes:
    """A tag with a length of one, two or four bytes behind it."""
    if short is not None and length < 1 << 8:
        return struct.pack(">BB", short, length)
    if length < 1 << 16:
        return struct.pack(">BH", medium, length)
    return struct.pack(">BI", long, length)


def _integer(value: int) -> bytes:
    if value >= 0:
        if value < 128:
            return bytes([value])
        width = next(index for index in range(4) if value < 1 << (8 << index))
        return bytes([0xCC + width]) + value.to_bytes(1 << width, "big")
    if value >= -32:
        return bytes([256 + value])
    width = next(index for index in range(4) if value >= -(1 << ((8 << index) - 1)))
    return bytes([0xD0 + width]) + value.to_bytes(1 << width, "big", signed=True)
