"""Mixtral and Phi-MoE: experts named w1, w3 and w2; the latter with layer norms, biases and sparsemixer routing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import Config
from estream_packer.families.places import Group, Places
from estream_packer.families.rotary import RotarySettings
from estream_packer.families.weights import WeightMap
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Router

MIXTRAL: Final = "mixtral"
PHIMOE: Final = "phimoe"
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 1e6
_JITTER: Final = 0.01
_BELOW_ZERO: Final = math.nextafter(0, -1)
"""The largest number that is not allowed where zero is."""
_OLD_BLOCK, _NEW_BLOCK = "block_sparse_moe", "mlp"


def read_mixtral(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a Mixtral configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    experts = common.expert_count(keys, common.layer_count(keys), "num_local_experts")
    router = Router(family="softmax-topk-renormalise", top_k=keys.integer("num_experts_per_tok", 1, experts, default=2))
    model = ModelDescription(
        **common.frame(MIXTRAL, keys, generation, epsilon=_NORM_EPSILON),
        layers=_layers(keys, common.context_length(keys)),
        attentions=(Attention(**common.heads(keys, common.rotary(keys, _ROPE_THETA))),),
        expert_blocks=(_experts(keys, experts, router),),
    )
    return _weights(model)


def read_phimoe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a Phi-MoE configuration describes, and where its tensors lie.

    With longrope, the published code changes frequencies past `original_max_position_embeddings` and transformers does
    not: the context ends there. Raises as `olmoe.read` does.
    """
    keys = Config(config)
    experts = common.expert_count(keys, common.layer_count(keys), "num_local_experts")
    keys.only("num_experts_per_tok", 2)
    if experts < 2:
        raise keys.refusal("num_local_experts", "two experts or more")
    tolerance = keys.number("router_jitter_noise", _BELOW_ZERO, 1, _JITTER)
    router = Router(family="sparsemixer", top_k=2, tolerance=tolerance)
    biased = keys.flag("attention_bias", default=False)
    rotary = RotarySettings(keys, theta=_ROPE_THETA, kinds=("default", "longrope"))
    frame = common.frame(PHIMOE, keys, generation, epsilon=_NORM_EPSILON)
    if rotary.original_context is not None:
        frame["context_length"] = min(frame["context_length"], rotary.original_context)
        for key in ("short_mscale", "long_mscale"):
            rotary.required(key)
    model = ModelDescription(
        **frame,
        layers=_layers(keys, frame["context_length"]),
        attentions=(Attention(**common.heads(keys, rotary), bias=biased, out_bias=biased),),
        expert_blocks=(_experts(keys, experts, router),),
        norm="layer",
        head_bias=keys.flag("lm_head_bias", default=False),
    )
    return _weights(model)


def _weights(model: ModelDescription) -> WeightMap:
    experts = names.per_expert(model, f"model.layers.{{layer}}.{_OLD_BLOCK}.experts", names.W)
    return names.weight_map(model, _layer, (experts, *names.expert_spellings(model)), _routers)


def _layers(keys: Config, context: int) -> tuple[Layer, ...]:
    window = common.window(keys, context)
    common.check_layers_alike(keys, window)
    return (Layer(attention=0, experts=0, window=window),) * common.layer_count(keys)


def _experts(keys: Config, experts: int, router: Router) -> ExpertBlock:
    return ExpertBlock(experts=experts, intermediate=common.width(keys, "intermediate_size"), router=router)


def _layer(model: ModelDescription, layer: int) -> Places:
    return {**names.norms(model, layer), **names.attention(model, layer)}


def _routers(model: ModelDescription, layer: int) -> tuple[Group, ...]:
    blocks = f"{_OLD_BLOCK}.gate", f"{_NEW_BLOCK}.gate", f"{_NEW_BLOCK}.router"
    return (tuple(names.router(model, layer, name) for name in blocks),)
