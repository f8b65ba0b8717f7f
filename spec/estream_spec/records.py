"""Fixed-size structures and their bytes. FORMAT.md sections 3 to 5 and 9.5.

Each class gives the fields in the order and under the names of FORMAT.md. `decode` only parses: it fails on short or
unmistakably foreign bytes and judges nothing else (`estream_spec.rules` does). `encode` is its inverse.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import crc32c

from estream_spec.constants import DIRECTORY_MAGIC, MAGIC, SIGNATURE_CONTEXT, SIGNATURE_MAGIC, TABLE_MAGIC, Algorithm
from estream_spec.limits import MAX_RANGES, MAX_RECORDS, MAX_SECTIONS
from estream_spec.rulebook import refusal


def _unpack(
    layout: struct.Struct, data: bytes | memoryview, rule: str, offset: int | None, path: str
) -> tuple[Any, ...]:
    if len(data) < layout.size:
        raise refusal(rule, f"{len(data)} bytes, expected at least {layout.size}", path=path, offset=offset)
    return layout.unpack_from(data)


class Structure:
    """A fixed-size structure whose dataclass fields stand in the order of its `LAYOUT`."""

    __slots__ = ()
    LAYOUT: ClassVar[struct.Struct]
    SIZE: ClassVar[int]
    RULE: ClassVar[str]
    """What bytes break that are too few, or reserved and not zero."""

    def encode(self) -> bytes:
        """The structure's `SIZE` bytes."""
        return self.LAYOUT.pack(*(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def decode(cls, data: bytes | memoryview, *, path: str, offset: int | None = None) -> Self:
        """Parse the structure at the start of `data`; `offset` and `path` say where that is in the package.

        Raises:
            MalformedError: too short, or reserved bytes set.
        """
        if len(data) < cls.SIZE:
            raise refusal(cls.RULE, f"{len(data)} bytes, expected {cls.SIZE}", path=path, offset=offset)
        decoded = cls(*cls.LAYOUT.unpack_from(data))
        encoded = decoded.encode()
        if encoded != data[: cls.SIZE]:
            at = next(at for at in range(cls.SIZE) if encoded[at] != data[at])
            raise refusal(cls.RULE, f"reserved byte {at} is {data[at]:#04x}, expected 0", path=path, offset=offset)
        return decoded


@dataclass(frozen=True, slots=True)
class Superblock(Structure):
    """Where everything else is, twice in every package. FORMAT.md section 3."""

    LAYOUT: ClassVar = struct.Struct("<8sHHB3xQQQQQQ32s28x")
    """Everything before the checksum."""
    SIZE: ClassVar = 128
    RULE: ClassVar = "EMOE-SUP-003"

    magic: bytes
    format_major: int
    format_minor: int
    page_shift: int
    generation: int
    file_length: int
    required_features: int
    optional_features: int
    directory_offset: int
    directory_length: int
    directory_sha256: bytes

    def encode(self) -> bytes:
        """The superblock's 128 bytes, checksum included."""
        body = Structure.encode(self)
        return body + struct.pack("<I", crc32c.crc32c(body))

    @classmethod
    def decode(cls, data: bytes | memoryview, *, path: str, offset: int | None = None) -> Self:
        """Parse the superblock and check its magic and its checksum.

        Raises:
            MalformedError: too short, another magic, or reserved bytes set.
            IntegrityError: the checksum differs.
        """
        if (magic := bytes(data[: len(MAGIC)])) != MAGIC:
            raise refusal("EMOE-SUP-001", f"magic is {magic!r}, expected {MAGIC!r}", path=path, offset=offset)
        body, stored = bytes(data[: cls.LAYOUT.size]), bytes(data[cls.LAYOUT.size : cls.SIZE])
        if len(stored) == 4 and (checksum := struct.pack("<I", crc32c.crc32c(body))) != stored:
            message = f"superblock has checksum {checksum.hex()}, but says {stored.hex()}"
            raise refusal("EMOE-SUP-002", message, path=path, offset=offset)
        return super(Superblock, cls).decode(data, path=path, offset=offset)


@dataclass(frozen=True, slots=True)
class DirectoryEntry(Structure):
    """One section: what it is and which bytes it has. FORMAT.md section 4."""

    LAYOUT: ClassVar = struct.Struct("<IIIHBxQQQ32s8x")
    SIZE: ClassVar = 80
    RULE: ClassVar = "EMOE-DIR-005"

    type: int
    id: int
    flags: int
    codec: int
    alignment_shift: int
    offset: int
    stored_length: int
    length: int
    sha256: bytes

    @property
    def end(self) -> int:
        """Offset of the first byte behind the section."""
        return self.offset + self.stored_length


DIRECTORY_HEADER = struct.Struct("<8sII")
"""Magic, entry count, entry size."""


def encode_directory(entries: tuple[DirectoryEntry, ...]) -> bytes:
    """The directory's bytes: header, then the entries as given."""
    return DIRECTORY_HEADER.pack(DIRECTORY_MAGIC, len(entries), DirectoryEntry.SIZE) + b"".join(
        entry.encode() for entry in entries
    )


def decode_directory(data: bytes, *, offset: int) -> tuple[DirectoryEntry, ...]:
    """Parse the directory.

    Raises:
        MalformedError: wrong magic or entry size, or a length other than the count asks for.
        LimitError: more entries than `MAX_SECTIONS`.
    """
    path = "directory"
    magic, count, size = _unpack(DIRECTORY_HEADER, data, "EMOE-DIR-002", offset, path)
    if magic != DIRECTORY_MAGIC or size != DirectoryEntry.SIZE:
        message = f"directory starts with {magic!r} and entry size {size}, expected {DIRECTORY_MAGIC!r} and 80"
        raise refusal("EMOE-DIR-002", message, path=path, offset=offset)
    if count > MAX_SECTIONS:
        message = f"{count} sections, the limit is {MAX_SECTIONS}"
        raise refusal("EMOE-DIR-003", message, path=f"{path}.count", offset=offset + 8)
    starts = range(DIRECTORY_HEADER.size, DIRECTORY_HEADER.size + count * DirectoryEntry.SIZE, DirectoryEntry.SIZE)
    if len(data) != starts.stop:
        message = f"directory of {count} entries has {len(data)} bytes, expected {starts.stop}"
        raise refusal("EMOE-DIR-004", message, path=path, offset=offset)
    view = memoryview(data)
    return tuple(
        DirectoryEntry.decode(view[start:], offset=offset + start, path=f"directory[{index}]")
        for index, start in enumerate(starts)
    )


@dataclass(frozen=True, slots=True)
class RecordRange(Structure):
    """Records of one length that follow each other: the experts of a layer, or one dense block. FORMAT.md section 5."""

    LAYOUT: ClassVar = struct.Struct("<QQII8x")
    SIZE: ClassVar = 32
    RULE: ClassVar = "EMOE-TAB-004"

    base: int
    """Offset of the first record from the start of the section that holds the records."""
    record_length: int
    """Bytes from one record to the next, padding included."""
    count: int
    layout: int
    """Index into the manifest's record layouts."""

    @property
    def end(self) -> int:
        """Offset of the first byte behind the range, from the start of the section."""
        return self.base + self.record_length * self.count


RECORD_DIGEST = struct.Struct("<I4x32s")
"""Checksum of the padded record, digest of its payload."""
TABLE_HEADER = struct.Struct("<8sII")
"""Magic, number of ranges, number of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """Every record of a section: where it is and what its bytes must be. FORMAT.md section 5.

    Records are numbered in the order of the ranges: range by range, record by record.
    """

    ranges: tuple[RecordRange, ...]
    checksums: tuple[int, ...]
    """crc32c of each padded record."""
    digests: tuple[bytes, ...]
    """SHA-256 of each record's payload, without the padding at its end."""
    first: tuple[int, ...] = field(init=False)
    """Number of the first record of each range."""

    def __post_init__(self) -> None:
        firsts, number = [], 0
        for record_range in self.ranges:
            firsts.append(number)
            number += record_range.count
        object.__setattr__(self, "first", tuple(firsts))

    def encode(self) -> bytes:
        """The table's bytes."""
        return b"".join(
            [
                TABLE_HEADER.pack(TABLE_MAGIC, len(self.ranges), len(self.checksums)),
                *(record_range.encode() for record_range in self.ranges),
                *(RECORD_DIGEST.pack(*pair) for pair in zip(self.checksums, self.digests, strict=True)),
            ]
        )

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> Self:
        """Parse a table.

        Raises:
            MalformedError: wrong magic, a length other than the counts ask for, or counts that disagree.
            LimitError: more ranges than `MAX_RANGES` or more records than `MAX_RECORDS`.
        """
        magic, range_count, record_count = _unpack(TABLE_HEADER, data, "EMOE-TAB-001", None, path)
        if magic != TABLE_MAGIC:
            raise refusal("EMOE-TAB-001", f"table starts with {magic!r}, expected {TABLE_MAGIC!r}", path=path)
        if range_count > MAX_RANGES:
            raise refusal("EMOE-TAB-002", f"{range_count} ranges, the limit is {MAX_RANGES}", path=path)
        if record_count > MAX_RECORDS:
            raise refusal("EMOE-TAB-002", f"{record_count} records, the limit is {MAX_RECORDS}", path=path)
        records_at = TABLE_HEADER.size + range_count * RecordRange.SIZE
        expected = records_at + record_count * RECORD_DIGEST.size
        if len(data) != expected:
            message = f"table has {len(data)} bytes, its counts ask for {expected}"
            raise refusal("EMOE-TAB-003", message, path=path)
        view = memoryview(data)
        ranges = tuple(
            RecordRange.decode(view[start:], path=f"{path}.ranges[{index}]")
            for index, start in enumerate(range(TABLE_HEADER.size, records_at, RecordRange.SIZE))
        )
        if (total := sum(record_range.count for record_range in ranges)) != record_count:
            message = f"ranges hold {total} records, the header says {record_count}"
            raise refusal("EMOE-TAB-005", message, path=path)
        pairs = list(RECORD_DIGEST.iter_unpack(view[records_at:]))
        table = cls(ranges=ranges, checksums=tuple(pair[0] for pair in pairs), digests=tuple(pair[1] for pair in pairs))
        if table.encode() != data:
            starts = range(records_at + 4, len(data), RECORD_DIGEST.size)
            number = next(number for number, start in enumerate(starts) if any(view[start : start + 4]))
            message = f"reserved bytes are {view[starts[number] :][:4].hex()}, expected 0"
            raise refusal("EMOE-TAB-006", message, path=f"{path}.digests[{number}]")
        return table


@dataclass(frozen=True, slots=True)
class Signature(Structure):
    """One signature over a file id, inside a package or beside it. FORMAT.md section 9.5."""

    LAYOUT: ClassVar = struct.Struct("<8sI4xQ32s64s")
    SIZE: ClassVar = 120
    RULE: ClassVar = "EMOE-SIG-001"

    magic: bytes
    algorithm: int
    security_counter: int
    """Rises with every release that must not be replaced by an older one."""
    public_key: bytes
    signature: bytes

    def message(self, file_id: bytes) -> bytes:
        """What is signed: a context, algorithm and counter as stored, and the file id; 63 bytes."""
        return SIGNATURE_CONTEXT + self.encode()[8:24] + file_id


SIGNATURE_HEADER = struct.Struct("<8sI4x")
"""Magic and algorithm: what signatures of every algorithm begin with."""


def decode_signature(data: bytes, *, path: str, offset: int | None = None) -> Signature | None:
    """Parse a signature; None where its algorithm is not known, so that it proves nothing.

    Raises:
        MalformedError: another magic, a length that is not the algorithm's, or reserved bytes set.
    """
    magic, algorithm = _unpack(SIGNATURE_HEADER, data, Signature.RULE, offset, path)
    if SIGNATURE_HEADER.pack(SIGNATURE_MAGIC, algorithm) != data[: SIGNATURE_HEADER.size]:
        message = f"signature starts with {magic!r}, expected {SIGNATURE_MAGIC!r}, and zeros from byte 12 on"
        raise refusal(Signature.RULE, message, path=path, offset=offset)
    if algorithm != Algorithm.ED25519:
        return None
    if len(data) != Signature.SIZE:
        message = f"signature of {len(data)} bytes, expected {Signature.SIZE}"
        raise refusal(Signature.RULE, message, path=path, offset=offset)
    return Signature.decode(data, path=path, offset=offset)
