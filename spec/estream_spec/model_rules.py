"""What a model description must satisfy. FORMAT.md section 8.

Structure and ranges of single values are checked where they are decoded; here stands what ties values to each other,
and what only becomes wrong when it is rounded to f32. Each function raises the first fault it finds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from estream_spec.limits import MAX_DIMENSION
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Router
from estream_spec.rulebook import require


def check_model(model: ModelDescription) -> None:
    """Judge a model description.

    Raises:
        InvalidError: see FORMAT.md section 8.
    """
    path = "manifest.model"
    _check_not_negative(model.norm_epsilon, "EMOE-MOD-001", f"{path}.norm_epsilon")
    for index, attention in enumerate(model.attentions):
        _check_attention(attention, f"{path}.attentions[{index}]")
    for index, block in enumerate(model.expert_blocks):
        _check_experts(block, f"{path}.expert_blocks[{index}]")
    for index, layer in enumerate(model.layers):
        _check_layer(layer, f"{path}.layers[{index}]")
    for name, used, count in (
        ("attentions", (layer.attention for layer in model.layers), len(model.attentions)),
        ("expert_blocks", (layer.experts for layer in model.layers), len(model.expert_blocks)),
        ("dense_blocks", (layer.dense for layer in model.layers), len(model.dense_blocks)),
        ("convolutions", (layer.convolution for layer in model.layers), len(model.convolutions)),
    ):
        _check_classes((each for each in used if each is not None), count, f"{path}.{name}")
    tokens = [*model.end_tokens, *([] if model.begin_token is None else [model.begin_token])]
    for token in tokens:
        message = f"token {token} in a vocabulary of {model.vocabulary}, expected a lower one"
        require(token < model.vocabulary, "EMOE-MOD-009", message, path)


def as_f32(value: float) -> float:
    """A number as models compute with it: rounded to f32, infinite where that is too large for it."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _check_attention(attention: Attention, where: str) -> None:
    rotary, heads, shared = attention.rotary, attention.heads, attention.key_value_heads
    if attention.latent is not None:
        _check_not_negative(attention.latent.norm_epsilon, "EMOE-MOD-001", f"{where}.latent.norm_epsilon")
    for name, number, rule in (
        ("rotary.theta", rotary.theta, "EMOE-MOD-002"),
        *(("rotary.frequencies", number, "EMOE-MOD-002") for number in rotary.frequencies),
        ("rotary.scale", rotary.scale, "EMOE-MOD-002"),
        ("clip_qkv", attention.clip_qkv, "EMOE-MOD-003"),
        ("scale", attention.scale, "EMOE-MOD-003"),
    ):
        _check_positive(number, rule, f"{where}.{name}")
    message = f"{heads} heads and {shared} key_value_heads, expected a divisor"
    require(heads % shared == 0, "EMOE-MOD-004", message, f"{where}.key_value_heads")
    rotated, width = attention.rotated, attention.head_dim
    message = f"{rotated} numbers of {width} in a head are rotated, expected an even number of at most {width}"
    field = "head_dim" if rotary.width is None else "rotary.width"
    require(rotated % 2 == 0 and rotated <= width, "EMOE-MOD-005", message, f"{where}.{field}")
    widest = heads * max(width, attention.value_width)
    message = f"heads are {widest} wide together, the limit is {MAX_DIMENSION}"
    require(widest <= MAX_DIMENSION, "EMOE-MOD-006", message, where)
    count = len(rotary.frequencies)
    message = f"{count} frequencies for {rotated} rotated numbers, expected none or {rotated // 2}"
    require(count in (0, rotated // 2), "EMOE-MOD-010", message, f"{where}.rotary.frequencies")
    if attention.latent is not None:
        _check_latent(attention, where)


def _check_latent(attention: Attention, where: str) -> None:
    heads, shared, rotated = attention.heads, attention.key_value_heads, attention.rotated
    plain = attention.qk_norm == "none" and attention.clip_qkv is None and not attention.bias
    message = "latent attention has qk_norm, clip_qkv or bias, expected none of them"
    require(plain, "EMOE-MOD-011", message, f"{where}.latent")
    message = f"latent attention has {heads} heads and {shared} key_value_heads, expected as many"
    require(heads == shared, "EMOE-MOD-011", message, f"{where}.key_value_heads")
    message = f"latent attention rotates {rotated} of {attention.head_dim} numbers in a head, expected fewer than all"
    require(rotated < attention.head_dim, "EMOE-MOD-011", message, f"{where}.rotary.width")


def _check_experts(block: ExpertBlock, where: str) -> None:
    router = block.router
    message = f"top_k {router.top_k} of {block.experts} experts, expected at most as many"
    require(router.top_k <= block.experts, "EMOE-MOD-007", message, f"{where}.router.top_k")
    _check_groups(router, block.experts, f"{where}.router")
    _check_router(router, f"{where}.router")
    clamped = block.activation == "clamped-swiglu"
    message = f"activation {block.activation!r} with limit {block.limit}, expected {'one' if clamped else 'none'}"
    require((block.limit is not None) == clamped, "EMOE-MOD-014", message, f"{where}.limit")
    _check_positive(block.limit, "EMOE-MOD-014", f"{where}.limit")


def _check_groups(router: Router, experts: int, where: str) -> None:
    """Groups must be of one size, and those that are not left out must have experts enough."""
    groups, top = router.groups, router.top_groups
    message = f"{groups} groups of {experts} experts, expected a divisor"
    require(experts % groups == 0, "EMOE-MOD-012", message, f"{where}.groups")
    size = experts // groups
    message = f"{top} of {groups} groups of {size} experts are not left out, expected at most {groups}"
    message += f" with {router.top_k} experts or more"
    require(top <= groups and top * size >= router.top_k, "EMOE-MOD-012", message, f"{where}.top_groups")
    message = "groups of 1 expert count by their two largest, expected groups of at least 2"
    require(groups == 1 or size >= 2 or router.group_score == "largest", "EMOE-MOD-012", message, f"{where}.groups")


def _check_router(router: Router, where: str) -> None:
    mixer = router.family == "sparsemixer"
    message = f"family {router.family!r} with tolerance {router.tolerance}, expected 0"
    require(mixer or router.tolerance == 0, "EMOE-MOD-013", message, f"{where}.tolerance")
    message = "family 'sparsemixer' with groups or a selection bias, expected neither"
    require(not mixer or (router.groups == 1 and not router.selection_bias), "EMOE-MOD-013", message, where)
    _check_positive(router.scale, "EMOE-MOD-013", f"{where}.scale")
    _check_not_negative(router.epsilon, "EMOE-MOD-013", f"{where}.epsilon")
    _check_not_negative(router.tolerance, "EMOE-MOD-013", f"{where}.tolerance")


def _check_layer(layer: Layer, where: str) -> None:
    message = f"layer has attention {layer.attention} and convolution {layer.convolution}, expected one of them"
    require((layer.attention is None) != (layer.convolution is None), "EMOE-MOD-015", message, where)
    message = "layer has neither experts nor a dense block, expected one or both"
    require(layer.experts is not None or layer.dense is not None, "EMOE-MOD-015", message, where)
    message = f"layer has a convolution and a window of {layer.window}, expected none"
    require(layer.convolution is None or layer.window is None, "EMOE-MOD-015", message, f"{where}.window")


def _check_positive(number: float | None, rule: str, where: str) -> None:
    """Where there is a number, it is above 0 and finite as f32."""
    if number is not None:
        message = f"{_named(where)} {number}, expected a number that is finite and above 0 as f32"
        require(0 < as_f32(number) < math.inf, rule, message, where)


def _check_not_negative(number: float, rule: str, where: str) -> None:
    """A number, known to be at least 0, is finite as f32."""
    message = f"{_named(where)} {number}, expected a number that is finite as f32"
    require(math.isfinite(as_f32(number)), rule, message, where)


def _named(where: str) -> str:
    """What a field is called."""
    return where.rpartition(".")[2]


def _check_classes(used: Iterable[int], count: int, path: str) -> None:
    odd = min(set(used) ^ set(range(count)), default=None)
    message = f"shape class {odd} is used or defined, expected both; there are {count}"
    require(odd is None, "EMOE-MOD-008", message, path)
