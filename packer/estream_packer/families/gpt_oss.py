"""GPT-OSS: sinks, windows in some layers, biases everywhere, and experts with a clamped activation, often in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import LARGEST, Config
from estream_packer.families.places import ExpertSpelling, Places, vector
from estream_packer.families.rotary import RotarySettings
from estream_packer.families.weights import WeightMap
from estream_spec.model import SWIGLU_SLOPE, Attention, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "gpt_oss"
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 150000.0
_HEAD_DIM: Final = 64
_LIMIT: Final = 7.0
_WINDOW: Final = 128
_SCALING: Final[dict[str, object]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where the configuration says nothing of scaling."""


def read(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a GPT-OSS configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config({"head_dim": _HEAD_DIM, **config})
    keys.only("swiglu_alpha", SWIGLU_SLOPE)
    biased = keys.flag("attention_bias", default=True)
    # An object without settings takes the place of the class's own only where it is the newer one.
    scaling = None if keys.has("rope_parameters") else _SCALING
    rotary = RotarySettings(keys, theta=_ROPE_THETA, kinds=common.ROTARY_KINDS, default=scaling)
    model = ModelDescription(
        **common.frame(MODEL_TYPE, keys, generation, epsilon=_NORM_EPSILON),
        layers=_layers(keys),
        attentions=(Attention(**common.heads(keys, rotary), bias=biased, out_bias=biased, sinks=True),),
        expert_blocks=(_expert_block(keys),),
    )
    return names.weight_map(model, _layer, _expert_spellings(model))


def _expert_spellings(model: ModelDescription) -> tuple[ExpertSpelling, ...]:
    """Stacks as MXFP4, which lies the other way round, or as plain numbers."""
    prefix = "model.layers.{layer}.mlp.experts"
    stacks = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    biases = f"{stacks[0]}_bias", f"{stacks[1]}_bias"
    return (
        names.fused(model, f"{stacks[0]}_blocks", f"{stacks[1]}_blocks", interleaved=True, biases=biases),
        names.fused(model, *stacks, layout="in-out", interleaved=True, biases=biases),
    )


def _layers(keys: Config) -> tuple[Layer, ...]:
    """Those with a window take turns with those without, unless the configuration says otherwise."""
    kinds = "sliding_attention", "full_attention"
    turns = [kinds[layer % 2] for layer in range(common.layer_count(keys))]
    found = common.layer_types(keys, kinds, turns)
    window = common.width(keys, "sliding_window", _WINDOW)
    return tuple(Layer(attention=0, experts=0, window=window if kind == kinds[0] else None) for kind in found)


def _expert_block(keys: Config) -> ExpertBlock:
    experts = common.expert_count(keys, common.layer_count(keys), "num_local_experts")
    top_k = keys.integer("num_experts_per_tok", 1, experts)
    keys.only("experts_per_token", top_k)
    return ExpertBlock(
        experts=experts,
        intermediate=common.width(keys, "intermediate_size"),
        router=Router(family="softmax-topk-renormalise", top_k=top_k, bias=True),
        activation="clamped-swiglu",
        limit=keys.number("swiglu_limit", 0, LARGEST, _LIMIT),
        bias=True,
    )


def _layer(model: ModelDescription, layer: int) -> Places:
    sinks = vector(f"model.layers.{layer}.self_attn.sinks", model.attention(layer).heads)
    return {
        **names.norms(model, layer),
        **names.attention(model, layer),
        "sinks": sinks,
        **names.router(model, layer, "mlp.router"),
    }
