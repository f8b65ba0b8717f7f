"""What the graph of each role computes. FORMAT.md sections 8.10 and 10.

Each function reads like the formula it stands for, and serves every target: how rows are multiplied with matrices, how
they are normed and scored in numbers of a given range is an `Arithmetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from estream_packer.graphs.builder import Builder
from estream_spec.manifest import GraphRole
from estream_spec.model import Attention, DenseBlock, ExpertBlock, Latent, ModelDescription, OutputClass


class Arithmetic(Protocol):
    """Adds to a graph what depends on the numbers that a target computes in. Rows are `[T, K]`, matrices `[K, N]`."""

    def product(self, rows: str, matrix: str, result: str | None = None) -> str:
        """The product of rows with one matrix, `[T, N]`, called `result`."""
        ...

    def products(self, rows: str, *matrices: str) -> Sequence[str]:
        """The products of rows with several matrices."""
        ...

    def norm(self, value: str, weight: str, epsilon: float, result: str | None = None) -> str:
        """RMS norm over the last axis: `x / sqrt(mean(x²) + epsilon) * weight`."""
        ...

    def scores(self, queries: str, keys: str, scale: float) -> str:
        """`queries keys scale`, of queries `[j, Q, D]` and keys `[j, D, S]`."""
        ...

    def gated(self, gate: str, up: str, matrix: str, result: str | None = None) -> str:
        """The product of `silu(gate) * up`, element by element, with one matrix, called `result`."""
        ...

    def clamped(self, gate: str, up: str, limit: float, matrix: str, result: str | None = None) -> str:
        """The product of `clamped-swiglu` of gate and up with one matrix, called `result`."""
        ...

    def sigmoid(self, value: str) -> str:
        """`1 / (1 + exp(-x))` of each number."""
        ...

    def exponential(self, value: str) -> str:
        """`exp(x)` of each number, none of which is above 0."""
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
            _qkv(graph, arithmetic, model, model.attentions[shape_class])
        case "attend":
            _attend(graph, arithmetic, model.attentions[shape_class])
        case "convolve":
            _convolve(graph, arithmetic, model)
        case "out":
            _out(graph, arithmetic, model, model.output_classes[shape_class])
        case "expert":
            _expert(graph, arithmetic, model.expert_blocks[shape_class])
        case "dense":
            _dense(graph, arithmetic, model.dense_blocks[shape_class])
        case "head":
            _head(graph, arithmetic, model)


def _qkv(graph: Builder, arithmetic: Arithmetic, model: ModelDescription, attention: Attention) -> None:
    normed = _normed(graph, arithmetic, model, "x", "attention_norm")
    if attention.latent is not None:
        _latent(graph, arithmetic, attention, attention.latent, normed)
        return
    projected = arithmetic.products(normed, "q", "k", "v")
    if attention.bias:
        projected = [graph.add("Add", *each) for each in zip(projected, ("q.bias", "k.bias", "v.bias"), strict=True)]
    queries, keys, values = projected
    if attention.qk_norm == "full":
        queries = arithmetic.norm(queries, "q_norm", model.norm_epsilon)
        keys = arithmetic.norm(keys, "k_norm", model.norm_epsilon)
    if attention.clip_qkv is not None:
        bounds = graph.number(-attention.clip_qkv), graph.number(attention.clip_qkv)
        queries, keys, values = (graph.add("Clip", value, *bounds) for value in (queries, keys, values))
    for rows, heads, norm, result in (
        (queries, attention.heads, "q_norm", "queries"),
        (keys, attention.key_value_heads, "k_norm", "keys"),
    ):
        split = _heads_first(graph, rows, heads)
        if attention.qk_norm == "head":
            split = arithmetic.norm(split, norm, model.norm_epsilon)
        _rotated(graph, split, attention, result)
    _heads_first(graph, values, attention.key_value_heads, "values")


def _latent(graph: Builder, arithmetic: Arithmetic, attention: Attention, latent: Latent, normed: str) -> None:
    """Queries, keys and values by way of narrow rows."""
    heads = attention.heads
    if latent.query_rank is None:
        queries, narrow, shared = arithmetic.products(normed, "q", "latent", "k_rotated")
    else:
        narrow_query, narrow, shared = arithmetic.products(normed, "query_latent", "latent", "k_rotated")
        narrow_query = arithmetic.norm(narrow_query, "query_latent_norm", latent.norm_epsilon)
        queries = arithmetic.product(narrow_query, "q")
    _rotated(graph, _heads_first(graph, queries, heads), attention, "queries")
    keys, values = arithmetic.products(arithmetic.norm(narrow, "latent_norm", latent.norm_epsilon), "k", "v")
    turned = _turned(graph, _heads_first(graph, shared, 1))
    repeated = graph.add("Expand", turned, graph.integers(heads, 1, 1))
    graph.add("Concat", repeated, _heads_first(graph, keys, heads), axis=-1, result="keys")
    _heads_first(graph, values, heads, "values")


def _attend(graph: Builder, arithmetic: Arithmetic, attention: Attention) -> None:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    # Query heads that share a key head become rows of one product, so that keys are never copied per query head.
    rows = graph.reshape("queries", shared, -1, width)
    scores = arithmetic.scores(rows, graph.add("Transpose", "keys", perm=[0, 2, 1]), attention.score_scale)
    masked = graph.add("Add", graph.reshape(scores, heads, -1, 0), "mask")
    if attention.sinks:
        shares = _shares_with_sinks(graph, arithmetic, masked, heads)
    else:
        shares = graph.add("Softmax", masked, axis=-1)
    mixed = graph.add("MatMul", graph.reshape(shares, shared, -1, 0), "values")
    tokens_first = graph.add("Transpose", graph.reshape(mixed, heads, -1, attention.value_width), perm=[1, 0, 2])
    graph.reshape(tokens_first, -1, heads * attention.value_width, result="attended")


def _shares_with_sinks(graph: Builder, arithmetic: Arithmetic, scores: str, heads: int) -> str:
    """Softmax of `[h, T, S]` in which each head's sink takes part: `exp(x - m) / (sum(exp(x - m)) + exp(sink - m))`."""
    sinks = graph.reshape("sinks", heads, 1, 1)
    largest = graph.add("Max", graph.add("ReduceMax", scores, axes=[-1], keepdims=1), sinks)
    exponentials = arithmetic.exponential(graph.add("Sub", scores, largest))
    total = graph.add("ReduceSum", exponentials, graph.integers(-1), keepdims=1)
    with_sink = graph.add("Add", total, arithmetic.exponential(graph.add("Sub", sinks, largest)))
    return graph.add("Div", exponentials, with_sink)


