"""OLMoE: every layer has experts, a softmax over all of them, and query and key norms that span all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import LARGEST, Config
from estream_packer.families.places import Places
from estream_packer.families.weights import WeightMap
from estream_spec.model import Attention, Layer, ModelDescription

MODEL_TYPE: Final = "olmoe"

# What transformers takes where config.json says nothing. The published OLMoE leaves out the epsilon.
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 10000.0


def read(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What an OLMoE configuration describes, and where its tensors lie.

    Args:
        config: `config.json`.
        generation: `generation_config.json`; its end tokens win, as they do in transformers.

    Raises:
        PackError: a key is missing, of a wrong type, out of range, or asks for something this family does not do.
    """
    keys = Config(config)
    keys.only("attention_bias", False)
    layers = common.layer_count(keys)
    common.check_layers_alike(keys, None)
    model = ModelDescription(
        **common.frame(MODEL_TYPE, keys, generation, epsilon=_NORM_EPSILON),
        layers=(Layer(attention=0, experts=0),) * layers,
        attentions=(_attention(keys),),
        expert_blocks=(common.softmax_experts(keys, layers, "intermediate_size"),),
    )
    return names.weight_map(model, _layer)


def _attention(keys: Config) -> Attention:
    heads = common.heads(keys, common.rotary(keys, _ROPE_THETA))
    keys.only("head_dim", common.width(keys, "hidden_size") // heads["heads"])
    clip = keys.number("clip_qkv", 0, LARGEST) if keys.has("clip_qkv") else None
    return Attention(**heads, qk_norm="full", clip_qkv=clip)


def _layer(model: ModelDescription, layer: int) -> Places:
    return {**names.norms(model, layer), **names.attention(model, layer), **names.router(model, layer)}
