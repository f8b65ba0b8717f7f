"""A file's bytes as the lines that are not zero, so that one of many gigabytes is as easily held as a small one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

LINE: Final = 32
"""Bytes in a line."""
_ZERO: Final = bytes(LINE)


@dataclass(frozen=True, slots=True)
class Image:
    """A file.

    Attributes:
        length: its bytes.
        lines: 32 bytes each by offset, a multiple of 32; where there is none, all are zero.
    """

    length: int
    lines: Mapping[int, bytes]

    @classmethod
    def of(cls, *pieces: tuple[int, bytes]) -> Image:
        """A file of pieces at offsets, ascending and apart from each other by whole lines, zero between them."""
        lines = {}
        for start, data in pieces:
            skipped = start % LINE
            data = bytes(skipped) + data
            for at in range(0, len(data), LINE):
                if any(line := data[at : at + LINE]):
                    lines[start - skipped + at] = line.ljust(LINE, b"\0")
        last_start, last = pieces[-1]
        return cls(last_start + len(last), lines)

    def over(self, base: Image) -> dict[int, bytes]:
        """The lines that differ from another file's, by offset; what makes this file out of that one."""
        offsets = sorted(at for at in {*self.lines, *base.lines} if at < self.length)
        pairs = ((at, self.lines.get(at, _ZERO), base.lines.get(at, _ZERO)) for at in offsets)
        return {at: own for at, own, other in pairs if own != other}

    def patched(self, length: int, lines: Mapping[int, bytes]) -> Image:
        """The file that differs from this one in some lines, and in its length."""
        merged = {**self.lines, **lines}
        kept = {at: line for at, line in sorted(merged.items()) if at < length and line != _ZERO}
        if (at := length - length % LINE) in kept:
            kept[at] = kept[at][: length - at].ljust(LINE, b"\0")
            if kept[at] == _ZERO:
                del kept[at]
        return Image(length, kept)

    def data(self) -> bytes:
        """All bytes."""
        whole = bytearray(-(-self.length // LINE) * LINE)
        for at, line in self.lines.items():
            whole[at : at + LINE] = line
        return bytes(whole[: self.length])

    def digest(self) -> str:
        """SHA-256 of all bytes, hexadecimal."""
        return sha256(self.data()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the file; what is zero takes no room where the file system has sparse files."""
        with path.open("wb") as file:
            for at, data in self._runs():
                file.seek(at)
                file.write(data[: self.length - at])
            file.truncate(self.length)

    def _runs(self) -> Iterator[tuple[int, bytes]]:
        """Lines that follow each other, joined."""
        begin, run = 0, bytearray()
        for at, line in sorted(self.lines.items()):
            if run and at != begin + len(run):
                yield begin, bytes(run)
                run.clear()
            begin = begin if run else at
            run += line
        if run:
            yield begin, bytes(run)
