"""The reference backend: ONNX's own evaluator in numpy. Slow; what it computes is what a graph means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np

from estream_runtime.backends.protocol import Array, GraphKey
from estream_spec.errors import LinkError, TrapError
from estream_spec.manifest import GraphRole, GraphWeights

# numpy sums products exactly whatever the sign of its operands, so the kind that needs no shifting comes first.
_PREFERENCE: Final[tuple[GraphWeights, ...]] = ("f32", "int8", "uint8")


class ReferenceBackend:
    """Runs graphs with `onnx.reference`.

    Args:
        graphs: ONNX models by name.
        threads: ignored, numpy decides.
    """

    name: ClassVar[str] = "reference"

    def __init__(self, graphs: Mapping[GraphKey, bytes], threads: int):
        self._graphs = dict(graphs)
        self._evaluators: dict[GraphKey, Any] = {}

    def weights_of(self, role: GraphRole, shape_class: int) -> GraphWeights:
        """The first of f32, int8 and uint8 that the package has."""
        for weights in _PREFERENCE:
            if GraphKey(role, shape_class, weights) in self._graphs:
                return weights
        raise LinkError(f"no graph for role {role!r}, shape class {shape_class}", path="graphs")

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a graph, see `Backend.run`."""
        key = GraphKey(role, shape_class, self.weights_of(role, shape_class))
        evaluator = self._evaluator(key)
        try:
            # Overflow to infinity and division by it are part of the operators' meaning.
            with np.errstate(all="ignore"):
                outputs = evaluator.run(None, dict(feeds))
        except Exception as error:
            raise TrapError(f"the run failed: {str(error)!r}", path=str(key)) from error
        contiguous = map(np.ascontiguousarray, outputs)
        return dict(zip(evaluator.output_names, contiguous, strict=True))

    def close(self) -> None:
        """Forgets all graphs."""
        self._graphs.clear()
        self._evaluators.clear()

    def _evaluator(self, key: GraphKey) -> Any:
        if key not in self._evaluators:
            # Imported here, since only who runs this backend needs onnx.
            import onnx
            from onnx.reference import ReferenceEvaluator

            try:
                onnx.checker.check_model(self._graphs[key])
                self._evaluators[key] = ReferenceEvaluator(self._graphs[key])
            except Exception as error:
                raise LinkError(f"onnx does not load the graph: {str(error)!r}", path=str(key)) from error
        return self._evaluators[key]
