"""Stored weights made ready as graph inputs. FORMAT.md sections 7 and 10.

What can be used where it lies is a view; a nibble expands to the 8-bit weight it stands for, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np

from estream_loader.dense import DenseRecords
from estream_loader.package import Package
from estream_loader.records import tensors
from estream_runtime.backends import Array, Backend, MatrixForm
from estream_spec.constants import TENSOR_ALIGNMENT
from estream_spec.graph_interface import ROLES, class_count, interface, layer_classes, role_shape
from estream_spec.layout import round_up
from estream_spec.manifest import GraphRole, Matrix, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.prefetch_router import ROUTER_TENSORS
from estream_spec.weights import GROUP_SIZES, expand_nibbles

Feeds = dict[str, Array]
"""Graph inputs by name."""

_LOOSE: Final = frozenset({"taps", *ROUTER_TENSORS})
"""Tensors of a layer's record that are asked for by themselves."""
_PACKED: Final = (".nibbles", ".multipliers")
"""Parts of matrices that no graph takes as they are."""
_SIGN: Final = np.uint8(128)
"""Flipping this bit of a signed byte adds 128 to it and makes it unsigned."""


def _integers(matrix: Matrix, parts: Mapping[str, Array], unsigned: bool, out: Array) -> Array:
    """A quantised matrix as int8, or that plus 128 as uint8, made in `out`."""
    if matrix.encoding != "w8":
        nibbles, multipliers = parts[f"{matrix.name}.nibbles"], parts[f"{matrix.name}.multipliers"]
        group = GROUP_SIZES[matrix.encoding]
        return expand_nibbles(
            nibbles, multipliers, group, matrix.rows, out=out if unsigned else out.view(np.int8), unsigned=unsigned
        )
    assert unsigned
    return np.bitwise_xor(parts[matrix.name].view(np.uint8), _SIGN, out=out)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of one graph from weights that stay in memory.

    Attributes:
        fixed: those that are used as they lie.
        packed: matrices that are expanded whenever the graph runs, and where to. Kept expanded, they would take twice
            the memory that storing them as nibbles is meant to save.
        stored: the parts of those, by name.
        unsigned: whether the graph takes them as uint8.
    """

    fixed: Feeds
    packed: tuple[tuple[Matrix, Array], ...]
    stored: Feeds
    unsigned: bool

    def __call__(self) -> Feeds:
        expanded = {each.name: _integers(each, self.stored, self.unsigned, out) for each, out in self.packed}
        return self.fixed | expanded


class DenseWeights:
    """Everything but experts and embedding, in memory for as long as a session lasts.

    Records may still be on their way; who asks for inputs made of one waits for it. Matrices stored as nibbles stay so,
    and are expanded into `scratch` when they are asked for: inputs with such matrices hold until others are asked for.

    Args:
        package: the open package.
        backend: says what its graphs take as matrices.
        scratch: uint8, see `scratch_for`.
        records: see `read_dense`.
    """

    def __init__(self, package: Package, backend: Backend, scratch: Array, records: DenseRecords):
        model = package.manifest.model
        self._model, self._scratch, self._records = model, scratch, records
        self._layouts = [package.dense.place(number).layout for number in _record_numbers(model)]
        served: list[tuple[GraphRole, int, int]] = [
            (role, layer, shape_class)
            for layer in range(len(model.layers))
            for role, shape_class in layer_classes(model, layer).items()
            if role != "expert"
        ]
        self._classes = {(role, layer): shape_class for role, layer, shape_class in [*served, ("head", 0, 0)]}
        self._kinds = {key: backend.weights_of(key[0], shape_class) for key, shape_class in self._classes.items()}
        self._made: dict[tuple[GraphRole, int], _Inputs] = {}
        self._loose: dict[int, Feeds] = {}

    def is_there(self, role: GraphRole, layer: int = 0) -> bool:
        """Whether inputs can be had without waiting for them."""
        return (role, layer) in self._made or all(map(self._records.is_there, self._needed(role, layer)))

    def await_(self, role: GraphRole, layer: int = 0) -> None:
        """Return when inputs can be had without waiting for them. Raises as `inputs` does."""
        for number in self._needed(role, layer):
            self._records.take(number)

    def inputs(self, role: GraphRole, layer: int = 0) -> Feeds:
        """What a graph of a layer, or `head`, takes as weights, by input.

        Raises:
            IntegrityError: the checksum of the record they are in differs or its bytes are missing.
            LinkError: the device failed.
        """
        key = role, layer
        if key not in self._made:
            self._made[key] = self._make(role, layer)
            if len(self._made) == len(self._kinds):  # all is here and nothing is left to be read
                self._records.close()
        return self._made[key]()

    def vector(self, layer: int, name: str) -> Array:
        """A tensor of a layer that is asked for by itself, f32, once there are inputs of one of its graphs."""
        return self._loose[layer][name]

    def router(self, layer: int) -> Mapping[str, Array]:
        """What decides the experts of a layer, f32, see `ROUTER_TENSORS`. Raises as `inputs` does."""
        self.inputs("out", layer)
        return self._loose[layer]

    def _needed(self, role: GraphRole, layer: int) -> list[int]:
        """Which of the records a graph takes weights from."""
        if role != "head":
            return [layer]
        final = len(self._model.layers)
        return [final, final + 1] if self._model.tied_head else [final]

    def _make(self, role: GraphRole, layer: int) -> _Inputs:
        kind = self._kinds[role, layer]
        number, *embedding = self._needed(role, layer)
        names = _input_names(role, self._model, self._classes[role, layer], kind)
        record = self._records.take(number)
        if role != "head":
            self._loose[layer] = {
                name: each for name, each in tensors(self._layouts[number], record).items() if name in _LOOSE
            }
        made = _inputs(self._layouts[number], record, names, kind, self._scratch)
        if not embedding:
            return made
        tied = _tied_head(self._layouts[embedding[0]], self._records.take(embedding[0]), kind)
        return replace(made, fixed=made.fixed | tied)


def read_dense(package: Package) -> DenseRecords:
    """Begin to read the records that `DenseWeights` needs, in the order in which it will.

    Raises:
        LinkError: the threads cannot be had.
        FormatError: the tables of the package are at fault.
    """
    return DenseRecords(package, [package.dense.place(number) for number in _record_numbers(package.manifest.model)])


def _record_numbers(model: ModelDescription) -> list[int]:
    """Dense records of a package that graphs take weights from: each layer, what follows the last, a tied embedding."""
    numbers = list(range(1, len(model.layers) + 2))
    return [*numbers, 0] if model.tied_head else numbers


def scratch_for(package: Package) -> Array:
    """Memory in which the matrices of any one graph find room, uint8.

    One is enough for all graphs, since one runs at a time. What no graph needs of it is never touched.
    """
    model = package.manifest.model
    names = {
        role_shape(role, model, shape_class).matrix_names
        for role in ROLES
        for shape_class in range(class_count(role, model))
    }
    rooms = [
        sum(_room(each) for each in layout.matrices if each.name in together)
        for layout in package.manifest.layouts
        for together in names
    ]
    return np.empty(max(rooms), np.uint8)


def _inputs(
    layout: RecordLayout, record: memoryview, names: frozenset[str], kind: MatrixForm, scratch: Array
) -> _Inputs:
    """Inputs of one graph from a record, which is the session's own: stored bytes are shifted where they lie."""
    stored = tensors(layout, record)
    if kind == "stored":
        return _Inputs({name: each for name, each in stored.items() if _belongs(name, names)}, (), {}, False)
    matrices = [each for each in layout.matrices if each.name in names]
    if kind == "uint8":
        for each in matrices:
            if each.encoding == "w8":
                stored[each.name] = _integers(each, stored, True, stored[each.name].view(np.uint8))
    packed = _places([each for each in matrices if each.encoding in GROUP_SIZES], scratch)
    fixed = {name: array for name, array in stored.items() if name in names}
    return _Inputs(fixed, packed, stored if packed else {}, kind == "uint8")


