"""Ways to store a matrix in four bits, each as the bits that it takes and the weights that it gives back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from estream_packer.quantise import quantise_matrix
from estream_spec.weights import GROUP_SIZES, MAX_MULTIPLIER, Encoding, Floats, dequantise, matrix_parts

Q4_0: Final = 2
"""Number of the type in ggml."""
Q4_0_BLOCK: Final = 32
Q4_0_BLOCK_BYTES: Final = 18


class Stored(NamedTuple):
    """A stored matrix: its bits, and f32 `[K, N]` that it stands for."""

    bits: int
    weight: Floats


Way = Callable[[Floats, Floats | None], Stored]
"""Stores a matrix f32 `[K, N]`, given what a squared error counts in each input channel, f32 `[K]`, where known."""


def plainly(weight: Floats, _: Floats | None) -> Stored:
    """`w4g32` without a search: the largest weight of a group is -8, and all is rounded."""
    group = GROUP_SIZES["w4g32"]
    groups = weight.reshape(-1, group, weight.shape[1])
    places = np.abs(groups).argmax(axis=1, keepdims=True)
    steps = np.take_along_axis(groups, places, axis=1) / np.float32(-8)
    scale = np.abs(steps).max(axis=0, keepdims=True) / MAX_MULTIPLIER
    multipliers = np.copysign(np.clip(np.rint(np.abs(steps) / scale), 1, MAX_MULTIPLIER), steps)
    nibbles = np.clip(np.rint(groups / (scale * multipliers)), -8, 7)
    return Stored(_bits("w4g32", weight), (nibbles * multipliers * scale).reshape(weight.shape).astype(np.float32))


def searched(encoding: Encoding) -> Way:
    """One of our encodings, by our search; where channels do not matter alike, by weighted error."""

    def store(weight: Floats, importance: Floats | None) -> Stored:
        parts = quantise_matrix(weight, encoding, importance)
        return Stored(_bits(encoding, weight), dequantise(encoding, parts, len(weight)))

    return store


def q4_0(library: Path) -> Way:
    """The type `Q4_0` as llama.cpp's own library makes and reads it; it takes importance, too.

    Args:
        library: `libggml-base.so`.
    """
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t

    def store(weight: Floats, importance: Floats | None) -> Stored:
        rows = np.ascontiguousarray(weight.T)  # a row for each output, blocks along the inputs
        count, width = rows.shape
        packed = np.zeros(count * width // Q4_0_BLOCK * Q4_0_BLOCK_BYTES, np.uint8)
        counts = None if importance is None else np.ascontiguousarray(importance)
        written = ggml.ggml_quantize_chunk(
            ctypes.c_int(Q4_0),
            _pointer(rows),
            _pointer(packed),
            ctypes.c_int64(0),
            ctypes.c_int64(count),
            ctypes.c_int64(width),
            None if counts is None else _pointer(counts),
        )
        assert written == len(packed), written
        found = np.empty_like(rows)
        ggml.dequantize_row_q4_0(_pointer(packed), _pointer(found), ctypes.c_int64(rows.size))
        return Stored(8 * len(packed), np.ascontiguousarray(found.T))

    return store


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _bits(encoding: Encoding, weight: Floats) -> int:
    return 8 * sum(part.length for part in matrix_parts("", encoding, *weight.shape))
