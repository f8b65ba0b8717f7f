"""Writes one ONNX graph, node by node, and turns it into bytes that are the same every time.

Standard operators only, in an operator set old enough for any runtime of the last years. Values in between are named
by what made them and a running number, so equal calls give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from estream_spec.graph_interface import DType, Interface, Value

OPSET: Final = 17
IR_VERSION: Final = 8
_END: Final = 2**31 - 1
"""Beyond every axis: where a span has no end."""
PRODUCER: Final = "estream-pack"
"""Named without a version, so that a release that changes no graph changes no byte."""

_ONNX_TYPES: Final[dict[DType, int]] = {"f32": TensorProto.FLOAT, "i8": TensorProto.INT8, "u8": TensorProto.UINT8}


class Builder:
    """A graph being written.

    Attributes:
        name: what the graph is called.
        interface: its inputs and outputs; each output must be the result of some node.
    """

    def __init__(self, name: str, interface: Interface):
        self.name, self.interface = name, interface
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}

    def add(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output.

        Args:
            operator: a standard ONNX operator.
            inputs: names of values; empty for an optional input left out.
            result: name of the result, when it is an output of the graph.
            attributes: the operator's attributes.

        Returns:
            The name of the result.
        """
        result = result or f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [result], **attributes))
        return result

    def split_half(self, value: str, axis: int = -1) -> tuple[str, str]:
        """Both halves of a value along an axis, the last one unless said otherwise."""
        number = len(self._nodes)
        halves = f"Split_{number}_low", f"Split_{number}_high"
        self._nodes.append(helper.make_node("Split", [value], halves, axis=axis))
        return halves

    def sizes(self, value: str) -> tuple[int, ...]:
        """Dimensions of an input; all are fixed."""
        [shape] = [each.shape for each in self.interface.inputs if each.name == value]
        return tuple(int(size) for size in shape)

    def number(self, value: float) -> str:
        """An f32 constant without dimensions."""
        return self._constant(f"f32_{value!r}", np.array(value, np.float32))

    def byte(self, value: int) -> str:
        """A uint8 constant without dimensions."""
        return self._constant(f"u8_{value}", np.array(value, np.uint8))

    def signed_byte(self, value: int) -> str:
        """An int8 constant without dimensions."""
        return self._constant(f"i8_{value}", np.array(value, np.int8))

    def columns(self, rows: str, which: Sequence[int]) -> str:
        """Some columns of rows `[T, K]`, in this order."""
        name = f"columns_{len(self._constants)}"
        return self.add("Gather", rows, self._constant(name, np.array(which, np.int64)), axis=1)

    def integers(self, *values: int) -> str:
        """An int64 constant `[n]`."""
        return self._constant("i64_" + "_".join(map(str, values)), np.array(values, np.int64))

    def span(self, start: int, end: int | None, axis: int) -> tuple[str, str, str]:
        """What `Slice` takes besides a value for what lies from `start` up to `end` along an axis; None is the end."""
        last = _END if end is None else end
        return self.integers(start), self.integers(last), self.integers(axis)

    def reshape(self, value: str, *shape: int, result: str | None = None) -> str:
        """Reshapes; 0 keeps the dimension that stands at its place, -1 takes what is left."""
        return self.add("Reshape", value, self.integers(*shape), result=result)

    def finish(self, rename: Callable[[str], str] = str) -> bytes:
        """The graph as bytes of a checked ONNX model.

        Args:
            rename: gives every value the name that it has in the model.
        """
        for node in self._nodes:
            node.input[:] = [rename(each) if each else each for each in node.input]
            node.output[:] = [rename(each) for each in node.output]
        for name, constant in self._constants.items():
            constant.name = rename(name)
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [_value_info(value, rename) for value in self.interface.inputs],
            [_value_info(value, rename) for value in self.interface.outputs],
            list(self._constants.values()),
        )
        model = helper.make_model(
            graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)], producer_name=PRODUCER
        )
        onnx.checker.check_model(model, full_check=True)
        data: bytes = model.SerializeToString(deterministic=True)
        return data

    def _constant(self, name: str, value: npt.NDArray[Any]) -> str:
        self._constants.setdefault(name, numpy_helper.from_array(value, name))
        return name


def _value_info(value: Value, rename: Callable[[str], str]) -> Any:
    return helper.make_tensor_value_info(rename(value.name), _ONNX_TYPES[value.dtype], value.shape)
