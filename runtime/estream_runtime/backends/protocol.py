"""What every backend offers, and how graphs are named to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy.typing as npt

from estream_spec.manifest import GraphRole, GraphWeights

Array = npt.NDArray[Any]


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
    """Runs the graphs of one package."""

    name: ClassVar[str]

    def weights_of(self, role: GraphRole, shape_class: int) -> GraphWeights:
        """What the matrix inputs of a graph must hold when this backend runs it.

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
            feeds: every input by name, as `estream_spec.graph_interface.interface` describes it for `weights_of`.
                C-contiguous arrays are read where they are.

        Returns:
            Every output by name, C-contiguous, sharing no memory with the feeds.

        Raises:
            LinkError: the package has no such graph that runs here.
            InvalidError: the graph has not the interface it must have.
            TrapError: the run failed, or an output is of another type or shape than the interface says.
        """
        ...

    def close(self) -> None:
        """Gives all memory back; the backend cannot run afterwards."""
        ...
