"""Tensors stored as codes with scales beside them: FP8 in blocks, and MXFP4. Read as f32, each value exactly.

A scale belongs to a block of codes; the last blocks of a row or a column may be cut off by the edge of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from estream_packer.checkpoint.folder import Checkpoint
from estream_packer.checkpoint.header import TensorInfo

MXFP4_BLOCK: Final = 32
"""Values that share a scale in MXFP4, two to a byte."""
_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The 16 values of a 4-bit code: sign, two bits of exponent, one of mantissa."""
_PAIRS: Final = _E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]
"""Both values of a byte, the low nibble first: `[256, 2]` f32."""


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """Codes that are numbers of their own, each multiplied by the scale of its block. One scale may cover everything.

    Attributes:
        scales: name of the tensor of scales.
        block: rows and columns that share a scale.
    """

    scales: str
    block: tuple[int, int]

    def shape(self, tensor: TensorInfo) -> tuple[int, ...]:
        """The shape of the values, in elements."""
        return tensor.shape

    def read(self, checkpoint: Checkpoint, name: str, rows: slice, index: int | None) -> NDArray[np.float32]:
        """Rows of the values: of the second dimension where `index` is given, as in `Checkpoint.read`.

        Raises:
            PackError: a value is not finite, or a file cannot be read.
        """
        height, width = self.block
        values = checkpoint.read(name, rows, index)
        first, count = rows.indices(checkpoint.tensors[name].shape[-2])[0], len(values)
        whole = self._scales(checkpoint, slice(first // height, -(-(first + count) // height)), index)
        of_row = np.arange(first, first + count) // height - first // height
        with np.errstate(over="ignore"):
            for column in range(whole.shape[1]):
                values[:, column * width : (column + 1) * width] *= whole[of_row, column, np.newaxis]
        checkpoint.check_finite(values, name, rows, index)
        return values

    def _scales(self, checkpoint: Checkpoint, rows: slice, index: int | None) -> NDArray[np.float32]:
        """Some rows of the grid of scales: `[rows, columns]` f32. A dimension that has one scale may be missing."""
        stored = checkpoint.tensors[self.scales].shape
        if stored in ((), (1,)):
            return checkpoint.read(self.scales).reshape(1, 1)
        if index is not None and len(stored) == 1:  # one scale for each matrix of a stack
            return checkpoint.read(self.scales, slice(index, index + 1)).reshape(1, 1)
        scales = checkpoint.read(self.scales, rows, index)
        return scales.reshape(len(scales), -1)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Two codes a byte, `[..., out, blocks, 16]` U8, and a power of two for each block, `[..., out, blocks]` U8.

    Attributes:
        scales: name of the tensor of scales.
    """

    scales: str

    def shape(self, tensor: TensorInfo) -> tuple[int, ...]:
        """The shape of the values, in elements."""
        return (*tensor.shape[:-2], tensor.shape[-2] * MXFP4_BLOCK)

    def read(self, checkpoint: Checkpoint, name: str, rows: slice, index: int | None) -> NDArray[np.float32]:
        """Rows of the values: of the second dimension where `index` is given, as in `Checkpoint.read`.

        Raises:
            PackError: a value is not finite, or a file cannot be read.
        """
        codes = checkpoint.read_bytes(name, rows, index)
        exponents = checkpoint.read_bytes(self.scales, rows, index).astype(np.int32)
        values = _PAIRS[codes].reshape(*exponents.shape, MXFP4_BLOCK)
        with np.errstate(over="ignore"):
            scaled = np.ldexp(values, exponents[..., np.newaxis] - 127)
        scaled[exponents == 0xFF] = np.nan  # the one code of a scale that is no number
        scaled = scaled.reshape(len(codes), -1)
        checkpoint.check_finite(scaled, name, rows, index)
        return scaled


Coding = BlockScaled | Mxfp4
"""How the values of a tensor follow from its codes."""
