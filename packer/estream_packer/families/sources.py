"""Reading a stored tensor from the place a checkpoint has it in, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from estream_packer.checkpoint import Checkpoint
from estream_packer.checkpoint.coding import Coding
from estream_packer.checkpoint.safetensors import NotFiniteError
from estream_packer.families.places import Place

BLOCK_WEIGHTS: Final = 1 << 17
"""Weights worked on at a time: 512 KiB as f32 stay in a processor's own cache and in memory that is there already."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a stored tensor comes from in one checkpoint. Plain data: it may be sent to another process.

    Attributes:
        place: which part of which tensor, under the name and of the shape that the checkpoint has.
        coding: how values follow from codes; None of a plain tensor.
        length: bytes of the checkpoint that it stands for.
    """

    place: Place
    coding: Coding | None
    length: int

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""
        return self.place.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Output and input channels, or rows and columns of the embedding; of a vector its length."""
        place = self.place
        return (place.count,) if len(place.part) == 1 else (place.count, place.inputs)

    @property
    def held_bytes(self) -> int:
        """Bytes held while the tensor is read in blocks: a matrix of `in-out` layout is gathered whole, as f32."""
        return prod(self.shape) * 4 if self.place.layout == "in-out" else 0

    def read(self, checkpoint: Checkpoint, rows: slice = slice(None)) -> NDArray[np.float32]:
        """The tensor as it is stored: a vector, the embedding `[rows, hidden]`, or a matrix `[in, out]`.

        Args:
            checkpoint: where to read.
            rows: which output channels, step 1, so columns of a matrix as it is stored.

        Returns:
            A new array, f32, finite. One that the checkpoint holds the other way round still lies in memory as there.

        Raises:
            PackError: see `Checkpoint.read`.
        """
        place = self.place
        if place.layout == "in-out":
            values = self._gather(checkpoint, rows)
        else:
            values = self._rows(checkpoint, rows)
            if len(place.part) > 1:
                values = values.reshape(len(values), place.inputs)
        if place.multiplier != 1.0:
            with np.errstate(over="ignore"):
                values *= np.float32(place.multiplier)
            if not np.isfinite(values).all():
                message = f"tensor {self.name!r} leaves the range of f32 when multiplied by {place.multiplier:g}"
                raise NotFiniteError(message, path=str(checkpoint.folder))
        return values.T if place.layout == "out-in" else values

    def blocks(self, checkpoint: Checkpoint, weights: int) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The tensor as `read` returns it, some output channels at a time.

        Args:
            checkpoint: where to read.
            weights: about how many weights a block should have.

        Yields:
            Which output channels, and their weights.

        Raises:
            PackError: see `Checkpoint.read`.
        """
        count = self.place.count
        step = max(1, weights // self.place.inputs)
        # Blocks of columns would read every row of the file again for each block.
        whole = self.read(checkpoint) if self.place.layout == "in-out" else None
        for start in range(0, count, step):
            block = slice(start, min(start + step, count))
            if whole is None:
                yield block, self.read(checkpoint, block)
            else:
                yield block, np.ascontiguousarray(whole[:, block])

    def _rows(self, checkpoint: Checkpoint, rows: slice) -> NDArray[np.float32]:
        """Some rows of the checkpoint's tensor. What lies between selected rows is read along and dropped."""
        place = self.place
        if place.outputs is None:
            return self._load(checkpoint, slice(*rows.indices(place.count)[:2]))
        positions = place.outputs.positions(rows)
        if not len(positions):
            return self._load(checkpoint, slice(0, 0))
        first = int(positions.min())
        values = self._load(checkpoint, slice(first, int(positions.max()) + 1))
        return values[positions - first]

    def _gather(self, checkpoint: Checkpoint, rows: slice) -> NDArray[np.float32]:
        """Some columns of the checkpoint's tensor, of all its rows."""
        place = self.place
        width = prod(place.part[1:])
        columns = np.arange(width)[rows] if place.outputs is None else place.outputs.positions(rows)
        gathered = np.empty((place.inputs, len(columns)), np.float32)
        step = max(1, BLOCK_WEIGHTS // width)
        for start in range(0, place.inputs, step):
            block = slice(start, min(start + step, place.inputs))
            gathered[block] = self._load(checkpoint, block).reshape(-1, width)[:, columns]
        return gathered

    def _load(self, checkpoint: Checkpoint, rows: slice) -> NDArray[np.float32]:
        if self.coding is None:
            return checkpoint.read(self.name, rows, self.place.index)
        return self.coding.read(checkpoint, self.name, rows, self.place.index)
