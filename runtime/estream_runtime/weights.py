"""Stored weights made ready as graph inputs. FORMAT.md sections 7 and 10.

What can be used where it lies is a view; a nibble expands to the 8-bit weight it stands for, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from estream_loader.dense import load_record
from estream_loader.package import Package
from estream_loader.records import tensors
from estream_runtime.backends import Array, Backend
from estream_spec.graph_interface import MATRICES, interface, shape_class_of
from estream_spec.manifest import GraphRole, GraphWeights, Matrix, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.weights import GROUP_SIZES, expand_nibbles

Feeds = dict[str, Array]
"""Graph inputs by name."""
KindOf = Callable[[GraphRole], GraphWeights]
"""What the graph of a role takes as matrices."""

_ROLE_OF: Final[dict[str, GraphRole]] = {name: role for role, names in MATRICES.items() for name in names}
_PACKED: Final = (".nibbles", ".multipliers")
"""Parts that no graph takes as they are."""
_SIGN: Final = np.uint8(128)
"""Flipping this bit of a signed byte adds 128 to it and makes it unsigned."""


class Binding:
    """How the records of one layout become graph inputs.

    Args:
        layout: what the records hold.
        kind_of: what the graph of a role takes as matrices; f32 where and only where f32 is stored, which is proven
            when a package is opened.
        scratch: for each quantised matrix, uint8 `[rows, columns]` to expand or shift into.
    """

    def __init__(self, layout: RecordLayout, kind_of: KindOf, scratch: Mapping[str, Array]):
        self._layout = layout
        self._quantised = [
            (matrix, kind_of(_ROLE_OF[matrix.name]) == "uint8", scratch[matrix.name])
            for matrix in layout.matrices
            if matrix.encoding != "f32"
        ]
        self._packed = [tensor.name for tensor in layout.tensors if tensor.name.endswith(_PACKED)]

    def inputs(self, record: memoryview) -> Feeds:
        """A record's tensors as the graphs take them; views where nothing has to be expanded or shifted."""
        feeds = tensors(self._layout, record)
        for matrix, unsigned, out in self._quantised:
            feeds[matrix.name] = _integers(matrix, feeds, unsigned, out)
        for name in self._packed:
            del feeds[name]
        return feeds


def _integers(matrix: Matrix, parts: Mapping[str, Array], unsigned: bool, out: Array) -> Array:
    """A quantised matrix as int8, or that plus 128 as uint8; `out` holds it unless it can be used as stored."""
    if matrix.encoding != "w8":
        nibbles, multipliers = parts[f"{matrix.name}.nibbles"], parts[f"{matrix.name}.multipliers"]
        group = GROUP_SIZES[matrix.encoding]
        return expand_nibbles(
            nibbles, multipliers, group, matrix.rows, out=out if unsigned else out.view(np.int8), unsigned=unsigned
        )
    stored = parts[matrix.name]
    return np.bitwise_xor(stored.view(np.uint8), _SIGN, out=out) if unsigned else stored


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Everything but experts and embedding, in memory for as long as a session lasts.

    Attributes:
        qkv: inputs of the graph `qkv`, by layer.
        out: inputs of the graph `out`, by layer.
        head: inputs of the graph `head`.
    """

    qkv: tuple[Feeds, ...]
    out: tuple[Feeds, ...]
    head: Feeds


def load_dense(package: Package, backend: Backend) -> DenseWeights:
    """Load the dense weights of a package for a backend.

    Raises:
        IntegrityError: a record's checksum differs or its bytes are missing.
        LinkError: the device failed.
    """
    model = package.manifest.model
    layers = range(len(model.layers))
    kinds = [_kinds(model, backend, layer) for layer in layers]
    weights = [_load(package, layer + 1, kinds[layer]) for layer in layers]
    head = _load(package, len(layers) + 1, kinds[0])
    if model.tied_head:
        head |= _tied_head(package, kinds[0]("head"))

    def of_role(role: GraphRole, layer: int) -> Feeds:
        shape_class = shape_class_of(role, model, layer)
        inputs = interface(role, model, shape_class, kinds[layer](role)).inputs
        return {each.name: weights[layer][each.name] for each in inputs if each.name in weights[layer]}

    return DenseWeights(
        qkv=tuple(of_role("qkv", layer) for layer in layers),
        out=tuple(of_role("out", layer) for layer in layers),
        head=head,
    )


def _kinds(model: ModelDescription, backend: Backend, layer: int) -> KindOf:
    return lambda role: backend.weights_of(role, shape_class_of(role, model, layer))


def _load(package: Package, number: int, kind_of: KindOf) -> Feeds:
    place = package.dense.place(number)
    record = load_record(package, place)
    matrices = place.layout.matrices
    # Memory of the record is the session's own, so a stored byte is shifted where it lies.
    stored = tensors(place.layout, record)
    own = {each.name: stored[each.name].view(np.uint8) for each in matrices if each.encoding == "w8"}
    packed = {
        each.name: np.empty((each.rows, each.columns), np.uint8) for each in matrices if each.encoding in GROUP_SIZES
    }
    feeds = Binding(place.layout, kind_of, own | packed).inputs(record)
    if not packed:
        return feeds
    # Nothing may refer to a record whose nibbles have been expanded, or it would stay in memory.
    return {name: array if name in packed else array.copy() for name, array in feeds.items()}


def _tied_head(package: Package, kind: GraphWeights) -> Feeds:
    """The embedding turned into a head: transposed, its scale per row now one per column."""
    place = package.dense.place(0)
    stored = tensors(place.layout, load_record(package, place))
    embedding = stored["embedding"]
    head = np.ascontiguousarray(embedding.T)
    if kind == "f32":
        return {"head": head}
    if kind == "uint8":
        head = np.bitwise_xor(head.view(np.uint8), _SIGN, out=head.view(np.uint8))
    return {"head": head, "head.scale": stored["embedding.scale"].copy()}


class ExpertWeights:
    """Turns a record in the arena into inputs of the graph `expert`.

    What has to be expanded goes to scratch memory of one expert, so inputs hold until the next call.
    """

    def __init__(self, package: Package, backend: Backend):
        model, experts = package.manifest.model, package.experts
        layers = range(len(model.layers))
        layouts = [experts.place(layer).layout for layer in layers]
        sizes: dict[str, int] = {}
        for matrix in (matrix for layout in layouts for matrix in layout.matrices if matrix.encoding != "f32"):
            sizes[matrix.name] = max(sizes.get(matrix.name, 0), matrix.rows * matrix.columns)
        memory = {name: np.empty(size, np.uint8) for name, size in sizes.items()}
        self._bindings = [
            Binding(layouts[layer], _kinds(model, backend, layer), _shaped(memory, layouts[layer])) for layer in layers
        ]

    def bind(self, layer: int, record: memoryview) -> Feeds:
        """Inputs for one expert of a layer.

        Args:
            layer: the layer.
            record: the expert's record, in a bank that is in use.
        """
        return self._bindings[layer].inputs(record)


def _shaped(memory: Mapping[str, Array], layout: RecordLayout) -> dict[str, Array]:
    """For each quantised matrix of a layout, as much of the memory of its name as it fills."""
    return {
        each.name: memory[each.name][: each.rows * each.columns].reshape(each.rows, each.columns)
        for each in layout.matrices
        if each.encoding != "f32"
    }
