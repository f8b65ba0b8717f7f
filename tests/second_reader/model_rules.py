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
ELEMENT_BYTES: Final = {"f32": 4, "i8": 1, "u8": 1}

GraphSets = dict[tuple[str, int], frozenset[tuple[str, str]]]
"""For each role and shape class the (activations, weights) of its graphs."""


def check_model(model: dict[str, Any]) -> None:
    """EMOE-MOD-001 to EMOE-MOD-009."""
    require(isfinite(_as_f32(model["norm_epsilon"])), "MOD-001")
    for attention in model["attentions"]:
        _check_attention(attention)
    for block in model["expert_blocks"]:
        require(block["router"]["top_k"] <= block["experts"], "MOD-007")
    for key, classes in (("attention", "attentions"), ("experts", "expert_blocks")):
        used = {layer[key] for layer in model["layers"]}
        require(used == set(range(len(model[classes]))), "MOD-008")
    tokens = [*model["end_tokens"], model["begin_token"] or 0]
    require(max(tokens) < model["vocabulary"], "MOD-009")


def _check_attention(attention: dict[str, Any]) -> None:
    require(0 < _as_f32(attention["rotary"]["theta"]) < inf, "MOD-002")
    clip = attention["clip_qkv"]
    require(clip is None or 0 < _as_f32(clip) < inf, "MOD-003")
    require(attention["heads"] % attention["key_value_heads"] == 0, "MOD-004")
    require(attention["head_dim"] % 2 == 0, "MOD-005")
    require(attention["heads"] * attention["head_dim"] <= limits.MAX_DIMENSION, "MOD-006")


def _as_f32(value: float) -> float:
    """A number that is not negative, rounded to f32."""
    try:
        rounded: float = F32.unpack(F32.pack(value))[0]
    except OverflowError:
        return inf
    return rounded


def pairs_in_use(model: dict[str, Any]) -> list[tuple[int, int]]:
    """The shape classes of role `out`: pairs (attention, experts) in the order of their first layer."""
    return list(dict.fromkeys((layer["attention"], layer["experts"]) for layer in model["layers"]))


def classes_of(model: dict[str, Any]) -> dict[str, int]:
    """How many shape classes each role has."""
    return {
        "qkv": len(model["attentions"]),
        "attend": len(model["attentions"]),
        "out": len(pairs_in_use(model)),
        "expert": len(model["expert_blocks"]),
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
