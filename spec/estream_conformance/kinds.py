"""Small models with what the smallest one lacks: one kind of block, router, norm or bias each. FORMAT.md section 8."""

from __future__ import annotations

from typing import Any, Final

from estream_conformance.builder import Draft, Values
from estream_conformance.keys import in_order
from estream_conformance.packages import draft, smallest_model

QUANTISED: Final = {
    "embedding": "w8",
    **dict.fromkeys(("q", "k", "v", "query_latent", "latent", "k_rotated"), "w8"),
    **dict.fromkeys(("entry", "entry_gate", "exit_gate"), "w4g32"),
    "o": "w4g64",
    **dict.fromkeys(("dense_gate", "dense_up", "dense_down"), "w8"),
    "head": "w8",
    **dict.fromkeys(("gate", "up", "down"), "w4g32"),
}
"""Every matrix that may be quantised."""


def changed(**changes: Any) -> Values:
    """The smallest model with other values of its own."""
    return in_order("model", smallest_model() | changes)


def with_attention(**changes: Any) -> Values:
    """The smallest model with another attention."""
    model = smallest_model()
    model["attentions"] = [in_order("attentions", model["attentions"][0] | changes)]
    return model


def with_block(experts: int = 4, **changes: Any) -> Values:
    """The smallest model with other experts."""
    model = smallest_model()
    block = {"experts": experts, "intermediate": 3, "router": model["expert_blocks"][0]["router"]}
    model["expert_blocks"] = [in_order("expert_blocks", block | changes)]
    return model


def with_router(experts: int = 4, **changes: Any) -> Values:
    """The smallest model with more experts and another router."""
    return with_block(experts, router=in_order("router", {"family": "softmax-topk", "top_k": 2} | changes))


def dense_layer() -> Values:
    """A layer of experts between two that have a dense block instead."""
    dense = {"attention": 0, "dense": 0}
    return changed(layers=[dense, {"attention": 0, "experts": 0}, dense], dense_blocks=[{"intermediate": 5}])


def shared_block(**changes: Any) -> Values:
    """A layer of experts with a dense block beside them."""
    layers = [{"attention": 0, "experts": 0, "dense": 0}]
    return changed(layers=layers, dense_blocks=[{"intermediate": 2} | changes])


def convolution(taps: int = 3) -> Values:
    """A layer with a convolution, and one with attention."""
    layers = [{"experts": 0, "convolution": 0}, {"attention": 0, "experts": 0}]
    return changed(layers=layers, convolutions=[{"taps": taps}])


def latent(**changes: Any) -> Values:
    """Latent attention: two heads 6 wide, of which 2 are rotated, with values 3 wide."""
    shape = {"heads": 2, "key_value_heads": 2, "head_dim": 6, "rotary": {"theta": 1.0, "width": 2}, "value_dim": 3}
    return with_attention(**shape, latent={"rank": 5, "norm_epsilon": 1e-6} | changes)


def everything() -> Values:
    """A model with all kinds of blocks, every bias, layer norms and a window, no two layers alike."""
    rotary = {"theta": 10000.0, "width": 4, "frequencies": [0.5, 0.25], "scale": 1.25}
    plain = {"heads": 4, "key_value_heads": 2, "head_dim": 6, "rotary": rotary}
    biased = {**plain, "qk_norm": "head", "value_dim": 8, "scale": 0.5, "bias": True, "out_bias": True, "sinks": True}
    narrow = {**plain, "key_value_heads": 4, "latent": {"rank": 7, "norm_epsilon": 1e-6, "query_rank": 5}}
    chosen = {"top_k": 2, "selection_bias": True, "groups": 2, "group_score": "two-largest", "scale": 2.5}
    return changed(
        hidden=12,
        vocabulary=9,
        layers=[
            {"attention": 1, "dense": 1},
            {"experts": 1, "dense": 0, "convolution": 0},
            {"attention": 0, "experts": 0, "dense": 1, "window": 3},
            {"dense": 0, "convolution": 1},
            {"attention": 0, "experts": 0},
        ],
        attentions=[biased, narrow],
        expert_blocks=[
            {
                "experts": 5,
                "intermediate": 6,
                "router": {"family": "softmax-topk", "top_k": 3, "bias": True},
                "activation": "clamped-swiglu",
                "limit": 7.0,
                "bias": True,
            },
            {
                "experts": 4,
                "intermediate": 8,
                "router": {"family": "sigmoid-topk-renormalise", **chosen, "epsilon": 1e-20},
            },
        ],
        dense_blocks=[{"intermediate": 10, "share": True}, {"intermediate": 34}],
        convolutions=[{"taps": 2}, {"taps": 64}],
        norm="layer",
        head_bias=True,
    )


def with_convolution() -> Draft:
    """A package with a convolution."""
    return draft(convolution())


def with_latent() -> Draft:
    """A package with latent attention."""
    return draft(latent())


def with_shared_block() -> Draft:
    """A package with a dense block."""
    return draft(shared_block())
