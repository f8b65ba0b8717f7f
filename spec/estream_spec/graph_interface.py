"""What a graph takes and gives, by role. FORMAT.md section 10.

A graph serves every layer, or every expert, of its shape class: weights are inputs like any other. This page says in
which order, under which name, in which type and shape they come, and no more; what a graph computes is written in
section 10 and built by the packer.

Dimensions: `T` is the number of token rows of a call and `S` the number of keys; they are symbolic, all others fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from estream_spec.errors import InvalidError
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import Attention, ModelDescription

DType = Literal["f32", "i8", "u8"]
"""Element type of an input or output."""

ROLES: Final[tuple[GraphRole, ...]] = ("qkv", "attend", "out", "expert", "head")
MATRICES: Final[dict[GraphRole, tuple[str, ...]]] = {
    "qkv": ("q", "k", "v"),
    "attend": (),
    "out": ("o",),
    "expert": ("gate", "up", "down"),
    "head": ("head",),
}
"""The inputs of each role that a graph's weight kind applies to; every other input is f32."""
VARIANTS: Final[tuple[frozenset[tuple[Activations, GraphWeights]], ...]] = (
    frozenset({("f32", "f32")}),
    frozenset({("f32", "int8")}),
    frozenset({("dynamic-int8", "int8"), ("dynamic-int8", "uint8")}),
)
"""What graphs a role and shape class may have: pairs of activations and weights.

Where activations are quantised both variants are there, since which of them a processor computes exactly differs.
The role `attend` has no matrix and is (`f32`, `f32`) always.
"""
COMBINATIONS: Final = frozenset().union(*VARIANTS)
"""Which activations go with which weights."""

Shape = tuple[int | str, ...]
_MATRIX_DTYPE: Final[dict[GraphWeights, DType]] = {"f32": "f32", "int8": "i8", "uint8": "u8"}


@dataclass(frozen=True, slots=True)
class Value:
    """One input or output of a graph.

    Attributes:
        name: its name in the graph.
        dtype: its element type.
        shape: fixed dimensions as int, symbolic ones as `T` or `S`.
    """

    name: str
    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class Interface:
    """Inputs and outputs of a graph, in order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def output_classes(model: ModelDescription) -> tuple[tuple[int, int], ...]:
    """Shape classes of the role `out`, which sees both halves of a layer.

    Returns:
        The pairs (attention class, expert class) that layers use, in the order of the first layer of each.
    """
    return tuple(dict.fromkeys((layer.attention, layer.experts) for layer in model.layers))


def class_count(role: GraphRole, model: ModelDescription) -> int:
    """How many shape classes a role has: a package carries a graph for each."""
    match role:
        case "qkv" | "attend":
            return len(model.attentions)
        case "out":
            return len(output_classes(model))
        case "expert":
            return len(model.expert_blocks)
        case "head":
            return 1


def shape_class_of(role: GraphRole, model: ModelDescription, layer: int) -> int:
    """The shape class of the graph that serves a layer in a role. The head serves no layer; its class is 0."""
    described = model.layers[layer]
    match role:
        case "qkv" | "attend":
            return described.attention
        case "out":
            return output_classes(model).index((described.attention, described.experts))
        case "expert":
            return described.experts
        case "head":
            return 0


def interface(role: GraphRole, model: ModelDescription, shape_class: int, weights: GraphWeights) -> Interface:
    """Inputs and outputs of one graph.

    Args:
        role: what the graph is for.
        model: the model it belongs to.
        shape_class: index into the role's shape classes: attention classes for `qkv` and `attend`, expert classes for
            `expert`, `output_classes` for `out`, 0 for `head`.
        weights: what its matrix inputs hold.

    Raises:
        InvalidError: the role has no such shape class, or `attend` is asked for weights it does not have.
    """
    if not 0 <= shape_class < class_count(role, model):
        found = f"shape class {shape_class} of role {role!r}, the model has {class_count(role, model)}"
        raise InvalidError(found, path="graphs")
    match role:
        case "qkv":
            return _qkv(model, model.attentions[shape_class], weights)
        case "attend":
            if weights != "f32":
                raise InvalidError(f"weights {weights!r} of role 'attend', expected 'f32'", path="graphs")
            return _attend(model.attentions[shape_class])
        case "out":
            return _out(model, *output_classes(model)[shape_class], weights)
        case "expert":
            return _expert(model, shape_class, weights)
        case "head":
            return _head(model, weights)


def _f32(name: str, *shape: int | str) -> Value:
    return Value(name, "f32", shape)


def _matrix(name: str, rows: int, columns: int, weights: GraphWeights) -> tuple[Value, ...]:
    """A matrix `[rows, columns]`, followed by its scale per column when it holds integers."""
    matrix = Value(name, _MATRIX_DTYPE[weights], (rows, columns))
    return (matrix,) if weights == "f32" else (matrix, _f32(f"{name}.scale", columns))


def _qkv(model: ModelDescription, attention: Attention, weights: GraphWeights) -> Interface:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    norms = () if attention.qk_norm == "none" else (_f32("q_norm", heads * width), _f32("k_norm", shared * width))
    return Interface(
        inputs=(
            _f32("x", "T", model.hidden),
            _f32("cos", "T", width),
            _f32("sin", "T", width),
            _f32("attention_norm", model.hidden),
            *norms,
            *_matrix("q", model.hidden, heads * width, weights),
            *_matrix("k", model.hidden, shared * width, weights),
            *_matrix("v", model.hidden, shared * width, weights),
        ),
        outputs=(
            _f32("queries", heads, "T", width),
            _f32("keys", shared, "T", width),
            _f32("values", shared, "T", width),
        ),
    )


def _attend(attention: Attention) -> Interface:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    return Interface(
        inputs=(
            _f32("queries", heads, "T", width),
            _f32("keys", shared, "S", width),
            _f32("values", shared, "S", width),
            _f32("mask", "T", "S"),
        ),
        outputs=(_f32("attended", "T", heads * width),),
    )


def _out(model: ModelDescription, attention_class: int, expert_class: int, weights: GraphWeights) -> Interface:
    attention, experts = model.attentions[attention_class], model.expert_blocks[expert_class].experts
    width = attention.heads * attention.head_dim
    return Interface(
        inputs=(
            _f32("attended", "T", width),
            _f32("residual", "T", model.hidden),
            _f32("expert_norm", model.hidden),
            _f32("router", model.hidden, experts),
            *_matrix("o", width, model.hidden, weights),
        ),
        outputs=(_f32("x", "T", model.hidden), _f32("normed", "T", model.hidden), _f32("scores", "T", experts)),
    )


def _expert(model: ModelDescription, expert_class: int, weights: GraphWeights) -> Interface:
    intermediate = model.expert_blocks[expert_class].intermediate
    return Interface(
        inputs=(
            _f32("normed", "T", model.hidden),
            *_matrix("gate", model.hidden, intermediate, weights),
            *_matrix("up", model.hidden, intermediate, weights),
            *_matrix("down", intermediate, model.hidden, weights),
        ),
        outputs=(_f32("y", "T", model.hidden),),
    )


def _head(model: ModelDescription, weights: GraphWeights) -> Interface:
    return Interface(
        inputs=(
            _f32("x", "T", model.hidden),
            _f32("final_norm", model.hidden),
            *_matrix("head", model.hidden, model.vocabulary, weights),
        ),
        outputs=(_f32("logits", "T", model.vocabulary),),
    )
