"""What one layer keeps of the tokens it has seen: keys and values, or what the last of them put into a convolution."""

from __future__ import annotations

from typing import Final

import numpy as np

from estream_spec.model import Attention
from estream_spec.weights import Floats

CHUNK: Final = 256
"""Tokens by which the room grows: few copies, little left unused."""


class KeyValues:
    """Keys and values of one layer, f32 `[key_value_heads, room, width]` each.

    Room beyond `length` is zero: a mask keeps it out of every result, but not what is not finite.

    Args:
        attention: shapes.
        limit: tokens that will ever be held.
    """

    def __init__(self, attention: Attention, limit: int):
        self.length = 0
        self._limit = limit
        heads = attention.key_value_heads
        self._keys = np.zeros((heads, 0, attention.head_dim), np.float32)
        self._values = np.zeros((heads, 0, attention.value_width), np.float32)

    def append(self, keys: Floats, values: Floats) -> None:
        """Add the tokens that follow, f32 `[key_value_heads, T, width]` each."""
        end = self.length + keys.shape[1]
        if end > self._keys.shape[1]:
            assert end <= self._limit, (end, self._limit)
            room = min(-(-end // CHUNK) * CHUNK, self._limit)
            self._keys, self._values = self._grown(self._keys, room), self._grown(self._values, room)
        begin, self.length = self.length, end  # first, so that `truncate` knows of what an interrupt cuts short
        self._keys[:, begin:end] = keys
        self._values[:, begin:end] = values

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; what is left of the others could be not finite."""
        assert length <= self.length
        self._keys[:, length : self.length], self._values[:, length : self.length] = 0, 0
        self.length = length

    def whole(self) -> tuple[Floats, Floats]:
        """All of the room, contiguous."""
        return self._keys, self._values

    def first(self, length: int) -> tuple[Floats, Floats]:
        """The first `length` tokens, as views."""
        return self._keys[:, :length], self._values[:, :length]

    def _grown(self, held: Floats, room: int) -> Floats:
        grown = np.zeros((held.shape[0], room, held.shape[2]), np.float32)
        grown[:, : self.length] = held[:, : self.length]
        return grown


class Entered:
    """What the last tokens put into the convolution of one layer.

    Attributes:
        length: tokens the layer has seen.
        rows: f32 `[taps - 1, hidden]`, zeros where there was no token.
    """

    def __init__(self, taps: int, hidden: int):
        self.length = 0
        self.rows: Floats = np.zeros((taps - 1, hidden), np.float32)

    def append(self, rows: Floats) -> None:
        """Add what the tokens that follow put in, f32 `[T, hidden]`."""
        kept = len(self.rows)
        self.length += len(rows)  # first, so that it tells when this is interrupted
        self.rows = np.concatenate([self.rows, rows[-kept:]])[-kept:]


Kept = KeyValues | Entered
"""What a layer keeps."""
