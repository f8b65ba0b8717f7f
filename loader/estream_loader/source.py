"""Where a package's bytes come from: a file, part of a file, or memory.

A source only reads. It may deliver less than asked, as `preadv` may; `read_exactly` is what everything else uses.
Tests inject faults by handing `open_package` a source of their own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, Self, runtime_checkable

from estream_loader.direct import DirectFile
from estream_spec.errors import LinkError, reason
from estream_spec.rulebook import refusal

PIECE: Final = 1 << 20
"""Bytes read at a time where a range is only passed through."""


@runtime_checkable
class ByteSource(Protocol):
    """Bytes at offsets from a package's start."""

    name: str
    """What messages call it."""

    def available(self) -> int:
        """Bytes from the package's start to the end of what there is."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the start of a non-empty writable buffer from `offset`; returns how many bytes, 0 only past the end.

        Raises:
            OSError: the device failed.
        """
        ...

    def close(self) -> None:
        """Release what the source itself opened."""
        ...


class FileSource:
    """A package that begins at byte `base` of a file.

    Reads are positioned, so one source may serve several threads, and a file that shrinks meanwhile gives an error and
    not a signal, as a mapping would.

    Args:
        descriptor: the file, open for reading.
        base: offset at which the package begins.
        name: what messages call the file; None names the descriptor.
        owned: whether closing the source closes the file.

    Raises:
        LinkError: the descriptor is not one of a regular file.
    """

    def __init__(self, descriptor: int, *, base: int = 0, name: str | None = None, owned: bool):
        self.name = f"file descriptor {descriptor}" if name is None else name
        self._descriptor, self._base, self._owned = descriptor, base, owned
        if not os.path.isfile(descriptor):  # noqa: PTH113 (of a descriptor)
            self.close()
            raise LinkError(f"{self.name!r} is not a regular file")

    @classmethod
    def open(cls, path: Path, *, base: int = 0) -> Self:
        """Open a file for reading.

        Raises:
            LinkError: it cannot be opened, or is not a regular file.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # the second for a zero byte in the path
            raise LinkError(f"file cannot be opened: {reason(error)}", path=str(path)) from None
        return cls(descriptor, base=base, name=str(path), owned=True)

    def available(self) -> int:
        """Bytes from the package's start to the end of the file; negative where the file ends before."""
        return os.fstat(self._descriptor).st_size - self._base

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `ByteSource.read_into`."""
        return os.preadv(self._descriptor, [buffer], self._base + offset)

    def expect(self, offset: int, length: int) -> None:
        """Tell the system that a range will be read soon, so that it can bring several together."""
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, self._base + offset, length, os.POSIX_FADV_WILLNEED)

    def open_direct(self) -> DirectFile:
        """Open the same file once more, to be read past the page cache; the caller closes it.

        Raises:
            OSError: the system refuses; its `strerror` says why.
        """
        return DirectFile(self._descriptor, self._base)

    def close(self) -> None:
        """Close the file if this source opened it; closing twice is harmless."""
        if self._owned:
            os.close(self._descriptor)
            # The number may soon be that of another file, which a late read must not reach.
            self._descriptor, self._owned = -1, False


class MemorySource:
    """A package held in memory."""

    def __init__(self, data: bytes | bytearray | memoryview):
        self.name = "package in memory"
        self._data = memoryview(data).cast("B")

    def available(self) -> int:
        """Bytes of the buffer."""
        return len(self._data)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `ByteSource.read_into`."""
        piece = self._data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Nothing to release."""


def read_exactly(source: ByteSource, buffer: memoryview, offset: int) -> None:
    """Fill the whole buffer from `offset`, however many reads that takes.

    Raises:
        IntegrityError: the bytes end before the buffer is full.
        LinkError: the device failed.
    """
    done = 0
    while done < len(buffer):
        try:
            count = source.read_into(buffer[done:], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            why = error.strerror or errno.errorcode.get(error.errno or 0, str(error))
            message = f"reading failed: {why}: got {done} of {len(buffer)} bytes"
            raise LinkError(message, path=source.name, offset=offset + done) from error
        if count == 0:
            message = f"the package ends early: got {done} of {len(buffer)} bytes"
            raise refusal("EMOE-SUP-011", message, path=source.name, offset=offset + done)
        done += count


def read(source: ByteSource, offset: int, length: int) -> bytes:
    """The bytes from `offset`, all of them. Raises as `read_exactly` does."""
    buffer = bytearray(length)
    read_exactly(source, memoryview(buffer), offset)
    return bytes(buffer)


def read_pieces(source: ByteSource, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of a range that may be long, a little at a time. Raises as `read_exactly` does."""
    for at in range(start, stop, PIECE):
        yield read(source, at, min(PIECE, stop - at))


def available(source: ByteSource) -> int:
    """Bytes from the package's start on; never negative."""
    return max(source.available(), 0)
