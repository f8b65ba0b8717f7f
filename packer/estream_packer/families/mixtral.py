"""Mixtral and Phi-MoE: experts named w1, w3 and w2; the latter with layer norms, biases and sparsemixer routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names, parts
from estream_packer.families.config import Config
from estream_packer.families.places import Group
from estream_packer.families.rotary import RotarySettings
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Router

MIXTRAL: Final = "mixtral"
PHIMOE: Final = "phimoe"
_NORM_EPSILON: Final = 1e-5
_MIXTRAL_THETA: Final = 1e6
_PHI_THETA: Final = 1e4
_PHI_KINDS: Final = (*parts.ROTARY_KINDS, "longrope")
_JITTER: Final = 0.01
_OLD_BLOCK, _NEW_BLOCK = "block_sparse_moe", "mlp"


def describe_mixtral(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that a Mixtral configuration describes. Raises as `olmoe.describe` does."""
    keys = Config(config)
    experts = common.expert_count(keys, parts.layer_count(keys))
    router = Router(
        family="softmax-topk-renormalise", top_k=parts.integer_or(keys, "num_experts_per_tok", 2, 1, experts)
    )
    attention = parts.attention(keys, _MIXTRAL_THETA)
    return _describe(MIXTRAL, keys, generation, attention, _experts(keys, experts, router))


def describe_phimoe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that a Phi-MoE configuration describes.

    With longrope, the published code changes frequencies past `original_max_position_embeddings` and transformers does
    not: the context ends there. Raises as `olmoe.describe` does.
    """
    keys = Config(config)
    experts = common.expert_count(keys, parts.layer_count(keys))
    keys.only("num_experts_per_tok", 2)
    tolerance = parts.number_or(keys, "router_jitter_noise", _JITTER, above=-1e-30, high=1)
    router = Router(family="sparsemixer", top_k=2, tolerance=tolerance)
    biased = keys.flag("attention_bias", default=False)
    attention = parts.attention(keys, _PHI_THETA, kinds=_PHI_KINDS, bias=biased, out_bias=biased)
    return _describe(PHIMOE, keys, generation, attention, _experts(keys, experts, router))


def weights(model: ModelDescription) -> WeightMap:
    """Where each tensor of a described Mixtral or Phi-MoE lies in its checkpoint."""
    prefix = "model.layers.{layer}."
    return WeightMap(
        model=model,
        embedding=names.embedding(model),
        layers=tuple(_layer(model, layer) for layer in range(len(model.layers))),
        experts=(
            names.per_expert(model, f"{prefix}{_OLD_BLOCK}.experts", "w1", "w3", "w2"),
            *names.expert_spellings(model),
        ),
        final=names.final(model),
        tied_head=names.tied_head(model),
    )


def _experts(keys: Config, experts: int, router: Router) -> ExpertBlock:
    width = keys.integer("intermediate_size", 1, limits.MAX_DIMENSION)
    return ExpertBlock(experts=experts, intermediate=width, router=router)


def _describe(
    family: str, keys: Config, generation: Mapping[str, object] | None, attention: Attention, block: ExpertBlock
) -> ModelDescription:
    parts.only_silu(keys)
    context = _context(keys, family)
    window = parts.window(keys, context)
    return parts.model(
        family,
        keys,
        generation,
        norm_epsilon=common.norm_epsilon(keys, _NORM_EPSILON),
        layers=(Layer(attention=0, experts=0, window=window),) * parts.layer_count(keys),
        attentions=(attention,),
        expert_blocks=(block,),
        context_length=context,
        tied_head=keys.flag("tie_word_embeddings", default=False),
        norm="layer" if family == PHIMOE else "rms",
        head_bias=family == PHIMOE and keys.flag("lm_head_bias", default=False),
    )


def _context(keys: Config, family: str) -> int:
    """The context length; with longrope that of the short factors."""
    context = common.sizes(keys).context_length
    if family != PHIMOE:
        return context
    original = RotarySettings(keys, theta=_PHI_THETA, kinds=_PHI_KINDS).original_context
    return context if original is None else min(context, original)


def _layer(model: ModelDescription, layer: int) -> tuple[Group, ...]:
    routers = tuple(
        names.router(model, layer, name)
        for name in (f"{_OLD_BLOCK}.gate", f"{_NEW_BLOCK}.gate", f"{_NEW_BLOCK}.router")
    )
    return ({**names.norms(model, layer), **names.attention(model, layer)},), routers
