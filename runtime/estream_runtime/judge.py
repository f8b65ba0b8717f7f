"""Finds out whether reading ahead pays on the device at hand."""

from __future__ import annotations

import statistics
from typing import Final

from estream_spec.decode_model import LEAST_GAIN

BLOCK: Final = 4
"""Tokens in a row that are decoded with, or without, reading ahead while the two are compared."""
ROUNDS: Final = 3
"""Blocks of each kind that a comparison takes."""
AGAIN: Final = 256
"""Tokens after which what was found is put to the test again: the device may have become hot, or the text another."""


class Judge:
    """Finds out whether reading ahead pays, by comparing tokens with and without it.

    Blocks of `BLOCK` tokens alternate until there are `ROUNDS` of each; then whichever was faster in the median is
    kept, and put to the test again after `AGAIN` tokens. The first token of a block is not counted, since what the
    other way has left behind shows in it.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._number = self._left = 0
        self._verdict = True
        self.gain: float | None = None
        """Share of a token's time that reading ahead saved when it was last compared; None before that."""

    @property
    def on(self) -> bool:
        """Whether the next token is to be decoded with reading ahead."""
        if self._left:
            return self._verdict
        return self._number // BLOCK % 2 == 0

    def took(self, seconds: float) -> None:
        """The token took so long."""
        if self._left:
            self._left -= 1
            return
        if self._number % BLOCK:
            self._seconds[self.on].append(seconds)
        self._number += 1
        if self._number == 2 * ROUNDS * BLOCK:
            with_it, without = (statistics.median(self._seconds[way]) for way in (True, False))
            self.gain = 1 - with_it / without if without > 0 else 0.0
            self._verdict = self.gain >= LEAST_GAIN
            self._seconds, self._number, self._left = {True: [], False: []}, 0, AGAIN

    @property
    def verdict(self) -> str:
        """What was found, in words."""
        if self.gain is None:
            return "on, not compared yet"
        does = "saves" if self.gain >= 0 else "costs"
        found = f"it {does} {abs(self.gain):.0%} of a token's time"
        return f"on: {found}" if self._verdict else f"off: {found} on this device"
