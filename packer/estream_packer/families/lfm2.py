"""LFM2-MoE: short convolutions in place of attention in most layers, dense first layers, sigmoids as router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import LARGEST, Config
from estream_packer.families.places import Place, Places, Selection, matrix, vector
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, Convolution, DenseBlock, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "lfm2_moe"
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 1e6
_DENSE_LAYERS: Final = 2
_EPSILON: Final = 1e-6
"""Added to the sum that weights are divided by."""
_BLOCK: Final = "feed_forward"


def read(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What an LFM2-MoE configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    keys.only("conv_bias", False)
    count = common.layer_count(keys)
    dense = keys.integer("num_dense_layers", 0, count - 1, _DENSE_LAYERS)
    kinds = common.layer_types(keys, ("conv", "full_attention"))
    if "full_attention" not in kinds:
        raise keys.refusal("layer_types", "some layer of full_attention")
    blocks = (DenseBlock(intermediate=common.width(keys, "intermediate_size")),) if dense else ()
    convolution = Convolution(taps=keys.integer("conv_L_cache", 2, limits.MAX_TAPS, default=3))
    tied = "tie_embedding" if keys.has("tie_embedding") else "tie_word_embeddings"
    model = ModelDescription(
        **common.frame(
            MODEL_TYPE, keys, generation, epsilon=_NORM_EPSILON, epsilon_key="norm_eps", tied=True, tied_key=tied
        ),
        layers=tuple(
            Layer(
                attention=None if kind == "conv" else 0,
                convolution=0 if kind == "conv" else None,
                experts=None if layer < dense else 0,
                dense=0 if layer < dense else None,
            )
            for layer, kind in enumerate(kinds)
        ),
        attentions=(Attention(**common.heads(keys, common.rotary(keys, _ROPE_THETA)), qk_norm="head"),),
        expert_blocks=(_expert_block(keys, count - dense),),
        dense_blocks=blocks,
        convolutions=(convolution,) if "conv" in kinds else (),
    )
    experts = names.per_expert(model, f"model.layers.{{layer}}.{_BLOCK}.experts", names.W)
    weights = names.weight_map(model, _layer, (experts, *names.expert_spellings(model, f"{_BLOCK}.experts")))
    return replace(weights, final=names.final(model, "model.embedding_norm"))


def _expert_block(keys: Config, layers: int) -> ExpertBlock:
    experts = common.expert_count(keys, layers)
    renormalise = keys.flag("norm_topk_prob", default=True)
    return ExpertBlock(
        experts=experts,
        intermediate=common.width(keys, "moe_intermediate_size"),
        router=Router(
            family="sigmoid-topk-renormalise" if renormalise else "sigmoid-topk",
            top_k=keys.integer("num_experts_per_tok", 1, experts),
            selection_bias=keys.flag("use_expert_bias", default=True),
            scale=keys.number("routed_scaling_factor", 0, LARGEST, 1.0),
            epsilon=_EPSILON if renormalise else 0.0,
        ),
    )


def _layer(model: ModelDescription, layer: int) -> Places:
    described = model.layers[layer]
    places = names.norms(model, layer, "operator_norm", "ffn_norm")
    places |= _convolution(model, layer) if described.attention is None else _attention(model, layer)
    if described.dense is not None:
        return places | names.dense(model, layer, _BLOCK, names.W)
    places |= names.router(model, layer, f"{_BLOCK}.gate")
    block = model.expert_block(layer)
    if block.router.selection_bias:
        places["selection_bias"] = vector(f"model.layers.{layer}.{_BLOCK}.expert_bias", block.experts)
    return places


def _attention(model: ModelDescription, layer: int) -> dict[str, Place]:
    places, at = names.attention(model, layer, out="out_proj"), f"model.layers.{layer}.self_attn"
    for stored, name in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
        places[stored] = vector(f"{at}.{name}.weight", model.attention(layer).head_dim)
    return places


def _convolution(model: ModelDescription, layer: int) -> dict[str, Place]:
    """The three parts of the projection into it, its taps, and the projection out of it."""
    hidden, at = model.hidden, f"model.layers.{layer}.conv"
    parts = {
        name: Place(
            f"{at}.in_proj.weight", (3 * hidden, hidden), "out-in", outputs=Selection.span(number * hidden, hidden)
        )
        for number, name in enumerate(("entry_gate", "exit_gate", "entry"))
    }
    index = model.layers[layer].convolution
    assert index is not None
    taps = Place(f"{at}.conv.weight", (hidden, 1, model.convolutions[index].taps), "out-in")
    return {**parts, "taps": taps, "o": matrix(f"{at}.out_proj.weight", hidden, hidden)}
