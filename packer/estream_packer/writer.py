"""Writes a package in one pass beside its final name, and gives it that name when whole. FORMAT.md sections 3 and 4.

Sections go one behind the other, the directory follows them, and the superblocks are filled in when all the rest is on
the disk. Until then their slots are zero, so what a killed writer leaves behind is no package. How leavings are told
from files at work is the business of `partial`, and which of their records hold that of `journal`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from pickle import PickleBuffer
from stat import S_ISDIR, S_ISREG
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import crc32c
import zstandard

from estream_packer.journal import Entry, Journal, StoppedError
from estream_packer.partial import (
    create_partial,
    create_scratch,
    journal_of,
    remove_partial,
    remove_scratch,
    take_leaving,
)
from estream_packer.remote import Location, RemotePath
from estream_spec import limits
from estream_spec.constants import (
    DATA_START,
    FLAGS,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MAGIC,
    MIN_SECTION_ALIGNMENT_SHIFT,
    SUPERBLOCK_OFFSETS,
    Codec,
    SectionType,
)
from estream_spec.container import Container
from estream_spec.errors import PackError, reason
from estream_spec.layout import round_up
from estream_spec.records import DirectoryEntry, RecordRange, RecordTable, Superblock, encode_directory

ZSTD_LEVEL: Final = 19
"""Graphs and a tokenizer are small; they are compressed once and read often."""
PROVING_BYTES: Final = 1 << 20
"""Bytes read at a time where records are proven."""
FULL: Final = errno.ENOSPC, errno.EDQUOT
HINTS: Final = {
    **dict.fromkeys(FULL, "free some space there, or write to another place"),
    errno.EFBIG: "the file system or a limit of this process allows no file of this size",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOENT: "make the folder first",
    errno.EROFS: "write to another place",
    errno.EACCES: "write to a folder you own",
}


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One finished record.

    Attributes:
        data: the payload, zero-padded to whole pages.
        checksum: crc32c of `data`.
        digest: SHA-256 of the payload.
    """

    data: memoryview
    checksum: int
    digest: bytes

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As bytes, which come without a copy where the protocol can do that."""
        data = PickleBuffer(self.data) if protocol >= 5 else bytes(self.data)
        return _record, (data, self.checksum, self.digest)

    @classmethod
    def seal(cls, data: memoryview, payload_length: int) -> Self:
        """Name the bytes of a record, of which padding follows the payload."""
        return cls(data, crc32c.crc32c(data), sha256(data[:payload_length]).digest())


def _record(data: bytes | bytearray | memoryview, checksum: int, digest: bytes) -> PackedRecord:
    """A record that came from another process."""
    return PackedRecord(memoryview(data), checksum, digest)


class PackageWriter:
    """A package being written; a context that leaves either the whole package or nothing under its name.

    Attributes:
        output: final name of the package.
        page_shift: records begin at multiples of `1 << page_shift` bytes.
    """

    def __init__(self, output: Location, page_shift: int, binding: bytes | None = None):
        """Nothing is written before the context is entered.

        Args:
            output: final name of the package.
            page_shift: records begin at multiples of `1 << page_shift` bytes.
            binding: digest of all that decides the bytes of records. A writer of the same package and binding can go
                on where one that was stopped ended. None where going on is not worth its while.
        """
        self.output, self.page_shift = output, page_shift
        self._binding = binding
        self._entries: list[DirectoryEntry] = []
        self._kept = deque[Entry]()
        self._end = 0
        self._superblock: Superblock | None = None
        self._partial: Path | None = None
        self._file: BinaryIO | None = None
        self._journal: Journal | None = None

    def __enter__(self) -> Self:
        check_output(self.output)
        staged = _staging(self.output)
        leaving = take_leaving(staged, self._binding)
        with _refused(self.output):
            if leaving is None:
                self._partial, self._file = create_partial(staged)
            else:
                self._partial, self._file = leaving.path, leaving.file
                self._kept.extend(leaving.entries)
        if self._binding is not None:
            self._journal = Journal(journal_of(self._partial), self._file, self._binding, begun=leaving is not None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._journal is not None:
            stopped = isinstance(error, StoppedError) or not isinstance(error, Exception | None)
            if stopped:
                with contextlib.suppress(OSError):  # then fewer records are kept
                    self._journal.finish()
            self._journal.close()
            if stopped and self._journal.begun:
                assert error is not None
                error.add_note(f"what was made is kept in {self._partial}, and the same build goes on from there")
                self._partial = None
        # The name goes first: the lock must be held for as long as the file can be seen.
        if self._partial is not None:
            remove_partial(self._partial)
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk would be reported a second time, by the last flush
                self._file.close()

    def keep(self, lengths: Iterable[tuple[int, int]], tell: Callable[[], object]) -> int:
        """Prove the records that a writer which was stopped has left, and keep them up to the first that fails.

        Call it once, before anything is added. The records count as the first that are added; the records given to
        `add_records` are those that follow.

        Args:
            lengths: bytes of all records of the package, in order, with padding and without.
            tell: called for each record that is kept.

        Returns:
            How many are kept.

        Raises:
            PackError: the file cannot be written.
        """
        if self._journal is None:
            return 0
        claimed, offset = list(self._kept), round_up(DATA_START, 1 << self.page_shift)
        self._kept.clear()
        for entry, (length, payload_length) in zip(claimed, lengths, strict=False):
            if _found(self._open_file.fileno(), offset, length, payload_length) != entry:
                break
            self._kept.append(entry)
            offset += length
            tell()
        with _refused(self.output):
            self._open_file.truncate(offset if self._kept else 0)
            self._journal.go_on(self._kept)
        return len(self._kept)

    def add(self, section_type: SectionType, data: bytes, section_id: int = 0, *, compress: bool = False) -> None:
        """Append a section that is read whole.

        Args:
            section_type: what it is.
            data: its bytes.
            section_id: its id.
            compress: store it as one zstd frame where that is smaller.

        Raises:
            PackError: it cannot be written.
        """
        stored, codec = _compressed(data) if compress else (data, Codec.NONE)
        offset = self._begin_section(MIN_SECTION_ALIGNMENT_SHIFT)
        self._write(stored)
        self._entries.append(
            DirectoryEntry(
                type=section_type,
                id=section_id,
                flags=FLAGS[section_type],
                codec=codec,
                alignment_shift=MIN_SECTION_ALIGNMENT_SHIFT,
                offset=offset,
                stored_length=len(stored),
                length=len(data),
                sha256=sha256(stored).digest(),
            )
        )

    def add_records(
        self, section_type: SectionType, ranges: tuple[RecordRange, ...], records: Iterable[PackedRecord]
    ) -> RecordTable:
        """Append a section of records.

        Args:
            section_type: `DENSE` or `EXPERTS`.
            ranges: where the records stand in it.
            records: those that are not kept, in order; each is let go once it is written. No more are taken than the
                section holds.

        Returns:
            The table that describes them.

        Raises:
            PackError: they cannot be written.
        """
        offset = self._begin_section(self.page_shift)
        checksums, digests, missing = [], [], iter(records)
        for record_range in ranges:
            for _ in range(record_range.count):
                entry = self._next_record(missing, record_range.record_length)
                checksums.append(entry.checksum)
                digests.append(entry.digest)
        table = RecordTable(ranges=ranges, checksums=tuple(checksums), digests=tuple(digests))
        length = self._end - offset
        assert length == ranges[-1].end, (length, ranges[-1])
        self._entries.append(
            DirectoryEntry(
                type=section_type,
                id=0,
                flags=FLAGS[section_type],
                codec=Codec.NONE,
                alignment_shift=self.page_shift,
                offset=offset,
                stored_length=length,
                length=length,
                sha256=sha256(b"".join(table.digests)).digest(),
            )
        )
        return table

    def finish(self) -> Container:
        """Append the directory and fill in the superblocks; the package is whole, but not yet under its name.

        Raises:
            PackError: it cannot be written.
        """
        entries = tuple(self._entries)
        directory = encode_directory(entries)
        offset = self._begin_section(MIN_SECTION_ALIGNMENT_SHIFT)
        self._write(directory)
        superblock = Superblock(
            magic=MAGIC,
            format_major=FORMAT_MAJOR,
            format_minor=FORMAT_MINOR,
            page_shift=self.page_shift,
            generation=1,
            file_length=offset + len(directory),
            required_features=0,
            optional_features=0,
            directory_offset=offset,
            directory_length=len(directory),
            directory_sha256=sha256(directory).digest(),
        )
        self._superblock = superblock
        return Container(superblock, entries)

    def commit(self) -> None:
        """Make sure the package is on the disk, then give it its name, replacing an older one.

        Raises:
            PackError: it cannot be written.
        """
        assert self._partial is not None
        assert self._superblock is not None, "the package has not been finished"
        with _refused(self.output):
            self._open_file.flush()
            os.fsync(self._open_file.fileno())
            for place in SUPERBLOCK_OFFSETS:
                self._open_file.seek(place)
                self._open_file.write(self._superblock.encode())
            self._open_file.flush()
            os.fsync(self._open_file.fileno())
            if isinstance(self.output, RemotePath):
                self.output.upload(self._partial)
                return
            journal_of(self._partial).unlink(missing_ok=True)
            self._partial.replace(self.output)
            _sync_folder(self.output.parent)

    def _next_record(self, missing: Iterator[PackedRecord], length: int) -> Entry:
        """Keep the next record where it is there, else take it and write it."""
        if self._kept:
            self._open_file.seek(length, os.SEEK_CUR)
            self._end += length
            return self._kept.popleft()
        record = next(missing)
        assert len(record.data) == length, (len(record.data), length)
        self._write(record.data)
        entry = Entry(record.checksum, record.digest)
        if self._journal is not None:
            with _refused(self.output):
                self._journal.add(entry, length)
        return entry

    @property
    def _open_file(self) -> BinaryIO:
        assert self._file is not None, "the writer has not been entered"
        return self._file

    def _write(self, data: bytes | memoryview) -> None:
        with _refused(self.output):
            self._open_file.write(data)
        self._end += len(data)

    def _begin_section(self, shift: int) -> int:
        """Pad with zeros to the first multiple of `1 << shift` where a section may begin; returns it."""
        begin = round_up(max(self._end, DATA_START), 1 << shift)
        self._write(bytes(begin - self._end))
        return begin


def check_output(output: Location) -> None:
    """Refuse a name that no package can take.

    Raises:
        PackError: it is a folder, a device, or anything else that is not a plain file; or it is too long; or it is
            remote and nothing can be written there.
    """
    if isinstance(output, RemotePath):
        output.check_writable()
        return
    with _refused(output):
        try:
            mode = output.stat().st_mode
        except FileNotFoundError:
            return
    if S_ISDIR(mode):
        raise PackError("output is a folder", path=str(output), hint="give the name of the .emoe file to write")
    if not S_ISREG(mode):
        raise PackError("output exists and is not a plain file", path=str(output), hint="write to another place")


def check_space(output: Location, length: int) -> None:
    """Refuse to write what its disk has no room for, beside an older package of that name.

    Args:
        output: the package.
        length: bytes that are still to come.

    Raises:
        PackError: there is no such folder; `StoppedError` where there is less room.
    """
    folder = _staging(output).parent
    with _refused(output):
        free = shutil.disk_usage(folder).free
    if free < length:
        message = f"{length:,} bytes are still to be written, the disk has room for {free:,}"
        raise StoppedError(message, path=str(output if isinstance(output, Path) else folder), hint=HINTS[errno.ENOSPC])


@contextlib.contextmanager
def scratch_folder(output: Location) -> Iterator[Path]:
    """A folder where the package will find room, removed in the end, or by a later writer where this one is killed.

    Raises:
        PackError: it cannot be made.
    """
    with _refused(output):
        path, descriptor = create_scratch(_staging(output))
    try:
        yield path
    finally:
        remove_scratch(path, descriptor)


@contextlib.contextmanager
def _refused(output: Location) -> Iterator[None]:
    """Turn what the operating system refuses into one kind of error, for a full disk one that can be gone on from."""
    try:
        yield
    except OSError as error:
        hint = HINTS.get(error.errno or 0)
        kind = StoppedError if error.errno in FULL else PackError
        raise kind(f"package cannot be written: {reason(error)}", path=str(output), hint=hint) from error


def _compressed(data: bytes) -> tuple[bytes, Codec]:
    """The data as one zstd frame, or as it is where a frame would be larger or too dense for readers."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)
    if len(frame) < len(data) <= len(frame) * limits.MAX_COMPRESSION_RATIO:
        return frame, Codec.ZSTD
    return data, Codec.NONE


def _staging(output: Location) -> Path:
    """The file of this machine beside which partial files are made: a remote package is written here, then uploaded."""
    if isinstance(output, Path):
        return output
    return Path(tempfile.gettempdir(), f"{output.name}~{sha256(str(output).encode()).hexdigest()[:16]}")


def _found(descriptor: int, offset: int, length: int, payload_length: int) -> Entry | None:
    """What is to be known of a record in a file; None if that ends early or cannot be read."""
    buffer, checksum, digest = memoryview(bytearray(min(PROVING_BYTES, length))), 0, sha256()
    end, payload_end = offset + length, offset + payload_length
    while offset < end:
        try:
            count = os.preadv(descriptor, [buffer[: end - offset]], offset)
        except OSError:
            return None
        if count == 0:
            return None
        checksum = crc32c.crc32c(buffer[:count], checksum)
        digest.update(buffer[: min(count, max(payload_end - offset, 0))])
        offset += count
    return Entry(checksum, digest.digest())


def _sync_folder(folder: Path) -> None:
    """Make a new name in the folder last, where the file system does not do so on its own."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
