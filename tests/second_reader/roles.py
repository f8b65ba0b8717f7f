"""Vectors and matrices of the graphs of each role: the table of FORMAT.md section 10.1."""

from __future__ import annotations

from typing import Any, NamedTuple

from second_reader.model_rules import out_classes, rotated_width, value_width

Vector = tuple[str, int]
"""Name and length."""
Matrix = tuple[str, int, int]
"""Name, rows and columns."""

Struct = dict[str, Any]


class Weights(NamedTuple):
    """What the graphs of a role take besides what a call computes with."""

    vectors: list[Vector]
    matrices: list[Matrix]


def weights_of(role: str, model: Struct, shape_class: int) -> Weights:
    """Those of one shape class of a role that has any: all but the table's columns of inputs and outputs."""
    hidden = model["hidden"]
    if role == "qkv":
        return _qkv(model, model["attentions"][shape_class])
    if role == "attend":
        attention = model["attentions"][shape_class]
        return Weights([("sinks", attention["heads"])] if attention["sinks"] else [], [])
    if role == "convolve":
        square = [(name, hidden, hidden) for name in ("entry", "entry_gate", "exit_gate")]
        return Weights(_norm(model, "attention_norm"), square)
    if role == "out":
        return _out(model, *out_classes(model)[shape_class])
    if role == "expert":
        block = model["expert_blocks"][shape_class]
        inner = block["intermediate"]
        biases = [("gate.bias", inner), ("up.bias", inner), ("down.bias", hidden)]
        return Weights(biases if block["bias"] else [], _feed_forward("", hidden, inner))
    if role == "dense":
        block = model["dense_blocks"][shape_class]
        return Weights(
            [("share", hidden)] if block["share"] else [], _feed_forward("dense_", hidden, block["intermediate"])
        )
    bias = [("head.bias", model["vocabulary"])] if model["head_bias"] else []
    return Weights([*_norm(model, "final_norm"), *bias], [("head", hidden, model["vocabulary"])])


def _norm(model: Struct, name: str) -> list[Vector]:
    weight = [(name, model["hidden"])]
    return weight if model["norm"] == "rms" else [*weight, (f"{name}.bias", model["hidden"])]


def _feed_forward(prefix: str, hidden: int, inner: int) -> list[Matrix]:
    return [(f"{prefix}gate", hidden, inner), (f"{prefix}up", hidden, inner), (f"{prefix}down", inner, hidden)]


def _qkv(model: Struct, attention: Struct) -> Weights:
    hidden, width, latent = model["hidden"], attention["head_dim"], attention["latent"]
    vectors = _norm(model, "attention_norm")
    if latent is not None:
        own, matrices = _latent(hidden, attention, latent)
        return Weights(vectors + own, matrices)
    queries, keys = attention["heads"] * width, attention["key_value_heads"] * width
    values = attention["key_value_heads"] * value_width(attention)
    if attention["qk_norm"] == "full":
        vectors += [("q_norm", queries), ("k_norm", keys)]
    if attention["qk_norm"] == "head":
        vectors += [("q_norm", width), ("k_norm", width)]
    if attention["bias"]:
        vectors += [("q.bias", queries), ("k.bias", keys), ("v.bias", values)]
    return Weights(vectors, [("q", hidden, queries), ("k", hidden, keys), ("v", hidden, values)])


def _latent(hidden: int, attention: Struct, latent: Struct) -> Weights:
    heads, rotated = attention["heads"], rotated_width(attention)
    queries, rank, query_rank = heads * attention["head_dim"], latent["rank"], latent["query_rank"]
    vectors: list[Vector] = []
    matrices: list[Matrix] = [("q", hidden, queries)]
    if query_rank is not None:
        vectors = [("query_latent_norm", query_rank)]
        matrices = [("query_latent", hidden, query_rank), ("q", query_rank, queries)]
    matrices += [
        ("latent", hidden, rank),
        ("k_rotated", hidden, rotated),
        ("k", rank, heads * (attention["head_dim"] - rotated)),
        ("v", rank, heads * value_width(attention)),
    ]
    return Weights([*vectors, ("latent_norm", rank)], matrices)


def _out(model: Struct, attention_class: int | None, convolution: int | None, experts: int | None) -> Weights:
    hidden = model["hidden"]
    width, vectors = hidden, _norm(model, "expert_norm")
    if experts is not None:
        block = model["expert_blocks"][experts]
        vectors += [("router.bias", block["experts"])] if block["router"]["bias"] else []
    if attention_class is not None:
        attention = model["attentions"][attention_class]
        width = attention["heads"] * value_width(attention)
        vectors += [("o.bias", hidden)] if attention["out_bias"] else []
    return Weights(vectors, [("o", width, hidden)])
