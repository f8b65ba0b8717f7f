"""What an input of each target is made of, and where the fields of its fixed structures stand.

Pieces of a package are joined to one run of bytes, so that whatever damages bytes can damage all of them:

* container: both superblocks, the bytes there are as u64, the directory
* tables: both directory entries of the records, the number of the model, the first table's length as u32, both tables
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random
from typing import Final

from estream_spec.constants import SUPERBLOCK_OFFSETS, SectionType
from estream_spec.records import (
    DIRECTORY_HEADER,
    RECORD_DIGEST,
    TABLE_HEADER,
    DirectoryEntry,
    RecordRange,
    Signature,
    Superblock,
)
from fuzz.spans import Field, fields_of

DIRECTORY_AT: Final = 2 * Superblock.SIZE + 8
"""Where the directory of a container input begins."""
TABLES_HEAD: Final = struct.Struct("<80s80sBI")
DIRECTORY_PLACE: Final = struct.Struct("<48xQQ")
"""Offset and length of the directory, in a superblock."""

_SUPERBLOCK: Final = (*fields_of(Superblock.LAYOUT), (Superblock.SIZE - 4, 4))
_ENTRY: Final = fields_of(DirectoryEntry.LAYOUT)
_HEADER: Final = fields_of(DIRECTORY_HEADER)
_TABLE: Final = fields_of(TABLE_HEADER)
_RANGE: Final = fields_of(RecordRange.LAYOUT)
_DIGEST: Final = fields_of(RECORD_DIGEST)
_SIGNATURE: Final = fields_of(Signature.LAYOUT)
_ENTRY_PLACE: Final = struct.Struct("<I4xI4xQQ")
"""Type, flags, offset and stored length, in a directory entry."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A section as a damaged directory has it.

    Attributes:
        at: where its directory entry stands in the package.
        type: its type.
        flags: its flags.
        start: where it begins.
        end: the first byte behind it.
    """

    at: int
    type: int
    flags: int
    start: int
    end: int


def directory_of(package: bytes) -> range:
    """Where the directory stands, as the first superblock has it; empty where that is nowhere."""
    if len(package) < DIRECTORY_PLACE.size:
        return range(0)
    start, length = DIRECTORY_PLACE.unpack_from(package)
    start = min(start, len(package))
    return range(start, min(start + length, len(package)))


def extents(package: bytes) -> list[Extent]:
    """The sections of a package as its directory has them, cut where the package ends."""
    directory, found = directory_of(package), []
    for at in range(directory.start + DIRECTORY_HEADER.size, directory.stop - DirectoryEntry.SIZE + 1, _ENTRY_SIZE):
        kind, flags, start, stored = _ENTRY_PLACE.unpack_from(package, at)
        start = min(start, len(package))
        found.append(Extent(at, kind, flags, start, min(start + stored, len(package))))
    return found


_ENTRY_SIZE: Final = DirectoryEntry.SIZE


def container_field(data: bytes, random: Random) -> Field:
    """A field of a superblock, of the directory's header or of an entry."""
    where = random.random()
    if where < 0.4:
        return _moved(random.choice(_SUPERBLOCK), random.choice((0, Superblock.SIZE)))
    if where < 0.45:
        return DIRECTORY_AT - 8, 8
    if where < 0.5:
        return _moved(random.choice(_HEADER), DIRECTORY_AT)
    return _moved(random.choice(_ENTRY), _nth(data, DIRECTORY_AT + DIRECTORY_HEADER.size, DirectoryEntry.SIZE, random))


def tables_field(data: bytes, random: Random) -> Field:
    """A field of the two directory entries, of what stands between, or of a table."""
    where = random.random()
    if where < 0.15:
        return _moved(random.choice(_ENTRY), random.choice((0, DirectoryEntry.SIZE)))
    if where < 0.2:
        return random.choice(((160, 1), (161, 4)))
    first = TABLES_HEAD.size
    second = first + struct.unpack_from("<161xI", data.ljust(first, b"\0"))[0]
    return table_field(data, random.choice((first, second)), random)


def table_field(data: bytes, start: int, random: Random) -> Field:
    """A field of the record table that begins at `start`."""
    if start + TABLE_HEADER.size > len(data) or random.random() < 0.15:
        return _moved(random.choice(_TABLE), start)
    ranges = min(TABLE_HEADER.unpack_from(data, start)[1], 64)
    if random.random() < 0.7 and ranges:
        at = start + TABLE_HEADER.size + random.randrange(ranges) * RecordRange.SIZE
        return _moved(random.choice(_RANGE), at)
    records = start + TABLE_HEADER.size + ranges * RecordRange.SIZE
    return _moved(random.choice(_DIGEST), _nth(data, records, RECORD_DIGEST.size, random))


def signature_field(data: bytes, random: Random) -> Field:
    """A field of a signature."""
    return random.choice(_SIGNATURE)


def package_field(data: bytes, random: Random) -> Field:
    """A field of any fixed structure of a package."""
    where = random.random()
    if where < 0.25:
        return _moved(random.choice(_SUPERBLOCK), random.choice(SUPERBLOCK_OFFSETS))
    if where < 0.3:
        return _moved(random.choice(_HEADER), directory_of(data).start)
    if not (sections := extents(data)):
        return 0, 8
    if where < 0.6:
        return _moved(random.choice(_ENTRY), random.choice(sections).at)
    tables = [each for each in sections if each.type in (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE)]
    return table_field(data, random.choice(tables or sections).start, random)


def _moved(field: Field, start: int) -> Field:
    return start + field[0], field[1]


def _nth(data: bytes, start: int, size: int, random: Random) -> int:
    """Where one of the structures of a size begins that fill the data from `start` on."""
    return start + random.randrange(max((len(data) - start) // size, 1)) * size
