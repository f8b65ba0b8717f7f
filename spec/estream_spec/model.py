"""The model description: what a model computes, as data. FORMAT.md section 8.

No family has code of its own outside the packer; a runtime that understands every value used here can run the model.
A value it does not understand is refused when the manifest is decoded, since every choice is a closed set.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from estream_spec import limits

Dimension = Annotated[int, Meta(ge=1, le=limits.MAX_DIMENSION)]
"""Rows or columns of a matrix."""
TokenId = Annotated[int, Meta(ge=0, lt=limits.MAX_DIMENSION)]
ClassIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_SHAPE_CLASSES)]
"""Position in a list of shape classes."""


SWIGLU_SLOPE: Final = 1.702
"""What the gate of `clamped-swiglu` is multiplied by inside the sigmoid."""
RouterFamily = Literal[
    "softmax-topk", "softmax-topk-renormalise", "sigmoid-topk", "sigmoid-topk-renormalise", "sparsemixer"
]


class Described(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct of the manifest: immutable, unknown keys refused, keys at their default left out."""


def share_defaults(value: Described) -> None:
    """Have one object stand for each default of a struct: the encoder leaves a value out only if it is that object.

    Small integers, booleans and words are such objects by themselves; floats are not, nor strings with a hyphen.
    """
    defaults = value.__struct_defaults__
    for name, default in zip(value.__struct_fields__[-len(defaults) :], defaults, strict=True):
        if getattr(value, name) == default:
            force_setattr(value, name, default)


