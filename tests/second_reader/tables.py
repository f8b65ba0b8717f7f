"""Record tables: FORMAT.md section 5."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from second_reader import limits
from second_reader.container import Entry
from second_reader.rules import require
from second_reader.source import is_zero, round_up

TABLE_MAGIC: Final = b"EMOETAB\0"
HEADER: Final = Struct("<8sII")
RANGE: Final = Struct("<QQIIQ")
DIGEST: Final = Struct("<II32s")


class Range(NamedTuple):
    """Section 5.2, the fields in their order."""

    base: int
    record_length: int
    record_count: int
    layout: int
    reserved: int

    @property
    def end(self) -> int:
        return self.base + self.record_length * self.record_count


class Place(NamedTuple):
    """One record: where it lies in the package and what its bytes must be."""

    offset: int
    length: int
    checksum: int
    sha256: bytes


class Table(NamedTuple):
    ranges: list[Range]
    digests: bytes
    """All digest entries as stored."""

    def payload_digests(self) -> bytes:
        """Those of all records, one behind the other in order."""
        return b"".join(sha256 for _, _, sha256 in DIGEST.iter_unpack(self.digests))

    def places(self, section: Entry) -> Iterator[list[Place]]:
        """The records of each range."""
        digests = DIGEST.iter_unpack(self.digests)
        for records in self.ranges:
            first = section.offset + records.base
            yield [
                Place(first + number * records.record_length, records.record_length, checksum, sha256)
                for number, (checksum, _, sha256) in zip(range(records.record_count), digests, strict=False)
            ]


def parse_table(data: bytes) -> Table:
    """EMOE-TAB-001 to EMOE-TAB-006."""
    require(len(data) >= HEADER.size and data.startswith(TABLE_MAGIC), "TAB-001")
    _, range_count, record_count = HEADER.unpack_from(data)
    require(range_count <= limits.MAX_RANGES and record_count <= limits.MAX_RECORDS, "TAB-002")
    digests_at = HEADER.size + RANGE.size * range_count
    require(len(data) == digests_at + DIGEST.size * record_count, "TAB-003")
    ranges = [Range._make(fields) for fields in RANGE.iter_unpack(data[HEADER.size : digests_at])]
    require(all(records.reserved == 0 for records in ranges), "TAB-004")
    require(sum(records.record_count for records in ranges) == record_count, "TAB-005")
    digests = data[digests_at:]
    require(all(is_zero(digests[at :: DIGEST.size]) for at in range(4, 8)), "TAB-006")
    return Table(ranges, digests)


def check_layouts_named(tables: Sequence[Table], count: int) -> None:
    """EMOE-LAY-002: the ranges of records name every one of so many layouts and no other."""
    named = {records.layout for table in tables for records in table.ranges if records.record_count}
    require(named == set(range(count)), "LAY-002")


def check_table(
    table: Table, section: Entry, counts: Sequence[int], layouts: Sequence[dict[str, Any]], page: int
) -> None:
    """EMOE-TAB-007 to EMOE-TAB-012.

    Args:
        table: of the section.
        section: the entry of the section that holds the records.
        counts: how many records each range must have.
        layouts: of the manifest.
        page: in bytes.
    """
    require([records.record_count for records in table.ranges] == list(counts), "TAB-007")
    end = 0
    for records in table.ranges:
        require(records.record_length <= limits.MAX_RECORD_LENGTH, "TAB-008")
        require(records.base == end, "TAB-009")
        if records.record_count:
            length = round_up(layouts[records.layout]["payload_length"], page)
            require(records.record_length == length, "TAB-010")
        else:
            require(records.record_length == records.layout == 0, "TAB-010")
        end = records.end
    require(end == section.stored_length, "TAB-011")
    require(hashlib.sha256(table.payload_digests()).digest() == section.sha256, "TAB-012")
