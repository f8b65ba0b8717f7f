"""Which records of a partial file are on its disk, so that a build that was stopped can go on from there.

The journal is a file of its own: what it is and what the records depend on, then an entry for each record in order. An
entry is written after its record has reached the disk, so a journal never promises what a power failure took, and a
record is read and compared with its entry before anyone goes on from it. Reaching the disk is waited for by a thread,
a few hundred megabytes at a time, while the next records are written; so the last sync of a package is short too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG
from struct import Struct
from typing import BinaryIO, Final, NamedTuple

import crc32c

from estream_spec import limits
from estream_spec.errors import PackError

STEP_BYTES: Final = 1 << 27
"""Bytes of records between two syncs, 128 MiB; smaller packages have no journal, and are made anew."""
HEADER: Final = b"estream-pack journal 1\n"
ENTRY: Final = Struct("<I32s")
CHECK: Final = Struct("<I")
MAX_ENTRIES: Final = limits.MAX_RECORDS + limits.MAX_LAYERS + 2
"""Expert records, dense records of all layers, the embedding, and what follows the last layer."""


class StoppedError(PackError):
    """A build ended by something outside it, such as a worker that is gone or a full disk: it can go on from there."""


class Entry(NamedTuple):
    """What is known of a record that is there: crc32c of its bytes, and SHA-256 of its payload."""

    checksum: int
    digest: bytes


class Journal:
    """The journal of a partial file that is being written. Used from one thread.

    Args:
        path: of the journal; it appears with its first entry.
        file: the partial file.
        binding: digest of all that decides the bytes of records.
        begun: whether there is a journal already; `go_on` is then called before `add`.

    Attributes:
        begun: whether the journal has an entry, so that what was made is worth keeping.
    """

    def __init__(self, path: Path, file: BinaryIO, binding: bytes, *, begun: bool = False):
        self.begun = begun
        self._path, self._file, self._binding = path, file, binding
        self._descriptor = -1
        self._pending, self._pending_bytes = bytearray(), 0
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def go_on(self, entries: Sequence[Entry]) -> None:
        """Take over the journal that is there, of which some first entries hold.

        Raises:
            OSError: it cannot be written.
        """
        self.begun = bool(entries)
        if not entries:
            self._path.unlink(missing_ok=True)
            return
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.ftruncate(self._descriptor, len(_head(self._binding)) + len(entries) * (ENTRY.size + CHECK.size))

    def add(self, entry: Entry, length: int) -> None:
        """Note a record of `length` bytes that has been written.

        Raises:
            OSError: it, or one before it, does not reach the disk.
        """
        self._pending += _encode(entry)
        self._pending_bytes += length
        if self._pending_bytes >= STEP_BYTES:
            self._begin_sync()

    def finish(self) -> None:
        """Note all records that were written.

        Raises:
            OSError: they do not reach the disk.
        """
        self._wait()
        if self._pending and self.begun:  # a small package has no journal
            self._begin_sync()
            self._wait()

    def close(self) -> None:
        """Wait for what is running, and give the descriptor back."""
        self._thread.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin_sync(self) -> None:
        self._wait()
        self._file.flush()
        self._running = self._thread.submit(self._sync, bytes(self._pending))
        self._pending.clear()
        self._pending_bytes = 0

    def _wait(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _sync(self, entries: bytes) -> None:
        """Wait until the records are on the disk, then say so."""
        os.fdatasync(self._file.fileno())
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
            entries = _head(self._binding) + entries
        while entries:
            entries = entries[os.write(self._descriptor, entries) :]
        os.fdatasync(self._descriptor)
        self.begun = True


def read_journal(path: Path, binding: bytes) -> tuple[Entry, ...]:
    """The entries of a journal, as far as they are whole; none if it is of another binding, or cannot be read."""
    head, size = _head(binding), ENTRY.size + CHECK.size
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            own = S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not own or file.read(len(head)) != head:
                return ()
            found = file.read(MAX_ENTRIES * size)
        entries = []
        for begin in range(0, len(found) - size + 1, size):
            entry = Entry(*ENTRY.unpack_from(found, begin))
            if _encode(entry) != found[begin : begin + size]:
                break
            entries.append(entry)
        return tuple(entries)
    return ()


def _head(binding: bytes) -> bytes:
    return HEADER + binding


def _encode(entry: Entry) -> bytes:
    """An entry with a checksum of its own: a power failure may tear it."""
    data = ENTRY.pack(*entry)
    return data + CHECK.pack(crc32c.crc32c(data))
