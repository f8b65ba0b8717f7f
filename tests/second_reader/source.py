"""Bytes of a package, read where they are needed and never all at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

CHUNK: Final = 1 << 20


class Source(NamedTuple):
    """A package and what follows it in its file."""

    read: Callable[[int, int], bytes]
    """Takes an offset and a length within `length`, both in bytes."""
    length: int

    def slice(self, start: int, end: int) -> bytes:
        """The bytes from start to end, fewer if they are not all there."""
        start, end = min(start, self.length), min(end, self.length)
        return self.read(start, end - start)

    def chunks(self, start: int, end: int) -> Iterator[bytes]:
        """The same bytes in pieces."""
        for at in range(start, end, CHUNK):
            yield self.slice(at, min(at + CHUNK, end))

    def sha256(self, start: int, end: int) -> bytes:
        """The digest of the same bytes."""
        state = hashlib.sha256()
        for chunk in self.chunks(start, end):
            state.update(chunk)
        return state.digest()

    def is_zero(self, start: int, end: int) -> bool:
        """Whether the same bytes are all zero."""
        return all(is_zero(chunk) for chunk in self.chunks(start, end))


def is_zero(data: bytes) -> bool:
    """Whether all bytes are zero."""
    return data.count(0) == len(data)


def round_up(value: int, alignment: int) -> int:
    """The smallest multiple of the alignment that is at least the value."""
    return -(-value // alignment) * alignment
