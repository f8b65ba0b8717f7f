"""Bring ranges of a package into memory of the caller, several reads at a time, while the caller does something else.

A `Reader` has `lanes` threads, each with one outstanding read. What is submitted is cut into pieces, so that several
lanes share one group's read, and free lanes take pieces in the order of submission. The lane that brings the last byte
of a record proves it, so that proving, too, happens beside the caller's computing and before it sees the record.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Self

from estream_loader.records import RecordPlace
from estream_loader.source import ByteSource, read_exactly
from estream_loader.uncached import UncachedSource
from estream_spec.errors import LinkError
from estream_spec.pieces import piece_bytes

Check = Callable[[RecordPlace, memoryview], None]
"""Proves a record that has landed, or raises."""


class ReadState(Enum):
    """Where a read is; the last three are final."""

    QUEUED = "queued"
    READING = "reading"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece that a lane has read, well or not."""

    lane: int
    offset: int
    """Bytes from the package's start."""
    length: int
    begun: float
    """Seconds, as `time.perf_counter` counts them."""
    ended: float


@dataclass(frozen=True, slots=True)
class ReadingStats:
    """What reading has cost so far."""

    bytes_read: int = 0
    """Bytes of pieces that have landed."""
    reads: int = 0
    """Ranges submitted."""
    pieces: int = 0
    """Pieces that have landed."""
    io_busy_s: float = 0.0
    """Seconds in which at least one lane was reading."""


