"""Runs a package and tells what enters each product with a matrix, for who wants to know which weights matter.

The portable graphs say themselves which rows meet which matrix, so nothing here knows a model: those rows become
further outputs of each graph. Which layer and expert a graph runs for is what the interpreter tells its recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import onnx

from estream_loader.package import Package
from estream_runtime.backends.graphs import GraphBackend
from estream_runtime.backends.protocol import Array
from estream_runtime.onnx_runtime import onnxruntime
from estream_runtime.recorder import Recorder
from estream_runtime.session import Session
from estream_spec.errors import LinkError, TrapError
from estream_spec.graph_interface import role_shape
from estream_spec.manifest import GraphRole, GraphWeights
from estream_spec.trace import Activity
from estream_spec.weights import Floats

Observe = Callable[[int | None, int | None, Mapping[str, Floats]], None]
"""Told of each graph with matrices that ran: layer, None for what follows the last; expert, None outside of experts;
and by matrix the rows it was multiplied with, f32 `[T, K]`, the very same array for matrices that share their rows."""
_THREADS: Final = 8
"""The same everywhere, however many processors there are: how a product is divided among threads shows in its bits."""
_SILENT: Final = 4


def open_observed(package: Package, observe: Observe) -> Session:
    """A session on `package` whose calls tell what enters each product. Raises as `Session` does.

    Args:
        package: an open package whose activations are f32.
        observe: told of each graph that ran.
    """
    place = _Place()
    session = Session(package, lambda threads: _ObservedGraphs(package, place, observe, threads), threads=_THREADS)
    session.interpreter.recorder = place
    return session


class _Place(Recorder):
    """Remembers what the activity under way is about."""

    layer: int | None = None
    expert: int | None = None

    def during(
        self,
        activity: Activity,
        layer: int | None = None,
        group: int | None = None,
        expert: int | None = None,
        tokens: int | None = None,
    ) -> Any:
        """See `Recorder.during`; activities never lie inside one another."""
        self.layer, self.expert = layer, expert
        return super().during(activity, layer, group, expert, tokens)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph that can be run.

    Attributes:
        session: of ONNX Runtime.
        outputs: names of what it gives, then of what enters its products.
        own: how many of those are the outputs of its interface.
        rows: by matrix the name of what enters the product with it: one of the outputs, or of the inputs.
    """

    session: Any
    outputs: tuple[str, ...]
    own: int
    rows: Mapping[str, str]


class _ObservedGraphs(GraphBackend):
    """Runs the portable graphs of a package with f32 activations, and tells what enters their products."""

    name: ClassVar[str] = "observing"

    def __init__(self, package: Package, place: _Place, observe: Observe, threads: int):
        self._model, self._place, self._observe, self._threads = package.manifest.model, place, observe, threads
        self._kinds: dict[tuple[GraphRole, int], GraphWeights] = {}
        self._data: dict[tuple[GraphRole, int], bytes] = {}
        self._graphs: dict[tuple[GraphRole, int], _Graph] = {}
        for each in package.manifest.graphs:
            if each.activations != "f32":
                message = f"activations of role {each.role!r} are {each.activations}, only f32 ones can be observed"
                raise LinkError(message, path=package.source.name)
            self._kinds[each.role, each.shape_class] = each.weights
            self._data[each.role, each.shape_class] = package.graph(each)

    def weights_of(self, role: GraphRole, shape_class: int) -> GraphWeights:
        """See `Backend.weights_of`."""
        return self._kinds[role, shape_class]

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a graph, see `Backend.run`."""
        key = role, shape_class
        if key not in self._graphs:
            matrices = role_shape(role, self._model, shape_class).matrix_names
            self._graphs[key] = _load(self._data[key], matrices, self._threads)
        graph = self._graphs[key]
        try:
            found = dict(zip(graph.outputs, graph.session.run(graph.outputs, dict(feeds)), strict=True))
        except Exception as error:  # What ONNX Runtime raises has no common base of its own.
            raise TrapError(f"the run failed: {str(error)!r}", path=f"graph {role}.{shape_class}") from error
        if graph.rows:
            values = {**feeds, **found}
            rows = {matrix: values[name] for matrix, name in graph.rows.items()}
            self._observe(self._place.layer, self._place.expert, rows)
        return {name: found[name] for name in graph.outputs[: graph.own]}

    def close(self) -> None:
        """Ends all sessions and their threads."""
        self._graphs.clear()


def _load(data: bytes, matrices: Iterable[str], threads: int) -> _Graph:
    """A graph with what enters its products among its outputs."""
    model = onnx.load_model_from_string(data)
    graph, rows = model.graph, _rows(model.graph, frozenset(matrices))
    own = [each.name for each in graph.output]
    inputs = {each.name for each in graph.input}
    further = [name for name in dict.fromkeys(rows.values()) if name not in inputs and name not in own]
    graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in further)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.use_deterministic_compute = True
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = _SILENT
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return _Graph(session, (*own, *further), len(own), rows)


def _rows(graph: Any, matrices: frozenset[str]) -> dict[str, str]:
    """By matrix the name of the rows that it is multiplied with. Integers are widened before the product."""
    widened = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    products = [node.input for node in graph.node if node.op_type == "MatMul"]
    named = {widened.get(right, right): left for left, right in products}
    return {matrix: rows for matrix, rows in named.items() if matrix in matrices}
