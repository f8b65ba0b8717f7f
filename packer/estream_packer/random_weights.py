"""Random weights made as they are stored, without a float matrix: as fast as memory can be copied.

A few megabytes of legal values of each kind are drawn once. Every tensor is a stretch of its kind's pool from a place
of its own, around the end and on from the beginning; the pools' lengths are primes, so that the rows of a matrix do not
repeat. Only raw words of the generator are used, which no version of numpy will change: equal seeds give equal bytes.

Weights have the deviations that keep a model sane. Every product of a row of unit variance has unit variance, but what
attention and experts add to the residual stream has that much in all layers together: tokens stay as different as
their embeddings, and since no direction is common to them, no expert is everybody's favourite, unless that is asked for
(`favourites`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from estream_loader.records import tensors
from estream_packer.favourites import LEVEL, common_channels, lean_router
from estream_packer.writer import PackedRecord
from estream_spec.layout import matrix_tensors
from estream_spec.manifest import Matrix, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.weights import GROUP_SIZES, MAX_MULTIPLIER, NIBBLE_ZERO, Bytes, Floats

MAX_SEED: Final = (1 << 64) - 1
"""Largest seed: the generator takes 64 bits."""
BYTES: Final = 16_777_213
"""Values in a pool of bytes, a prime: 16 MiB."""
FLOATS: Final = 1_048_573
"""Values in the pool of floats, a prime: 4 MiB."""
RMS_W8: Final = math.sqrt(2 * sum(n * n for n in range(1, 128)) / 256)
"""Of a random byte as an int8 weight, -128 being 0."""
RMS_W4: Final = math.sqrt(
    sum(n * n for n in range(-8, 8)) / 16 * sum(m * m for m in range(1, MAX_MULTIPLIER + 1)) / MAX_MULTIPLIER
)
"""Of a random nibble times a random multiplier."""
SCALE_SPREAD: Final = 0.25
"""The scales of a matrix lie within this share of their mean."""
_ONES: Final = ("norm", "taps")
"""What the names of vectors of ones end in."""
SWIGLU_VARIANCE: Final = 0.356
"""Of `silu(gate) * up`, both of unit variance."""

Pool = npt.NDArray[Any]


class RandomRecords:
    """Makes records of random weights.

    Args:
        seed: picks the weights.
        model: its shape; the more layers there are, the less each adds.
        skew: of the experts' popularity, see `favourites`; 0 prefers none.
    """

    def __init__(self, seed: int, model: ModelDescription, skew: float = 0):
        self._seed, self._model, self._skew = seed, model, skew
        words = _words(seed, 0, BYTES)
        self._nibbles = words
        self._int8s: Pool = np.where(words == 128, np.uint8(0), words).view(np.int8)
        sizes = (words % np.uint8(MAX_MULTIPLIER) + np.uint8(1)).view(np.int8)
        self._multipliers: Pool = np.where(_words(seed, 1, BYTES) < 128, sizes, -sizes)
        whole = _words(seed, 2, 2 * FLOATS).view("<i2").astype(np.float32)
        self._floats: Floats = whole * np.float32(math.sqrt(3) / 32768)

    def make(self, number: int, layout: RecordLayout, length: int) -> PackedRecord:
        """Make one record; norms and taps are ones, biases and all that works like one are zeros.

        Args:
            number: of the record among all of the package: the embedding, each layer, what follows the last, the
                experts; picks its weights.
            layout: what the record holds.
            length: bytes of the record, padding included.
        """
        data = np.zeros(length, np.uint8)
        stored = tensors(layout, data.data)
        generator = _generator(self._seed, 3 + number)
        starts = iter(generator.random_raw(len(stored)).tolist())
        vectors = dict(stored)
        for matrix in layout.matrices:
            deviation = self._deviation(matrix)
            for part in matrix_tensors(matrix):
                self._fill(vectors.pop(part.name), part.name.partition(".")[2], matrix, deviation, next(starts))
        for name, vector in vectors.items():
            vector[...] = name.endswith(_ONES)
        if self._skew:
            self._prefer(number, stored, generator)
        return PackedRecord.seal(data.data, layout.payload_length)

    def _prefer(self, number: int, stored: Mapping[str, Pool], generator: np.random.SFC64) -> None:
        """Make the tensors of a record prefer some experts, where they have to do with that."""
        if (embedding := stored.get("embedding")) is not None:
            level = round(LEVEL * RMS_W8) if embedding.dtype == np.int8 else LEVEL
            embedding[:, : common_channels(self._model.hidden)] = level
        if (router := stored.get("router")) is not None:
            block = self._model.layers[number - 1].experts
            assert block is not None
            favourites = np.argsort(generator.random_raw(router.shape[1]), kind="stable").tolist()
            lean_router(router, favourites, self._model.expert_blocks[block].router.top_k, self._skew)

    def _fill(self, out: Pool, part: str, matrix: Matrix, deviation: float, start: int) -> None:
        """Fill one part of a matrix whose weights are to have a standard deviation."""
        match part:
            case "nibbles":
                _copy(self._nibbles, start, out)
                _clear_padding(out, matrix.rows, GROUP_SIZES[matrix.encoding])
            case "multipliers":
                _copy(self._multipliers, start, out)
            case "scale":
                _copy(self._floats, start, out)
                rms = RMS_W8 if matrix.encoding == "w8" else RMS_W4
                # Uniform around the mean; the pool reaches up to the square root of 3.
                out *= np.float32(SCALE_SPREAD / math.sqrt(3))
                out += np.float32(1)
                out *= np.float32(deviation / (rms * math.hypot(1, SCALE_SPREAD / math.sqrt(3))))
            case _ if matrix.encoding == "w8":
                _copy(self._int8s, start, out)
            case _:
                _copy(self._floats, start, out)
                out *= np.float32(deviation)

    def _deviation(self, matrix: Matrix) -> float:
        """The standard deviation of a matrix's weights."""
        match matrix.name:
            case "embedding":
                return 1.0
            case "o":
                return 1 / math.sqrt(matrix.rows * len(self._model.layers))
            case "down" | "dense_down":
                return 1 / math.sqrt(matrix.rows * SWIGLU_VARIANCE * len(self._model.layers))
            case _:
                return 1 / math.sqrt(matrix.rows)


def _generator(seed: int, stream: int) -> np.random.SFC64:
    return np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(stream,)))


def _words(seed: int, stream: int, count: int) -> Bytes:
    """Random bytes, uint8 `[count]`."""
    words = _generator(seed, stream).random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:count]


def _copy(pool: Pool, start: int, out: Pool) -> None:
    """Copy the pool to `out`, from a place in it on and around its end as often as needed."""
    flat = out.reshape(-1)
    start, done = start % len(pool), 0
    while done < len(flat):
        stretch = pool[start : start + len(flat) - done]
        flat[done : done + len(stretch)] = stretch
        start, done = 0, done + len(stretch)


def _clear_padding(nibbles: Bytes, rows: int, group: int) -> None:
    """Make the rows beyond a matrix's last one zeros: they share the bytes of its last group.

    Args:
        nibbles: uint8 `[K' / 2, N]`.
        rows: logical K.
        group: rows in a group.
    """
    filled, half = rows % group or group, group // 2
    last = nibbles[-half:]
    # A byte holds row r and, in its high nibble, row r + half.
    last[filled:] = NIBBLE_ZERO
    high = last[max(filled - half, 0) :]
    high[...] = high & np.uint8(15) | np.uint8(NIBBLE_ZERO << 4)
