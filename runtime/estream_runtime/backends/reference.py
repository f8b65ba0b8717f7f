"""The reference backend: ONNX's own evaluator in numpy. Slow; what it computes is what a graph means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from estream_runtime.backends.contract import Found, check_interface, check_outputs
from estream_runtime.backends.graphs import GraphBackend
from estream_runtime.backends.protocol import Array, GraphKey
from estream_spec.errors import LinkError, TrapError
from estream_spec.graph_interface import Interface, interface
from estream_spec.manifest import GraphRole, GraphWeights
from estream_spec.model import ModelDescription

# numpy sums products exactly whatever the sign of its operands, so the kind that needs no shifting comes first.
_PREFERENCE: Final[tuple[GraphWeights, ...]] = ("f32", "int8", "uint8")


class ReferenceBackend(GraphBackend):
    """Runs graphs with `onnx.reference`.

    Args:
        model: what the graphs must fit.
        graphs: ONNX models by name.
        threads: ignored, numpy decides.
    """

    name: ClassVar[str] = "reference"

    def __init__(self, model: ModelDescription, graphs: Mapping[GraphKey, bytes], threads: int):
        self._model, self._graphs = model, dict(graphs)
        self._evaluators: dict[GraphKey, tuple[Any, Interface]] = {}

    def weights_of(self, role: GraphRole, shape_class: int) -> GraphWeights:
        """The first of f32, int8 and uint8 that the package has."""
        for weights in _PREFERENCE:
            if GraphKey(role, shape_class, weights) in self._graphs:
                return weights
        raise LinkError(f"no graph for role {role!r}, shape class {shape_class}", path="graphs")

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs a graph, see `Backend.run`."""
        key = GraphKey(role, shape_class, self.weights_of(role, shape_class))
        evaluator, expected = self._evaluator(key)
        try:
            # Overflow to infinity and division by it are part of the operators' meaning.
            with np.errstate(all="ignore"):
                outputs = evaluator.run(None, dict(feeds))
        except Exception as error:
            raise TrapError(f"the run failed: {str(error)!r}", path=str(key)) from error
        # Asked for order, an array of no dimensions keeps its shape.
        contiguous = (np.asarray(output, order="C") for output in outputs)
        named = dict(zip(evaluator.output_names, contiguous, strict=True))
        check_outputs(key, expected, feeds, named)
        return named

    def close(self) -> None:
        """Forgets all graphs."""
        self._graphs.clear()
        self._evaluators.clear()

    def _evaluator(self, key: GraphKey) -> tuple[Any, Interface]:
        """What runs a graph, and the interface it was found to have."""
        if key not in self._evaluators:
            # Imported here, since only who runs this backend needs onnx.
            import onnx
            from onnx.reference import ReferenceEvaluator

            expected = interface(key.role, self._model, key.shape_class, key.weights)
            try:
                onnx.checker.check_model(self._graphs[key])
                model = onnx.load_model_from_string(self._graphs[key])
                evaluator = ReferenceEvaluator(model)
            except Exception as error:
                raise LinkError(f"onnx does not load the graph: {str(error)!r}", path=str(key)) from error
            check_interface(key, expected, _found(model.graph.input), _found(model.graph.output))
            self._evaluators[key] = evaluator, expected
        return self._evaluators[key]


def _found(values: Iterable[Any]) -> Found:
    """What `check_interface` takes, from values of an ONNX graph."""
    return [(value.name, _dtype(value.type.tensor_type), _shape(value.type.tensor_type)) for value in values]


def _dtype(tensor: Any) -> str:
    from onnx import TensorProto

    known = {TensorProto.FLOAT: "f32", TensorProto.INT8: "i8", TensorProto.UINT8: "u8"}
    return known.get(tensor.elem_type, f"type {tensor.elem_type}")


def _shape(tensor: Any) -> tuple[int | str | None, ...]:
    return tuple(size.dim_value if size.HasField("dim_value") else size.dim_param or None for size in tensor.shape.dim)
