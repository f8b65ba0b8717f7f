"""Which records a layer keeps in its share of the arena when decoding needs room: the policies, by name.

Each layer judges its own records and knows nothing of the others. A policy only ranks: what is held and how much may
stay is the caller's. For each token of a layer the caller notes the routed experts and then asks for the order in which
what is held may be dropped, the routed ones included. All of it is plain numbers, so equal calls give equal orders;
of two experts that count alike, the higher id goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
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


class LeastRecent:
    """LRU: what was not routed to for longest goes first.

    Of what only the prompt chose, the least chosen goes first.

    Args:
        experts: of the layer.
    """

    def __init__(self, experts: int):
        self._last = [0] * experts
        self._now = 1

    def seed(self, counts: Sequence[int]) -> None:
        """See `Retention.seed`."""
        self._last = list(counts)
        self._now = max(counts) + 1

    def note(self, experts: Sequence[int]) -> None:
        """See `Retention.note`."""
        for expert in experts:
            self._last[expert] = self._now
        self._now += 1

    def order(self, held: Iterable[int]) -> list[int]:
        """See `Retention.order`."""
        return _ranked(held, self._last)


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
        return _ranked(held, self._scores)


class LeastStale:
    """Least-stale: what the latest token was not routed to is stale and goes first, the earliest to come before others.

    After SpecMD (arXiv 2602.03921), which keeps what the current forward pass used and drops what earlier passes left
    behind, in the order in which it came; here for one layer, whose experts all have their turn at the same time in
    each pass. A prompt's records count as having come before all others, the least chosen first.

    What was dropped and came back for the very next token counts as having stayed.

    Args:
        experts: of the layer.
    """

    def __init__(self, experts: int):
        self._came = [0] * experts
        self._latest: frozenset[int] = frozenset()
        self._held: frozenset[int] = frozenset()
        self._now = 1

    def seed(self, counts: Sequence[int]) -> None:
        """See `Retention.seed`."""
        self._came = list(counts)
        self._now = max(counts) + 1
        self._held = frozenset(range(len(counts)))

    def note(self, experts: Sequence[int]) -> None:
        """See `Retention.note`."""
        for expert in experts:
            if expert not in self._held:
                self._came[expert] = self._now
        self._latest = frozenset(experts)
        self._now += 1

    def order(self, held: Iterable[int]) -> list[int]:
        """See `Retention.order`."""
        self._held = frozenset(held)
        return _ranked(self._held - self._latest, self._came) + _ranked(self._held & self._latest, self._came)


def _ranked(held: Iterable[int], worth: Sequence[float]) -> list[int]:
    """Those of the least worth first, by a number for each expert of the layer; of equals the higher id."""
    return sorted(sorted(held, reverse=True), key=worth.__getitem__)


_GROWN: Final = 1e200
"""Far from what a float cannot hold, yet seldom reached."""
RETENTIONS: Final[Mapping[str, Callable[[int], Retention]]] = MappingProxyType(
    {"lru": LeastRecent, "lfu": AgeingFrequency, "least-stale": LeastStale}
)
"""By name; each takes the number of experts of its layer."""
RETENTION: Final = "lfu"
"""The one that is used where nobody chose: on the sample model's held-out text it has more of what is demanded than the
others at every size (61.4 % where a layer keeps 5 of 16 records, 82.3 % where it keeps 8; LRU 56.3 % and 76.4 %,
Belady's optimum 74.1 % and 88.8 %), and where routing is even all have the same; `tests/bench/retention.py`."""
