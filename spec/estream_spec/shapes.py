"""Published models by shape alone, for planning and for synthetic packages: no weights, and no checkpoint needed.

Each is what the packer makes of the model's published `config.json`, but for rotary encodings that are scaled to a
longer context: here their frequencies follow from the base, which costs the same bytes and the same products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_spec.model import (
    Attention,
    Convolution,
    DenseBlock,
    ExpertBlock,
    Latent,
    Layer,
    ModelDescription,
    Rotary,
    Router,
)

_ROUTED: Final = Layer(attention=0, experts=0)
_BESIDE: Final = Layer(attention=0, experts=0, dense=0)
"""With a shared expert."""
_DENSE: Final = Layer(attention=0, dense=1)
"""Dense, in a model whose other layers have a shared expert."""

OLMOE_1B_7B: Final = ModelDescription(
    family="olmoe",
    hidden=2048,
    vocabulary=50304,
    context_length=4096,
    norm_epsilon=1e-5,
    layers=(_ROUTED,) * 16,
    attentions=(Attention(heads=16, key_value_heads=16, head_dim=128, rotary=Rotary(theta=1e4), qk_norm="full"),),
    expert_blocks=(ExpertBlock(experts=64, intermediate=1024, router=Router(family="softmax-topk", top_k=8)),),
    end_tokens=(50279,),
)

QWEN15_MOE_A27B: Final = ModelDescription(
    family="qwen2_moe",
    hidden=2048,
    vocabulary=151936,
    context_length=8192,
    norm_epsilon=1e-6,
    layers=(_BESIDE,) * 24,
    attentions=(Attention(heads=16, key_value_heads=16, head_dim=128, rotary=Rotary(theta=1e6), bias=True),),
    expert_blocks=(ExpertBlock(experts=60, intermediate=1408, router=Router(family="softmax-topk", top_k=4)),),
    dense_blocks=(DenseBlock(intermediate=5632, share=True),),
    end_tokens=(151643,),
)

DEEPSEEK_V2_LITE: Final = ModelDescription(
    family="deepseek_v2",
    hidden=2048,
    vocabulary=102400,
    context_length=163840,
    norm_epsilon=1e-6,
    layers=(_DENSE,) + (_BESIDE,) * 26,
    attentions=(
        Attention(
            heads=16,
            key_value_heads=16,
            head_dim=192,
            rotary=Rotary(theta=1e4, width=64),
            value_dim=128,
            scale=0.11472138679292611,
            latent=Latent(rank=512, norm_epsilon=1e-6),
        ),
    ),
    expert_blocks=(ExpertBlock(experts=64, intermediate=1408, router=Router(family="softmax-topk", top_k=6)),),
    dense_blocks=(DenseBlock(intermediate=2816), DenseBlock(intermediate=10944)),
    end_tokens=(100001,),
)

MIXTRAL_8X7B: Final = ModelDescription(
    family="mixtral",
    hidden=4096,
    vocabulary=32000,
    context_length=32768,
    norm_epsilon=1e-5,
    layers=(_ROUTED,) * 32,
    attentions=(Attention(heads=32, key_value_heads=8, head_dim=128, rotary=Rotary(theta=1e6)),),
    expert_blocks=(
        ExpertBlock(experts=8, intermediate=14336, router=Router(family="softmax-topk-renormalise", top_k=2)),
    ),
    end_tokens=(2,),
)

QWEN3_30B_A3B: Final = ModelDescription(
    family="qwen3_moe",
    hidden=2048,
    vocabulary=151936,
    context_length=40960,
    norm_epsilon=1e-6,
    layers=(_ROUTED,) * 48,
    attentions=(Attention(heads=32, key_value_heads=4, head_dim=128, rotary=Rotary(theta=1e6), qk_norm="head"),),
    expert_blocks=(
        ExpertBlock(experts=128, intermediate=768, router=Router(family="softmax-topk-renormalise", top_k=8)),
    ),
    end_tokens=(151645, 151643),
)

GPT_OSS_20B: Final = ModelDescription(
    family="gpt_oss",
    hidden=2880,
    vocabulary=201088,
    context_length=131072,
    norm_epsilon=1e-5,
    layers=(Layer(attention=0, experts=0, window=128), _ROUTED) * 12,
    attentions=(
        Attention(
            heads=64,
            key_value_heads=8,
            head_dim=64,
            rotary=Rotary(theta=150000.0),
            bias=True,
            out_bias=True,
            sinks=True,
        ),
    ),
    expert_blocks=(
        ExpertBlock(
            experts=32,
            intermediate=2880,
            router=Router(family="softmax-topk-renormalise", top_k=4, bias=True),
            activation="clamped-swiglu",
            limit=7.0,
            bias=True,
        ),
    ),
    end_tokens=(200002, 199999, 200012),
)

GRANITE_30_1B_A400M: Final = ModelDescription(
    family="granitemoe",
    hidden=1024,
    vocabulary=49155,
    context_length=4096,
    norm_epsilon=1e-6,
    layers=(_ROUTED,) * 24,
    attentions=(Attention(heads=16, key_value_heads=8, head_dim=64, rotary=Rotary(theta=1e4), scale=0.015625),),
    expert_blocks=(
        ExpertBlock(experts=32, intermediate=512, router=Router(family="softmax-topk-renormalise", top_k=8)),
    ),
    tied_head=True,
    end_tokens=(0,),
)

_LFM2_ATTENTION: Final = (2, 6, 10, 14, 18, 21)
"""The layers that have no convolution."""

LFM2_8B_A1B: Final = ModelDescription(
    family="lfm2_moe",
    hidden=2048,
    vocabulary=65536,
    context_length=128000,
    norm_epsilon=1e-5,
    layers=(Layer(convolution=0, dense=0),) * 2
    + tuple(_ROUTED if layer in _LFM2_ATTENTION else Layer(convolution=0, experts=0) for layer in range(2, 24)),
    attentions=(Attention(heads=32, key_value_heads=8, head_dim=64, rotary=Rotary(theta=1e6), qk_norm="head"),),
    expert_blocks=(
        ExpertBlock(
            experts=32,
            intermediate=1792,
            router=Router(family="sigmoid-topk-renormalise", top_k=4, selection_bias=True, epsilon=1e-6),
        ),
    ),
    dense_blocks=(DenseBlock(intermediate=7168),),
    convolutions=(Convolution(taps=3),),
    tied_head=True,
    end_tokens=(7,),
)

MOONLIGHT_16B_A3B: Final = ModelDescription(
    family="deepseek_v3",
    hidden=2048,
    vocabulary=163840,
    context_length=8192,
    norm_epsilon=1e-5,
    layers=(_DENSE,) + (_BESIDE,) * 26,
    attentions=(
        Attention(
            heads=16,
            key_value_heads=16,
            head_dim=192,
            rotary=Rotary(theta=5e4, width=64),
            value_dim=128,
            latent=Latent(rank=512, norm_epsilon=1e-6),
        ),
    ),
    expert_blocks=(
        ExpertBlock(
            experts=64,
            intermediate=1408,
            router=Router(family="sigmoid-topk-renormalise", top_k=6, selection_bias=True, scale=2.446, epsilon=1e-20),
        ),
    ),
    dense_blocks=(DenseBlock(intermediate=2816), DenseBlock(intermediate=11264)),
    end_tokens=(163585,),
)

PHI_35_MOE: Final = ModelDescription(
    family="phimoe",
    hidden=4096,
    vocabulary=32064,
    context_length=4096,
    norm_epsilon=1e-5,
    layers=(_ROUTED,) * 32,
    attentions=(
        Attention(heads=32, key_value_heads=8, head_dim=128, rotary=Rotary(theta=1e4), bias=True, out_bias=True),
    ),
    expert_blocks=(
        ExpertBlock(experts=16, intermediate=6400, router=Router(family="sparsemixer", top_k=2, tolerance=0.01)),
    ),
    norm="layer",
    head_bias=True,
    end_tokens=(32000,),
)

ERNIE_45_21B_A3B: Final = ModelDescription(
    family="ernie4_5_moe",
    hidden=2560,
    vocabulary=103424,
    context_length=131072,
    norm_epsilon=1e-5,
    layers=(_DENSE,) + (_BESIDE,) * 27,
    attentions=(Attention(heads=20, key_value_heads=4, head_dim=128, rotary=Rotary(theta=5e5)),),
    expert_blocks=(
        ExpertBlock(
            experts=64,
            intermediate=1536,
            router=Router(family="softmax-topk-renormalise", top_k=6, selection_bias=True),
        ),
    ),
    dense_blocks=(DenseBlock(intermediate=3072), DenseBlock(intermediate=12288)),
    tied_head=True,
    end_tokens=(2,),
)

SHAPES: Final[Mapping[str, ModelDescription]] = {
    "olmoe-1b-7b": OLMOE_1B_7B,
    "qwen1.5-moe-a2.7b": QWEN15_MOE_A27B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "granite-3.0-1b-a400m": GRANITE_30_1B_A400M,
    "lfm2-8b-a1b": LFM2_8B_A1B,
    "moonlight-16b-a3b": MOONLIGHT_16B_A3B,
    "phi-3.5-moe": PHI_35_MOE,
    "ernie-4.5-21b-a3b": ERNIE_45_21B_A3B,
}
"""Shapes by the name that command lines take."""
