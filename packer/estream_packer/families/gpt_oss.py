"""GPT-OSS: sinks, windows in some layers, biases everywhere, and experts with a clamped activation, often in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names, parts
from estream_packer.families.config import Config
from estream_packer.families.places import Places, vector
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import SWIGLU_SLOPE, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "gpt_oss"
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 150000.0
_HEAD_DIM: Final = 64
_LIMIT: Final = 7.0
_WINDOW: Final = 128


def describe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that a GPT-OSS configuration describes. Raises as `olmoe.describe` does."""
    keys = Config(config)
    keys.only("swiglu_alpha", SWIGLU_SLOPE)
    if not any(keys.has(name) for name in ("rope_scaling", "rope_parameters")):
        # The class fills in a YaRN of its own there, which no published model relies on.
        raise keys.refusal("rope_scaling", "an object")
    count = parts.layer_count(keys)
    experts = common.expert_count(keys, count)
    biased = keys.flag("attention_bias", default=True)
    attention = parts.attention(
        keys,
        _ROPE_THETA,
        head_dim=_HEAD_DIM,
        bias=biased,
        out_bias=biased,
        sinks=True,
    )
    window = parts.integer_or(keys, "sliding_window", _WINDOW, 1, limits.MAX_DIMENSION)
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(count)]
    kinds = parts.layer_types(keys, {"sliding_attention", "full_attention"}, alternating)
    block = ExpertBlock(
        experts=experts,
        intermediate=keys.integer("intermediate_size", 1, limits.MAX_DIMENSION),
        router=Router(
            family="softmax-topk-renormalise", top_k=keys.integer("num_experts_per_tok", 1, experts), bias=True
        ),
        activation="clamped-swiglu",
        limit=parts.number_or(keys, "swiglu_limit", _LIMIT),
        bias=True,
    )
    return parts.model(
        MODEL_TYPE,
        keys,
        generation,
        norm_epsilon=common.norm_epsilon(keys, _NORM_EPSILON),
        layers=tuple(
            Layer(attention=0, experts=0, window=window if kind == "sliding_attention" else None) for kind in kinds
        ),
        attentions=(attention,),
        expert_blocks=(block,),
        tied_head=keys.flag("tie_word_embeddings", default=False),
    )


def weights(model: ModelDescription) -> WeightMap:
    """Where each tensor of a described GPT-OSS lies in its checkpoint."""
    prefix = "model.layers.{layer}.mlp.experts"
    stacks = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    biases = f"{stacks[0]}_bias", f"{stacks[1]}_bias"
    return WeightMap(
        model=model,
        embedding=names.embedding(model),
        layers=tuple(((_layer(model, layer),),) for layer in range(len(model.layers))),
        experts=(
            names.fused(model, f"{stacks[0]}_blocks", f"{stacks[1]}_blocks", interleaved=True, biases=biases),
            names.fused(model, *stacks, layout="in-out", interleaved=True, biases=biases),
        ),
        final=names.final(model),
        tied_head=names.tied_head(model),
    )


def _layer(model: ModelDescription, layer: int) -> Places:
    sinks = vector(f"model.layers.{layer}.self_attn.sinks", model.attention(layer).heads)
    return {
        **names.norms(model, layer),
        **names.attention(model, layer),
        "sinks": sinks,
        **names.router(model, layer, "mlp.router"),
    }
