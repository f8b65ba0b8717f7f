"""Arithmetic of portable graphs: f32, or integers where activations are quantised. FORMAT.md section 10.2, annex A."""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto, numpy_helper

from estream_packer.graphs.builder import Builder
from estream_spec.manifest import Activations, GraphWeights
from estream_spec.model import SWIGLU_SLOPE
from estream_spec.weights import ACTIVATION_ZERO

LARGEST: Final = 127
"""What the largest activation of a row is quantised to."""


class PortableArithmetic:
    """Products in one kind of activations and weights; all else in f32.

    Args:
        graph: where they are added.
        weights: what matrices hold.
        activations: what enters products.
    """

    def __init__(self, graph: Builder, weights: GraphWeights, activations: Activations):
        self._graph, self._weights, self._activations = graph, weights, activations

    def product(self, rows: str, matrix: str, result: str | None = None) -> str:
        """The product of rows with one matrix."""
        if self._activations == "f32":
            return self._float(rows, matrix, result)
        return self._integer(*self._quantise(rows), matrix, result)

    def products(self, rows: str, *matrices: str) -> list[str]:
        """The products of rows with several matrices; rows are quantised once for all of them."""
        if self._activations == "f32":
            return [self._float(rows, matrix) for matrix in matrices]
        quantised, row_scale = self._quantise(rows)
        return [self._integer(quantised, row_scale, matrix) for matrix in matrices]

    def norm(self, value: str, weight: str, epsilon: float, result: str | None = None) -> str:
        """RMS norm over the last axis, as `x * (1 / sqrt(mean(x * x) + epsilon)) * weight`."""
        graph = self._graph
        mean = graph.add("ReduceMean", graph.add("Mul", value, value), axes=[-1], keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", mean, graph.number(epsilon)))
        unit = graph.add("Mul", value, graph.add("Div", graph.number(1), root))
        return graph.add("Mul", unit, weight, result=result)

    def scores(self, queries: str, keys: str, scale: float) -> str:
        """`queries keys scale`."""
        graph = self._graph
        return graph.add("Mul", graph.add("MatMul", queries, keys), graph.number(scale))

    def gated(self, gate: str, up: str, matrix: str, result: str | None = None) -> str:
        """The product of `silu(gate) * up` with one matrix."""
        graph = self._graph
        silu = graph.add("Mul", gate, graph.add("Sigmoid", gate))
        return self.product(graph.add("Mul", silu, up), matrix, result)

    def clamped(self, gate: str, up: str, limit: float, matrix: str, result: str | None = None) -> str:
        """The product of `clamped-swiglu` of gate and up with one matrix."""
        graph = self._graph
        gate = graph.add("Min", gate, graph.number(limit))
        up = graph.add("Clip", up, graph.number(-limit), graph.number(limit))
        share = graph.add("Sigmoid", graph.add("Mul", gate, graph.number(SWIGLU_SLOPE)))
        inner = graph.add("Mul", graph.add("Mul", gate, share), graph.add("Add", up, graph.number(1)))
        return self.product(inner, matrix, result)

    def sigmoid(self, value: str) -> str:
        """`1 / (1 + exp(-x))`."""
        return self._graph.add("Sigmoid", value)

    def exponential(self, value: str) -> str:
        """`exp(x)`."""
        return self._graph.add("Exp", value)

    def _float(self, rows: str, matrix: str, result: str | None = None) -> str:
        graph = self._graph
        if self._weights == "f32":
            return graph.add("MatMul", rows, matrix, result=result)
        widened = graph.add("Cast", matrix, to=TensorProto.FLOAT)
        return graph.add("Mul", graph.add("MatMul", rows, widened), f"{matrix}.scale", result=result)

    def _quantise(self, rows: str) -> tuple[str, str]:
        """Rows as uint8 `[T, K]` around 128, and the scale of each, f32 `[T, 1]`."""
        graph = self._graph
        largest = graph.add("ReduceMax", graph.add("Abs", rows), axes=[-1], keepdims=0)
        scale = graph.add("Div", largest, graph.number(LARGEST))
        # A row of zeros, or of numbers so small that nothing is left of their scale, is divided by one.
        scale = graph.add("Where", graph.add("Equal", scale, graph.number(0)), graph.number(1), scale)
        zero = numpy_helper.from_array(np.array([ACTIVATION_ZERO], np.uint8))
        zeros = graph.add("ConstantOfShape", graph.add("Shape", scale), value=zero)
        return graph.add("QuantizeLinear", rows, scale, zeros, axis=0), graph.reshape(scale, -1, 1)

    def _integer(self, quantised: str, row_scale: str, matrix: str, result: str | None = None) -> str:
        graph = self._graph
        zero = graph.byte(ACTIVATION_ZERO)
        # The zero point of int8 weights is 0, which is what leaving it out means.
        zeros = [zero] if self._weights == "int8" else [zero, zero]
        sums = graph.add("Cast", graph.add("MatMulInteger", quantised, matrix, *zeros), to=TensorProto.FLOAT)
        return graph.add("Mul", graph.add("Mul", sums, row_scale), f"{matrix}.scale", result=result)
