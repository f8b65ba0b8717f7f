"""Qwen2-MoE and Qwen3-MoE: dense layers among routed ones; one with a shared expert, one with head norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import Config
from estream_packer.families.places import Place, Places
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, DenseBlock, Layer, ModelDescription

QWEN2: Final = "qwen2_moe"
QWEN3: Final = "qwen3_moe"
_NORM_EPSILON: Final = 1e-6
_ROPE_THETA: Final = 10000.0
_SHARED_WIDTH: Final = 5632
_WINDOW: Final = 4096


def read_qwen2(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a Qwen2-MoE configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    if keys.flag("use_sliding_window", default=False):
        raise keys.refusal("use_sliding_window", "false: which layers have a window differs between versions")
    common.check_layers_alike(keys, None)
    heads = common.heads(keys, common.rotary(keys, _ROPE_THETA))
    attention = Attention(**heads, bias=keys.flag("qkv_bias", default=True))
    shared = DenseBlock(
        intermediate=common.width(keys, "shared_expert_intermediate_size", _SHARED_WIDTH),
        share=True,
    )
    return _read(QWEN2, keys, generation, attention, shared, None)


def read_qwen3(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a Qwen3-MoE configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    windowed = keys.flag("use_sliding_window", default=False)
    window = common.window(keys, common.context_length(keys), _WINDOW) if windowed else None
    common.check_layers_alike(keys, window)
    biased = keys.flag("attention_bias", default=False)
    heads = common.heads(keys, common.rotary(keys, _ROPE_THETA))
    attention = Attention(**heads, bias=biased, out_bias=biased, qk_norm="head")
    return _read(QWEN3, keys, generation, attention, None, window)


def _read(
    family: str,
    keys: Config,
    generation: Mapping[str, object] | None,
    attention: Attention,
    shared: DenseBlock | None,
    window: int | None,
) -> WeightMap:
    routed = _routed(keys)
    blocks = [] if shared is None else [shared]
    if not all(routed):
        blocks.append(DenseBlock(intermediate=common.width(keys, "intermediate_size")))
    with_experts = Layer(attention=0, experts=0, dense=None if shared is None else 0, window=window)
    without = Layer(attention=0, dense=len(blocks) - 1, window=window)
    model = ModelDescription(
        **common.frame(family, keys, generation, epsilon=_NORM_EPSILON),
        layers=tuple(with_experts if has_experts else without for has_experts in routed),
        attentions=(attention,),
        expert_blocks=(common.softmax_experts(keys, sum(routed), "moe_intermediate_size"),),
        dense_blocks=tuple(blocks),
    )
    return names.weight_map(model, _layer)


def _routed(keys: Config) -> list[bool]:
    """Whether each layer has experts."""
    count = common.layer_count(keys)
    step = keys.integer("decoder_sparse_step", 1, limits.MAX_LAYERS, default=1)
    dense = keys.values["mlp_only_layers"] if keys.has("mlp_only_layers") else []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise keys.refusal("mlp_only_layers", "a list of layers")
    routed = [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]
    if not any(routed):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        raise keys.refusal(key, f"some of the {count} layers to have experts, with decoder_sparse_step {step}")
    return routed


def _layer(model: ModelDescription, layer: int) -> Places:
    places = {**names.norms(model, layer), **names.attention(model, layer)}
    if model.layers[layer].experts is None:
        return places | names.dense(model, layer)
    places |= names.router(model, layer)
    if model.layers[layer].dense is not None:
        places |= names.dense(model, layer, "mlp.shared_expert")
        gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        places["share"] = Place(gate, (1, model.hidden), index=0)
    return places
