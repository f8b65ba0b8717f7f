"""Which graphs a package needs on an accelerator: for each role, shape class and encoding those of all tiles.

Their number depends on the shapes of a model and not on how many layers or experts it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from estream_loader.package import Package
from estream_packer.graphs import build_fixed_graph
from estream_packer.htp.compiler import Tile
from estream_spec.binary_interface import label
from estream_spec.graph_interface import ROLES, class_count, layer_classes, role_shape
from estream_spec.manifest import BinaryGraph, GraphRole, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.weights import Encoding

TOKENS: Final[dict[GraphRole, tuple[int, ...]]] = {
    "qkv": (32, 64, 128, 256),
    "attend": (32, 64, 128),
    "convolve": (32, 64, 128, 256),
    "out": (32, 64, 128, 256),
    "expert": (32, 64, 128, 256),
    "dense": (32, 64, 128, 256),
    "head": (32, 64, 128),
}
"""Rows of the tiles of each role. The matrix unit works in tiles of 32 rows; each tile has twice the rows of the one
before, so that at most half of one is wasted; and no more than 128 rows attend together or enter the head together,
since scores and logits are large."""
KEYS: Final = (256, 512, 1024, 2048, 4096)
"""Keys that `attend` takes: longer prompts are refused on the accelerator."""

Encodings = tuple[Encoding, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """How the weights of a package are stored.

    Attributes:
        model: whose weights.
        dense: layout of each dense record: the embedding, each layer, what follows the last.
        experts: layout of the expert records of each layer; any where there are none.
    """

    model: ModelDescription
    dense: Sequence[RecordLayout]
    experts: Sequence[RecordLayout]

    @classmethod
    def of(cls, package: Package) -> Self:
        """Those of a package.

        Raises:
            FormatError: its tables are at fault.
        """
        model = package.manifest.model
        tables = package.dense.table, package.experts.table
        dense, experts = ([package.manifest.layouts[each.layout] for each in table.ranges] for table in tables)
        return cls(model, dense, experts)

    def encodings(self, role: GraphRole, shape_class: int) -> list[Encodings]:
        """How the matrices of a role are stored, in the order of the first layer that has them so."""
        names = role_shape(role, self.model, shape_class).matrix_names
        if role == "head":
            # A tied head is the embedding, transposed when a session opens.
            stored = (
                [_stored(self.dense[0])["embedding"]] if self.model.tied_head else [_stored(self.dense[-1])["head"]]
            )
            return [tuple(stored)]
        layouts = self.experts if role == "expert" else self.dense[1:-1]
        layers = range(len(self.model.layers))
        served = (layer for layer in layers if layer_classes(self.model, layer).get(role) == shape_class)
        return list(dict.fromkeys(tuple(_stored(layouts[layer])[name] for name in names) for layer in served))


def tiles_for(weights: Weights) -> list[Tile]:
    """The graphs that a package needs."""
    model = weights.model
    return [
        _tile(model, role, shape_class, tokens, keys, encodings)
        for role in ROLES
        for shape_class in range(class_count(role, model))
        for encodings in weights.encodings(role, shape_class)
        for tokens in TOKENS[role]
        for keys in (_capacities(model) if role == "attend" else (0,))
    ]


def _stored(layout: RecordLayout) -> dict[str, Encoding]:
    return {matrix.name: matrix.encoding for matrix in layout.matrices}


def _capacities(model: ModelDescription) -> list[int]:
    """Numbers of keys up to the first that holds the whole context."""
    fitting = [keys for keys in KEYS if keys < model.context_length]
    return [*fitting, *KEYS[len(fitting) : len(fitting) + 1]]


def _tile(
    model: ModelDescription, role: GraphRole, shape_class: int, tokens: int, keys: int, encodings: Encodings
) -> Tile:
    graph = BinaryGraph(
        name=label(role, shape_class, tokens, keys, encodings),
        role=role,
        shape_class=shape_class,
        tokens=tokens,
        keys=keys,
        encodings=encodings,
    )
    return Tile(graph, build_fixed_graph(role, model, shape_class, tokens, keys, encodings))