def _places(matrices: Sequence[Matrix], scratch: Array) -> tuple[tuple[Matrix, Array], ...]:
    """Each matrix with its own stretch of the scratch memory, uint8 `[rows, columns]`."""
    ends = list(accumulate(map(_room, matrices), initial=0))
    return tuple(
        (each, scratch[end : end + each.rows * each.columns].reshape(each.rows, each.columns))
        for each, end in zip(matrices, ends, strict=False)
    )


def _room(matrix: Matrix) -> int:
    """Bytes of scratch memory for a matrix, so that the next one is aligned as well."""
    return round_up(matrix.rows * matrix.columns, TENSOR_ALIGNMENT)


def _belongs(name: str, inputs: frozenset[str]) -> bool:
    """Whether a tensor is an input or a part of a matrix that is one."""
    return name in inputs or (name.endswith(_PACKED) and name.rpartition(".")[0] in inputs)


def _input_names(role: GraphRole, model: ModelDescription, shape_class: int, kind: MatrixForm) -> frozenset[str]:
    weights = "int8" if kind == "stored" else kind
    return frozenset(each.name for each in interface(role, model, shape_class, weights).inputs)


def _tied_head(layout: RecordLayout, record: memoryview, kind: MatrixForm) -> Feeds:
    """The embedding turned into a head: transposed, its scale per row now one per column."""
    stored = tensors(layout, record)
    embedding = stored["embedding"]
    head = np.ascontiguousarray(embedding.T)
    if "embedding.scale" not in stored:  # it is f32
        return {"head": head}
    if kind == "uint8":
        head = np.bitwise_xor(head.view(np.uint8), _SIGN, out=head.view(np.uint8))
    return {"head": head, "head.scale": stored["embedding.scale"].copy()}


