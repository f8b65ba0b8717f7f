"""Superblocks, directory and extents: FORMAT.md sections 3 and 4, and file_id of section 9.1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from second_reader import limits
from second_reader.crc32c import crc32c
from second_reader.rules import RefusedError, require
from second_reader.source import Source, is_zero, round_up

MAGIC: Final = b"\x89EMOE\r\n\x1a"
DIRECTORY_MAGIC: Final = b"EMOEDIR\0"
SLOT: Final = 16384
SLOTS: Final = (0, SLOT)
DATA_START: Final = 32768
DIRECTORY_ALIGNMENT: Final = 64

SUPERBLOCK: Final = Struct("<8sHHB3sQQQQQQ32s28sI")
HEADER: Final = Struct("<8sII")
ENTRY: Final = Struct("<IIIHBBQQQ32sQ")

CRITICAL: Final = 1
SAFE_TO_COPY: Final = 2
UNSIGNED: Final = 4
RECORDS: Final = 8
ALL_FLAGS: Final = 15

FREE: Final = 0
MANIFEST: Final = 1
DENSE: Final = 2
DENSE_TABLE: Final = 3
EXPERTS: Final = 4
EXPERT_TABLE: Final = 5
GRAPH: Final = 6
TOKENIZER: Final = 7
CHAT_TEMPLATE: Final = 8
SCHEDULE: Final = 9
BINARY: Final = 10
PREFETCH_ROUTER: Final = 11
DEVICE_CONFIGURATION: Final = 13
SIGNATURE: Final = 14

FLAGS: Final = {
    FREE: 0,
    MANIFEST: CRITICAL,
    DENSE: CRITICAL | RECORDS,
    DENSE_TABLE: CRITICAL,
    EXPERTS: CRITICAL | RECORDS,
    EXPERT_TABLE: CRITICAL,
    GRAPH: CRITICAL,
    TOKENIZER: SAFE_TO_COPY,
    CHAT_TEMPLATE: SAFE_TO_COPY,
    SCHEDULE: SAFE_TO_COPY | UNSIGNED,
    BINARY: SAFE_TO_COPY,
    PREFETCH_ROUTER: SAFE_TO_COPY,
    DEVICE_CONFIGURATION: SAFE_TO_COPY | UNSIGNED,
    SIGNATURE: SAFE_TO_COPY | UNSIGNED,
}
"""Of every known type."""
ONE: Final = (MANIFEST, DENSE, DENSE_TABLE, EXPERTS, EXPERT_TABLE)
AT_MOST_ONE: Final = (TOKENIZER, CHAT_TEMPLATE, PREFETCH_ROUTER)

NONE: Final = 0
ZSTD: Final = 1


class Superblock(NamedTuple):
    """Section 3.1, the fields in their order."""

    magic: bytes
    format_major: int
    format_minor: int
    page_shift: int
    reserved: bytes
    generation: int
    file_length: int
    required_features: int
    optional_features: int
    directory_offset: int
    directory_length: int
    directory_sha256: bytes
    more_reserved: bytes
    checksum: int


class Entry(NamedTuple):
    """Section 4.2, the fields in their order."""

    type: int
    id: int
    flags: int
    codec: int
    alignment_shift: int
    reserved: int
    offset: int
    stored_length: int
    length: int
    sha256: bytes
    more_reserved: int

    @property
    def is_known(self) -> bool:
        return self.type in FLAGS

    @property
    def has_records(self) -> bool:
        return self.flags & RECORDS != 0

    @property
    def end(self) -> int:
        return self.offset + self.stored_length


class Container(NamedTuple):
    """What all other checks build on."""

    superblock: Superblock
    entries: list[Entry]

    def of_type(self, section_type: int) -> Iterator[Entry]:
        """The sections of one type, in the order of the directory."""
        return (entry for entry in self.entries if entry.type == section_type)

    def only(self, section_type: int) -> Entry:
        """The section of a type of which there is one."""
        return next(self.of_type(section_type))


def read_container(source: Source) -> Container:
    """Everything from the twins to all entries, in the order of section 9.4."""
    superblock = _choose_twin([source.slice(slot, slot + SUPERBLOCK.size) for slot in SLOTS])
    _check_superblock(superblock, source.length)
    entries = _read_directory(source, superblock)
    _check_each_entry(entries, superblock)
    _check_all_entries(entries, superblock)
    return Container(superblock, entries)


def _choose_twin(slots: Sequence[bytes]) -> Superblock:
    with_magic = [slot for slot in slots if slot.startswith(MAGIC)]
    require(len(with_magic) > 0, "SUP-001")
    whole = [slot for slot in with_magic if len(slot) == SUPERBLOCK.size]
    right = [slot for slot in whole if crc32c(slot[:124]) == int.from_bytes(slot[124:], "little")]
    intact = [slot for slot in right if is_zero(slot[13:16]) and is_zero(slot[96:124])]
    if not intact:
        raise RefusedError("SUP-002" if len(right) < len(whole) else "SUP-003")
    twins = [Superblock._make(SUPERBLOCK.unpack(slot)) for slot in intact]
    same_generation = len(twins) == 2 and twins[0].generation == twins[1].generation
    require(not same_generation or intact[0] == intact[1], "SUP-004")
    return max(twins, key=lambda twin: twin.generation)


def _check_superblock(superblock: Superblock, length: int) -> None:
    require(superblock.format_major == 0, "SUP-005")
    require(superblock.required_features == 0, "SUP-006")
    require(limits.MIN_PAGE_SHIFT <= superblock.page_shift <= limits.MAX_PAGE_SHIFT, "SUP-007")
    require(superblock.file_length <= limits.MAX_FILE_LENGTH, "SUP-008")
    require(superblock.directory_length <= HEADER.size + ENTRY.size * limits.MAX_SECTIONS, "SUP-009")
    require(superblock.directory_offset >= DATA_START, "SUP-010")
    require(superblock.directory_offset + superblock.directory_length == superblock.file_length, "SUP-010")
    require(superblock.file_length <= length, "SUP-011")


def _read_directory(source: Source, superblock: Superblock) -> list[Entry]:
    data = source.slice(superblock.directory_offset, superblock.file_length)
    require(hashlib.sha256(data).digest() == superblock.directory_sha256, "DIR-001")
    require(len(data) >= HEADER.size, "DIR-002")
    magic, count, entry_size = HEADER.unpack_from(data)
    require(magic == DIRECTORY_MAGIC and entry_size == ENTRY.size, "DIR-002")
    require(count <= limits.MAX_SECTIONS, "DIR-003")
    require(len(data) == HEADER.size + ENTRY.size * count, "DIR-004")
    entries = [Entry._make(fields) for fields in ENTRY.iter_unpack(data[HEADER.size :])]
    require(all(entry.reserved == entry.more_reserved == 0 for entry in entries), "DIR-005")
    return entries


def _check_each_entry(entries: Sequence[Entry], superblock: Superblock) -> None:
    end = DATA_START
    earlier: set[tuple[int, int]] = set()
    for entry in entries:
        _check_kind(entry)
        least_shift = superblock.page_shift if entry.has_records else 6
        require(least_shift <= entry.alignment_shift <= 21, "SEC-005")
        _check_lengths(entry, superblock.file_length)
        require(entry.offset == round_up(end, 1 << entry.alignment_shift), "SEC-012")
        require((entry.type, entry.id) not in earlier, "SEC-013")
        if entry.type != FREE:
            earlier.add((entry.type, entry.id))
        end = entry.end


def _check_kind(entry: Entry) -> None:
    require(entry.flags & ~ALL_FLAGS == 0, "SEC-001")
    require(entry.flags == FLAGS.get(entry.type, entry.flags), "SEC-002")
    require(entry.is_known or entry.flags & CRITICAL == 0, "SEC-003")
    require(not entry.is_known or entry.codec in (NONE, ZSTD), "SEC-004")


def _check_lengths(entry: Entry, file_length: int) -> None:
    require(entry.offset <= file_length and entry.stored_length <= file_length, "SEC-006")
    require(entry.stored_length > 0, "SEC-007")
    if entry.codec == NONE:
        require(entry.length == entry.stored_length, "SEC-008")
    if entry.codec == ZSTD:
        require(entry.type not in (MANIFEST, FREE) and not entry.has_records, "SEC-009")
        require(1 <= entry.length <= limits.MAX_COMPRESSION_RATIO * entry.stored_length, "SEC-010")
    longer = max(entry.length, entry.stored_length)
    if entry.type in (MANIFEST, CHAT_TEMPLATE, DEVICE_CONFIGURATION, SIGNATURE):
        require(longer <= limits.MAX_MANIFEST_LENGTH, "SEC-011")
    elif entry.type == PREFETCH_ROUTER:
        require(longer <= limits.MAX_PREFETCH_ROUTER_LENGTH, "SEC-011")
    elif entry.is_known and entry.type != FREE and not entry.has_records:
        require(longer <= limits.MAX_SMALL_SECTION_LENGTH, "SEC-011")


def _check_all_entries(entries: Sequence[Entry], superblock: Superblock) -> None:
    end = entries[-1].end if entries else DATA_START
    require(superblock.directory_offset == round_up(end, DIRECTORY_ALIGNMENT), "SEC-014")
    present = {(entry.type, entry.id) for entry in entries}
    require(all((section_type, 0) in present for section_type in ONE), "SEC-015")
    require(all(entry.id == 0 for entry in entries if entry.type in (*ONE, *AT_MOST_ONE)), "SEC-016")
    types = [entry.type for entry in entries]
    require(types.count(DEVICE_CONFIGURATION) <= limits.MAX_DEVICE_CONFIGURATIONS, "SEC-017")
    require(types.count(SIGNATURE) <= limits.MAX_SIGNATURES, "SEC-017")
    require(types.count(SCHEDULE) <= limits.MAX_SCHEDULES, "SEC-017")


def file_id(container: Container) -> bytes:
    """Section 9.1."""
    superblock = container.superblock
    head = Struct("<13sHBBQ").pack(
        b"EMOE file_id\0", superblock.format_major, superblock.page_shift, 0, superblock.required_features
    )
    signed = [entry for entry in container.entries if entry.type != FREE and entry.flags & UNSIGNED == 0]
    signed.sort(key=lambda entry: (entry.type, entry.id))
    return hashlib.sha256(head + b"".join(ENTRY.pack(*entry) for entry in signed)).digest()


def check_padding(source: Source, container: Container) -> None:
    """EMOE-PAD-001: both slots, then what lies between sections, then what lies before the directory."""
    for slot in SLOTS:
        require(source.is_zero(slot + SUPERBLOCK.size, slot + SLOT), "PAD-001")
    end = DATA_START
    for entry in container.entries:
        require(source.is_zero(end, entry.offset), "PAD-001")
        end = entry.end
    require(source.is_zero(end, container.superblock.directory_offset), "PAD-001")
