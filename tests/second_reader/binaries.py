"""Rules on what the manifest says of binaries: FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from second_reader.model_rules import classes_of
from second_reader.roles import weights_of
from second_reader.rules import require


def check_binaries(manifest: dict[str, Any], sections: Sequence[int]) -> None:
    """EMOE-BIN-001 to EMOE-BIN-005.

    Args:
        manifest: as decoded.
        sections: the ids of all BINARY sections.
    """
    binaries = manifest["binaries"]
    require(sorted(binary["section"] for binary in binaries) == sorted(sections), "BIN-001")
    earlier: list[tuple[str, int, int]] = []
    for binary in binaries:
        chip = binary["target"], binary["soc_model"], binary["architecture"]
        require(chip not in earlier, "BIN-002")
        earlier.append(chip)
        _check_graphs(binary["graphs"], manifest["model"])


def _check_graphs(graphs: Sequence[dict[str, Any]], model: dict[str, Any]) -> None:
    classes = classes_of(model)
    purposes, names = set(), set()
    for graph in graphs:
        role = graph["role"]
        require(graph["shape_class"] < classes[role], "BIN-003")
        matrices = weights_of(role, model, graph["shape_class"]).matrices
        require(len(graph["encodings"]) == len(matrices), "BIN-003")
        require(graph["keys"] >= 1 if role == "attend" else graph["keys"] == 0, "BIN-003")
        purpose = role, graph["shape_class"], graph["tokens"], graph["keys"], *graph["encodings"]
        require(purpose not in purposes, "BIN-004")
        require(graph["name"] not in names, "BIN-005")
        purposes.add(purpose)
        names.add(graph["name"])
