"""Reading tensors of one safetensors file, as f32."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from estream_packer.checkpoint.files import InputFile
from estream_packer.checkpoint.header import BITS, LENGTH_SIZE, MAX_HEADER_LENGTH, TensorInfo, decode_header
from estream_spec.errors import PackError

READABLE: Final = ("F32", "F16", "BF16")
"""The dtypes whose values can be read."""


class NotFiniteError(PackError):
    """A tensor holds a number that is not finite."""


class SafetensorsFile:
    """One file of tensors. Only the header is read on opening.

    Attributes:
        file: the open file.
        tensors: what it holds, by name.
    """

    def __init__(self, path: Path):
        """Open and check the header.

        Raises:
            PackError: the file cannot be read, or is not a sound safetensors file.
        """
        self.file = InputFile(path)
        try:
            self.tensors = MappingProxyType(_read_header(self.file))
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        """Give the descriptor back."""
        self.file.close()

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """A tensor, or some rows of it, converted to f32.

        Args:
            name: a key of `tensors`.
            rows: which part of the first dimension, step 1; None for everything. Nothing else is read.

        Returns:
            A new array, `[rows, ...]` f32. Every value is finite.

        Raises:
            PackError: the dtype is not one of `READABLE`, a value is not finite, or the file cannot be read.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in READABLE:
            raise PackError(
                f"tensor {name!r} has dtype {tensor.dtype}, expected one of {', '.join(READABLE)}",
                path=str(self.file.path),
            )
        shape, skipped = tensor.shape, 0
        if rows is not None:
            first, stop, step = rows.indices(shape[0])
            assert step == 1
            skipped, shape = first, (max(stop - first, 0), *shape[1:])
        size = BITS[tensor.dtype] // 8
        stored = np.empty(prod(shape) * size, np.uint8)
        self.file.read_into(stored.data, tensor.begin + skipped * prod(shape[1:]) * size)
        values = _to_f32(stored, tensor.dtype).reshape(shape)
        self._check_finite(values, name, skipped)
        return values

    def _check_finite(self, values: NDArray[np.float32], name: str, skipped: int) -> None:
        finite = np.isfinite(values)
        if finite.all():
            return
        index = [int(part) for part in np.unravel_index(int(np.argmin(finite)), values.shape)]
        value = values[tuple(index)]
        if index:
            index[0] += skipped
        raise NotFiniteError(
            f"tensor {name!r} has {value} at index {index}, expected finite numbers", path=str(self.file.path)
        )


def _read_header(file: InputFile) -> dict[str, TensorInfo]:
    path = str(file.path)
    if file.length < LENGTH_SIZE:
        raise PackError(
            f"file has {file.length} bytes, too few for a safetensors header: incomplete download?",
            path=path,
            hint="download the file again",
        )
    prefix = bytearray(LENGTH_SIZE)
    file.read_into(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    # Both bounds come before the allocation: these eight bytes may say anything.
    if length > MAX_HEADER_LENGTH:
        raise PackError(
            f"header length {length} exceeds the limit of {MAX_HEADER_LENGTH} bytes: not a safetensors file?",
            path=path,
            offset=0,
        )
    if length > file.length - LENGTH_SIZE:
        raise PackError(
            f"file is shorter than its header declares: header of {length} bytes in a file of {file.length}:"
            " incomplete download?",
            path=path,
            offset=0,
            hint="download the file again",
        )
    header = bytearray(length)
    file.read_into(memoryview(header), LENGTH_SIZE)
    return decode_header(header, file.length, path)


def _to_f32(stored: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Little-endian numbers as f32. No value changes: f32 holds every value of both 16-bit dtypes."""
    if dtype == "BF16":  # the upper half of an f32
        bits = stored.view("<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return stored.view("<f2" if dtype == "F16" else "<f4").astype(np.float32, copy=False)
