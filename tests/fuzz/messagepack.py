"""Damage to a MessagePack document that knows what a value, a count and a pair is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Final

from estream_spec import limits
from fuzz.spans import Document, Value, document

_INTEGERS: Final = (
    *(0, 1, 2, 3, 16, 127, 128, 255, 65535, limits.MAX_INTEGER_ROWS + 1),
    *(
        limit + step
        for limit in (limits.MAX_DIMENSION, limits.MAX_EXPERTS, limits.MAX_SHAPE_CLASSES)
        for step in (0, 1)
    ),
)
_LARGE: Final = ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 44, (1 << 44) + 1, (1 << 63) - 1, (1 << 64) - 1)
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 5e-324, 1e-46, 3.4e38, 3.5e38, 1.7e308)
_NOT_NUMBERS: Final = (float("inf"), float("-inf"), float("nan"))
_FOREIGN: Final = (
    *(bytes([tag]) for tag in (0xC0, 0xC1, 0xC2, 0xC3, 0x80, 0x90, 0xA0, 0xFF, 0xE0)),
    b"\xc4\x00",
    b"\xc4\x20" + bytes(32),
    b"\xa1a",
    b"\xa4none",
    b"\xa3f32",
    b"\xa8portable",
    b"\xa2\xff\xfe",  # not UTF-8
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\xa1\x00",
    b"\xd4\xff\x00",
    b"\xd6\xff" + bytes(4),  # a time
    b"\xd7\xff" + bytes([255]) * 8,
    b"\xc7\x0c\xff" + bytes([255]) * 12,
    b"\xd9\x80" + b"n" * 128,
    b"\xd9\x81" + b"n" * 129,
    b"\xda\x10\x01" + b"t" * 4097,
    b"\x91\x90",
    b"\x81\xa1a\x01",
)
_HUGE_COUNTS: Final = (0, 1, 15, 16, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_DEPTHS: Final = (1, 2, 20, 200, 1100)
_REPEATS: Final = (1, 2, 64, 65, 257, 1025, 4097)
MOST_ADDED: Final = 1 << 14
"""Bytes that repeating a value may add: more says no more and takes longer."""

Change = Callable[[bytes, Document, Random, bytes], bytes]


def damaged(data: bytes, random: Random, other: bytes) -> bytes:
    """The document with one fault.

    Args:
        data: a document, sound or not.
        random: what decides.
        other: another document, to take values from.
    """
    values = document(data)
    if not values:
        return other
    return random.choice(_CHANGES)(data, values, random, other)


def _scalar(random: Random) -> bytes:
    """A value of any type, often one that is just outside what some field allows."""
    kind = random.randrange(8)
    if kind < 3:
        return _integer(random.choice(_INTEGERS), random)
    if kind == 3:
        return _integer(random.choice(_LARGE), random)
    if kind == 4:
        return struct.pack(">Bd", 0xCB, random.choice(_FLOATS))
    if kind == 5:
        return struct.pack(">Bd", 0xCB, random.choice(_NOT_NUMBERS))
    if kind == 6:
        return struct.pack(">Bf", 0xCA, random.choice(_FLOATS[:6]))
    return random.choice(_FOREIGN)


def _integer(number: int, random: Random) -> bytes:
    """An integer; its shortest spelling in most cases, else a longer one, or a negative one."""
    if random.random() < 0.1:
        return struct.pack(">Bq", 0xD3, -(number & ((1 << 63) - 1)))
    if random.random() < 0.1:
        return struct.pack(">BQ", 0xCF, number)
    if number < 128:
        return bytes([number])
    width = next(width for width in (1, 2, 4, 8) if number < 1 << 8 * width)
    return bytes([0xCB + width.bit_length()]) + number.to_bytes(width, "big")


def _counted(tag: int, count: int) -> bytes:
    """A tag of the same kind with another count, in the shortest spelling."""
    count = min(count, (1 << 32) - 1)
    if _is_container(tag):
        short, long = (0x80, 0xDE) if _is_map(tag) else (0x90, 0xDC)
        if count < 16:
            return bytes([short | count])
        return struct.pack(">BH", long, count) if count < 1 << 16 else struct.pack(">BI", long + 1, count)
    first = 0xC4 if tag in (0xC4, 0xC5, 0xC6) else 0xD9
    if first == 0xD9 and count < 32:
        return bytes([0xA0 | count])
    step = 0 if count < 1 << 8 else 1 if count < 1 << 16 else 2
    return bytes([first + step]) + count.to_bytes(1 << step, "big")


def _is_map(tag: int) -> bool:
    return 0x80 <= tag < 0x90 or tag >= 0xDE


def _is_container(tag: int) -> bool:
    return 0x80 <= tag < 0xA0 or 0xDC <= tag < 0xE0


def _with_count(data: bytes, values: Document, value: Value, more: int, random: Random) -> bytes:
    """The container of a value told that it has more or fewer, in most cases; `data` differs only behind its count."""
    if value.parent < 0 or random.random() < 0.2:
        return data
    container = values[value.parent]
    head = _counted(data[container.start], max(container.counted + more, 0))
    return data[: container.start] + head + data[container.body :]


def _item(values: Document, random: Random) -> tuple[Value, int, int]:
    """Something to take out or put in again: a value of an array, or a key with its value. Its start and end too."""
    value = random.choice(values)
    if not values.in_map(value):
        return value, value.start, value.end
    if value.number % 2 == 0:
        after = values.after(value)
        return value, value.start, value.end if after is None else after.end
    return value, values.before(value).start, value.end


def _replace(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    value = random.choice(values)
    return data[: value.start] + _scalar(random) + data[value.end :]


def _replace_number(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """A number by another, near it or at some limit."""
    if not values.integers:
        return _replace(data, values, random, other)
    value = values[random.choice(values.integers)]
    old = int.from_bytes(data[value.body : value.end], "big") if value.end > value.body else data[value.start]
    near = (old + 1, max(old - 1, 0), old * 2, old // 2, old ^ 1, random.choice(_INTEGERS), random.choice(_LARGE))
    return data[: value.start] + _integer(random.choice(near) % (1 << 64), random) + data[value.end :]


def _recount(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """A count or a length that lies."""
    value = random.choice(values)
    count = random.choice((value.counted + 1, max(value.counted - 1, 0), random.choice(_HUGE_COUNTS)))
    return data[: value.start] + _counted(data[value.start], count) + data[value.body :]


def _respell(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """The same value with a longer count than it needs."""
    value = random.choice(values)
    tag = data[value.start]
    if _is_container(tag):
        head = struct.pack(">BI", 0xDF if _is_map(tag) else 0xDD, min(value.counted, (1 << 32) - 1))
    elif 0xA0 <= tag < 0xC0:
        head = bytes([0xD9, value.counted])
    elif tag < 0x80:
        return data[: value.start] + bytes([0xCC, tag]) + data[value.end :]
    else:
        return _recount(data, values, random, other)
    return data[: value.start] + head + data[value.body :]


def _drop(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    value, start, end = _item(values, random)
    return _with_count(data[:start] + data[end:], values, value, -1, random)


def _repeat(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    value, start, end = _item(values, random)
    times = min(random.choice(_REPEATS), MOST_ADDED // max(end - start, 1))
    return _with_count(data[:end] + data[start:end] * times + data[end:], values, value, times, random)


def _swap(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """Two items that do not overlap, each in the other's place; neighbours in half of the cases."""
    value, start, end = _item(values, random)
    _, first, last = _item(values, random)
    if random.random() < 0.5 and (behind := values.after(value._replace(end=end))) is not None:
        follower = values.after(behind) if values.in_map(behind) else None
        first, last = behind.start, (follower or behind).end
    (start, end), (first, last) = sorted([(start, end), (first, last)])
    if first < end:
        return _drop(data, values, random, other)
    return data[:start] + data[first:last] + data[end:first] + data[start:end] + data[last:]


