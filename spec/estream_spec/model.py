"""The model description: what a model computes, as data. FORMAT.md section 8.

No family has code of its own outside the packer; a runtime that understands every value used here can run the model.
A value it does not understand is refused when the manifest is decoded, since every choice is a closed set.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from estream_spec import limits

Dimension = Annotated[int, Meta(ge=1, le=limits.MAX_DIMENSION)]
"""Rows or columns of a matrix."""
TokenId = Annotated[int, Meta(ge=0, lt=limits.MAX_DIMENSION)]
ClassIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_SHAPE_CLASSES)]
"""Position in a list of shape classes."""


class Described(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct of the manifest: immutable, unknown keys refused, keys at their default left out."""


class Rotary(Described, frozen=True, kw_only=True):
    """Rotary position encoding of queries and keys, halves rotated against each other (`x[i]` with `x[i + d/2]`).

    Attributes:
        theta: base of the frequencies; frequency `i` of `d/2` is `theta ** (-2 i / d)`, d being the head dimension.
    """

    theta: Annotated[float, Meta(gt=0)]


class Attention(Described, frozen=True, kw_only=True):
    """One attention shape class: multi-head attention in which `heads / key_value_heads` query heads share a key head.

    Attributes:
        heads: query heads.
        key_value_heads: key and value heads; divides `heads`.
        head_dim: width of one head.
        rotary: position encoding of queries and keys.
        qk_norm: `full` normalises all heads together (weight of `heads * head_dim`) before heads are split,
            `none` does not normalise.
        clip_qkv: bound on the absolute value of the three projections, applied after `qk_norm` and before rotation.
    """

    heads: Dimension
    key_value_heads: Dimension
    head_dim: Dimension
    rotary: Rotary
    qk_norm: Literal["none", "full"] = "none"
    clip_qkv: Annotated[float, Meta(gt=0)] | None = None


class Router(Described, frozen=True, kw_only=True):
    """How a token's experts and their weights follow from the router's scores, in f32. FORMAT.md annex A.

    `softmax-topk` takes the softmax over all experts and keeps the weights of the `top_k` largest as they are;
    `softmax-topk-renormalise` divides those by their sum. Equal scores go to the lower expert id.
    """

    family: Literal["softmax-topk", "softmax-topk-renormalise"]
    top_k: Dimension


class ExpertBlock(Described, frozen=True, kw_only=True):
    """One feed-forward shape class made of routed experts: `down(silu(gate(x)) * up(x))`.

    Attributes:
        experts: routed experts in the layer.
        intermediate: rows of gate and up.
        router: how experts are chosen.
    """

    experts: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    intermediate: Dimension
    router: Router
    activation: Literal["silu"] = "silu"


class Layer(Described, frozen=True, kw_only=True):
    """One layer, in order: norm, attention, residual, norm, experts, residual.

    Attributes:
        attention: index into `ModelDescription.attentions`.
        experts: index into `ModelDescription.expert_blocks`.
    """

    attention: ClassIndex
    experts: ClassIndex


class ModelDescription(Described, frozen=True, kw_only=True):
    """Everything a runtime must know of the model besides its weights.

    Attributes:
        family: the checkpoint family it came from, for people; nothing may depend on it.
        hidden: width of the residual stream.
        vocabulary: rows of the embedding, and logits.
        context_length: most tokens of prompt and output together.
        norm_epsilon: added to the mean square in every RMS norm.
        layers: in order of computation.
        attentions: attention shape classes, each used by some layer.
        expert_blocks: expert shape classes, each used by some layer.
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

    def expert_block(self, layer: int) -> ExpertBlock:
        """The expert shape class of a layer."""
        return self.expert_blocks[self.layers[layer].experts]

    def attention(self, layer: int) -> Attention:
        """The attention shape class of a layer."""
        return self.attentions[self.layers[layer].attention]
