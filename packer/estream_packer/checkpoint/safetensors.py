"""Reading tensors of one safetensors file, as f32."""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from estream_packer.checkpoint.files import InputFile
from estream_packer.checkpoint.header import BITS, LENGTH_SIZE, MAX_HEADER_LENGTH, TensorInfo, decode_header
from estream_packer.remote import Location
from estream_spec.errors import PackError

PLAIN: Final = ("F32", "F16", "BF16")
"""The dtypes a tensor may have that has no scales beside it."""
READABLE: Final = (*PLAIN, "F8_E4M3", "F8_E8M0")
"""The dtypes whose values can be read."""


class NotFiniteError(PackError):
    """A tensor holds a number that is not finite."""


class SafetensorsFile:
    """One file of tensors. Only the header is read on opening.

    Attributes:
        file: the open file.
        tensors: what it holds, by name.
    """

    def __init__(self, path: Location):
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

    def read(self, name: str, rows: slice | None = None, index: int | None = None) -> NDArray[np.float32]:
        """A tensor, or some rows of it, converted to f32.

        Args:
            name: a key of `tensors`.
            rows: which part of the first dimension, step 1; None for everything. Nothing else is read.
            index: where given, a position in the first dimension, and `rows` counts in the second.

        Returns:
            A new array, `[rows, ...]` f32. Every value is finite.

        Raises:
            PackError: the dtype is not one of `READABLE`, a value is not finite, or the file cannot be read.
        """
        dtype = self.tensors[name].dtype
        if dtype not in READABLE:
            raise PackError(
                f"tensor {name!r} has dtype {dtype}, expected one of {', '.join(READABLE)}", path=str(self.file.path)
            )
        stored, shape = self._load(name, rows, index)
        values = _to_f32(stored, dtype).reshape(shape)
        self.check_finite(values, name, rows, index)
        return values

    def read_bytes(self, name: str, rows: slice | None = None, index: int | None = None) -> NDArray[np.uint8]:
        """A tensor of bytes, or some rows of it, as they are. See `read`.

        Raises:
            PackError: the file cannot be read.
        """
        assert BITS[self.tensors[name].dtype] == 8
        stored, shape = self._load(name, rows, index)
        return stored.reshape(shape)

    def check_finite(
        self, values: NDArray[np.float32], name: str, rows: slice | None = None, index: int | None = None
    ) -> None:
        """Refuse values that are not finite.

        Args:
            values: what was made of `read(name, rows, index)`.
            name: as there.
            rows: as there.
            index: as there.

        Raises:
            NotFiniteError: some value is not finite; the message says where in the tensor.
        """
        finite = np.isfinite(values)
        if finite.all():
            return
        where = [int(part) for part in np.unravel_index(int(np.argmin(finite)), values.shape)]
        value = values[tuple(where)]
        if where and rows is not None:
            shape = self.tensors[name].shape
            where[0] += rows.indices(shape[0] if index is None else shape[1])[0]
        where = [*([] if index is None else [index]), *where]
        raise NotFiniteError(
            f"tensor {name!r} has {value} at index {where}, expected finite numbers", path=str(self.file.path)
        )

    def _load(self, name: str, rows: slice | None, index: int | None) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """The bytes of some rows, and their shape."""
        tensor = self.tensors[name]
        size, shape, offset = BITS[tensor.dtype] // 8, tensor.shape, tensor.begin
        if index is not None:
            assert 0 <= index < shape[0]
            shape = shape[1:]
            offset += index * prod(shape) * size
        if rows is not None:
            first, stop, step = rows.indices(shape[0])
            assert step == 1
            shape = (max(stop - first, 0), *shape[1:])
            offset += first * prod(shape[1:]) * size
        stored = np.empty(prod(shape) * size, np.uint8)
        self.file.read_into(stored.data, offset)
        return stored, shape


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
    """Little-endian numbers as f32. No value changes: f32 holds every value of the smaller dtypes."""
    if dtype in _VALUES:
        return _VALUES[dtype][stored]
    if dtype == "BF16":  # the upper half of an f32
        bits = stored.view("<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return stored.view("<f2" if dtype == "F16" else "<f4").astype(np.float32, copy=False)


def _e4m3() -> NDArray[np.float32]:
    """Every code of F8_E4M3: a sign, four bits of exponent, three of mantissa; the last of each sign is NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, (codes & 7).astype(np.float32)
    values = np.ldexp(np.where(exponents > 0, mantissas + 8, mantissas), np.maximum(exponents, 1) - 10)
    values[-1] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _e8m0() -> NDArray[np.float32]:
    """Every code of F8_E8M0: a power of two; the last is NaN."""
    return np.array([*(2.0**exponent for exponent in range(-127, 128)), np.nan], np.float32)


_VALUES: Final = {"F8_E4M3": _e4m3(), "F8_E8M0": _e8m0()}
"""The value of every code, by dtype."""
