"""Records of an open package: where each one is, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from estream_spec.manifest import RecordLayout
from estream_spec.records import DirectoryEntry, RecordTable
from estream_spec.rulebook import refusal

DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "i8": np.dtype("i1"), "u8": np.dtype("u1")}


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """One record: where it is and what it must be."""

    offset: int
    """Bytes from the package's start."""
    length: int
    """Bytes, padding included."""
    layout: RecordLayout
    checksum: int
    """crc32c over all its bytes."""
    digest: bytes
    """SHA-256 over its payload."""
    path: str
    """What messages call it."""

    def check(self, checksum: int) -> None:
        """Compare the checksum of what was read, crc32c over all its bytes, with the table's.

        Raises:
            IntegrityError: it is another.
        """
        if checksum != self.checksum:
            message = f"record has checksum {checksum:08x}, its table says {self.checksum:08x}"
            raise refusal("EMOE-REC-001", message, path=self.path, offset=self.offset)


class RecordSection:
    """Records of one section through their table."""

    def __init__(self, entry: DirectoryEntry, table: RecordTable, layouts: tuple[RecordLayout, ...], name: str):
        self.entry, self.table, self._layouts, self._name = entry, table, layouts, name

    def place(self, range_index: int, index: int = 0) -> RecordPlace:
        """The record `index` of a range: of layer `range_index` for experts, of that block for dense weights."""
        record_range = self.table.ranges[range_index]
        number = self.table.first[range_index] + index
        return RecordPlace(
            offset=self.entry.offset + record_range.base + index * record_range.record_length,
            length=record_range.record_length,
            layout=self._layouts[record_range.layout],
            checksum=self.table.checksums[number],
            digest=self.table.digests[number],
            path=f"{self._name}[{range_index}][{index}]",
        )

    def places(self) -> Iterator[RecordPlace]:
        """Every record, in order."""
        for range_index, record_range in enumerate(self.table.ranges):
            for index in range(record_range.count):
                yield self.place(range_index, index)


def tensors(layout: RecordLayout, record: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a record by name, as views: nothing is copied, and writing to one writes to the record.

    Args:
        layout: what the record holds.
        record: the record's bytes.
    """
    return {
        tensor.name: np.frombuffer(
            record[tensor.offset : tensor.offset + tensor.length], dtype=DTYPES[tensor.dtype]
        ).reshape(tensor.shape)
        for tensor in layout.tensors
    }
