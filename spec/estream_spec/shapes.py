"""Published models by shape alone, for planning and for synthetic packages: no weights, and no checkpoint needed.

Where a model does something the model description cannot say yet, the shape says the nearest thing that costs the same
bytes and the same products. Source: each model's published `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router

OLMOE_1B_7B: Final = ModelDescription(
    family="olmoe",
    hidden=2048,
    vocabulary=50304,
    context_length=4096,
    norm_epsilon=1e-5,
    layers=(Layer(attention=0, experts=0),) * 16,
    attentions=(Attention(heads=16, key_value_heads=16, head_dim=128, rotary=Rotary(theta=10000.0), qk_norm="full"),),
    expert_blocks=(ExpertBlock(experts=64, intermediate=1024, router=Router(family="softmax-topk", top_k=8)),),
    end_tokens=(50279,),
)
"""OLMoE-1B-7B-0924, exactly."""

MIXTRAL_8X7B: Final = ModelDescription(
    family="mixtral",
    hidden=4096,
    vocabulary=32000,
    context_length=32768,
    norm_epsilon=1e-5,
    layers=(Layer(attention=0, experts=0),) * 32,
    attentions=(Attention(heads=32, key_value_heads=8, head_dim=128, rotary=Rotary(theta=1e6)),),
    expert_blocks=(
        ExpertBlock(experts=8, intermediate=14336, router=Router(family="softmax-topk-renormalise", top_k=2)),
    ),
    end_tokens=(2,),
)
"""Mixtral-8x7B-v0.1. Its router takes the softmax over the two largest scores alone, which is the same weight as this
one's but for rounding."""

QWEN3_30B_A3B: Final = ModelDescription(
    family="qwen3_moe",
    hidden=2048,
    vocabulary=151936,
    context_length=40960,
    norm_epsilon=1e-6,
    layers=(Layer(attention=0, experts=0),) * 48,
    attentions=(Attention(heads=32, key_value_heads=4, head_dim=128, rotary=Rotary(theta=1e6), qk_norm="full"),),
    expert_blocks=(
        ExpertBlock(experts=128, intermediate=768, router=Router(family="softmax-topk-renormalise", top_k=8)),
    ),
    end_tokens=(151645, 151643),
)
"""Qwen3-30B-A3B. It normalises each head of queries and keys by itself, with one weight of 128 for all of them; this
shape normalises all heads together."""

SHAPES: Final[Mapping[str, ModelDescription]] = {
    "olmoe-1b-7b": OLMOE_1B_7B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
"""Shapes by the name that command lines take."""
