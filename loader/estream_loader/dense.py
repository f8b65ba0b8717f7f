"""Dense weights: whole records into memory of their own, embedding rows one by one from the file."""

from __future__ import annotations

import mmap

import crc32c
import numpy as np
from numpy.typing import NDArray

from estream_loader.package import Package
from estream_loader.records import RecordPlace
from estream_loader.source import read, read_exactly
from estream_spec.errors import IntegrityError

_PIECE = 1 << 22
"""Bytes read at a time while the embedding is proven."""


def load_record(package: Package, place: RecordPlace) -> memoryview:
    """A record in page-aligned memory of its own, proven as the package's integrity policy asks.

    Raises:
        IntegrityError: its checksum differs or bytes are missing.
        LinkError: the device failed.
    """
    memory = memoryview(mmap.mmap(-1, place.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    package.read_record(place, memory)
    return memory


class EmbeddingRows:
    """The embedding, of which only the rows asked for are read.

    Its record is proven once, in pieces, before the first row is used (unless the policy is `open`).
    """

    def __init__(self, package: Package):
        self._package = package
        self._place = place = package.dense.place(0)
        by_name = {tensor.name: tensor for tensor in place.layout.tensors}
        self._rows = by_name["embedding"]
        self._row_bytes = self._rows.length // self._rows.shape[0]
        if package.integrity != "open":
            self._prove()
        self._scale: NDArray[np.float32] | None = None
        if scale := by_name.get("embedding.scale"):
            data = read(package.source, place.offset + scale.offset, scale.length)
            self._scale = np.frombuffer(data, np.float32)

    def gather(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the embedding.

        Args:
            token_ids: [tokens], each in the vocabulary.

        Returns:
            [tokens, hidden] f32.
        """
        dtype = np.int8 if self._rows.dtype == "i8" else np.float32
        stored = np.empty((len(token_ids), self._rows.shape[1]), dtype)
        view = stored.data.cast("B")
        for position, token in enumerate(token_ids):
            offset = self._place.offset + self._rows.offset + int(token) * self._row_bytes
            into = view[position * self._row_bytes : (position + 1) * self._row_bytes]
            read_exactly(self._package.source, into, offset)
        if self._scale is None:
            return stored.astype(np.float32, copy=False)
        return stored * self._scale[token_ids, None]

    def _prove(self) -> None:
        checksum, place = 0, self._place
        for start in range(0, place.length, _PIECE):
            piece = read(self._package.source, place.offset + start, min(_PIECE, place.length - start))
            checksum = crc32c.crc32c(piece, checksum)
        if checksum != place.checksum:
            message = f"record has checksum {checksum:08x}, its table says {place.checksum:08x}"
            raise IntegrityError(message, path=place.path, offset=place.offset)
