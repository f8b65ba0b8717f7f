"""Granite-MoE: fused experts, and multipliers, which are folded into the weights they stand before or behind.

The embedding is stored times its multiplier; a tied head is the same matrix, so the final norm divides by it again, and
by the scaling of logits. What goes to the residual stream is multiplied in the output projection and in `down`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from estream_packer.families import common, names
from estream_packer.families.config import LARGEST, Config
from estream_packer.families.places import ExpertSpelling, Group, Places
from estream_packer.families.weights import WeightMap
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Router

MODEL_TYPE: Final = "granitemoe"
_NORM_EPSILON: Final = 1e-6
_ROPE_THETA: Final = 10000.0
_BLOCK: Final = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class _Multipliers:
    """What a configuration multiplies by, besides scores."""

    embedding: float
    residual: float
    logits: float

    @classmethod
    def of(cls, keys: Config) -> Self:
        """Those of a configuration."""
        return cls(
            embedding=keys.number("embedding_multiplier", 0, LARGEST, 1.0),
            residual=keys.number("residual_multiplier", 0, LARGEST, 1.0),
            logits=1 / keys.number("logits_scaling", 0, LARGEST, 1.0),
        )


def read(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a Granite-MoE configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    model, factors = _describe(keys, generation), _Multipliers.of(keys)
    back = 1 / factors.embedding if model.tied_head else 1.0
    block = f"model.layers.{{layer}}.{_BLOCK}"
    spellings = (
        names.fused(model, f"{block}.input_linear.weight", f"{block}.output_linear.weight"),
        *names.fused_spellings(model, f"{block}.experts"),
    )
    weights = names.weight_map(
        model,
        lambda model, layer: _layer(model, layer, factors.residual),
        tuple(_scaled(spelling, factors.residual) for spelling in spellings),
        _routers,
    )
    return replace(
        weights,
        embedding=names.embedding(model, multiplier=factors.embedding),
        final=names.final(model, multiplier=factors.logits * back),
    )


def _describe(keys: Config, generation: Mapping[str, object] | None) -> ModelDescription:
    count = common.layer_count(keys)
    common.check_layers_alike(keys, None)
    experts = common.expert_count(keys, count, "num_local_experts")
    biased = keys.flag("attention_bias", default=False)
    attention = Attention(
        **common.heads(keys, common.rotary(keys, _ROPE_THETA)),
        bias=biased,
        out_bias=biased,
        scale=keys.number("attention_multiplier", 0, LARGEST, 1.0),
    )
    block = ExpertBlock(
        experts=experts,
        intermediate=common.width(keys, "intermediate_size"),
        router=Router(
            family="softmax-topk-renormalise", top_k=keys.integer("num_experts_per_tok", 1, experts, default=2)
        ),
    )
    return ModelDescription(
        **common.frame(MODEL_TYPE, keys, generation, epsilon=_NORM_EPSILON),
        layers=(Layer(attention=0, experts=0),) * count,
        attentions=(attention,),
        expert_blocks=(block,),
    )


def _scaled(spelling: ExpertSpelling, factor: float) -> ExpertSpelling:
    def places(layer: int, expert: int) -> Places:
        found = spelling(layer, expert)
        return {**found, "down": replace(found["down"], multiplier=factor)}

    return places


def _layer(model: ModelDescription, layer: int, factor: float) -> Places:
    attention = names.attention(model, layer)
    for name in attention.keys() & {"o", "o.bias"}:
        attention[name] = replace(attention[name], multiplier=factor)
    return {**names.norms(model, layer), **attention}


def _routers(model: ModelDescription, layer: int) -> tuple[Group, ...]:
    return (tuple(names.router(model, layer, f"{_BLOCK}.{name}") for name in ("router.layer", "router")),)
