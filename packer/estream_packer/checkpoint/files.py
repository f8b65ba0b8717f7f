"""One input file, read by position: through its descriptor, or by ranges where it is on another machine.

Never mapped: on a network file system a mapped page that cannot be read, or that was cut off meanwhile, kills the
process, where a read returns an error that can be told.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG
from threading import local
from typing import TYPE_CHECKING, Final, Protocol, Self

from estream_packer.journal import StoppedError
from estream_packer.remote import Location, RemotePath
from estream_spec.errors import PackError, reason

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_STEP = 1 << 20
"""Bytes read at a time where a file is only passed through."""
REQUEST_BYTES: Final = 1 << 23
"""Bytes asked of another machine at a time, 8 MiB: an answer takes tens of milliseconds, however short."""


class _Reader(Protocol):
    """What differs between files here and elsewhere.

    Attributes:
        length: bytes the file had when it was opened.
        version: what is the same on every machine that sees the file, and differs after the file was written anew.
        identity: what tells the file from any other that this machine sees under its name, and from what it was before
            it was written anew; empty where nothing does.
    """

    length: int
    version: str
    identity: str

    def read_some(self, target: memoryview, offset: int) -> int:
        """Fill some first bytes of `target`, from byte `offset` on; 0 where the file ends."""

    def has_changed(self) -> bool:
        """Whether the file is no longer what it was when it was opened."""

    def close(self) -> None:
        """Give back what it takes to read. Closing twice is harmless."""


class _LocalReader:
    """Through a descriptor."""

    def __init__(self, path: Path):
        self._path = path
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise PackError(f"file cannot be opened: {reason(error)}", path=str(path)) from None
        status = os.fstat(self._descriptor)
        self.length, self.version = status.st_size, str(status.st_mtime_ns)
        self.identity = f"{status.st_dev} {status.st_ino} {status.st_ctime_ns}"
        self._stamp = _stamp(status)
        if not S_ISREG(status.st_mode):
            self.close()
            raise PackError("not a regular file", path=str(path))

    def __del__(self) -> None:
        self.close()

    def read_some(self, target: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [target], offset)
        except OSError as error:
            raise StoppedError(f"file cannot be read: {reason(error)}", path=str(self._path), offset=offset) from None

    def has_changed(self) -> bool:
        try:
            return _stamp(os.fstat(self._descriptor)) != self._stamp
        except OSError as error:
            raise StoppedError(f"file cannot be read: {reason(error)}", path=str(self._path)) from None

    def close(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:  # it has none where it could not be opened
            os.close(self._descriptor)
            self._descriptor = -1


class _RemoteReader:
    """By requests of good size. Each thread keeps the last answer, since it reads on from there as a rule."""

    def __init__(self, path: RemotePath):
        self._path, self._kept = path, local()
        self.length, self.version = path.status()
        self.identity = self.version

    def read_some(self, target: memoryview, offset: int) -> int:
        begin: int = getattr(self._kept, "begin", 0)
        data: bytes = getattr(self._kept, "data", b"")
        if not begin <= offset < begin + len(data):
            self._kept.data = b""  # not two of them at a time
            data = self._path.read(offset, min(offset + max(len(target), REQUEST_BYTES), self.length))
            self._kept.begin, self._kept.data, begin = offset, data, offset
        found = data[offset - begin : offset - begin + len(target)]
        target[: len(found)] = found
        return len(found)

    def has_changed(self) -> bool:
        return self._path.status() != (self.length, self.version)

    def close(self) -> None:
        self._kept = local()


class InputFile:
    """A regular file, opened for reading. Safe to share between threads.

    Attributes:
        path: where it is.
        length: bytes it had when it was opened.
        version: what is the same on every machine that sees the file, and differs after the file was written anew.
        identity: what tells the file from any other that this machine sees under its name, and from what it was before
            it was written anew; empty where nothing does.

    Raises:
        PackError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Location):
        self.path = path
        self._reader: _Reader = _LocalReader(path) if isinstance(path, Path) else _RemoteReader(path)
        self.length, self.version = self._reader.length, self._reader.version
        self.identity = self._reader.identity

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Closing twice is harmless."""
        self._reader.close()

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target`, contiguous bytes, from byte `offset` on.

        Raises:
            PackError: the file cannot be read there or has become shorter.
        """
        done = 0
        while done < len(target):
            count = self._reader.read_some(target[done:], offset + done)
            if count == 0:
                raise PackError(
                    f"file ends {len(target) - done} bytes early: it shrank while it was read",
                    path=str(self.path),
                    offset=offset + done,
                )
            done += count

    def read_all(self, limit: int) -> bytes:
        """The whole file.

        Raises:
            PackError: it is longer than `limit` bytes, or cannot be read.
        """
        if self.length > limit:
            raise PackError(f"file length {self.length} exceeds the limit of {limit} bytes", path=str(self.path))
        data = bytearray(self.length)
        self.read_into(memoryview(data), 0)
        return bytes(data)

    def check_unchanged(self) -> None:
        """Refuse a file that is no longer what it was when it was opened.

        Raises:
            PackError: its length, its content or its inode changed, or that cannot be known.
        """
        if self._reader.has_changed():
            hint = "try again when nothing writes to the checkpoint"
            raise PackError("file changed while it was packed", path=str(self.path), hint=hint)

    def update(self, digest: Hash, begin: int, end: int) -> None:
        """Feed the bytes from `begin` to `end` to a digest, through a small buffer.

        Raises:
            PackError: the file cannot be read.
        """
        buffer = memoryview(bytearray(min(_STEP, end - begin)))
        for offset in range(begin, end, _STEP):
            step = buffer[: min(_STEP, end - offset)]
            self.read_into(step, offset)
            digest.update(step)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    """What differs after any write: length, and the times of the last change of content and of inode."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
