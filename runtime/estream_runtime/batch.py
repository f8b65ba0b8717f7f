"""The token rows of one pass through the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """A sequence, and any number of continuations of it that do not see each other.

    Attributes:
        token_ids: `[T]`, the sequence first, then each continuation.
        positions: `[T]`, tokens before each in its own sequence.
        segments: rows of the sequence, then of each continuation, as (start, stop).
    """

    token_ids: Ids
    positions: Ids
    segments: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sequence: Ids, continuations: Sequence[Ids] = (), past: int = 0) -> Batch:
        """Lay out rows.

        Args:
            sequence: token ids, at least one.
            continuations: token ids that follow the sequence, each by itself.
            past: tokens before the sequence, whose keys and values are at hand.
        """
        parts = [sequence, *continuations]
        first = [past] + [past + len(sequence)] * len(continuations)
        bounds = np.cumsum([0, *map(len, parts)]).tolist()
        return cls(
            token_ids=np.concatenate(parts),
            positions=np.concatenate([np.arange(len(part)) + at for part, at in zip(parts, first, strict=True)]),
            segments=tuple(pairwise(bounds)),
        )