class Rotary(Described, frozen=True, kw_only=True):
    """Rotary position encoding of queries and keys, halves rotated against each other (`x[i]` with `x[i + d/2]`).

    Attributes:
        theta: base of the frequencies; frequency `i` of `d/2` is `theta ** (-2 i / d)`, d being the rotated width.
        width: numbers at the beginning of a head that are rotated; None for the whole head.
        frequencies: in place of those that follow from `theta`, one for each of `d/2`; empty where they follow.
        scale: multiplies every cosine and sine.
    """

    theta: Annotated[float, Meta(gt=0)]
    width: Dimension | None = None
    frequencies: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(max_length=limits.MAX_FREQUENCIES)] = ()
    scale: Annotated[float, Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        """See `share_defaults`."""
        share_defaults(self)


class Latent(Described, frozen=True, kw_only=True):
    """Keys and values made from a narrow row that all heads share (multi-head latent attention).

    A head's query and key begin with the rotated numbers; the rotated part of a key is the same for all heads.

    Attributes:
        rank: width of the row that keys and values are made from; it is normalised.
        norm_epsilon: of the norms of these rows.
        query_rank: width of the row that queries are made from, likewise; None where they are made from the input.
    """

    rank: Dimension
    norm_epsilon: Annotated[float, Meta(ge=0)]
    query_rank: Dimension | None = None


class Attention(Described, frozen=True, kw_only=True):
    """One attention shape class: multi-head attention in which `heads / key_value_heads` query heads share a key head.

    Attributes:
        heads: query heads.
        key_value_heads: key and value heads; divides `heads`.
        head_dim: width of one head of queries and keys.
        rotary: position encoding of queries and keys.
        qk_norm: `full` normalises all heads together (weight of `heads * head_dim`) before heads are split, `head` each
            head by itself (weight of `head_dim`), `none` does not normalise.
        clip_qkv: bound on the absolute value of the three projections, applied after the norm of all
            heads together, before that of each head.
        value_dim: width of one head of values; None for `head_dim`.
        scale: multiplies scores; None for `1 / sqrt(head_dim)`.
        bias: the projections of queries, keys and values have biases.
        out_bias: the output projection has a bias.
        sinks: each head has a score of its own that takes part in the softmax and has no value.
        latent: how keys and values are made where they are not projected directly.
    """

    heads: Dimension
    key_value_heads: Dimension
    head_dim: Dimension
    rotary: Rotary
    qk_norm: Literal["none", "full", "head"] = "none"
    clip_qkv: Annotated[float, Meta(gt=0)] | None = None
    value_dim: Dimension | None = None
    scale: Annotated[float, Meta(gt=0)] | None = None
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    latent: Latent | None = None

    @property
    def value_width(self) -> int:
        """Width of one head of values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def rotated(self) -> int:
        """How many numbers at the beginning of a head are rotated."""
        return self.head_dim if self.rotary.width is None else self.rotary.width

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale


class Convolution(Described, frozen=True, kw_only=True):
    """One convolution shape class, in place of attention: a gated causal convolution over each channel by itself.

    Attributes:
        taps: tokens that one output depends on, its own included.
    """

    taps: Annotated[int, Meta(ge=2, le=limits.MAX_TAPS)]


class Router(Described, frozen=True, kw_only=True):
    """How a token's experts and their weights follow from the router's scores, in f32. FORMAT.md annex A.4.

    `softmax-topk` takes the softmax over all experts and keeps the weights of the `top_k` largest as they are;
    `softmax-topk-renormalise` divides those by their sum, which is the softmax over the chosen alone. The two families
    of sigmoids do the same with `sigmoid(score)`. `sparsemixer` takes one expert after the other, each weighed against
    those whose score is near its own. Equal scores go to the lower expert id.

    Attributes:
        family: see above.
        top_k: experts for each token.
        bias: the router's scores have a bias, as any product may.
        selection_bias: a bias that is added to the weights for choosing, and is not in the weights themselves.
        groups: consecutive experts form so many groups of equal size, of which some are left out first.
        top_groups: groups that are not left out.
        group_score: a group counts by its largest weight, or by the sum of its two largest.
        scale: multiplies the weights in the end.
        epsilon: added to the sum by which `...-renormalise` divides.
        tolerance: how near is near for `sparsemixer`, as a share of the larger of score and best score.
    """

    family: RouterFamily
    top_k: Dimension
    bias: bool = False
    selection_bias: bool = False
    groups: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)] = 1
    top_groups: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)] = 1
    group_score: Literal["largest", "two-largest"] = "largest"
    scale: Annotated[float, Meta(gt=0)] = 1.0
    epsilon: Annotated[float, Meta(ge=0)] = 0.0
    tolerance: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        """See `share_defaults`."""
        share_defaults(self)


class ExpertBlock(Described, frozen=True, kw_only=True):
    """One shape class of routed experts: `down(activation(gate(x), up(x)))`.

    Attributes:
        experts: routed experts in the layer.
        intermediate: rows of gate and up.
        router: how experts are chosen.
        activation: `silu`: `silu(g) u`; `clamped-swiglu`: with g held to at most `limit` and u to `limit` either way,
            `g sigmoid(1.702 g) (u + 1)`.
        limit: of `clamped-swiglu`, None for others.
        bias: gate, up and down have biases.
    """

    experts: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    intermediate: Dimension
    router: Router
    activation: Literal["silu", "clamped-swiglu"] = "silu"
    limit: Annotated[float, Meta(gt=0)] | None = None
    bias: bool = False


class DenseBlock(Described, frozen=True, kw_only=True):
    """One shape class of feed-forward blocks that every token goes through: dense layers, and shared experts.

    Attributes:
        intermediate: rows of gate and up; `down(silu(gate(x)) * up(x))`.
        share: what it gives is multiplied by `sigmoid(x . share)`, a number for each token.
    """

    intermediate: Dimension
    share: bool = False


class Layer(Described, frozen=True, kw_only=True):
    """One layer, in order: norm, attention or convolution, residual, norm, experts and dense block, residual.

    Attributes:
        attention: index into `ModelDescription.attentions`; None where there is a convolution.
        experts: index into `ModelDescription.expert_blocks`; None where the layer has none.
        dense: index into `ModelDescription.dense_blocks`; None where the layer has none.
        convolution: index into `ModelDescription.convolutions`; None where there is attention.
        window: tokens that a token attends to, itself included; None for all before it.
    """

    attention: ClassIndex | None = None
    experts: ClassIndex | None = None
    dense: ClassIndex | None = None
    convolution: ClassIndex | None = None
    window: Dimension | None = None


class OutputClass(NamedTuple):
    """One shape class of the role `out`, which sees both halves of a layer; see `Layer`."""

    attention: int | None
    convolution: int | None
    experts: int | None


class ModelDescription(Described, frozen=True, kw_only=True, dict=True):
    """Everything a runtime must know of the model besides its weights.

    Attributes:
        family: the checkpoint family it came from, for people; nothing may depend on it.
        hidden: width of the residual stream.
        vocabulary: rows of the embedding, and logits.
        context_length: most tokens of prompt and output together.
        norm_epsilon: added to the mean square, or the variance, in every norm.
        layers: in order of computation.
        attentions: attention shape classes, each used by some layer.
        expert_blocks: expert shape classes, each used by some layer.
        dense_blocks: dense shape classes, each used by some layer.
        convolutions: convolution shape classes, each used by some layer.
        norm: `rms`: `x / sqrt(mean(x²) + e) w`; `layer`: `(x - mean(x)) / sqrt(var(x) + e) w + b`.
        head_bias: the head has a bias.
        tied_head: the head is the embedding transposed, stored once.
        begin_token: put before a prompt; None when the model wants none.
        end_tokens: any of them ends generation.
    """

    family: Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME)]
    hidden: Dimension
    vocabulary: Dimension
    context_length: Dimension
    norm_epsilon: Annotated[float, Meta(ge=0)]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=limits.MAX_LAYERS)]
    attentions: Annotated[tuple[Attention, ...], Meta(min_length=1, max_length=limits.MAX_SHAPE_CLASSES)]
    expert_blocks: Annotated[tuple[ExpertBlock, ...], Meta(min_length=1, max_length=limits.MAX_SHAPE_CLASSES)]
    tied_head: bool = False
    begin_token: TokenId | None = None
    end_tokens: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_END_TOKENS)] = ()
    dense_blocks: Annotated[tuple[DenseBlock, ...], Meta(max_length=limits.MAX_SHAPE_CLASSES)] = ()
    convolutions: Annotated[tuple[Convolution, ...], Meta(max_length=limits.MAX_SHAPE_CLASSES)] = ()
    norm: Literal["rms", "layer"] = "rms"
    head_bias: bool = False

    def expert_block(self, layer: int) -> ExpertBlock:
        """The expert shape class of a layer that has experts."""
        index = self.layers[layer].experts
        assert index is not None
        return self.expert_blocks[index]

    def attention(self, layer: int) -> Attention:
        """The attention shape class of a layer that has attention."""
        index = self.layers[layer].attention
        assert index is not None
        return self.attentions[index]

    @cached_property
    def output_classes(self) -> tuple[OutputClass, ...]:
        """Shape classes of the role `out`, in the order of the first layer of each."""
        used = (OutputClass(layer.attention, layer.convolution, layer.experts) for layer in self.layers)
        return tuple(dict.fromkeys(used))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.experts is not None)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Experts of each layer, 0 where it has none."""
        return tuple(0 if layer.experts is None else self.expert_blocks[layer.experts].experts for layer in self.layers)

    @property
    def top_k(self) -> tuple[int, ...]:
        """Experts of each layer that a token is routed to, 0 where it has none."""
        blocks = self.expert_blocks
        return tuple(0 if layer.experts is None else blocks[layer.experts].router.top_k for layer in self.layers)

    @property
    def dense_layers(self) -> frozenset[int]:
        """The layers that have a dense block."""
        return frozenset(number for number, layer in enumerate(self.layers) if layer.dense is not None)
