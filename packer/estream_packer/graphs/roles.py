"""What the graph of each role computes. FORMAT.md sections 8.7 and 10.

Each function reads like the formula it stands for, and serves every target: how rows are multiplied with matrices, how
they are normed and scored in numbers of a given range is an `Arithmetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from estream_packer.graphs.builder import Builder
from estream_spec.manifest import GraphRole
from estream_spec.model import Attention, ModelDescription


class Arithmetic(Protocol):
    """Adds to a graph what depends on the numbers that a target computes in. Rows are `[T, K]`, matrices `[K, N]`."""

    def product(self, rows: str, matrix: str, result: str | None = None) -> str:
        """The product of rows with one matrix, `[T, N]`, called `result`."""
        ...

    def products(self, rows: str, *matrices: str) -> Sequence[str]:
        """The products of rows with several matrices."""
        ...

    def norm(self, value: str, weight: str, result: str | None = None) -> str:
        """RMS norm over the last axis: `x / sqrt(mean(x²) + epsilon) * weight`."""
        ...

    def scores(self, queries: str, keys: str, width: int) -> str:
        """`queries keys / sqrt(width)`, of queries `[j, Q, D]` and keys `[j, D, S]`."""
        ...

    def gated(self, gate: str, up: str, matrix: str, result: str) -> str:
        """The product of `silu(gate) * up`, element by element, with one matrix, called `result`."""
        ...


def compute(graph: Builder, arithmetic: Arithmetic, role: GraphRole, model: ModelDescription, shape_class: int) -> None:
    """Adds all that a role computes.

    Args:
        graph: with the interface of the role.
        arithmetic: adds to the same graph.
        role: what it is for.
        model: the model it belongs to.
        shape_class: which of the role's shape classes.
    """
    match role:
        case "qkv":
            _qkv(graph, arithmetic, model.attentions[shape_class])
        case "attend":
            _attend(graph, arithmetic, model.attentions[shape_class])
        case "out":
            _out(graph, arithmetic)
        case "expert":
            _expert(arithmetic)
        case "head":
            arithmetic.product(arithmetic.norm("x", "final_norm"), "head", "logits")


def _qkv(graph: Builder, arithmetic: Arithmetic, attention: Attention) -> None:
    queries, keys, values = arithmetic.products(arithmetic.norm("x", "attention_norm"), "q", "k", "v")
    if attention.qk_norm == "full":
        queries = arithmetic.norm(queries, "q_norm")
        keys = arithmetic.norm(keys, "k_norm")
    if attention.clip_qkv is not None:
        bounds = graph.number(-attention.clip_qkv), graph.number(attention.clip_qkv)
        queries, keys, values = (graph.add("Clip", value, *bounds) for value in (queries, keys, values))
    _rotated(graph, _heads_first(graph, queries, attention.heads, attention), "queries")
    _rotated(graph, _heads_first(graph, keys, attention.key_value_heads, attention), "keys")
    _heads_first(graph, values, attention.key_value_heads, attention, "values")


def _attend(graph: Builder, arithmetic: Arithmetic, attention: Attention) -> None:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    # Query heads that share a key head become rows of one product, so that keys are never copied per query head.
    rows = graph.reshape("queries", shared, -1, width)
    scores = arithmetic.scores(rows, graph.add("Transpose", "keys", perm=[0, 2, 1]), width)
    shares = graph.add("Softmax", graph.add("Add", graph.reshape(scores, heads, -1, 0), "mask"), axis=-1)
    mixed = graph.add("MatMul", graph.reshape(shares, shared, -1, 0), "values")
    tokens_first = graph.add("Transpose", graph.reshape(mixed, heads, -1, width), perm=[1, 0, 2])
    graph.reshape(tokens_first, -1, heads * width, result="attended")


def _out(graph: Builder, arithmetic: Arithmetic) -> None:
    x = graph.add("Add", "residual", arithmetic.product("attended", "o"), result="x")
    graph.add("MatMul", arithmetic.norm(x, "expert_norm", "normed"), "router", result="scores")


def _expert(arithmetic: Arithmetic) -> None:
    gate, up = arithmetic.products("normed", "gate", "up")
    arithmetic.gated(gate, up, "down", "y")


def _heads_first(graph: Builder, rows: str, heads: int, attention: Attention, result: str | None = None) -> str:
    """Rows `[T, heads * D]` as `[heads, T, D]`."""
    split = graph.reshape(rows, -1, heads, attention.head_dim)
    return graph.add("Transpose", split, perm=[1, 0, 2], result=result)


def _rotated(graph: Builder, value: str, result: str) -> str:
    """Rotary encoding of `[heads, T, D]`: `x * cos + (-x2, x1) * sin`, x1 and x2 being the halves of x."""
    low, high = graph.split_half(value)
    turned = graph.add("Concat", graph.add("Neg", high), low, axis=-1)
    return graph.add("Add", graph.add("Mul", value, "cos"), graph.add("Mul", turned, "sin"), result=result)
