"""What backends that run graphs have in common: what goes on around an expert's graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from estream_runtime.backends.protocol import Array, During
from estream_spec.manifest import GraphRole
from estream_spec.weights import Floats

ExpertInputs = Callable[[], Mapping[str, Array]]
"""Gives an expert's matrices."""


class GraphBackend(ABC):
    """Serves experts by way of their graph."""

    tile_rows = 0
    padded_rows = 0
    most_tokens: int | None = None

    @property
    def detail(self) -> str:
        """Nothing: the same library computes everywhere."""
        return ""

    @abstractmethod
    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a graph, see `Backend.run`."""

    def expert_rows(self, normed: Floats) -> Floats:
        """The rows themselves."""
        return normed

    def add_expert(
        self,
        shape_class: int,
        rows: Floats,
        chosen: npt.NDArray[np.int64],
        shares: Floats,
        weights: Mapping[str, Array],
        total: Floats,
        during: During,
    ) -> None:
        """See `Backend.add_expert`."""
        with during("gather"):
            normed = rows[chosen]
        with during("products"):
            added = self.run("expert", shape_class, {"normed": normed, **weights})["y"]
        with during("scatter"):
            total[chosen] += shares[:, None] * added

    def bind_expert(self, shape_class: int, weights: ExpertInputs) -> ExpertInputs:
        """What gives the matrices: they may have to be expanded anew each time."""
        return weights

    def expert_outputs(
        self,
        shape_class: int,
        rows: Floats,
        shares: Floats,
        experts: Sequence[ExpertInputs],
        out: Floats,
        during: During,
    ) -> None:
        """See `Backend.expert_outputs`."""
        out[:] = 0
        row = np.zeros(1, np.int64)
        for number, weights in enumerate(experts):
            with during("expand"):
                inputs = weights()
            one = slice(number, number + 1)
            self.add_expert(shape_class, rows, row, shares[one], inputs, out[one], during)