class ExpertWeights:
    """Turns a record in the arena into inputs of the graph `expert`.

    What has to be expanded or shifted goes to scratch memory, so inputs hold until others are asked for.

    Args:
        package: the open package.
        backend: says what its graphs take as matrices.
        scratch: uint8, see `scratch_for`.
    """

    def __init__(self, package: Package, backend: Backend, scratch: Array):
        model, layouts = package.manifest.model, package.manifest.layouts
        self._layouts = [layouts[each.layout] for each in package.experts.table.ranges]
        kinds = [
            "f32" if layer.experts is None else backend.weights_of("expert", layer.experts) for layer in model.layers
        ]
        self._stored = [kind == "stored" for kind in kinds]
        self._unsigned = [kind == "uint8" for kind in kinds]
        self._made = [
            _places([each for each in layout.matrices if _changes(each, unsigned)], scratch)
            if layer.experts is not None
            else ()
            for layer, layout, unsigned in zip(model.layers, self._layouts, self._unsigned, strict=True)
        ]

    def bind(self, layer: int, record: memoryview) -> Feeds:
        """What the backend takes of one expert of a layer; views where nothing has to be expanded or shifted.

        Args:
            layer: the layer.
            record: the expert's record, in a bank that is in use.
        """
        stored = tensors(self._layouts[layer], record)
        if self._stored[layer]:
            return stored
        feeds = {name: array for name, array in stored.items() if not name.endswith(_PACKED)}
        for matrix, out in self._made[layer]:
            feeds[matrix.name] = _integers(matrix, stored, self._unsigned[layer], out)
        return feeds


def _changes(matrix: Matrix, unsigned: bool) -> bool:
    """Whether a matrix is something else for the graph than it is in the record."""
    return matrix.encoding in GROUP_SIZES or (matrix.encoding == "w8" and unsigned)
