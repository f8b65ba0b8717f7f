"""Which records a layer keeps in its share of the arena when decoding needs room.

Each layer judges its own records and knows nothing of the others. A policy only ranks: what is held and how much may
stay is the caller's. For each token of a layer the caller notes the routed experts and then asks for the order in which
what is held may be dropped, the routed ones included. All of it is plain numbers, so equal calls give equal orders;
of two experts that count alike, the higher id goes first.

LFU with ageing was chosen by replay, `tests/bench/retention.py`: on the sample model's held-out text it has more of
what is demanded than LRU and least-stale at every size (61.4 % where a layer keeps 5 of 16 records, 82.3 % where it
keeps 8; LRU 56.3 and 76.4 %, Belady's optimum 74.1 and 88.8 %), and where routing is even all have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

MEMORY: Final = 32
"""Routings that `AgeingFrequency` looks back on, for each expert of the layer: 256 tokens where 8 of 64 are chosen.
Chosen on the sample's calibration text, where half and twice as many do as well
(`tests/bench/retention.py --calibration`)."""


class Retention(Protocol):
    """Ranks the records of one layer by what they are worth keeping."""

    def seed(self, counts: Sequence[int]) -> None:
        """Begin with what a prompt chose.

        Args:
            counts: tokens of the prompt by expert, int `[experts]`.
        """

    def note(self, experts: Sequence[int]) -> None:
        """Learn that one more token was routed to these, int `[top_k]`."""

    def order(self, held: Iterable[int]) -> list[int]:
        """Rank what is held: the first to be dropped first.

        Args:
            held: experts whose records are there, each once, in any order.

        Returns:
            The same experts.
        """


class AgeingFrequency:
    """LFU with ageing: what was routed to least often goes first, where each routing counts less the older it is.

    A routing that lies `n` routings of the layer back counts `(1 - 1 / (MEMORY * experts)) ** n`. Age is measured
    in routings and not in tokens, so that it means the same for every top-k. A prompt counts as if its choices had come
    evenly spread.

    Args:
        experts: of the layer.
        memory: in place of `MEMORY`.
    """

    def __init__(self, experts: int, memory: int = MEMORY):
        self._fade = 1 - 1 / (memory * experts)
        self._scores = [0.0] * experts
        # In place of all scores fading, what is added grows.
        self._worth = 1.0

    def seed(self, counts: Sequence[int]) -> None:
        """See `Retention.seed`."""
        routings = max(sum(counts), 1)
        weight = (1 - self._fade**routings) / ((1 - self._fade) * routings)
        self._scores = [count * weight for count in counts]
        self._worth = 1.0

    def note(self, experts: Sequence[int]) -> None:
        """See `Retention.note`."""
        self._worth /= self._fade ** len(experts)
        for expert in experts:
            self._scores[expert] += self._worth
        if self._worth > _GROWN:
            self._scores = [score / self._worth for score in self._scores]
            self._worth = 1.0

    def order(self, held: Iterable[int]) -> list[int]:
        """See `Retention.order`."""
        return ranked(held, self._scores)


def ranked(held: Iterable[int], worth: Sequence[float]) -> list[int]:
    """Those of the least worth first, by a number for each expert of the layer; of equals the higher id."""
    return sorted(sorted(held, reverse=True), key=worth.__getitem__)


_GROWN: Final = 1e200
"""Far from what a float cannot hold, yet seldom reached."""
