"""One input file, read by position through its descriptor.

Never mapped: on a network file system a mapped page that cannot be read, or that was cut off meanwhile, kills the
process, where a read returns an error that can be told.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Self

from estream_spec.errors import PackError, reason

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_STEP = 1 << 20
"""Bytes read at a time where a file is only passed through."""


class InputFile:
    """A regular file, opened for reading. Safe to share between threads.

    Attributes:
        path: where it is.
        length: bytes it had when it was opened.

    Raises:
        PackError: it cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise PackError(f"file cannot be opened: {reason(error)}", path=str(path)) from None
        status = os.fstat(self._descriptor)
        self.length = status.st_size
        self._stamp = _stamp(status)
        if not S_ISREG(status.st_mode):
            self.close()
            raise PackError("not a regular file", path=str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target`, contiguous bytes, from byte `offset` on.

        Raises:
            PackError: the file cannot be read there or has become shorter.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise PackError(
                    f"file cannot be read: {reason(error)}", path=str(self.path), offset=offset + done
                ) from None
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
        try:
            now = _stamp(os.fstat(self._descriptor))
        except OSError as error:
            raise PackError(f"file cannot be read: {reason(error)}", path=str(self.path)) from None
        if now != self._stamp:
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
