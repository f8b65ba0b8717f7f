"""How checkpoints spell a stored tensor, as data: the name, the shape there, and which part of it is meant.

Whether a matrix lies as `[out, in]` or `[in, out]` is declared by the family and never guessed from a shape: a square
matrix would fit both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a tensor, in which order: of each `width` rows from `start` on, `groups` times, those at `pattern`.

    Attributes:
        groups: how often the pattern is applied.
        width: rows from one group to the next.
        pattern: positions in a group, in the order wanted.
        start: first row of the first group.
    """

    groups: int
    width: int = 1
    pattern: tuple[int, ...] = (0,)
    start: int = 0

    @classmethod
    def span(cls, start: int, count: int) -> Selection:
        """`count` rows from `start` on."""
        return cls(groups=count, start=start)

    @property
    def count(self) -> int:
        """Rows selected."""
        return self.groups * len(self.pattern)

    def positions(self, wanted: slice) -> NDArray[np.int64]:
        """The rows of the tensor that the selected rows `wanted` are: `[rows]` i64."""
        group, place = np.divmod(np.arange(self.count, dtype=np.int64)[wanted], len(self.pattern))
        return self.start + group * self.width + np.array(self.pattern, np.int64)[place]


def halves(width: int) -> tuple[int, ...]:
    """The pattern that turns pairs into halves: even positions of `width`, then odd ones.

    For heads whose neighbouring channels rotate together, where packages rotate `x[i]` with `x[i + width/2]`.
    """
    return (*range(0, width, 2), *range(1, width, 2))


@dataclass(frozen=True, slots=True)
class Place:
    """One place in a checkpoint where a stored tensor can come from.

    Attributes:
        name: of the checkpoint's tensor, as `model.layers.0...` or `lm_head.weight`; a prefix that the whole checkpoint
            has instead of `model.` is found when the checkpoint is looked at.
        shape: the whole shape there, in elements. MXFP4 goes by the name of its blocks and the shape of its values.
        layout: `out-in` is a matrix whose first dimension is the output channels and the others together the input
            channels, stored transposed; `in-out` is a matrix the other way round; `as-is` is a vector or the embedding,
            which are stored as they stand.
        index: position in the first dimension, which `layout` does not count; None where there is no such dimension.
        outputs: which output channels (elements of a vector, rows of the embedding); None takes all.
        multiplier: what every value is multiplied by, in f32.
        padded: whether the checkpoint may have more rows than `shape`; they are left out.
    """

    name: str
    shape: tuple[int, ...]
    layout: Literal["out-in", "in-out", "as-is"] = "as-is"
    index: int | None = None
    outputs: Selection | None = None
    multiplier: float = 1.0
    padded: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """The shape below `index`."""
        return self.shape if self.index is None else self.shape[1:]

    @property
    def inputs(self) -> int:
        """Input channels; 1 of a vector."""
        return self.part[0] if self.layout == "in-out" else prod(self.part[1:])

    @property
    def count(self) -> int:
        """Output channels that are selected."""
        if self.outputs is not None:
            return self.outputs.count
        return prod(self.part[1:]) if self.layout == "in-out" else self.part[0]


Places = Mapping[str, Place]
"""Places by the name the tensor is stored under."""
Group = tuple[Places, ...]
"""Tensors that are spelled together: every spelling names the same ones. The first is named where none is found."""
ExpertSpelling = Callable[[int, int], Places]
"""The places of one expert's tensors, given layer and expert id."""


def matrix(name: str, outputs: int, inputs: int) -> Place:
    """A whole matrix, `[out, in]` in the checkpoint."""
    return Place(name, (outputs, inputs), "out-in")


def vector(name: str, length: int) -> Place:
    """A whole vector."""
    return Place(name, (length,))
