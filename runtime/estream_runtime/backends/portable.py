"""The portable backend: ONNX Runtime on the CPU.

Integer products come in two variants, signed and unsigned weights. Signed ones are faster where the processor has the
instruction for them and wrong where it has not; unsigned ones are exact everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar, Final

from estream_runtime.backends.contract import Found, check_interface, check_outputs
from estream_runtime.backends.graphs import GraphBackend
from estream_runtime.backends.protocol import Array, GraphKey
from estream_runtime.backends.saturation import is_exact
from estream_runtime.onnx_runtime import onnxruntime
from estream_spec.errors import LinkError, TrapError
from estream_spec.graph_interface import Interface, interface
from estream_spec.manifest import GraphRole, GraphWeights
from estream_spec.model import ModelDescription

_PREFERENCE: Final[tuple[GraphWeights, ...]] = ("f32", "int8", "uint8")
_DTYPES: Final = {"tensor(float)": "f32", "tensor(int8)": "i8", "tensor(uint8)": "u8"}
_SILENT: Final = 4
"""Logs only what ends the process: what goes wrong is raised, and told once."""


class PortableBackend(GraphBackend):
    """Runs graphs with ONNX Runtime; sessions are made when first used.

    Args:
        model: what the graphs must fit.
        graphs: ONNX models by name.
        threads: threads a graph may use.
    """

    name: ClassVar[str] = "portable"

    def __init__(self, model: ModelDescription, graphs: Mapping[GraphKey, bytes], threads: int):
        self._model, self._graphs, self._threads = model, dict(graphs), threads
        self._sessions: dict[GraphKey, tuple[Any, Interface]] = {}
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
        session, expected = self._session(key)
        try:
            outputs = session.run(None, dict(feeds))
        except Exception as error:  # What ONNX Runtime raises has no common base of its own.
            raise TrapError(f"the run failed: {str(error)!r}", path=str(key)) from error
        named = dict(zip((value.name for value in expected.outputs), outputs, strict=True))
        check_outputs(key, expected, feeds, named)
        return named

    def _session(self, key: GraphKey) -> tuple[Any, Interface]:
        """What runs a graph, and the interface it was found to have."""
        if key not in self._sessions:
            expected = interface(key.role, self._model, key.shape_class, key.weights)
            try:
                # Without fallback: it would say on standard output that it tries again, in the same way.
                session = onnxruntime.InferenceSession(
                    self._graphs[key],
                    _options(self._threads),
                    providers=["CPUExecutionProvider"],
                    enable_fallback=False,
                )
            except Exception as error:
                raise LinkError(f"ONNX Runtime does not load the graph: {str(error)!r}", path=str(key)) from error
            check_interface(key, expected, _found(session.get_inputs()), _found(session.get_outputs()))
            self._sessions[key] = session, expected
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
        exact = is_exact(partial(self._run, key), self._model.hidden, self._model.expert_blocks[key.shape_class])
        if not exact:
            self._sessions.pop(key, None)
        return exact

    def _paired(self, key: GraphKey) -> bool:
        return GraphKey(key.role, key.shape_class, "uint8") in self._graphs


def _found(values: Iterable[Any]) -> Found:
    """What `check_interface` takes, from what a session says of its graph."""
    return [(value.name, _DTYPES.get(value.type, value.type), tuple(value.shape)) for value in values]


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
    options.log_severity_level = _SILENT
    return options
