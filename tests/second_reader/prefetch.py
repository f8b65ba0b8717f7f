"""The prefetch router: FORMAT.md sections 6.12 and 6.13."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from second_reader import manifest as tables_of_structs
from second_reader.rules import require
from second_reader.schema import read_document

MAGIC: Final = b"EMOEPRE\0"
ROUTER_TENSORS: Final = ("expert_norm", "expert_norm.bias", "router", "router.bias", "selection_bias")

Json = dict[str, Any]


def check_prefetch_router(data: bytes, manifest: Json) -> Json:
    """EMOE-PRE-001 to EMOE-PRE-007 of the content of a section. Gives what stands behind the magic."""
    require(data.startswith(MAGIC), "PRE-001")
    found = read_document(tables_of_structs.PREFETCH_ROUTER, data[len(MAGIC) :])
    model = manifest["model"]
    require(found["model"] == _model_digest(manifest), "PRE-002")
    with_experts = [number for number, layer in enumerate(model["layers"]) if layer["experts"] is not None]
    require([each["layer"] for each in found["layers"]] == with_experts, "PRE-003")
    for each in found["layers"]:
        _check_layer(each, model["hidden"], model["expert_blocks"][model["layers"][each["layer"]]["experts"]])
    return found


def check_routers(prefetch_router: Json, tensors: Callable[[int], dict[str, bytes]]) -> None:
    """EMOE-PRE-008.

    Args:
        prefetch_router: what `check_prefetch_router` gave.
        tensors: gives the bytes of the tensors of a layer's dense record by name.
    """
    for each in prefetch_router["layers"]:
        stored = tensors(each["layer"])
        digest = hashlib.sha256(b"".join(stored.get(name, b"") for name in ROUTER_TENSORS)).digest()
        require(each["router"] == digest, "PRE-008")


def _model_digest(manifest: Json) -> bytes:
    described = hashlib.sha256(tables_of_structs.MODEL.write(manifest["model"])).digest()
    sources = manifest["provenance"]["sources"]
    tensors = [source["sha256"] for source in sources if source["name"] == "tensors"]
    return hashlib.sha256(b"EMOE prefetch\0" + described + [*tensors, bytes(32)][0]).digest()


def _check_layer(layer: Json, hidden: int, block: Json) -> None:
    experts, top_k = block["experts"], block["router"]["top_k"]
    counts = {
        "weights": hidden * experts,
        "bias": experts,
        "confidence": min(experts, top_k + 8) + 2 * experts,
        "thresholds": experts - top_k + 1,
        "needed": experts,
    }
    kinds = {name: "e" if name == "weights" else "f" for name in counts}
    require(all(len(layer[name]) == counts[name] * struct.calcsize(kinds[name]) for name in counts), "PRE-004")
    numbers = {name: struct.unpack(f"<{counts[name]}{kinds[name]}", layer[name]) for name in counts}
    require(all(math.isfinite(number) for each in numbers.values() for number in each), "PRE-005")
    require(all(before <= after for before, after in pairwise(numbers["thresholds"])), "PRE-006")
    require(all(0 <= number <= 1 for number in numbers["needed"]), "PRE-007")
