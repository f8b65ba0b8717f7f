"""OLMoE: every layer has experts, a softmax over all of them, and query and key norms that span all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import Config
from estream_packer.families.rotary import RotarySettings
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "olmoe"
ARCHITECTURE: Final = "OlmoeForCausalLM"

# What transformers takes where config.json says nothing. The published OLMoE leaves out the epsilon.
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 10000.0
_NORMALISE_TOP_K: Final = False
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")


def describe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that an OLMoE configuration describes.

    Args:
        config: `config.json`.
        generation: `generation_config.json`; its end tokens win, as they do in transformers.

    Raises:
        PackError: a key is missing, of a wrong type, out of range, or asks for something this family does not do.
    """
    keys = Config(config)
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    sizes = common.sizes(keys)
    return ModelDescription(
        family=MODEL_TYPE,
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        context_length=sizes.context_length,
        norm_epsilon=common.norm_epsilon(keys, _NORM_EPSILON),
        layers=(Layer(attention=0, experts=0),) * sizes.layers,
        attentions=(_attention(keys, sizes.hidden),),
        expert_blocks=(_expert_block(keys, sizes.layers),),
        tied_head=keys.flag("tie_word_embeddings", default=False),
        end_tokens=common.end_tokens(keys, generation, sizes.vocabulary),
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


def _attention(keys: Config, hidden: int) -> Attention:
    shape = common.heads(keys, hidden)
    keys.only("head_dim", hidden // shape.heads)
    return Attention(
        heads=shape.heads,
        key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        rotary=RotarySettings(keys, theta=_ROPE_THETA, kinds=_ROPE_KINDS).rotary(shape.head_dim),
        qk_norm="full",
        clip_qkv=keys.number("clip_qkv", 0, 1e30) if keys.has("clip_qkv") else None,
    )


def _expert_block(keys: Config, layers: int) -> ExpertBlock:
    experts = common.expert_count(keys, layers)
    renormalise = keys.flag("norm_topk_prob", default=_NORMALISE_TOP_K)
    return ExpertBlock(
        experts=experts,
        intermediate=keys.integer("intermediate_size", 1, limits.MAX_DIMENSION),
        router=Router(
            family="softmax-topk-renormalise" if renormalise else "softmax-topk",
            top_k=keys.integer("num_experts_per_tok", 1, experts),
        ),
    )
