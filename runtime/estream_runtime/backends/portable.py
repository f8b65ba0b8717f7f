"""The portable backend: ONNX Runtime on the CPU.

Integer products come in two variants, signed and unsigned weights. Signed ones are faster where the processor has the
instruction for them and wrong where it has not; unsigned ones are exact everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar, Final

import onnxruntime

from estream_runtime.backends.protocol import Array, GraphKey
from estream_runtime.backends.saturation import is_exact
from estream_spec.errors import InvalidError, LinkError, TrapError
from estream_spec.graph_interface import MATRICES
from estream_spec.manifest import GraphRole, GraphWeights

_PREFERENCE: Final[tuple[GraphWeights, ...]] = ("f32", "int8", "uint8")
_ERRORS_ONLY: Final = 3


class PortableBackend:
    """Runs graphs with ONNX Runtime; sessions are made when first used.

    Args:
        graphs: ONNX models by name.
        threads: threads a graph may use.
    """

    name: ClassVar[str] = "portable"

    def __init__(self, graphs: Mapping[GraphKey, bytes], threads: int):
        self._graphs, self._threads = dict(graphs), threads
        self._sessions: dict[GraphKey, Any] = {}
        self._chosen: dict[tuple[GraphRole, int], GraphWeights] = {}

    def weights_of(self, role: GraphRole, shape_class: int) -> GraphWeights:
        """The first of f32, int8 and uint8 that the package has and that is exact here."""
        key = role, shape_class
        if key not in self._chosen:
            self._chosen[key] = self._choose(role, shape_class)
        return self._chosen[key]

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a graph, see `Backend.run`."""
        return self._run(GraphKey(role, shape_class, self.weights_of(role, shape_class)), feeds)

    def close(self) -> None:
        """Ends all sessions and their threads."""
        self._graphs.clear()
        self._sessions.clear()
        self._chosen.clear()

    def _choose(self, role: GraphRole, shape_class: int) -> GraphWeights:
        present = [kind for kind in _PREFERENCE if GraphKey(role, shape_class, kind) in self._graphs]
        if not present:
            raise LinkError(f"no graph for role {role!r}, shape class {shape_class}", path="graphs")
        if present == ["int8", "uint8"] and not self._signed_is_exact:
            return "uint8"
        return present[0]

    def _run(self, key: GraphKey, feeds: Mapping[str, Array]) -> dict[str, Array]:
        session = self._session(key)
        try:
            outputs = session.run(None, dict(feeds))
        except Exception as error:  # What ONNX Runtime raises has no common base of its own.
            raise TrapError(f"the run failed: {str(error)!r}", path=str(key)) from error
        return dict(zip((output.name for output in session.get_outputs()), outputs, strict=True))

    def _session(self, key: GraphKey) -> Any:
        if key not in self._sessions:
            try:
                self._sessions[key] = onnxruntime.InferenceSession(
                    self._graphs[key], _options(self._threads), providers=["CPUExecutionProvider"]
                )
            except Exception as error:
                raise LinkError(f"ONNX Runtime does not load the graph: {str(error)!r}", path=str(key)) from error
        return self._sessions[key]

    @cached_property
    def _signed_is_exact(self) -> bool:
        """Whether uint8 times int8 is exact here.

        Tried once, on the package's own graph; where it has no expert graph to try, nothing is taken for granted.
        """
        pairs = [key for key in self._graphs if key.role == "expert" and key.weights == "int8" and self._paired(key)]
        if not pairs:
            return False
        key = min(pairs, key=lambda key: key.shape_class)
        exact = is_exact(partial(self._run, key), self._matrix_shapes(key))
        if not exact:
            del self._sessions[key]
        return exact

    def _matrix_shapes(self, key: GraphKey) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrix inputs of a graph, asked of the graph itself."""
        shapes = {value.name: value.shape for value in self._session(key).get_inputs()}
        matrices = {name: tuple(shapes.get(name, ())) for name in MATRICES[key.role]}
        for name, shape in matrices.items():
            if len(shape) != 2 or not all(isinstance(dimension, int) for dimension in shape):
                raise InvalidError(
                    f"input {name!r} has shape {list(shape)}, expected two fixed dimensions", path=str(key)
                )
        return matrices

    def _paired(self, key: GraphKey) -> bool:
        return GraphKey(key.role, key.shape_class, "uint8") in self._graphs


def _options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    # Memory is handed back after each run: row counts differ from call to call, and a pool would keep the sum of the
    # largest of every graph.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Graphs take turns, so threads of one must not spin while another computes.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = _ERRORS_ONLY
    return options
