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
from estream_spec.errors import FormatError, located
from estream_spec.layout import round_up
from estream_spec.records import DIRECTORY_HEADER, DirectoryEntry, Superblock, decode_directory
from estream_spec.rulebook import refusal

SINGLE = (
    SectionType.MANIFEST,
    SectionType.DENSE,
    SectionType.DENSE_TABLE,
    SectionType.EXPERTS,
    SectionType.EXPERT_TABLE,
)
"""Types of which a package has exactly one section, with id 0."""
AT_MOST_ONE = (SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE, SectionType.PREFETCH_ROUTER)
"""Types of which a package has at most one section, with id 0."""
LONGEST = {
    SectionType.MANIFEST: limits.MAX_MANIFEST_LENGTH,
    SectionType.CHAT_TEMPLATE: limits.MAX_MANIFEST_LENGTH,
    SectionType.DEVICE_CONFIGURATION: limits.MAX_MANIFEST_LENGTH,
    SectionType.SIGNATURE: limits.MAX_MANIFEST_LENGTH,
    SectionType.PREFETCH_ROUTER: limits.MAX_PREFETCH_ROUTER_LENGTH,
}
"""How long a section of a type may be, where that is not `MAX_SMALL_SECTION_LENGTH`."""
MOST = {
    SectionType.DEVICE_CONFIGURATION: limits.MAX_DEVICE_CONFIGURATIONS,
    SectionType.SIGNATURE: limits.MAX_SIGNATURES,
    SectionType.SCHEDULE: limits.MAX_SCHEDULES,
}
"""How many sections of a type a package may have at most, with any ids."""


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
            message = f"not an .emoe package: it starts with {found!r}, expected {MAGIC!r}"
            raise refusal("EMOE-SUP-001", message, path="superblock[0]", offset=0)
        by_rule = {fault.rule: fault for fault in reversed(faults)}
        raise by_rule.get("EMOE-SUP-002") or by_rule["EMOE-SUP-003"]
    if len(intact) == 2 and intact[0].generation == intact[1].generation and intact[0] != intact[1]:
        message = f"the two superblocks are both of generation {intact[0].generation} but differ"
        raise refusal("EMOE-SUP-004", message, path="superblock", offset=0)
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

    def require(condition: bool, rule: str, message: str, field: str, hint: str | None = None) -> None:
        if not condition:
            raise refusal(rule, message, path=f"superblock.{field}", offset=0, hint=hint)

    version = f"{superblock.format_major}.{superblock.format_minor}"
    message = f"format {version}, this reader knows {FORMAT_MAJOR}.x"
    hint = "a newer version of the reader may know it"
    require(superblock.format_major == FORMAT_MAJOR, "EMOE-SUP-005", message, "format_major", hint)
    unknown = [bit for bit in range(64) if superblock.required_features >> bit & 1 and bit not in REQUIRED_FEATURES]
    message = f"required feature {', '.join(map(str, unknown))} is not known to this reader"
    require(not unknown, "EMOE-SUP-006", message, "required_features", hint)
    shift, lowest, highest = superblock.page_shift, limits.MIN_PAGE_SHIFT, limits.MAX_PAGE_SHIFT
    message = f"page shift {shift}, expected {lowest} to {highest}"
    require(lowest <= shift <= highest, "EMOE-SUP-007", message, "page_shift")
    message = f"file length {superblock.file_length}, the limit is {limits.MAX_FILE_LENGTH}"
    require(superblock.file_length <= limits.MAX_FILE_LENGTH, "EMOE-SUP-008", message, "file_length")
    most = DIRECTORY_HEADER.size + limits.MAX_SECTIONS * DirectoryEntry.SIZE
    message = f"directory of {superblock.directory_length} bytes, the limit is {most}"
    require(superblock.directory_length <= most, "EMOE-SUP-009", message, "directory_length")
    start = superblock.directory_offset
    end = start + superblock.directory_length
    bounds = f"{DATA_START} or later to {superblock.file_length}, the end of the package"
    message = f"directory spans {start} to {end}, expected {bounds}"
    ends = start >= DATA_START and end == superblock.file_length
    require(ends, "EMOE-SUP-010", message, "directory_offset")
    message = f"package has {available} bytes, its superblock says {superblock.file_length}"
    hint = "was the download or the copy complete?"
    require(available >= superblock.file_length, "EMOE-SUP-011", message, "file_length", hint)


def decode_container(superblock: Superblock, directory: bytes) -> Container:
    """Decode and judge the directory.

    Raises:
        IntegrityError: its digest differs from the superblock's.
        FormatError: see `records.decode_directory` and `check_entries`.
    """
    if sha256(directory).digest() != superblock.directory_sha256:
        found, expected = sha256(directory).hexdigest(), superblock.directory_sha256.hex()
        message = f"directory has digest {found}, the superblock says {expected}"
        raise refusal("EMOE-DIR-001", message, path="directory", offset=superblock.directory_offset)
    entries = decode_directory(directory, offset=superblock.directory_offset)
    check_entries(superblock, entries)
    return Container(superblock, entries)


