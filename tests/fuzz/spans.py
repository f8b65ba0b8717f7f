"""Where the values of a MessagePack document and the fields of fixed structures stand, damaged or not."""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

MOST_VALUES: Final = 1200
"""Values looked for in one document; what stands behind them is left to mutations that know no structure."""


class _Tag(NamedTuple):
    """What a tag says of the bytes behind it.

    Attributes:
        width: bytes of the count.
        inline: the count, where it is in the tag.
        values: values for each that is counted: 1 for arrays, 2 for maps, 0 for all others.
        more: bytes of the body that the count leaves out.
    """

    width: int
    inline: int
    values: int
    more: int


def _tag(tag: int) -> _Tag:
    if 0x80 <= tag < 0xA0:
        return _Tag(0, tag & 15, 2 if tag < 0x90 else 1, 0)
    if 0xA0 <= tag < 0xC0:
        return _Tag(0, tag & 31, 0, 0)
    if tag in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):
        return _Tag(1 << (tag - (0xC4 if tag < 0xD0 else 0xD9)), 0, 0, 0)
    if tag in (0xC7, 0xC8, 0xC9):
        return _Tag(1 << (tag - 0xC7), 0, 0, 1)
    if 0xDC <= tag < 0xE0:
        return _Tag(2 + (tag & 1) * 2, 0, 1 if tag < 0xDE else 2, 0)
    return _Tag(0, 0, 0, _NUMBERS.get(tag, 0))


_NUMBERS: Final = {
    0xCA: 4,
    0xCB: 8,
    **{0xCC + index: 1 << index for index in range(4)},
    **{0xD0 + index: 1 << index for index in range(4)},
    **{0xD4 + index: 1 + (1 << index) for index in range(5)},
}
"""Tags with so many bytes behind them, whatever those are."""
_TAGS: Final = tuple(_tag(tag) for tag in range(256))


class Value(NamedTuple):
    """One MessagePack value.

    Attributes:
        position: which one of the document, counted by their tags.
        start: offset of its tag.
        body: offset behind tag and count.
        end: offset behind all of it.
        counted: what its count says: values of an array, pairs of a map, bytes of anything else.
        parent: position of the array or map that holds it; -1 for the document itself.
        number: which of the parent's values it is; keys of a map have even numbers.
    """

    position: int
    start: int
    body: int
    end: int
    counted: int
    parent: int
    number: int


class Document(Sequence[Value]):
    """The values of a document in the order of their tags, as far as it can be followed.

    Args:
        data: the document's bytes.
    """

    def __init__(self, data: bytes):
        self._starts: list[int] = []
        self._bodies: list[int] = []
        self._ends: list[int] = []
        self._counts: list[int] = []
        self._parents: list[int] = []
        self._numbers: list[int] = []
        self.integers: list[int] = []
        """Positions of unsigned integers."""
        self._maps: set[int] = set()
        self._read(data)

    def _read(self, data: bytes) -> None:
        open_ones: list[tuple[int, int, int]] = []  # values around those at work: position, values so far, and in all
        parent, number, wanted = -1, 0, 1
        at, position, length = 0, 0, len(data)
        while at < length and position < MOST_VALUES:
            tag = data[at]
            width, count, values, more = _TAGS[tag]
            body = at + 1 + width
            if width:
                count = int.from_bytes(data[at + 1 : body], "big")
            end = body + more if values else body + more + count
            self._starts.append(at)
            self._bodies.append(min(body, length))
            self._ends.append(min(end, length))
            self._counts.append(count)
            self._parents.append(parent)
            self._numbers.append(number)
            if tag < 0x80 or 0xCC <= tag < 0xD0:
                self.integers.append(position)
            at, number = end, number + 1
            if values:
                open_ones.append((parent, number, wanted))
                parent, number, wanted = position, 0, count * values
                if values == 2:
                    self._maps.add(position)
            position += 1
            while number >= wanted and parent >= 0:
                self._ends[parent] = min(at, length)
                parent, number, wanted = open_ones.pop()
            if parent < 0 and number >= wanted:
                break
        while parent >= 0:
            self._ends[parent] = min(at, length)
            parent, _, _ = open_ones.pop()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, at: int) -> Value:  # type: ignore[override]  # slices are not needed
        return Value(
            at,
            self._starts[at],
            self._bodies[at],
            self._ends[at],
            self._counts[at],
            self._parents[at],
            self._numbers[at],
        )

    def in_map(self, value: Value) -> bool:
        """Whether it is a key of a map, or what stands behind one."""
        return value.parent in self._maps

    def after(self, value: Value) -> Value | None:
        """The value that begins where this one ends."""
        at = bisect_left(self._starts, value.end)
        return self[at] if at < len(self) and self._starts[at] == value.end else None

    def before(self, value: Value) -> Value:
        """The value in front of this one in the same array or map; this one where it is the first."""
        if value.number == 0:
            return value
        at = value.position - 1
        while self._parents[at] != value.parent:
            at -= 1
        return self[at]


@lru_cache(maxsize=256)
def document(data: bytes) -> Document:
    """The values of a document; those of inputs that are damaged again and again are not looked for each time."""
    return Document(data)


Field = tuple[int, int]
"""Offset and width of a number or of bytes."""


def fields_of(layout: struct.Struct) -> tuple[Field, ...]:
    """The fields of a fixed structure, padding among them."""
    found, at = [], 0
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        one_field = kind in "sx"
        width = int(count or 1) if one_field else struct.calcsize(f"<{kind}")
        for _ in range(1 if one_field else int(count or 1)):
            found.append((at, width))
            at += width
    assert at == layout.size
    return tuple(found)
