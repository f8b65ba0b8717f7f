"""Superblock and directory as one value, and the order in which they are judged. FORMAT.md sections 3, 4 and 9.

Every function either returns or raises the first fault in that order, so each bad package has one right answer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256

from estream_spec import limits
from estream_spec.constants import (
    DATA_START,
    FILE_ID_CONTEXT,
    FLAGS,
    FORMAT_MAJOR,
    KNOWN_SECTIONS,
    MAGIC,
    MIN_SECTION_ALIGNMENT_SHIFT,
    REQUIRED_FEATURES,
    SUPERBLOCK_OFFSETS,
    Codec,
    SectionFlag,
    SectionType,
)
from estream_spec.errors import FormatError, IntegrityError, InvalidError, LimitError, MalformedError, UnsupportedError
from estream_spec.layout import round_up
from estream_spec.records import DIRECTORY_HEADER, DirectoryEntry, Superblock, decode_directory

SINGLE = (
    SectionType.MANIFEST,
    SectionType.DENSE,
    SectionType.DENSE_TABLE,
    SectionType.EXPERTS,
    SectionType.EXPERT_TABLE,
)
"""Types of which a package has exactly one section, with id 0."""
AT_MOST_ONE = (SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE)
"""Types of which a package has at most one section, with id 0."""


@dataclass(frozen=True, slots=True)
class Container:
    """What is known of a package before its manifest is read."""

    superblock: Superblock
    entries: tuple[DirectoryEntry, ...]

    @property
    def page_size(self) -> int:
        """Bytes in a page: the unit of records."""
        return 1 << self.superblock.page_shift

    def find(self, section_type: SectionType, section_id: int = 0) -> DirectoryEntry | None:
        """The entry of a section, or None."""
        for entry in self.entries:
            if entry.type == section_type and entry.id == section_id:
                return entry
        return None

    def section(self, section_type: SectionType, section_id: int = 0) -> DirectoryEntry:
        """The entry of a section that a valid package has."""
        entry = self.find(section_type, section_id)
        assert entry is not None, (section_type, section_id)
        return entry

    def file_id(self) -> bytes:
        """SHA-256 over everything a signature covers: unsigned and free sections stay out. FORMAT.md section 9."""
        signed = sorted(
            (
                entry
                for entry in self.entries
                if entry.type != SectionType.FREE and not entry.flags & SectionFlag.UNSIGNED
            ),
            key=lambda entry: (entry.type, entry.id),
        )
        head = struct.pack(
            "<HBxQ", self.superblock.format_major, self.superblock.page_shift, self.superblock.required_features
        )
        return sha256(FILE_ID_CONTEXT + head + b"".join(entry.encode() for entry in signed)).digest()


def choose_superblock(slots: tuple[bytes, bytes]) -> Superblock:
    """The twin to trust: the intact one with the highest generation.

    Args:
        slots: what stands at the two superblock offsets, as far as the package reaches.

    Raises:
        MalformedError: neither twin has the magic.
        IntegrityError: no twin is intact.
        InvalidError: two intact twins of one generation differ.
    """
    intact: list[Superblock] = []
    faults: list[FormatError] = []
    for index, (slot, offset) in enumerate(zip(slots, SUPERBLOCK_OFFSETS, strict=True)):
        try:
            intact.append(Superblock.decode(slot, offset=offset, path=f"superblock[{index}]"))
        except FormatError as fault:
            faults.append(fault)
    if not intact:
        if not any(slot.startswith(MAGIC) for slot in slots):
            found = bytes(slots[0][: len(MAGIC)])
            raise MalformedError(f"not an .emoe package: it starts with {found!r}, expected {MAGIC!r}", offset=0)
        raise next((fault for fault in faults if isinstance(fault, IntegrityError)), faults[0])
    if len(intact) == 2 and intact[0].generation == intact[1].generation and intact[0] != intact[1]:
        raise InvalidError(
            f"the two superblocks are both of generation {intact[0].generation} but differ", path="superblock", offset=0
        )
    return max(intact, key=lambda superblock: superblock.generation)


def check_superblock(superblock: Superblock, available: int) -> None:
    """Judge a superblock by itself and against the bytes that are there.

    Args:
        superblock: the twin chosen.
        available: bytes from the package's start to the end of the file or buffer.

    Raises:
        UnsupportedError: another major version, or a required feature this reader lacks.
        LimitError: a length or the page size outside its limits.
        InvalidError: a directory that does not end the package.
        IntegrityError: the package is cut short.
    """
    path = "superblock"
    if superblock.format_major != FORMAT_MAJOR:
        message = f"format {superblock.format_major}.{superblock.format_minor}, this reader knows {FORMAT_MAJOR}.x"
        raise UnsupportedError(message, path=f"{path}.format_major", hint="a newer version of the reader may know it")
    unknown = [bit for bit in range(64) if superblock.required_features >> bit & 1 and bit not in REQUIRED_FEATURES]
    if unknown:
        message = f"required feature {', '.join(map(str, unknown))} is not known to this reader"
        raise UnsupportedError(message, path=f"{path}.required_features")
    if not limits.MIN_PAGE_SHIFT <= superblock.page_shift <= limits.MAX_PAGE_SHIFT:
        message = f"page shift {superblock.page_shift}, expected {limits.MIN_PAGE_SHIFT} to {limits.MAX_PAGE_SHIFT}"
        raise LimitError(message, path=f"{path}.page_shift")
    if superblock.file_length > limits.MAX_FILE_LENGTH:
        message = f"file length {superblock.file_length}, the limit is {limits.MAX_FILE_LENGTH}"
        raise LimitError(message, path=f"{path}.file_length")
    most = DIRECTORY_HEADER.size + limits.MAX_SECTIONS * DirectoryEntry.SIZE
    if superblock.directory_length > most:
        message = f"directory of {superblock.directory_length} bytes, the limit is {most}"
        raise LimitError(message, path=f"{path}.directory_length")
    end = superblock.directory_offset + superblock.directory_length
    if superblock.directory_offset < DATA_START or end != superblock.file_length:
        message = (
            f"directory spans {superblock.directory_offset} to {end}, the package ends at {superblock.file_length}"
        )
        raise InvalidError(message, path=f"{path}.directory_offset")
    if available < superblock.file_length:
        raise IntegrityError(
            f"package has {available} bytes, its superblock says {superblock.file_length}",
            path=f"{path}.file_length",
            hint="was the download or the copy complete?",
        )


def decode_container(superblock: Superblock, directory: bytes) -> Container:
    """Decode and judge the directory.

    Raises:
        IntegrityError: its digest differs from the superblock's.
        FormatError: see `records.decode_directory` and `check_entries`.
    """
    if sha256(directory).digest() != superblock.directory_sha256:
        raise IntegrityError("directory digest differs from the superblock's", offset=superblock.directory_offset)
    entries = decode_directory(directory, offset=superblock.directory_offset)
    check_entries(superblock, entries)
    return Container(superblock, entries)


def check_entries(superblock: Superblock, entries: tuple[DirectoryEntry, ...]) -> None:
    """Judge the directory: each entry, then their order and extents, then which sections there are.

    Raises:
        UnsupportedError: a critical section or codec this reader lacks.
        LimitError: a length outside its limit.
        InvalidError: a rule of FORMAT.md section 4 is broken.
    """
    end, seen = DATA_START, set[tuple[int, int]]()
    for index, entry in enumerate(entries):
        path = f"directory[{index}]"
        _check_entry(entry, superblock, path)
        if entry.offset != (expected := round_up(end, 1 << entry.alignment_shift)):
            kind = "overlaps what stands before it" if entry.offset < expected else "leaves a hole before it"
            message = f"section at offset {entry.offset} {kind}: it should begin at {expected}"
            raise InvalidError(message, path=f"{path}.offset")
        end = entry.end
        if entry.type != SectionType.FREE and (entry.type, entry.id) in seen:
            raise InvalidError(f"second section of type {entry.type} and id {entry.id}", path=path)
        seen.add((entry.type, entry.id))
    if superblock.directory_offset != (expected := round_up(end, 1 << MIN_SECTION_ALIGNMENT_SHIFT)):
        message = (
            f"directory at offset {superblock.directory_offset}, the sections before it end so that it is {expected}"
        )
        raise InvalidError(message, path="superblock.directory_offset")
    for single in SINGLE:
        if (single, 0) not in seen:
            raise InvalidError(f"no {single.name} section", path="directory")
    for entry in entries:
        if entry.type in (*SINGLE, *AT_MOST_ONE) and entry.id != 0:
            raise InvalidError(
                f"{SectionType(entry.type).name} section with id {entry.id}, expected 0", path="directory"
            )


def _check_entry(entry: DirectoryEntry, superblock: Superblock, path: str) -> None:
    if entry.flags & ~sum(SectionFlag):
        raise InvalidError(f"section flags {entry.flags:#x} include undefined bits", path=f"{path}.flags")
    if entry.type in KNOWN_SECTIONS:
        if entry.flags != FLAGS[entry.type]:
            message = (
                f"flags {entry.flags:#x} of a {SectionType(entry.type).name} section, expected {FLAGS[entry.type]:#x}"
            )
            raise InvalidError(message, path=f"{path}.flags")
    elif entry.flags & SectionFlag.CRITICAL:
        raise UnsupportedError(f"critical section of unknown type {entry.type}", path=f"{path}.type")
    if entry.type in KNOWN_SECTIONS and entry.codec not in {codec.value for codec in Codec}:
        raise UnsupportedError(f"codec {entry.codec} is not known", path=f"{path}.codec")
    in_pages = bool(entry.flags & SectionFlag.RECORDS)
    lowest = superblock.page_shift if in_pages else MIN_SECTION_ALIGNMENT_SHIFT
    if not lowest <= entry.alignment_shift <= limits.MAX_PAGE_SHIFT:
        message = f"alignment shift {entry.alignment_shift}, expected {lowest} to {limits.MAX_PAGE_SHIFT}"
        raise InvalidError(message, path=f"{path}.alignment_shift")
    if entry.offset > superblock.file_length or entry.stored_length > superblock.file_length:
        message = (
            f"section of {entry.stored_length} bytes at {entry.offset} reaches past the end, {superblock.file_length}"
        )
        raise InvalidError(message, path=f"{path}.offset")
    if entry.stored_length == 0:
        raise InvalidError("section is empty", path=f"{path}.stored_length")
    if entry.codec == Codec.NONE and entry.length != entry.stored_length:
        message = f"length {entry.length} of a section stored plainly in {entry.stored_length} bytes"
        raise InvalidError(message, path=f"{path}.length")
    if entry.codec == Codec.ZSTD:
        if in_pages or entry.type in (SectionType.MANIFEST, SectionType.FREE):
            raise InvalidError("this section may not be compressed", path=f"{path}.codec")
        if entry.length > entry.stored_length * limits.MAX_COMPRESSION_RATIO or entry.length == 0:
            message = (
                f"{entry.length} bytes out of {entry.stored_length}, the limit is {limits.MAX_COMPRESSION_RATIO} to 1"
            )
            raise LimitError(message, path=f"{path}.length")
    if entry.type in KNOWN_SECTIONS and entry.type != SectionType.FREE and not in_pages:
        most = limits.MAX_MANIFEST_LENGTH if entry.type == SectionType.MANIFEST else limits.MAX_SMALL_SECTION_LENGTH
        if entry.length > most:
            raise LimitError(f"section of {entry.length} bytes, the limit is {most}", path=f"{path}.length")
