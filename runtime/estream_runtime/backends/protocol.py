"""What every backend offers, and how graphs are named to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from estream_spec.manifest import GraphRole, GraphWeights
from estream_spec.trace import Activity
from estream_spec.weights import Floats

Array = npt.NDArray[Any]

MatrixForm = GraphWeights | Literal["stored"]
"""What a backend takes as matrices: what a graph's matrix inputs hold, or the parts of a record as they lie."""
During = Callable[[Activity], AbstractContextManager[None]]
"""Gives a context in which an activity goes on."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Names one graph of a package.

    Attributes:
        role: what it is for.
        shape_class: which of the role's shape classes it serves.
        weights: what its matrix inputs hold.
    """

    role: GraphRole
    shape_class: int
    weights: GraphWeights

    def __str__(self) -> str:
        return f"graph {self.role}.{self.shape_class}.{self.weights}"


class Backend(Protocol):
    """Runs the graphs of one package.

    Attributes:
        name: what it is called.
        detail: what computes in it, where that depends on the processor; empty where it does not.
        tile_rows: rows computed so far by graphs that take fixed numbers of rows; 0 where none do.
        padded_rows: how many of those stood for none.
        most_tokens: tokens that prompt and output may have together; None where the model alone bounds them.
    """

    name: ClassVar[str]
    tile_rows: int
    padded_rows: int
    most_tokens: int | None

    @property
    def detail(self) -> str:
        """See above."""
        ...

    def weights_of(self, role: GraphRole, shape_class: int) -> MatrixForm:
        """What `run` takes as matrices.

        Raises:
            LinkError: the package has no such graph that runs here.
            InvalidError: a graph that was tried to find out has not the interface it must have.
        """
        ...

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a graph.

        Args:
            role: what the graph is for.
            shape_class: which of the role's shape classes.
            feeds: every input by name, as `estream_spec.graph_interface.interface` describes it for `weights_of`. Of
                matrices as they are stored, the parts. All are C-contiguous, but for keys and values, whose heads may
                lie apart; contiguous arrays are read where they are.

        Returns:
            Every output by name, C-contiguous, sharing no memory with the feeds.

        Raises:
            LinkError: the package has no such graph that runs here.
            InvalidError: the graph has not the interface it must have.
            TrapError: the run failed, or an output is of another type or shape than the interface says.
        """
        ...

    def expert_rows(self, normed: Floats) -> Any:
        """Makes token rows ready for the experts of a layer.

        Args:
            normed: f32 `[T, hidden]`, not changed while they are in use.

        Returns:
            What `add_expert` and `expert_outputs` take.
        """
        ...

    def add_expert(
        self,
        shape_class: int,
        rows: Any,
        chosen: npt.NDArray[np.int64],
        shares: Floats,
        weights: Mapping[str, Array],
        total: Floats,
        during: During,
    ) -> None:
        """Adds what an expert makes of some rows, times their shares, to those rows of a total. Raises as `run` does.

        Args:
            shape_class: the expert's shape class.
            rows: what `expert_rows` gave.
            chosen: which of them, int64 `[t]`, none twice.
            shares: what each counts, f32 `[t]`.
            weights: the expert's matrices, as `weights_of` says.
            total: f32 `[T, hidden]`, added to.
            during: told of the activities that this takes.
        """
        ...

    def bind_expert(self, shape_class: int, weights: Callable[[], Mapping[str, Array]]) -> Any:
        """Makes an expert ready for `expert_outputs`, once for as long as its record lies where it does.

        Args:
            shape_class: the expert's shape class.
            weights: gives its matrices, as `weights_of` says. Where they have to be expanded, what it gives holds only
                until another expert's are asked for; then it is called whenever the expert computes, or else only now.

        Returns:
            What `expert_outputs` takes; it may hold views of the record.
        """
        ...

    def expert_outputs(
        self, shape_class: int, rows: Any, shares: Floats, experts: Sequence[Any], out: Floats, during: During
    ) -> None:
        """Computes what some experts of a layer make of one row, times their shares. Raises as `run` does.

        Each row of the result is, bit for bit, what `add_expert` adds of that expert to zeros.

        Args:
            shape_class: the experts' shape class.
            rows: what `expert_rows` gave of one row.
            shares: what each expert counts, f32 `[n]`.
            experts: what `bind_expert` gave of each, n of them.
            out: f32 `[n, hidden]`, C-contiguous, overwritten: row i is `shares[i]` times what expert i makes.
            during: told of the activities that this takes.
        """
        ...

    def close(self) -> None:
        """Gives all memory back; the backend cannot run afterwards."""
        ...
