"""The backend for Qualcomm's Hexagon tensor processor: graphs compiled for one chip, run where weights lie.

A compiled graph takes a fixed number of rows. Rows are covered by graphs of one role, padded with zeros at the end, and
what became of the padding is dropped. FORMAT.md section 10.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Final

import numpy as np

from estream_runtime.backends.graphs import GraphBackend
from estream_runtime.backends.protocol import Array, MatrixForm
from estream_runtime.device import profile_of
from estream_runtime.npu.context import open_context
from estream_runtime.npu.qnn import simulated
from estream_runtime.npu.tiling import cover
from estream_spec.binary_interface import HIDDEN, LARGEST, interface_of, label_of, tensor_name
from estream_spec.chips import Chip, chip_named
from estream_spec.errors import LinkError, TrapError
from estream_spec.graph_interface import DType, Interface, Value, interface, role_shape
from estream_spec.manifest import BinaryGraph, GraphRole
from estream_spec.model import ModelDescription
from estream_spec.weights import GROUP_SIZES, Encoding

KNOWN_CHIP: Final = "sm8850"
"""The chip whose profile counts for chips that have none: its figures were fitted to published ones."""

MOST_ROWS: Final = 4096
MOST_KEYS: Final = 1 << 17
"""Tiles and capacities of any use; a run makes room for their rows."""

_DTYPES: Final[dict[DType, type]] = {"f32": np.float32, "i8": np.int8, "u8": np.uint8}


@dataclass(frozen=True, slots=True)
class _Tile:
    """One graph, ready to run."""

    graph: BinaryGraph
    interface: Interface
    session: Any

    def run(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs it on inputs and into outputs of its very shapes, C-contiguous, which are used where they lie."""
        label = label_of(self.graph)
        binding = self.session.io_binding()
        given = [_fitting(feeds[value.name], value, label) for value in self.interface.inputs]  # held until it has run
        for value, array in zip(self.interface.inputs, given, strict=True):
            binding.bind_input(tensor_name(label, value.name), "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for value in self.interface.outputs:
            made = outputs[value.name]
            assert made.flags.c_contiguous
            assert made.shape == value.shape
            binding.bind_output(tensor_name(label, value.name), "cpu", 0, made.dtype, made.shape, made.ctypes.data)
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # what ONNX Runtime raises has no common base of its own
            raise TrapError(f"the run failed: {str(error)!r}", path=f"graph {label}") from error


def _fitting(array: Array, value: Value, label: str) -> Array:
    """The array, if it is what a graph takes: the vendor's library is given its address and asks nothing."""
    if array.shape != value.shape or array.dtype != _DTYPES[value.dtype]:
        found = f"{value.name!r} is {array.dtype} {list(array.shape)}"
        raise TrapError(f"{found}, expected {value.dtype} {list(value.shape)}", path=f"graph {label}")
    return np.ascontiguousarray(array)


@dataclass(frozen=True, slots=True)
class _Served:
    """Graphs that differ in their rows and keys alone.

    Attributes:
        tiles: by keys, then by rows, each rising; keys are 0 for every role but `attend`.
        symbolic: inputs and outputs with `T` and `S` where the graphs have their numbers.
    """

    tiles: dict[int, dict[int, _Tile]]
    symbolic: Interface

    def for_keys(self, keys: int) -> tuple[int, dict[int, _Tile]]:
        """The least capacity that holds so many keys, and the tiles of it.

        Raises:
            TrapError: there is none.
        """
        for capacity, tiles in self.tiles.items():
            if capacity >= keys:
                return capacity, tiles
        message = f"{keys} keys are more than the binary's graphs take, which is {max(self.tiles)}"
        raise TrapError(message, path="graph attend", hint="give fewer tokens, or use another backend")


class HtpBackend(GraphBackend):
    """Runs the graphs of one context binary.

    Args:
        model: what the graphs must fit.
        data: the context binary, made for the chip and by no newer SDK than the one that is here.
        graphs: what is in it.
        chip: the chip.

    Attributes:
        tile_rows: rows computed so far.
        padded_rows: how many of them stood for none.
        most_tokens: tokens that prompt and output may have together.

    Raises:
        LinkError: the vendor's library is not installed, or refuses the binary, or a graph takes too many rows.
    """

    name: ClassVar[str] = "htp"

    def __init__(self, model: ModelDescription, data: bytes, graphs: Sequence[BinaryGraph], chip: Chip):
        for graph in graphs:
            if graph.tokens > MOST_ROWS or graph.keys > MOST_KEYS:
                found = f"{graph.tokens} rows and {graph.keys} keys"
                message = f"{found} are more than a run has memory for, expected at most {MOST_ROWS} and {MOST_KEYS}"
                raise LinkError(message, path=f"graph {label_of(graph)}")
        self._model, self._chip, self._call_rows = model, chip, _call_rows(chip, model)
        self.most_tokens = max((graph.keys for graph in graphs if graph.role == "attend"), default=None)
        self._served: dict[tuple[GraphRole, int, tuple[Encoding, ...]], _Served] = {}
        ordered = sorted(graphs, key=lambda graph: (graph.keys, graph.tokens))
        for graph, session in zip(ordered, open_context(data, ordered, model, chip), strict=True):
            key = graph.role, graph.shape_class, graph.encodings
            if key not in self._served:
                symbolic = interface(graph.role, model, graph.shape_class, "f32")
                self._served[key] = _Served({}, symbolic)
            tile = _Tile(graph, interface_of(graph, model), session)
            self._served[key].tiles.setdefault(graph.keys, {})[graph.tokens] = tile

    @property
    def detail(self) -> str:
        """The chip, and whether a simulator computes in its place."""
        return f"{self._chip.name}, simulated" if simulated() else self._chip.name

    def weights_of(self, role: GraphRole, shape_class: int) -> MatrixForm:
        """Matrices as they are stored."""
        if not any(key[:2] == (role, shape_class) for key in self._served):
            raise LinkError(f"the binary has no graph for role {role!r}, shape class {shape_class}", path="binaries")
        return "f32" if role == "attend" else "stored"

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs as many graphs as the rows take, see `Backend.run`."""
        served = self._graphs_for(role, shape_class, feeds)
        axes = {value.name: value.shape.index("T") for value in _with_rows(served.symbolic)}
        count = _count(feeds, axes, role)
        if role == "attend":
            feeds = _with_seen_keys(feeds)
            capacity, tiles = served.for_keys(feeds["keys"].shape[1])
            feeds = _with_capacity(feeds, capacity)
        else:
            _, tiles = served.for_keys(0)
        for name, array in feeds.items():
            if name in axes:
                _check_range(array, f"graph {role}.{shape_class}", name)
        taken = cover(count, list(tiles), self._call_rows)
        self.tile_rows += sum(taken)
        self.padded_rows += sum(taken) - count
        outputs = {
            value.name: np.empty([sum(taken) if size == "T" else int(size) for size in value.shape], np.float32)
            for value in served.symbolic.outputs
        }
        for start, tokens in zip(accumulate(taken, initial=0), taken, strict=False):
            block = slice(start, start + tokens)
            inputs = {name: _rows(array, axes.get(name), block) for name, array in feeds.items()}
            made = {name: _room(array, axes[name], block) for name, array in outputs.items()}
            tiles[tokens].run(inputs, made)
            for name, array in made.items():
                if not np.may_share_memory(array, outputs[name]):
                    outputs[name][:, block] = array
        results = {name: np.ascontiguousarray(_cut(array, axes[name], count)) for name, array in outputs.items()}
        for name, array in results.items():
            _check_range(array, f"graph {role}.{shape_class}", name, made=True)
        return results

    def close(self) -> None:
        """Ends all sessions and gives the context back."""
        self._served.clear()

    def _graphs_for(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> _Served:
        names = role_shape(role, self._model, shape_class).matrix_names
        encodings = tuple(_encoding(name, feeds) for name in names)
        try:
            return self._served[role, shape_class, encodings]
        except KeyError:
            wanted = f"role {role!r}, shape class {shape_class}, encodings {', '.join(encodings) or 'none'}"
            raise LinkError(f"the binary has no graph for {wanted}", path="binaries") from None


def _encoding(name: str, feeds: Mapping[str, Array]) -> Encoding:
    """How a matrix is stored, told from its parts."""
    if f"{name}.nibbles" in feeds:
        group = 2 * len(feeds[f"{name}.nibbles"]) // len(feeds[f"{name}.multipliers"])
        return next(encoding for encoding, size in GROUP_SIZES.items() if size == group)
    return "w8" if f"{name}.scale" in feeds else "f32"


def _call_rows(chip: Chip, model: ModelDescription) -> float:
    """Rows that are computed in the time that a call takes to move and unpack its weights, by the chip's profile."""
    profile = profile_of(chip) or profile_of(chip_named(KNOWN_CHIP))
    assert profile is not None
    flops = profile.experts.flops(max(block.intermediate for block in model.expert_blocks))
    return profile.experts.weight_s.value * flops / 2


def _with_rows(symbolic: Interface) -> Iterator[Value]:
    """Inputs and outputs that have a row for each token."""
    return (value for value in (*symbolic.inputs, *symbolic.outputs) if "T" in value.shape)


def _count(feeds: Mapping[str, Array], axes: Mapping[str, int], role: GraphRole) -> int:
    """How many rows inputs have, which must be as many in each: rows that are missing would be filled up."""
    counts = {name: array.shape[axes[name]] for name, array in feeds.items() if name in axes}
    found = set[int](counts.values())
    if len(found) != 1:
        told = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
        raise TrapError(f"inputs of other numbers of rows: {told}", path=f"graph {role}")
    return found.pop()


def _with_seen_keys(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
    """Inputs of `attend` without the keys at the end that no row sees: caches have room for later ones."""
    seen = np.flatnonzero((feeds["mask"] == 0).any(axis=0))
    count = int(seen[-1]) + 1 if len(seen) else 1
    shorter = {name: feeds[name][:, :count] for name in ("keys", "values", "mask")}
    return {**feeds, **shorter}


def _with_capacity(feeds: Mapping[str, Array], capacity: int) -> dict[str, Array]:
    """Inputs of `attend` for as many keys as a graph takes: those that are not there are hidden."""
    mask = np.maximum(feeds["mask"], np.float32(HIDDEN))
    missing = capacity - feeds["keys"].shape[1]
    if not missing:
        return {**feeds, "mask": mask}
    longer = {name: np.pad(feeds[name], ((0, 0), (0, missing), (0, 0))) for name in ("keys", "values")}
    return {**feeds, **longer, "mask": np.pad(mask, ((0, 0), (0, missing)), constant_values=HIDDEN)}


def _check_range(rows: Array, graph: str, name: str, *, made: bool = False) -> None:
    """Refuse numbers that fp16 does not have, given or made: what else they spoil need not show in results.

    Where they were made, the largest of all is refused as well: it stands for any beyond it on chips that saturate.
    """
    largest = float(np.abs(rows).max(initial=0))
    if not largest <= LARGEST or (made and largest == LARGEST):
        hint = "another backend computes in f32"
        raise TrapError(f"{name!r} has {largest:g}, the largest number of fp16 is {LARGEST:g}", path=graph, hint=hint)


def _rows(array: Array, axis: int | None, block: slice) -> Array:
    """The rows of a tile, those that are not there being zeros; an input without rows as it is."""
    if axis is None:
        return array
    given = array[(slice(None),) * axis + (block,)]
    missing = block.stop - block.start - given.shape[axis]
    if not missing:
        return given
    return np.pad(given, [(0, missing if each == axis else 0) for each in range(array.ndim)])


def _room(whole: Array, axis: int, block: slice) -> Array:
    """Where a tile's rows of an output go: into the whole of it where they lie together there."""
    if axis == 0 or block == slice(0, whole.shape[axis]):
        return whole[(slice(None),) * axis + (block,)]
    return np.empty((whole.shape[0], block.stop - block.start, *whole.shape[2:]), whole.dtype)


def _cut(array: Array, axis: int, count: int) -> Array:
    """Without the rows that stand for none."""
    return array[(slice(None),) * axis + (slice(count),)]
