"""OLMoE: every layer has experts, a softmax over all of them, and query and key norms that span all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import LARGEST, Config
from estream_packer.families.weights import WeightMap
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "olmoe"

# What transformers takes where config.json says nothing. The published OLMoE leaves out the epsilon.
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 10000.0
_NORMALISE_TOP_K: Final = False


def describe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that an OLMoE configuration describes.

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
    return ModelDescription(
        **common.frame(MODEL_TYPE, keys, generation, epsilon=_NORM_EPSILON),
        layers=(Layer(attention=0, experts=0),) * layers,
        attentions=(_attention(keys),),
        expert_blocks=(_expert_block(keys, layers),),
    )


def weights(model: ModelDescription) -> WeightMap:
    """Where each tensor of a described OLMoE lies in its checkpoint."""
    return WeightMap(
        model=model,
        embedding=names.embedding(model),
        layers=tuple(
            (({**names.norms(model, layer), **names.attention(model, layer), **names.router(model, layer)},),)
            for layer in range(len(model.layers))
        ),
        experts=names.expert_spellings(model),
        final=names.final(model),
        tied_head=names.tied_head(model),
    )


def _attention(keys: Config) -> Attention:
    heads = common.heads(keys, common.rotary(keys, _ROPE_THETA))
    keys.only("head_dim", common.width(keys, "hidden_size") // heads["heads"])
    clip = keys.number("clip_qkv", 0, LARGEST) if keys.has("clip_qkv") else None
    return Attention(**heads, qk_norm="full", clip_qkv=clip)


def _expert_block(keys: Config, layers: int) -> ExpertBlock:
    experts = common.expert_count(keys, layers)
    renormalise = keys.flag("norm_topk_prob", default=_NORMALISE_TOP_K)
    return ExpertBlock(
        experts=experts,
        intermediate=common.width(keys, "intermediate_size"),
        router=Router(
            family="softmax-topk-renormalise" if renormalise else "softmax-topk",
            top_k=keys.integer("num_experts_per_tok", 1, experts),
        ),
    )
