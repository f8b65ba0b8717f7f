"""What a graph takes and gives, by role. FORMAT.md section 10.

A graph serves every layer, or every expert, of its shape class: weights are inputs like any other. This page says in
which order, under which name, in which type and shape they come, and no more; what a graph computes is written in
section 10 and built by the packer.

Dimensions: `T` is the number of token rows of a call and `S` the number of keys; they are symbolic, all others fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from estream_spec.errors import InvalidError
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import Attention, Latent, ModelDescription, OutputClass

DType = Literal["f32", "i8", "u8"]
"""Element type of an input or output."""

ROLES: Final[tuple[GraphRole, ...]] = ("qkv", "attend", "convolve", "out", "expert", "dense", "head")
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


class MatrixInput(NamedTuple):
    """A matrix that a graph takes: `[rows, columns]`, or its stored parts."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Interface:
    """Inputs and outputs of a graph, in order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class RoleShape:
    """What the graphs of a role and shape class take and give, whatever matrices hold.

    Attributes:
        inputs: what a call computes with, f32.
        vectors: weights that are f32 always.
        matrices: weights that a graph's weight kind applies to.
        outputs: what a call gives, f32.
    """

    inputs: tuple[Value, ...]
    vectors: tuple[Value, ...]
    matrices: tuple[MatrixInput, ...]
    outputs: tuple[Value, ...]

    @property
    def matrix_names(self) -> tuple[str, ...]:
        """Names of the matrices, in order."""
        return tuple(each.name for each in self.matrices)


def class_count(role: GraphRole, model: ModelDescription) -> int:
    """How many shape classes a role has: a package carries a graph for each."""
    match role:
        case "qkv" | "attend":
            return len(model.attentions)
        case "convolve":
            return len(model.convolutions)
        case "out":
            return len(model.output_classes)
        case "expert":
            return len(model.expert_blocks)
        case "dense":
            return len(model.dense_blocks)
        case "head":
            return 1


def layer_classes(model: ModelDescription, layer: int) -> dict[GraphRole, int]:
    """The roles of the graphs that serve a layer, in the order in which they are computed, and the shape class of each.

    The head serves no layer.
    """
    described = model.layers[layer]
    both = OutputClass(described.attention, described.convolution, described.experts)
    classes: dict[GraphRole, int | None] = {
        "qkv": described.attention,
        "attend": described.attention,
        "convolve": described.convolution,
        "out": model.output_classes.index(both),
        "dense": described.dense,
        "expert": described.experts,
    }
    return {role: shape_class for role, shape_class in classes.items() if shape_class is not None}


def role_shape(role: GraphRole, model: ModelDescription, shape_class: int) -> RoleShape:
    """What the graphs of a role and shape class take and give.

    Args:
        role: what they are for.
        model: the model they belong to.
        shape_class: index into the role's shape classes: attentions for `qkv` and `attend`, convolutions for
            `convolve`, expert blocks for `expert`, dense blocks for `dense`, `output_classes` for `out`, 0 for `head`.

    Raises:
        InvalidError: the role has no such shape class.
    """
    if not 0 <= shape_class < class_count(role, model):
        found = f"shape class {shape_class} of role {role!r}, the model has {class_count(role, model)}"
        raise InvalidError(found, path="graphs")
    match role:
        case "qkv":
            return _qkv(model, model.attentions[shape_class])
        case "attend":
            return _attend(model.attentions[shape_class])
        case "convolve":
            return _convolve(model)
        case "out":
            return _out(model, model.output_classes[shape_class])
        case "expert":
            return _expert(model, shape_class)
        case "dense":
            return _dense(model, shape_class)
        case "head":
            return _head(model)


def interface(role: GraphRole, model: ModelDescription, shape_class: int, weights: GraphWeights) -> Interface:
    """Inputs and outputs of one graph.

    Args:
        role: what the graph is for.
        model: the model it belongs to.
        shape_class: which of the role's shape classes, see `role_shape`.
        weights: what its matrix inputs hold.

    Raises:
        InvalidError: the role has no such shape class, or `attend` is asked for weights it does not have.
    """
    shape = role_shape(role, model, shape_class)
    if role == "attend" and weights != "f32":
        raise InvalidError(f"weights {weights!r} of role 'attend', expected 'f32'", path="graphs")
    matrices = (value for matrix in shape.matrices for value in _matrix(matrix, weights))
    return Interface(inputs=(*shape.inputs, *shape.vectors, *matrices), outputs=shape.outputs)


def _f32(name: str, *shape: int | str) -> Value:
    return Value(name, "f32", shape)


def _matrix(matrix: MatrixInput, weights: GraphWeights) -> tuple[Value, ...]:
    """A matrix, followed by its scale per column when it holds integers."""
    value = Value(matrix.name, _MATRIX_DTYPE[weights], (matrix.rows, matrix.columns))
    return (value,) if weights == "f32" else (value, _f32(f"{matrix.name}.scale", matrix.columns))


def _norm(model: ModelDescription, name: str) -> tuple[Value, ...]:
    """The weights of a norm over the residual stream."""
    weight = _f32(name, model.hidden)
    return (weight,) if model.norm == "rms" else (weight, _f32(f"{name}.bias", model.hidden))


def _biases(matrices: tuple[MatrixInput, ...], there: bool) -> tuple[Value, ...]:
    """A bias for each matrix."""
    return tuple(_f32(f"{each.name}.bias", each.columns) for each in matrices) if there else ()


def _qkv(model: ModelDescription, attention: Attention) -> RoleShape:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    if attention.latent is None:
        projections: tuple[MatrixInput, ...] = (
            MatrixInput("q", model.hidden, heads * width),
            MatrixInput("k", model.hidden, shared * width),
            MatrixInput("v", model.hidden, shared * attention.value_width),
        )
        vectors = (*_qk_norms(attention), *_biases(projections, attention.bias))
    else:
        projections = _latent(model, attention, attention.latent)
        vectors = _latent_norms(attention.latent)
    return RoleShape(
        inputs=(
            _f32("x", "T", model.hidden),
            _f32("cos", "T", attention.rotated),
            _f32("sin", "T", attention.rotated),
        ),
        vectors=(*_norm(model, "attention_norm"), *vectors),
        matrices=projections,
        outputs=(
            _f32("queries", heads, "T", width),
            _f32("keys", shared, "T", width),
            _f32("values", shared, "T", attention.value_width),
        ),
    )


def _qk_norms(attention: Attention) -> tuple[Value, ...]:
    match attention.qk_norm:
        case "none":
            return ()
        case "head":
            return _f32("q_norm", attention.head_dim), _f32("k_norm", attention.head_dim)
        case "full":
            return (
                _f32("q_norm", attention.heads * attention.head_dim),
                _f32("k_norm", attention.key_value_heads * attention.head_dim),
            )


def _latent(model: ModelDescription, attention: Attention, latent: Latent) -> tuple[MatrixInput, ...]:
    heads, rotated = attention.heads, attention.rotated
    queries = heads * attention.head_dim
    if latent.query_rank is None:
        for_queries: tuple[MatrixInput, ...] = (MatrixInput("q", model.hidden, queries),)
    else:
        narrow = MatrixInput("query_latent", model.hidden, latent.query_rank)
        for_queries = narrow, MatrixInput("q", latent.query_rank, queries)
    return (
        *for_queries,
        MatrixInput("latent", model.hidden, latent.rank),
        MatrixInput("k_rotated", model.hidden, rotated),
        MatrixInput("k", latent.rank, heads * (attention.head_dim - rotated)),
        MatrixInput("v", latent.rank, heads * attention.value_width),
    )


def _latent_norms(latent: Latent) -> tuple[Value, ...]:
    for_queries = () if latent.query_rank is None else (_f32("query_latent_norm", latent.query_rank),)
    return *for_queries, _f32("latent_norm", latent.rank)


def _attend(attention: Attention) -> RoleShape:
    heads, shared, width = attention.heads, attention.key_value_heads, attention.head_dim
    return RoleShape(
        inputs=(
            _f32("queries", heads, "T", width),
            _f32("keys", shared, "S", width),
            _f32("values", shared, "S", attention.value_width),
            _f32("mask", "T", "S"),
        ),
        vectors=(_f32("sinks", heads),) if attention.sinks else (),
        matrices=(),
        outputs=(_f32("attended", "T", heads * attention.value_width),),
    )


def _convolve(model: ModelDescription) -> RoleShape:
    hidden = model.hidden
    return RoleShape(
        inputs=(_f32("x", "T", hidden),),
        vectors=_norm(model, "attention_norm"),
        matrices=tuple(MatrixInput(name, hidden, hidden) for name in ("entry", "entry_gate", "exit_gate")),
        outputs=(_f32("entered", "T", hidden), _f32("exit", "T", hidden)),
    )


def _out(model: ModelDescription, both: OutputClass) -> RoleShape:
    attention = None if both.attention is None else model.attentions[both.attention]
    width = model.hidden if attention is None else attention.heads * attention.value_width
    projection = (MatrixInput("o", width, model.hidden),)
    vectors = _norm(model, "expert_norm")
    outputs: tuple[Value, ...] = (_f32("x", "T", model.hidden), _f32("normed", "T", model.hidden))
    if both.experts is not None:
        block = model.expert_blocks[both.experts]
        vectors += (_f32("router", model.hidden, block.experts),)
        vectors += (_f32("router.bias", block.experts),) if block.router.bias else ()
        outputs += (_f32("scores", "T", block.experts),)
    return RoleShape(
        inputs=(_f32("attended", "T", width), _f32("residual", "T", model.hidden)),
        vectors=(*vectors, *_biases(projection, attention is not None and attention.out_bias)),
        matrices=projection,
        outputs=outputs,
    )


def _expert(model: ModelDescription, shape_class: int) -> RoleShape:
    block = model.expert_blocks[shape_class]
    matrices = _feed_forward(model.hidden, block.intermediate, "")
    return RoleShape(
        inputs=(_f32("normed", "T", model.hidden),),
        vectors=_biases(matrices, block.bias),
        matrices=matrices,
        outputs=(_f32("y", "T", model.hidden),),
    )


def _dense(model: ModelDescription, shape_class: int) -> RoleShape:
    block = model.dense_blocks[shape_class]
    return RoleShape(
        inputs=(_f32("normed", "T", model.hidden),),
        vectors=(_f32("share", model.hidden),) if block.share else (),
        matrices=_feed_forward(model.hidden, block.intermediate, "dense_"),
        outputs=(_f32("y", "T", model.hidden),),
    )


def _feed_forward(hidden: int, inner: int, prefix: str) -> tuple[MatrixInput, ...]:
    return (
        MatrixInput(f"{prefix}gate", hidden, inner),
        MatrixInput(f"{prefix}up", hidden, inner),
        MatrixInput(f"{prefix}down", inner, hidden),
    )


def _head(model: ModelDescription) -> RoleShape:
    matrices = (MatrixInput("head", model.hidden, model.vocabulary),)
    return RoleShape(
        inputs=(_f32("x", "T", model.hidden),),
        vectors=(*_norm(model, "final_norm"), *_biases(matrices, model.head_bias)),
        matrices=matrices,
        outputs=(_f32("logits", "T", model.vocabulary),),
    )
