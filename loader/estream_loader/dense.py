"""Dense weights: whole records into memory of their own, embedding rows one by one from the file.

What is read whole is read past the page cache, as experts are: it is needed once, and the system counts cached pages as
memory of the process that read them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import crc32c
import numpy as np
from numpy.typing import NDArray

from estream_loader.package import Package
from estream_loader.reading import Reader
from estream_loader.records import DTYPES, RecordPlace
from estream_loader.source import read, read_exactly
from estream_loader.uncached import UncachedSource
from estream_spec.layout import round_up
from estream_spec.manifest import LANES
from estream_spec.rulebook import refusal

_PIECE = 1 << 14
"""Bytes with a checksum of their own, a divisor of what is read at a time: what is proven again for each row."""
_STRETCH = 1 << 22
"""Bytes read at a time to prove the whole."""


def load_records(package: Package, places: Sequence[RecordPlace]) -> list[memoryview]:
    """Records, each in page-aligned memory of its own, proven as the package's integrity policy asks.

    Raises:
        IntegrityError: the checksum of one differs or bytes are missing.
        LinkError: the device failed.
    """
    check = None if package.integrity == "open" else package.check_record
    memories = [_memory(place.length) for place in places]
    with Reader(package.source, LANES, check=check) as reader:
        pairs = zip(places, memories, strict=True)
        for read in [reader.submit(place.offset, memory, [place]) for place, memory in pairs]:
            read.wait()
    return memories


class EmbeddingRows:
    """The embedding, of which only the rows asked for are read.

    Unless the policy is `open`, the record is proven as a whole before the first row is used. The checksums of its
    pieces are kept from that, and whatever is read later must agree with them.
    """

    def __init__(self, package: Package):
        self._package = package
        self._place = place = package.dense.place(0)
        self._checksums: list[int] = []
        if package.integrity != "open":
            self._prove()
        by_name = {tensor.name: tensor for tensor in place.layout.tensors}
        self._rows = by_name["embedding"]
        self._row_bytes = self._rows.length // self._rows.shape[0]
        scale = by_name.get("embedding.scale")
        self._scale = None if scale is None else np.frombuffer(self._read(scale.offset, scale.length), np.float32)

    def gather(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the embedding.

        Args:
            token_ids: [tokens], each in the vocabulary.

        Returns:
            [tokens, hidden] f32.

        Raises:
            IntegrityError: bytes are missing or not the ones that were proven.
            LinkError: the device failed.
        """
        rows = [self._read(self._rows.offset + int(token) * self._row_bytes, self._row_bytes) for token in token_ids]
        stored = np.frombuffer(b"".join(rows), DTYPES[self._rows.dtype]).reshape(len(rows), -1)
        if self._scale is None:
            return stored
        return stored * self._scale[token_ids, None]

    def _prove(self) -> None:
        checksum, place = 0, self._place
        buffer, source = _memory(min(_STRETCH, place.length)), UncachedSource(self._package.source)
        try:
            for start in range(0, place.length, _STRETCH):
                data = buffer[: place.length - start]
                read_exactly(source, data, place.offset + start)
                checksum = crc32c.crc32c(data, checksum)
                self._checksums += _piece_checksums(data)
        finally:
            source.close()
        place.check(checksum)

    def _read(self, offset: int, length: int) -> bytes:
        """Bytes of the record from `offset`, read in whole pieces and compared with what was proven."""
        first = offset // _PIECE
        start, stop = first * _PIECE, min(round_up(offset + length, _PIECE), self._place.length)
        data = read(self._package.source, self._place.offset + start, stop - start)
        found = _piece_checksums(data) if self._checksums else []
        if found != self._checksums[first : first + len(found)]:
            message = "the embedding has changed since it was proven"
            raise refusal("EMOE-REC-001", message, path=self._place.path, offset=self._place.offset + start)
        return data[offset - start : offset - start + length]


def _memory(length: int) -> memoryview:
    """Page-aligned memory."""
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _piece_checksums(data: bytes | memoryview) -> list[int]:
    view = memoryview(data)
    return [crc32c.crc32c(view[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]
