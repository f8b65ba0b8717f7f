"""What a loader must print of an accepted package. LOADER-CLI.md section 3."""

from __future__ import annotations

import json
import struct
from hashlib import sha256
from typing import Any, Final

from estream_conformance.builder import ENTRY, SUPERBLOCK, Sealed, Values
from estream_conformance.programs import header_of
from estream_spec.constants import KNOWN_SECTIONS, Algorithm, SectionFlag, SectionType

MODEL: Final[Values] = {
    "tied_head": False,
    "begin_token": None,
    "end_tokens": [],
    "dense_blocks": [],
    "convolutions": [],
    "norm": "rms",
    "head_bias": False,
}
LAYER: Final[Values] = dict.fromkeys(("attention", "experts", "dense", "convolution", "window"))
ROTARY: Final[Values] = {"width": None, "frequencies": [], "scale": 1.0}
ATTENTION: Final[Values] = {
    "qk_norm": "none",
    "clip_qkv": None,
    "value_dim": None,
    "scale": None,
    "bias": False,
    "out_bias": False,
    "sinks": False,
    "latent": None,
}
EXPERT_BLOCK: Final[Values] = {"activation": "silu", "limit": None, "bias": False}
ROUTER: Final[Values] = {
    "bias": False,
    "selection_bias": False,
    "groups": 1,
    "top_groups": 1,
    "group_score": "largest",
    "scale": 1.0,
    "epsilon": 0.0,
    "tolerance": 0.0,
}
"""Defaults of the structs of the model description, the few of one key aside."""

_NAMELESS = {"magic", "reserved", "reserved_too", "content"}


def expected_json(sealed: Sealed, signatures: list[Values], configurations: list[Values]) -> str:
    """The line for a package.

    Args:
        sealed: the package.
        signatures: fields of its signatures, in the order of the directory.
        configurations: its device configurations outside the manifest, in the order in which they are to be given.
    """
    entries = [{name: each.get(name, 0) for name in ENTRY if name not in _NAMELESS} for each in sealed.entries]
    for entry, own in zip(entries, sealed.entries, strict=True):
        plain = own["type"] in KNOWN_SECTIONS and own["type"] != SectionType.FREE
        whole = plain and not own["flags"] & SectionFlag.RECORDS
        entry["content_sha256"] = sha256(own["content"]).digest() if whole else None
    manifest = _filled(sealed.draft.manifest)
    manifest["content_id"] = sealed.draft.content_id()
    layouts = manifest["layouts"]
    value = {
        "file_id": sealed.file_id,
        "superblock": {name: sealed.superblock[name] for name in SUPERBLOCK if name not in _NAMELESS},
        "sections": entries,
        "manifest": manifest,
        "device_configurations": [_configuration(each) for each in configurations],
        "schedules": [
            {name: value for name, value in header_of(each["content"]).items() if name not in _NAMELESS}
            for each in sealed.entries
            if each["type"] == SectionType.SCHEDULE
        ],
        "signatures": [each for each in signatures if each["algorithm"] == Algorithm.ED25519],
        "dense": _records(sealed.records[SectionType.DENSE], layouts),
        "experts": _records(sealed.records[SectionType.EXPERTS], layouts),
    }
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _records(ranges: list[list[Values]], layouts: list[Values]) -> list[list[Values]]:
    return [[_record(each, layouts[each["layout"]]) for each in records] for records in ranges]


def _record(record: Values, layout: Values) -> Values:
    tensors = []
    for tensor in layout["tensors"]:
        length = 4 if tensor["dtype"] == "f32" else 1
        for dimension in tensor["shape"]:
            length *= dimension
        data = record["payload"][tensor["offset"] :][:length]
        place = {"name": tensor["name"], "offset": record["offset"] + tensor["offset"]}
        tensors.append({**place, "sha256": sha256(data).digest()})
    kept = {name: record[name] for name in ("offset", "length", "checksum", "sha256", "layout")}
    return {**kept, "tensors": tensors}


def _filled(manifest: Values) -> Values:
    """The manifest with every key that was left out at its default."""
    model = filled_model(manifest["model"])
    return {
        **manifest,
        "model": model,
        "layouts": [{"kind": 1, **each} for each in manifest["layouts"]],
        "device_configurations": [_configuration(each) for each in manifest["device_configurations"]],
        "provenance": {"licence": "", "sources": [], **manifest["provenance"]},
        "binaries": [_binary(each) for each in manifest.get("binaries", [])],
        "extensions": [list(pair) for pair in manifest.get("extensions", {}).items()],
    }


def filled_model(values: Values) -> Values:
    """A model description with every key that was left out at its default."""
    model = MODEL | values
    model["layers"] = [LAYER | each for each in model["layers"]]
    model["attentions"] = [_attention(each) for each in model["attentions"]]
    blocks = [EXPERT_BLOCK | each for each in model["expert_blocks"]]
    model["expert_blocks"] = [{**each, "router": ROUTER | each["router"]} for each in blocks]
    model["dense_blocks"] = [{"share": False, **each} for each in model["dense_blocks"]]
    return model


def _attention(values: Values) -> Values:
    attention = ATTENTION | values
    latent = attention["latent"]
    narrow = None if latent is None else {"query_rank": None, **latent}
    return {**attention, "rotary": ROTARY | attention["rotary"], "latent": narrow}


def _configuration(values: Values) -> Values:
    return {"lanes": 2, "policy": "pre-routing", "prompt_tokens": 0, **values}


def _binary(values: Values) -> Values:
    graphs = [{"keys": 0, "encodings": [], **each} for each in values["graphs"]]
    return {"options": "", **values, "graphs": graphs}


def _plain(value: Any) -> Any:
    """The value as JSON has it: bytes and floats as hexadecimal digits."""
    match value:
        case bytes() | bytearray():
            return bytes(value).hex()
        case float():
            return struct.pack(">d", value).hex()
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value
