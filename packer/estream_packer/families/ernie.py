"""ERNIE-4.5-MoE: dense layers at both ends, shared experts, and a bias by which experts are chosen and not weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import Config
from estream_packer.families.places import Group, Place, Places, Selection, halves
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, DenseBlock, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "ernie4_5_moe"
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 500000.0
_SHARED: Final = 2
_LEAST_SUM: Final = 1e-12


def read(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What an ERNIE-4.5-MoE configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    _check_routing(keys)
    common.check_layers_alike(keys, None)
    routed = _routed(keys)
    experts = common.expert_count(keys, sum(routed), "moe_num_experts")
    width = common.width(keys, "moe_intermediate_size")
    shared = common.shared_width(keys, "moe_num_shared_experts", _SHARED, width, fewest=0)
    blocks = [DenseBlock(intermediate=shared)] if shared else []
    if not all(routed):
        blocks.append(DenseBlock(intermediate=common.width(keys, "intermediate_size")))
    top_k = keys.integer(common.agreed(keys, "moe_k", "num_experts_per_tok"), 1, experts)
    router = Router(family="softmax-topk-renormalise", top_k=top_k, selection_bias=True)
    with_experts = Layer(attention=0, experts=0, dense=0 if shared else None)
    without = Layer(attention=0, dense=len(blocks) - 1)
    model = ModelDescription(
        **common.frame(MODEL_TYPE, keys, generation, epsilon=_NORM_EPSILON, tied=True),
        layers=tuple(with_experts if has_experts else without for has_experts in routed),
        attentions=(Attention(**common.heads(keys, common.rotary(keys, _ROPE_THETA))),),
        expert_blocks=(ExpertBlock(experts=experts, intermediate=width, router=router),),
        dense_blocks=tuple(blocks),
    )
    return replace(names.weight_map(model, _layer, spelled=_biases), skipped=("model.mtp_",))


def _check_routing(keys: Config) -> None:
    """Refuse what only other code than transformers' computes, which has it one way."""
    keys.only("use_bias", False)
    keys.only("moe_gate", "topk")
    keys.only("moe_use_aux_free", True)
    keys.only("norm_topk_prob", True)
    # The least that weights are divided by; the sum of probabilities that were chosen for their size is never so small.
    keys.only("moe_norm_min", _LEAST_SUM)


def _routed(keys: Config) -> list[bool]:
    """Whether each layer has experts."""
    count = common.layer_count(keys)
    first = keys.integer("moe_layer_start_index", 0, count - 1, default=1)
    last = keys.integer("moe_layer_end_index", -1, limits.MAX_LAYERS, default=-1)
    interval = keys.integer("moe_layer_interval", 1, limits.MAX_LAYERS, default=1)
    end = count - 1 if last == -1 else last
    routed = [first <= layer <= end and (layer + 1) % interval == 0 for layer in range(count)]
    if not any(routed):
        key = "moe_layer_end_index" if end < first else "moe_layer_interval"
        raise keys.refusal(key, f"some of the {count} layers to have experts")
    return routed


def _layer(model: ModelDescription, layer: int) -> Places:
    attention = names.attention(model, layer)
    width = model.attention(layer).head_dim
    for name, heads in (("q", model.attention(layer).heads), ("k", model.attention(layer).key_value_heads)):
        attention[name] = _paired(attention[name], heads, width)
    places = {**names.norms(model, layer), **attention}
    described = model.layers[layer]
    if described.experts is None:
        return places | names.dense(model, layer)
    if described.dense is not None:
        places |= names.dense(model, layer, "mlp.shared_experts")
    return places | names.router(model, layer)


def _biases(model: ModelDescription, layer: int) -> tuple[Group, ...]:
    if model.layers[layer].experts is None:
        return ()
    experts, at = model.expert_block(layer).experts, f"model.layers.{layer}.mlp"
    spellings = (f"{at}.{name}.e_score_correction_bias" for name in ("moe_statics", "gate.moe_statics"))
    return (tuple({"selection_bias": Place(name, (1, experts), index=0)} for name in spellings),)


def _paired(place: Place, heads: int, width: int) -> Place:
    """A projection whose neighbouring channels rotate together."""
    return Place(place.name, place.shape, place.layout, outputs=Selection(heads, width, halves(width)))
