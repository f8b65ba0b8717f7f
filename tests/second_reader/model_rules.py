"""Rules on the model description and on what the manifest says of graphs: FORMAT.md sections 8 and 10.2."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite, prod
from struct import Struct
from typing import Any, Final

from second_reader import limits
from second_reader.rules import require

F32: Final = Struct("<f")
ALL_F32: Final = frozenset({("f32", "f32")})
SETS: Final = (
    ALL_F32,
    frozenset({("f32", "int8")}),
    frozenset({("dynamic-int8", "int8"), ("dynamic-int8", "uint8")}),
)
"""Of (activations, weights)."""
CLASS_LISTS: Final = {
    "attention": "attentions",
    "experts": "expert_blocks",
    "dense": "dense_blocks",
    "convolution": "convolutions",
}
"""Where the model describes what a layer names by an index."""
ELEMENT_BYTES: Final = {"f32": 4, "i8": 1, "u8": 1}

OutClass = tuple[int | None, int | None, int | None]
"""Attention, convolution and experts of a layer."""
GraphSets = dict[tuple[str, int], frozenset[tuple[str, str]]]
"""For each role and shape class the (activations, weights) of its graphs."""


def check_model(model: dict[str, Any]) -> None:
    """EMOE-MOD-001 to EMOE-MOD-015, in the order of section 9.4."""
    _require_finite(model["norm_epsilon"], "MOD-001")
    for attention in model["attentions"]:
        _check_attention(attention)
    for block in model["expert_blocks"]:
        _check_experts(block)
    for layer in model["layers"]:
        require((layer["attention"] is None) != (layer["convolution"] is None), "MOD-015")
        require(layer["experts"] is not None or layer["dense"] is not None, "MOD-015")
        require(layer["convolution"] is None or layer["window"] is None, "MOD-015")
    for key, classes in CLASS_LISTS.items():
        used = {layer[key] for layer in model["layers"]} - {None}
        require(used == set(range(len(model[classes]))), "MOD-008")
    tokens = [*model["end_tokens"], model["begin_token"] or 0]
    require(max(tokens) < model["vocabulary"], "MOD-009")


def _check_attention(attention: dict[str, Any]) -> None:
    rotary, latent, head_dim = attention["rotary"], attention["latent"], attention["head_dim"]
    if latent is not None:
        _require_finite(latent["norm_epsilon"], "MOD-001")
    for number in (rotary["theta"], *rotary["frequencies"], rotary["scale"]):
        _require_positive(number, "MOD-002")
    for bound in (attention["clip_qkv"], attention["scale"]):
        _require_positive(bound, "MOD-003")
    require(attention["heads"] % attention["key_value_heads"] == 0, "MOD-004")
    rotated = rotated_width(attention)
    require(rotated % 2 == 0 and rotated <= head_dim, "MOD-005")
    require(attention["heads"] * max(head_dim, value_width(attention)) <= limits.MAX_DIMENSION, "MOD-006")
    require(len(rotary["frequencies"]) in (0, rotated // 2), "MOD-010")
    if latent is not None:
        require(attention["heads"] == attention["key_value_heads"] and rotated < head_dim, "MOD-011")
        require(attention["qk_norm"] == "none" and attention["clip_qkv"] is None, "MOD-011")
        require(not attention["bias"], "MOD-011")


def rotated_width(attention: dict[str, Any]) -> int:
    """How many numbers of a head are rotated."""
    return int(attention["rotary"]["width"] or attention["head_dim"])


def value_width(attention: dict[str, Any]) -> int:
    """How wide a head of values is."""
    return int(attention["value_dim"] or attention["head_dim"])


def _check_experts(block: dict[str, Any]) -> None:
    router, experts = block["router"], block["experts"]
    require(router["top_k"] <= experts, "MOD-007")
    groups, stay = router["groups"], router["top_groups"]
    require(experts % groups == 0, "MOD-012")
    require(stay <= groups and stay * (experts // groups) >= router["top_k"], "MOD-012")
    counts_two = groups > 1 and router["group_score"] == "two-largest"
    require(not counts_two or experts // groups >= 2, "MOD-012")
    if router["family"] == "sparsemixer":
        require(groups == 1 and not router["selection_bias"], "MOD-013")
    else:
        require(router["tolerance"] == 0, "MOD-013")
    _require_positive(router["scale"], "MOD-013")
    _require_finite(router["epsilon"], "MOD-013")
    _require_finite(router["tolerance"], "MOD-013")
    require((block["limit"] is None) == (block["activation"] == "silu"), "MOD-014")
    _require_positive(block["limit"], "MOD-014")


def _require_finite(value: float, rule: str) -> None:
    require(isfinite(_as_f32(value)), rule)


def _require_positive(value: float | None, rule: str) -> None:
    require(value is None or 0 < _as_f32(value) < inf, rule)


def _as_f32(value: float) -> float:
    """A number that is not negative, rounded to f32."""
    try:
        rounded: float = F32.unpack(F32.pack(value))[0]
    except OverflowError:
        return inf
    return rounded


def out_class(layer: dict[str, Any]) -> OutClass:
    """What tells shape classes of role `out` apart."""
    return layer["attention"], layer["convolution"], layer["experts"]


def out_classes(model: dict[str, Any]) -> list[OutClass]:
    """The shape classes of role `out`, in the order of their first layer."""
    return list(dict.fromkeys(out_class(layer) for layer in model["layers"]))


def classes_of(model: dict[str, Any]) -> dict[str, int]:
    """How many shape classes each role has."""
    return {
        "qkv": len(model["attentions"]),
        "attend": len(model["attentions"]),
        "convolve": len(model["convolutions"]),
        "out": len(out_classes(model)),
        "expert": len(model["expert_blocks"]),
        "dense": len(model["dense_blocks"]),
        "head": 1,
    }


def check_graphs(manifest: dict[str, Any], sections: Iterable[int]) -> GraphSets:
    """EMOE-GRA-001 to EMOE-GRA-004.

    Args:
        manifest: as decoded.
        sections: the ids of all GRAPH sections.
    """
    found: dict[tuple[str, int], set[tuple[str, str]]] = {
        (role, shape_class): set()
        for role, count in classes_of(manifest["model"]).items()
        for shape_class in range(count)
    }
    for graph in manifest["graphs"]:
        key, kind = (graph["role"], graph["shape_class"]), (graph["activations"], graph["weights"])
        require(key in found, "GRA-001")
        require(kind not in found[key], "GRA-002")
        found[key].add(kind)
    for (role, _), kinds in found.items():
        require(frozenset(kinds) in (SETS[:1] if role == "attend" else SETS), "GRA-003")
    require(sorted(graph["section"] for graph in manifest["graphs"]) == sorted(sections), "GRA-004")
    return {key: frozenset(kinds) for key, kinds in found.items()}


def tensor_end(tensor: dict[str, Any]) -> int:
    """Where a tensor ends in its record, in bytes."""
    length: int = prod(tensor["shape"]) * ELEMENT_BYTES[tensor["dtype"]]
    offset: int = tensor["offset"]
    return offset + length


def check_payload_lengths(layouts: list[dict[str, Any]]) -> None:
    """EMOE-LAY-001."""
    for layout in layouts:
        require(layout["payload_length"] == max(tensor_end(tensor) for tensor in layout["tensors"]), "LAY-001")
