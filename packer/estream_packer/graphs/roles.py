"""What the graph of each role computes. FORMAT.md section 10 and annex A.

Each function reads like the formula it stands for. How rows are multiplied with matrices is all that differs between
kinds of activations and weights, and lives in `_Products`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto, numpy_helper

from estream_packer.graphs.builder import Builder
from estream_spec.errors import InvalidError
from estream_spec.graph_interface import COMBINATIONS, interface
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import Attention, ModelDescription
from estream_spec.weights import ACTIVATION_ZERO

LARGEST: Final = 127
"""What the largest activation of a row is quantised to."""


def build_graph(
    role: GraphRole, model: ModelDescription, shape_class: int, weights: GraphWeights, activations: Activations
) -> bytes:
    """Builds one graph.

    Args:
        role: what the graph is for.
        model: the model it belongs to.
        shape_class: which of the role's shape classes it serves, see `estream_spec.graph_interface.interface`.
        weights: what its matrix inputs hold.
        activations: how rows are multiplied with matrices.

    Returns:
        An ONNX model; equal arguments give equal bytes.

    Raises:
        InvalidError: there is no such shape class, or the weights do not go with the role or the activations.
    """
    if (activations, weights) not in COMBINATIONS:
        raise InvalidError(f"activations {activations!r} do not go with weights {weights!r}", path=f"graph {role}")
    graph = Builder(f"{role}.{shape_class}.{weights}.{activations}", interface(role, model, shape_class, weights))
    products = _Products(graph, weights, activations)
    match role:
        case "qkv":
            _qkv(graph, products, model, model.attentions[shape_class])
        case "attend":
            _attend(graph, model.attentions[shape_class])
        case "out":
            _out(graph, products, model)
        case "expert":
            _expert(graph, products)
        case "head":
            _head(graph, products, model)
    return graph.finish()


class _Products:
    """Products of rows with matrix inputs, in one kind of activations and weights.

    Rows are f32 `[T, K]`, matrices `[K, N]`, products f32 `[T, N]`.
    """

    def __init__(self, graph: Builder, weights: GraphWeights, activations: Activations):
        self._graph, self._weights, self._activations = graph, weights, activations

    def one(self, rows: str, matrix: str, result: str | None = None) -> str:
        """The product with one matrix, called `result`."""
        if self._activations == "f32":
            return self._float(rows, matrix, result)
        return self._integer(*self._quantise(rows), matrix, result)

    def several(self, rows: str, *matrices: str) -> list[str]:
        """The products with several matrices; rows are quantised once for all of them."""
        if self._activations == "f32":
            return [self._float(rows, matrix) for matrix in matrices]
        quantised, row_scale = self._quantise(rows)
        return [self._integer(quantised, row_scale, matrix) for matrix in matrices]

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


def _qkv(graph: Builder, products: _Products, model: ModelDescription, attention: Attention) -> None:
    queries, keys, values = products.several(_normed(graph, model, "x", "attention_norm"), "q", "k", "v")
    if attention.qk_norm == "full":
        queries = _normed(graph, model, queries, "q_norm")
        keys = _normed(graph, model, keys, "k_norm")
    if attention.clip_qkv is not None:
        bounds = graph.number(-attention.clip_qkv), graph.number(attention.clip_qkv)
        queries, keys, values = (graph.add("Clip", value, *bounds) for value in (queries, keys, values))
    _rotated(graph, _heads_first(graph, queries, attention.heads, attention), "queries")
    _rotated(graph, _heads_first(graph, keys, attention.key_value_heads, attention), "keys")
    _heads_first(graph, values, attention.key_value_heads, attention, "values")


def _attend(graph: Builder, attention: Attention) -> None:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    # Query heads that share a key head become rows of one product, so that keys are never copied per query head.
    rows = graph.reshape("queries", shared, -1, width)
    scores = graph.reshape(graph.add("MatMul", rows, graph.add("Transpose", "keys", perm=[0, 2, 1])), heads, -1, 0)
    scaled = graph.add("Mul", scores, graph.number(width**-0.5))
    shares = graph.add("Softmax", graph.add("Add", scaled, "mask"), axis=-1)
    mixed = graph.add("MatMul", graph.reshape(shares, shared, -1, 0), "values")
    tokens_first = graph.add("Transpose", graph.reshape(mixed, heads, -1, width), perm=[1, 0, 2])
    graph.reshape(tokens_first, -1, heads * width, result="attended")


def _out(graph: Builder, products: _Products, model: ModelDescription) -> None:
    x = graph.add("Add", "residual", products.one("attended", "o"), result="x")
    graph.add("MatMul", _normed(graph, model, x, "expert_norm", "normed"), "router", result="scores")


def _expert(graph: Builder, products: _Products) -> None:
    gate, up = products.several("normed", "gate", "up")
    silu = graph.add("Mul", gate, graph.add("Sigmoid", gate))
    products.one(graph.add("Mul", silu, up), "down", "y")


def _head(graph: Builder, products: _Products, model: ModelDescription) -> None:
    products.one(_normed(graph, model, "x", "final_norm"), "head", "logits")


def _normed(graph: Builder, model: ModelDescription, value: str, weight: str, result: str | None = None) -> str:
    """RMS norm over the last axis: `x * (1 / sqrt(mean(x * x) + epsilon)) * weight`."""
    mean = graph.add("ReduceMean", graph.add("Mul", value, value), axes=[-1], keepdims=1)
    root = graph.add("Sqrt", graph.add("Add", mean, graph.number(model.norm_epsilon)))
    unit = graph.add("Mul", value, graph.add("Div", graph.number(1), root))
    return graph.add("Mul", unit, weight, result=result)


def _heads_first(graph: Builder, rows: str, heads: int, attention: Attention, result: str | None = None) -> str:
    """Rows `[T, heads * D]` as `[heads, T, D]`."""
    split = graph.reshape(rows, -1, heads, attention.head_dim)
    return graph.add("Transpose", split, perm=[1, 0, 2], result=result)


def _rotated(graph: Builder, value: str, result: str) -> str:
    """Rotary encoding of `[heads, T, D]`: `x * cos + (-x2, x1) * sin`, x1 and x2 being the halves of x."""
    low, high = graph.split_half(value)
    turned = graph.add("Concat", graph.add("Neg", high), low, axis=-1)
    return graph.add("Add", graph.add("Mul", value, "cos"), graph.add("Mul", turned, "sin"), result=result)