def _convolve(graph: Builder, arithmetic: Arithmetic, model: ModelDescription) -> None:
    """What enters a convolution and what its result is multiplied by; the convolution itself is the caller's."""
    normed = _normed(graph, arithmetic, model, "x", "attention_norm")
    entry, entry_gate, exit_gate = arithmetic.products(normed, "entry", "entry_gate", "exit_gate")
    graph.add("Mul", entry, entry_gate, result="entered")
    graph.add("Identity", exit_gate, result="exit")


def _out(graph: Builder, arithmetic: Arithmetic, model: ModelDescription, both: OutputClass) -> None:
    projected = arithmetic.product("attended", "o")
    if both.attention is not None and model.attentions[both.attention].out_bias:
        projected = graph.add("Add", projected, "o.bias")
    x = graph.add("Add", "residual", projected, result="x")
    normed = _normed(graph, arithmetic, model, x, "expert_norm", "normed")
    if both.experts is None:
        return
    if model.expert_blocks[both.experts].router.bias:
        graph.add("Add", graph.add("MatMul", normed, "router"), "router.bias", result="scores")
    else:
        graph.add("MatMul", normed, "router", result="scores")


def _expert(graph: Builder, arithmetic: Arithmetic, block: ExpertBlock) -> None:
    gate, up = arithmetic.products("normed", "gate", "up")
    result = None if block.bias else "y"
    if block.bias:
        gate, up = graph.add("Add", gate, "gate.bias"), graph.add("Add", up, "up.bias")
    if block.limit is None:
        y = arithmetic.gated(gate, up, "down", result)
    else:
        y = arithmetic.clamped(gate, up, block.limit, "down", result)
    if block.bias:
        graph.add("Add", y, "down.bias", result="y")


def _dense(graph: Builder, arithmetic: Arithmetic, block: DenseBlock) -> None:
    gate, up = arithmetic.products("normed", "dense_gate", "dense_up")
    if not block.share:
        arithmetic.gated(gate, up, "dense_down", "y")
        return
    share = arithmetic.sigmoid(graph.add("MatMul", "normed", graph.reshape("share", -1, 1)))
    graph.add("Mul", arithmetic.gated(gate, up, "dense_down"), share, result="y")


def _head(graph: Builder, arithmetic: Arithmetic, model: ModelDescription) -> None:
    normed = _normed(graph, arithmetic, model, "x", "final_norm")
    if model.head_bias:
        graph.add("Add", arithmetic.product(normed, "head"), "head.bias", result="logits")
    else:
        arithmetic.product(normed, "head", "logits")


def _normed(
    graph: Builder, arithmetic: Arithmetic, model: ModelDescription, value: str, weight: str, result: str | None = None
) -> str:
    """The model's norm over the residual stream. A layer norm is the RMS norm of `x - mean(x)`, and a bias."""
    if model.norm == "rms":
        return arithmetic.norm(value, weight, model.norm_epsilon, result)
    centred = graph.add("Sub", value, graph.add("ReduceMean", value, axes=[-1], keepdims=1))
    return graph.add("Add", arithmetic.norm(centred, weight, model.norm_epsilon), f"{weight}.bias", result=result)


def _heads_first(graph: Builder, rows: str, heads: int, result: str | None = None) -> str:
    """Rows `[T, heads * D]` as `[heads, T, D]`."""
    split = graph.reshape(rows, 0, heads, -1)
    return graph.add("Transpose", split, perm=[1, 0, 2], result=result)


def _rotated(graph: Builder, value: str, attention: Attention, result: str) -> str:
    """Rotary encoding of the beginning of every head of `[heads, T, D]`; the rest stays as it is."""
    if attention.rotated == attention.head_dim:
        return _turned(graph, value, result)
    beginning = graph.add("Slice", value, *graph.span(0, attention.rotated, axis=2))
    rest = graph.add("Slice", value, *graph.span(attention.rotated, None, axis=2))
    return graph.add("Concat", _turned(graph, beginning), rest, axis=-1, result=result)


def _turned(graph: Builder, value: str, result: str | None = None) -> str:
    """`x * cos + (-x2, x1) * sin` of `[heads, T, D]`, x1 and x2 being the halves of x."""
    low, high = graph.split_half(value)
    turned = graph.add("Concat", graph.add("Neg", high), low, axis=-1)
    return graph.add("Add", graph.add("Mul", value, "cos"), graph.add("Mul", turned, "sin"), result=result)
