"""MATCHING.md, written from its text alone."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

Json = dict[str, Any]

FREE: Final = 0
DENSE: Final = 2
GRAPH: Final = 6
BINARY: Final = 10


def match(device: Json, header: Json) -> Json:
    """What comes out for a device, as an object of section 5.

    Args:
        device: the facts of section 2; a key at its default may be left out.
        header: the keys of LOADER-CLI.md section 3 that matter here.
    """
    manifest = header["manifest"]
    page = 2 ** header["superblock"]["page_shift"]
    [dense] = [section["length"] for section in header["sections"] if section["type"] == DENSE]
    if not manifest["model"]["tied_head"]:
        dense -= max(_records(manifest, page, "embedding"))
    record = max(_records(manifest, page, "gate"))
    room = device["memory_bytes"] - dense
    mapped = [
        bound - beside - 1
        for bound, beside in ((device.get("npu_buffer_bytes"), 0), (device.get("npu_session_bytes"), dense))
        if bound is not None
    ]
    soc_model, architecture = device.get("soc_model", 0), device.get("architecture", 0)
    binaries = [each for each in manifest["binaries"] if each["target"] == "htp"]
    kin = [each for each in binaries if each["architecture"] == architecture]
    mine = [each for each in kin if each["soc_model"] == soc_model]
    age = _value(mine[0]["sdk"]) - _value(device["sdk"]) if mine and device.get("sdk") else Fraction()
    verdict, reason = next(
        (verdict, reason)
        for holds, verdict, reason in (
            (page % device["page_bytes"] != 0, "refuse", "page-size"),
            (room < record, "refuse", "memory"),
            (0 in (soc_model, architecture), "usable", "no-npu"),
            (architecture < 69, "usable", "no-fp16"),
            (not device.get("sdk"), "usable", "no-sdk"),
            (any(each < record for each in mapped), "usable", "npu-memory"),
            (not binaries, "recompile", "no-binary"),
            (not kin, "recompile", "other-architecture"),
            (not mine, "recompile", "other-chip"),
            (age > 0, "recompile", "newer-sdk"),
            (age == 0, "exact", "same-sdk"),
            (True, "usable", "older-sdk"),
        )
        if holds
    )
    used = mine[0] if reason in ("same-sdk", "older-sdk") else None
    bounds = [_configured(manifest, device.get("configuration", "")), room, *(mapped if used else [])]
    refused = verdict == "refuse"
    return {
        "verdict": verdict,
        "reason": reason,
        "binary": used and used["section"],
        "arena_bytes": 0 if refused else min(bounds),
        "sections": [] if refused else _sections(header, used),
    }


def _records(manifest: Json, page: int, matrix: str) -> list[int]:
    """Bytes of the records of each layout that has a matrix of that name."""
    return [
        (layout["payload_length"] + page - 1) // page * page
        for layout in manifest["layouts"]
        if matrix in [each["name"] for each in layout["matrices"]]
    ]


def _configured(manifest: Json, name: str) -> int:
    arenas: dict[str, int] = {}
    for each in manifest["device_configurations"]:
        arenas[each["name"]] = max(arenas.get(each["name"], 0), each["arena_bytes"])
    return arenas.get(name, next(iter(arenas.values())))


def _value(sdk: str) -> Fraction:
    """An SDK build as one number, of which each part is a digit to the base 10^18."""
    return sum((Fraction(int(part), 10 ** (18 * place)) for place, part in enumerate(sdk.split("."))), Fraction())


def _sections(header: Json, used: Json | None) -> list[list[int]]:
    manifest = header["manifest"]
    left_out = {(BINARY, each["section"]) for each in manifest["binaries"]}
    if used is not None:
        left_out.remove((BINARY, used["section"]))
        for graph in manifest["graphs"]:
            for other in used["graphs"]:
                if (graph["role"], graph["shape_class"]) == (other["role"], other["shape_class"]):
                    left_out.add((GRAPH, graph["section"]))
    found = [(section["type"], section["id"]) for section in header["sections"]]
    return [list(each) for each in found if each[0] != FREE and each not in left_out]