def _nest(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """A value inside many arrays or maps, or inside arrays that never end."""
    value = random.choice(values)
    depth = random.choice(_DEPTHS)
    shell = random.choice((b"\x91", b"\x81\xa1a", b"\x81", b"\xdd\x00\x00\x00\x01", b"\x92\xc0", b"\xc4"))
    return data[: value.start] + shell * depth + data[value.start :]


def _transplant(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """A value from somewhere else in this document, or from the other one."""
    donor = random.choice((data, other))
    values_there = values if donor is data else document(donor)
    if not values_there:
        return other
    source, target = random.choice(values_there), random.choice(values)
    return data[: target.start] + donor[source.start : source.end] + data[target.end :]


def _flip(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """A bit of a tag, a count or a text."""
    value = random.choice(values)
    at = random.randrange(value.start, max(value.body, value.start + 1))
    if value.end > value.body and random.random() < 0.5:
        at = random.randrange(value.body, value.end)
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _follow(data: bytes, values: Document, random: Random, other: bytes) -> bytes:
    """Bytes behind the document, or none of its last ones."""
    if random.random() < 0.5:
        return data[: random.choice(values).start]
    return data + random.choice((b"\0", b"\xc0", data, random.randbytes(9)))


_CHANGES: Final[tuple[Change, ...]] = (
    *3 * (_replace,),
    *4 * (_replace_number,),
    *2 * (_recount, _transplant, _flip, _drop),
    _respell,
    _repeat,
    _swap,
    _nest,
    _follow,
)