def check_entries(superblock: Superblock, entries: tuple[DirectoryEntry, ...]) -> None:
    """Judge the directory: each entry, then their order and extents, then which sections there are.

    Raises:
        UnsupportedError: a critical section or codec this reader lacks.
        LimitError: a length or a number of sections outside its limit.
        InvalidError: a rule of FORMAT.md section 4 is broken.
    """
    end, seen = DATA_START, set[tuple[int, int]]()
    for index, entry in enumerate(entries):
        path, offset = f"directory[{index}]", _entry_offset(superblock, index)
        with located(offset):
            _check_entry(entry, superblock, path)
            if entry.offset != (expected := round_up(end, 1 << entry.alignment_shift)):
                kind = "overlaps what stands before it" if entry.offset < expected else "leaves a hole before it"
                message = f"section at offset {entry.offset} {kind}: it should begin at {expected}"
                raise refusal("EMOE-SEC-012", message, path=f"{path}.offset")
            end = entry.end
            if entry.type != SectionType.FREE and (entry.type, entry.id) in seen:
                message = f"second section of type {entry.type} and id {entry.id}, expected one"
                raise refusal("EMOE-SEC-013", message, path=path)
            seen.add((entry.type, entry.id))
    if superblock.directory_offset != (expected := round_up(end, 1 << MIN_SECTION_ALIGNMENT_SHIFT)):
        message = (
            f"directory at offset {superblock.directory_offset}, the sections before it end so that it is {expected}"
        )
        raise refusal("EMOE-SEC-014", message, path="superblock.directory_offset", offset=superblock.directory_offset)
    for single in SINGLE:
        if (single, 0) not in seen:
            message = f"no {single.name} section with id 0, expected one"
            raise refusal("EMOE-SEC-015", message, path="directory", offset=superblock.directory_offset)
    for index, entry in enumerate(entries):
        if entry.type in (*SINGLE, *AT_MOST_ONE) and entry.id != 0:
            message = f"{SectionType(entry.type).name} section with id {entry.id}, expected 0"
            raise refusal(
                "EMOE-SEC-016", message, path=f"directory[{index}].id", offset=_entry_offset(superblock, index)
            )
    for several, most in MOST.items():
        if (count := sum(entry.type == several for entry in entries)) > most:
            message = f"{count} {several.name} sections, the limit is {most}"
            raise refusal("EMOE-SEC-017", message, path="directory", offset=superblock.directory_offset)


def _entry_offset(superblock: Superblock, index: int) -> int:
    return superblock.directory_offset + DIRECTORY_HEADER.size + index * DirectoryEntry.SIZE


def _check_entry(entry: DirectoryEntry, superblock: Superblock, path: str) -> None:
    def require(condition: bool, rule: str, message: str, field: str) -> None:
        if not condition:
            raise refusal(rule, message, path=f"{path}.{field}")

    known, in_pages = entry.type in KNOWN_SECTIONS, bool(entry.flags & SectionFlag.RECORDS)
    message = f"section flags {entry.flags:#x} include undefined bits, expected none above {max(SectionFlag):#x}"
    require(not entry.flags & ~sum(SectionFlag), "EMOE-SEC-001", message, "flags")
    if known:
        name, flags = SectionType(entry.type).name, FLAGS[entry.type]
        message = f"flags {entry.flags:#x} of a {name} section, expected {flags:#x}"
        require(entry.flags == flags, "EMOE-SEC-002", message, "flags")
        message = f"codec {entry.codec}, this reader knows {', '.join(str(codec.value) for codec in Codec)}"
        require(entry.codec in {codec.value for codec in Codec}, "EMOE-SEC-004", message, "codec")
    else:
        message = f"critical section of type {entry.type}, which this reader does not know"
        require(not entry.flags & SectionFlag.CRITICAL, "EMOE-SEC-003", message, "type")
    lowest = superblock.page_shift if in_pages else MIN_SECTION_ALIGNMENT_SHIFT
    message = f"alignment shift {entry.alignment_shift}, expected {lowest} to {limits.MAX_PAGE_SHIFT}"
    require(lowest <= entry.alignment_shift <= limits.MAX_PAGE_SHIFT, "EMOE-SEC-005", message, "alignment_shift")
    message = f"section of {entry.stored_length} bytes at {entry.offset}, the package ends at {superblock.file_length}"
    inside = entry.offset <= superblock.file_length and entry.stored_length <= superblock.file_length
    require(inside, "EMOE-SEC-006", message, "offset")
    require(entry.stored_length > 0, "EMOE-SEC-007", "section of 0 bytes, expected at least 1", "stored_length")
    if entry.codec == Codec.NONE:
        message = f"length {entry.length} of a section stored plainly in {entry.stored_length} bytes, expected the same"
        require(entry.length == entry.stored_length, "EMOE-SEC-008", message, "length")
    if entry.codec == Codec.ZSTD:
        plain = in_pages or entry.type in (SectionType.MANIFEST, SectionType.FREE)
        require(not plain, "EMOE-SEC-009", "codec 1 of a section that may not be compressed, expected 0", "codec")
        most = entry.stored_length * limits.MAX_COMPRESSION_RATIO
        message = f"length {entry.length} out of {entry.stored_length} stored bytes, expected 1 to {most}"
        require(1 <= entry.length <= most, "EMOE-SEC-010", message, "length")
    if known and entry.type != SectionType.FREE and not in_pages:
        most = LONGEST.get(SectionType(entry.type), limits.MAX_SMALL_SECTION_LENGTH)
        message = f"section of {entry.length} bytes, {entry.stored_length} stored, the limit is {most} each"
        require(max(entry.length, entry.stored_length) <= most, "EMOE-SEC-011", message, "length")
