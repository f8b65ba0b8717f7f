"""ERNIE-4.5-MoE: dense layers at both ends, shared experts, and a bias by which experts are chosen and not weighed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names, parts
from estream_packer.families.config import Config
from estream_packer.families.places import Group, Place, Places, Selection, halves
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import DenseBlock, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "ernie4_5_moe"
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 500000.0
_SHARED: Final = 2


def describe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that an ERNIE-4.5-MoE configuration describes. Raises as `olmoe.describe` does."""
    keys = Config(config)
    parts.only_silu(keys)
    keys.only("use_bias", False)
    count = parts.layer_count(keys)
    routed = _routed(keys, count)
    experts = common.expert_count(keys, count)
    width = keys.integer("moe_intermediate_size", 1, limits.MAX_DIMENSION)
    shared = parts.integer_or(keys, "moe_num_shared_experts", _SHARED, 0, limits.MAX_EXPERTS)
    blocks = [DenseBlock(intermediate=width * shared)] if shared else []
    if not all(routed):
        blocks.append(DenseBlock(intermediate=keys.integer("intermediate_size", 1, limits.MAX_DIMENSION)))
    router = Router(family="softmax-topk-renormalise", top_k=keys.integer("moe_k", 1, experts), selection_bias=True)
    return parts.model(
        MODEL_TYPE,
        keys,
        generation,
        norm_epsilon=common.norm_epsilon(keys, _NORM_EPSILON),
        layers=tuple(
            Layer(attention=0, experts=0, dense=0 if shared else None)
            if has_experts
            else Layer(attention=0, dense=len(blocks) - 1)
            for has_experts in routed
        ),
        attentions=(parts.attention(keys, _ROPE_THETA),),
        expert_blocks=(ExpertBlock(experts=experts, intermediate=width, router=router),),
        dense_blocks=tuple(blocks),
        tied_head=keys.flag("tie_word_embeddings", default=True),
    )


def weights(model: ModelDescription) -> WeightMap:
    """Where each tensor of a described ERNIE-4.5-MoE lies in its checkpoint."""
    return WeightMap(
        model=model,
        embedding=names.embedding(model),
        layers=tuple(_layer(model, layer) for layer in range(len(model.layers))),
        experts=names.expert_spellings(model),
        final=names.final(model),
        tied_head=names.tied_head(model),
        skipped=("model.mtp_",),
    )


def _routed(keys: Config, count: int) -> list[bool]:
    """Whether each layer has experts."""
    first = parts.integer_or(keys, "moe_layer_start_index", 1, 0, count - 1)
    last = parts.integer_or(keys, "moe_layer_end_index", -1, -1, count - 1)
    interval = parts.integer_or(keys, "moe_layer_interval", 1, 1, limits.MAX_LAYERS)
    end = count - 1 if last == -1 else last
    routed = [first <= layer <= end and (layer + 1) % interval == 0 for layer in range(count)]
    if not any(routed):
        raise keys.refusal("moe_layer_start_index", f"some of the {count} layers to have experts")
    return routed


def _layer(model: ModelDescription, layer: int) -> tuple[Group, ...]:
    attention = names.attention(model, layer)
    width = model.attention(layer).head_dim
    for name, heads in (("q", model.attention(layer).heads), ("k", model.attention(layer).key_value_heads)):
        attention[name] = _paired(attention[name], heads, width)
    places: Places = {**names.norms(model, layer), **attention}
    described = model.layers[layer]
    if described.experts is None:
        return (({**places, **names.dense(model, layer)},),)
    if described.dense is not None:
        places = {**places, **names.dense(model, layer, "mlp.shared_experts")}
    experts, at = model.expert_block(layer).experts, f"model.layers.{layer}.mlp"
    biases = tuple(
        {"selection_bias": Place(f"{at}.{name}.e_score_correction_bias", (1, experts), index=0)}
        for name in ("moe_statics", "gate.moe_statics")
    )
    return ({**places, **names.router(model, layer)},), biases


def _paired(place: Place, heads: int, width: int) -> Place:
    """A projection whose neighbouring channels rotate together."""
    return Place(place.name, place.shape, place.layout, outputs=Selection(heads, width, halves(width)))
