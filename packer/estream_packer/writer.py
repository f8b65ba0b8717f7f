"""Writes a package in one pass beside its final name, and gives it that name when whole. FORMAT.md sections 3 and 4.

Sections go one behind the other, the directory follows them, the superblocks are filled in last. Until then their slots
are zero, so what a killed writer leaves behind is no package. Such leavings have names of their own; a lock that dies
with its writer tells them from the files of a writer at work, and the next writer of the same package removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from types import TracebackType
from typing import BinaryIO, Final, Self

import crc32c
import zstandard

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
PARTIAL_SUFFIX: Final = ".partial"
MAX_PARTIAL_STEM: Final = 255 - len("..01234567") - len(PARTIAL_SUFFIX)
"""Bytes of the output's name that fit into that of a partial file, where a name may have 255."""
HINTS: Final = {
    errno.ENOSPC: "free some space there, or write to another place",
    errno.EDQUOT: "free some space there, or write to another place",
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

    @classmethod
    def seal(cls, data: memoryview, payload_length: int) -> Self:
        """Name the bytes of a record, of which padding follows the payload."""
        return cls(data, crc32c.crc32c(data), sha256(data[:payload_length]).digest())


class PackageWriter:
    """A package being written; a context that leaves either the whole package or nothing.

    Attributes:
        output: final name of the package.
        page_shift: records begin at multiples of `1 << page_shift` bytes.
    """

    def __init__(self, output: Path, page_shift: int):
        self.output, self.page_shift = output, page_shift
        self._entries: list[DirectoryEntry] = []
        self._end = 0
        self._partial: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        check_output(self.output)
        _remove_leavings(self.output)
        with _refused(self.output):
            self._partial, self._file = _create_partial(self.output)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The name goes first: the lock must be held for as long as the file can be seen.
        if self._partial is not None:
            with contextlib.suppress(OSError):  # gone already, after a commit
                self._partial.unlink()
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk would be reported a second time, by the last flush
                self._file.close()

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
            records: all of them, in order; each is let go once it is written.

        Returns:
            The table that describes them.

        Raises:
            PackError: they cannot be written.
        """
        offset = self._begin_section(self.page_shift)
        checksums, digests = [], []
        for record in records:
            self._write(record.data)
            checksums.append(record.checksum)
            digests.append(record.digest)
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
        with _refused(self.output):
            for place in SUPERBLOCK_OFFSETS:
                self._open_file.seek(place)
                self._open_file.write(superblock.encode())
        return Container(superblock, entries)

    def commit(self) -> None:
        """Make sure the package is on the disk, then give it its name, replacing an older one.

        Raises:
            PackError: it cannot be written.
        """
        assert self._partial is not None
        with _refused(self.output):
            self._open_file.flush()
            os.fsync(self._open_file.fileno())
            self._partial.replace(self.output)
            _sync_folder(self.output.parent)

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


def check_output(output: Path) -> None:
    """Refuse a name that no package can take.

    Raises:
        PackError: it is a folder, a device, or anything else that is not a plain file; or it is too long.
    """
    with _refused(output):
        try:
            mode = output.stat().st_mode
        except FileNotFoundError:
            return
    if S_ISDIR(mode):
        raise PackError("output is a folder", path=str(output), hint="give the name of the .emoe file to write")
    if not S_ISREG(mode):
        raise PackError("output exists and is not a plain file", path=str(output), hint="write to another place")


def check_space(output: Path, length: int) -> None:
    """Refuse to begin a package that its disk has no room for, beside an older one of that name.

    Args:
        output: the package.
        length: bytes it will have.

    Raises:
        PackError: there is less room, or no such folder.
    """
    with _refused(output):
        free = shutil.disk_usage(output.parent).free
    if free < length:
        message = f"package takes {length:,} bytes, its disk has room for {free:,}"
        raise PackError(message, path=str(output), hint=HINTS[errno.ENOSPC])


@contextlib.contextmanager
def _refused(output: Path) -> Iterator[None]:
    """Turn what the operating system refuses into one kind of error."""
    try:
        yield
    except OSError as error:
        hint = HINTS.get(error.errno or 0)
        raise PackError(f"package cannot be written: {reason(error)}", path=str(output), hint=hint) from error


def _compressed(data: bytes) -> tuple[bytes, Codec]:
    """The data as one zstd frame, or as it is where a frame would be larger or too dense for readers."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)
    if len(frame) < len(data) <= len(frame) * limits.MAX_COMPRESSION_RATIO:
        return frame, Codec.ZSTD
    return data, Codec.NONE


def _partial_stem(output: Path) -> str:
    """How partial files of the output are called: by its name, or where that is long, its beginning and digest."""
    name = os.fsencode(output.name)
    if len(name) <= MAX_PARTIAL_STEM:
        return output.name
    digest = sha256(name).hexdigest()[:16]
    return f"{name[: MAX_PARTIAL_STEM - len(digest) - 1].decode(errors='ignore')}~{digest}"


def _create_partial(output: Path) -> tuple[Path, BinaryIO]:
    """Make a locked file beside the output."""
    stem = _partial_stem(output)
    while True:
        path = output.parent / f".{stem}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb")
        with contextlib.suppress(OSError):  # some network file systems know no locks; then nothing is ever swept there
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another writer may have taken the new file for a leaving before it was locked.
        if os.fstat(descriptor).st_nlink > 0:
            return path, file
        file.close()


def _remove_leavings(output: Path) -> None:
    """Remove the partial files of this output whose writers are dead, as far as that is possible."""
    leaving = re.compile(rf"\.{re.escape(_partial_stem(output))}\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}")
    with contextlib.suppress(OSError):
        for path in output.parent.iterdir():
            if leaving.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    _remove_leaving(path)


def _remove_leaving(path: Path) -> None:
    """Remove a regular file that nobody has locked. A pipe is not waited for, a link not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make a new name in the folder last, where the file system does not do so on its own."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