class Read:
    """One range on its way into memory. The memory is the reader's until the read is over."""

    def __init__(self, reader: Reader, offset: int, buffer: memoryview, records: Sequence[RecordPlace]):
        self.offset, self.length = offset, len(buffer)
        self._reader = reader
        self._buffer: memoryview | None = buffer
        self._records = tuple(records)
        self._state = ReadState.QUEUED
        self._pieces = deque(_cut(len(buffer), reader.piece_of(len(buffer))))
        self._missing = [record.length for record in records]
        self._at_work = 0
        self._error: BaseException | None = None
        self._over = threading.Event()

    @property
    def state(self) -> ReadState:
        """Where the read is."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._over.is_set()

    def cancel(self) -> bool:
        """Give the read up unless its first piece has begun; whether it is cancelled."""
        return self._reader._cancel(self)

    def wait(self) -> None:
        """Return when every byte is there and every record proven.

        Raises:
            IntegrityError: the package ends early, or a record's checksum differs.
            LinkError: the device failed, the read was cancelled, or the reader was closed before it was done.
        """
        if (error := self.outcome()) is not None:
            raise error

    def outcome(self) -> BaseException | None:
        """What `wait` would raise, or None; returns when the read is over."""
        self._over.wait()
        return self._error


class Reader:
    """Reading threads over one source. Use it as a context manager; the source stays the caller's.

    Args:
        source: the package's bytes; those of a file are read past the page cache where that works.
        lanes: reads outstanding at a time.
        check: proves each record as it lands, on the lane that completed it; None proves nothing.
        piece: bytes that reads are cut into, the last with what is left over; None cuts each read as
            `estream_spec.pieces` says.
        on_piece: told of every piece when it is over, on its lane.

    Raises:
        LinkError: no lane is asked for, or the threads cannot be had.
    """

    def __init__(
        self,
        source: ByteSource,
        lanes: int,
        *,
        check: Check | None = None,
        piece: int | None = None,
        on_piece: Callable[[Span], None] | None = None,
    ):
        if lanes < 1:
            raise LinkError(f"{lanes} lanes for reading, expected 1 or more")
        self._lanes, self._piece = lanes, piece
        self._source = UncachedSource(source)
        self._check, self._on_piece = check, on_piece
        self._change = threading.Condition()
        """Guards all that follows, and the reads; notified when there is something to take."""
        self._queue: deque[Read] = deque()
        """Reads with pieces that no lane has taken, in order of submission."""
        self._unfinished: set[Read] = set()
        """Reads that are not over."""
        self._closed = False
        self._stats = ReadingStats()
        self._reading = 0
        self._busy_since = 0.0
        self._threads: list[threading.Thread] = []
        try:
            for lane in range(lanes):
                thread = threading.Thread(target=self._work, args=(lane,), name=f"reading lane {lane}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise LinkError(f"cannot start {lanes} reading threads: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def piece_of(self, length: int) -> int:
        """Bytes of the pieces that a read of `length` bytes is cut into."""
        return piece_bytes(length, self._lanes) if self._piece is None else self._piece

    @property
    def mode(self) -> str:
        """Whether the page cache is bypassed: `direct`, `direct, unproven: REASON`, or `buffered: REASON`."""
        return self._source.mode

    @property
    def stats(self) -> ReadingStats:
        """What reading has cost up to now."""
        with self._change:
            under_way = time.perf_counter() - self._busy_since if self._reading else 0.0
            return replace(self._stats, io_busy_s=self._stats.io_busy_s + under_way)

    def submit(self, offset: int, buffer: memoryview, records: Sequence[RecordPlace] = ()) -> Read:
        """Begin to read a range.

        Args:
            offset: of its first byte, from the package's start.
            buffer: memory to fill, writable bytes. Page-aligned memory, lengths and offsets let it bypass the cache.
            records: those in the range that are to be proven, each lying in it as a whole.

        Raises:
            LinkError: the reader is closed.
        """
        assert all(offset <= each.offset and each.offset + each.length <= offset + len(buffer) for each in records)
        self._source.require_alignment(buffer, offset)
        read = Read(self, offset, buffer, records)
        with self._change:
            if self._closed:
                raise self._stopped(read, "the reader is closed")
            self._unfinished.add(read)
            self._queue.append(read)
            self._stats = replace(self._stats, reads=self._stats.reads + 1)
            self._change.notify(len(read._pieces))
        return read

    def drain(self) -> None:
        """Cancel what has not begun and wait for the rest, also for reads whose submitter was interrupted.

        Once this returns, no memory that was submitted is written to.
        """
        with self._change:
            unfinished = tuple(self._unfinished)
        for read in reversed(unfinished):
            read.cancel()
        for read in unfinished:
            read.outcome()

    def close(self) -> None:
        """Stop: pieces under way are finished, no other begins, and all threads end. Closing twice is harmless.

        Once this returns, no memory that was submitted is written to.
        """
        with self._change:
            self._closed = True
            for read in self._queue:
                read._pieces.clear()
                read._error = read._error or self._stopped(read, "the reader was closed before a read was done")
                self._conclude(read, ReadState.CANCELLED if read._state is ReadState.QUEUED else ReadState.FAILED)
            self._queue.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        self._source.close()

    def _cancel(self, read: Read) -> bool:
        with self._change:
            if read._state is ReadState.QUEUED:
                self._queue.remove(read)
                read._pieces.clear()
                read._error = self._stopped(read, "the read was cancelled")
                self._conclude(read, ReadState.CANCELLED)
            return read._state is ReadState.CANCELLED

    def _work(self, lane: int) -> None:
        """What each thread does."""
        while (taken := self._take()) is not None:
            read, start, stop = taken
            error = self._bring(lane, read, start, stop)
            if error is not None:
                _forget_frames(error)
            self._finish(read, error)

    def _take(self) -> tuple[Read, int, int] | None:
        """The next piece, as (read, start, stop) in its buffer; None when the reader closes."""
        with self._change:
            while not self._queue and not self._closed:
                self._change.wait()
            if self._closed:
                return None
            read = self._queue[0]
            start, stop = read._pieces.popleft()
            if not read._pieces:
                self._queue.popleft()
            read._state = ReadState.READING
            read._at_work += 1
            return read, start, stop

    def _bring(self, lane: int, read: Read, start: int, stop: int) -> BaseException | None:
        """Read one piece and prove the records it completes; what went wrong, if anything did."""
        assert read._buffer is not None
        try:
            begun = self._begin()
            landed = False
            try:
                read_exactly(self._source, read._buffer[start:stop], read.offset + start)
                landed = True
            finally:
                ended = self._end(stop - start if landed else None)
                if self._on_piece is not None:
                    self._on_piece(Span(lane, read.offset + start, stop - start, begun, ended))
            if self._check is not None:
                for record in self._completed(read, read.offset + start, read.offset + stop):
                    first = record.offset - read.offset
                    self._check(record, read._buffer[first : first + record.length])
        except BaseException as error:  # a source of the caller's may raise anything; it belongs to whoever waits
            return error
        return None

    def _begin(self) -> float:
        with self._change:
            now = time.perf_counter()
            if self._reading == 0:
                self._busy_since = now
            self._reading += 1
            return now

    def _end(self, landed: int | None) -> float:
        with self._change:
            now, stats = time.perf_counter(), self._stats
            self._reading -= 1
            if self._reading == 0:
                stats = replace(stats, io_busy_s=stats.io_busy_s + now - self._busy_since)
            if landed is not None:
                stats = replace(stats, bytes_read=stats.bytes_read + landed, pieces=stats.pieces + 1)
            self._stats = stats
            return now

    def _completed(self, read: Read, start: int, stop: int) -> list[RecordPlace]:
        """Records of which the bytes from `start` to `stop` of the package were the last to come."""
        completed = []
        with self._change:
            for index, record in enumerate(read._records):
                common = min(stop, record.offset + record.length) - max(start, record.offset)
                if common > 0:
                    read._missing[index] -= common
                    if read._missing[index] == 0:
                        completed.append(record)
        return completed

    def _finish(self, read: Read, error: BaseException | None) -> None:
        with self._change:
            if error is not None and read._error is None:
                read._error = error
                if read._pieces:
                    read._pieces.clear()
                    self._queue.remove(read)
            read._at_work -= 1
            if not read._pieces:
                self._conclude(read, ReadState.DONE if read._error is None else ReadState.FAILED)

    def _conclude(self, read: Read, state: ReadState) -> None:
        """The read is over as soon as no lane is at work on it."""
        if read._at_work == 0:
            read._state, read._buffer = state, None
            self._unfinished.discard(read)
            read._over.set()

    def _stopped(self, read: Read, message: str) -> LinkError:
        return LinkError(message, path=self._source.name, offset=read.offset)


def _cut(length: int, piece: int) -> list[tuple[int, int]]:
    """Pieces of a range, as (start, stop): each of `piece` bytes, the last with what is left over."""
    return [(start, min(start + piece, length)) for start in range(0, length, piece)] or [(0, 0)]


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error refer to: the caller's memory, which it may want to release."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
