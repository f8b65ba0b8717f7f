"""Which graphs a package needs on an accelerator: for each role, shape class and encoding those of all tiles.

Their number depends on the shapes of a model and not on how many layers or experts it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from estream_loader.package import Package
from estream_packer.graphs import build_fixed_graph
from estream_packer.htp.compiler import Tile
from estream_spec.binary_interface import label
from estream_spec.graph_interface import MATRICES, ROLES, class_count, shape_class_of
from estream_spec.manifest import BinaryGraph, GraphRole, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.weights import Encoding

TOKENS: Final[dict[GraphRole, tuple[int, ...]]] = {
    "qkv": (32, 64, 128, 256),
    "attend": (32, 128),
    "out": (32, 64, 128, 256),
    "expert": (32, 64, 128, 256),
    "head": (32, 128),
}
"""Rows of the tiles of each role. The matrix unit works in tiles of 32 rows; no more than 128 rows attend together or
enter the head together, since scores and logits are large."""
KEYS: Final = (256, 512, 1024, 2048, 4096)
"""Keys that `attend` takes: longer prompts are refused on the accelerator."""

Encodings = tuple[Encoding, ...]


def tiles_for(package: Package) -> Iterator[Tile]:
    """The graphs of a package, each built when it is asked for.

    Raises:
        FormatError: the tables of the package are at fault.
    """
    model = package.manifest.model
    for role in ROLES:
        for shape_class in range(class_count(role, model)):
            for encodings in encodings_of(package, role, shape_class):
                for tokens in TOKENS[role]:
                    for keys in _capacities(model) if role == "attend" else (0,):
                        yield _tile(model, role, shape_class, tokens, keys, encodings)


def encodings_of(package: Package, role: GraphRole, shape_class: int) -> list[Encodings]:
    """How the matrices of a role are stored, in the order of the first layer that has them so."""
    model = package.manifest.model
    layers = [layer for layer in range(len(model.layers)) if shape_class_of(role, model, layer) == shape_class]
    found = (_encodings(_layout(package, role, layer), role) for layer in layers)
    return list(dict.fromkeys(found))


def _layout(package: Package, role: GraphRole, layer: int) -> RecordLayout:
    """The layout of the record that a role's matrices of a layer are in."""
    model = package.manifest.model
    match role:
        case "expert":
            return package.experts.place(layer).layout
        case "head" if model.tied_head:
            return package.dense.place(0).layout
        case "head":
            return package.dense.place(len(model.layers) + 1).layout
        case _:
            return package.dense.place(layer + 1).layout


def _encodings(layout: RecordLayout, role: GraphRole) -> Encodings:
    stored = {matrix.name: matrix.encoding for matrix in layout.matrices}
    if role == "head" and "head" not in stored:
        return (stored["embedding"],)  # transposed when a session opens
    return tuple(stored[name] for name in MATRICES[role])


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
