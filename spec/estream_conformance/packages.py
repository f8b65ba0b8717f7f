"""The packages that cases start from. FORMAT.md sections 7, 8 and 10.

Weights are any legal numbers, graphs and documents a few bytes of text: no loader has to look inside them to judge a
package.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from estream_conformance.builder import Draft, Range, Section, Values, round_up
from estream_conformance.programs import PRE_ROUTING, Paging
from estream_conformance.roles import Shapes, class_counts, layer_roles, matrices_of, vectors_of
from estream_spec.constants import SectionType

TOKENIZER: Final = b'{"version":"1.0"}'
CHAT_TEMPLATE: Final = "{{ messages }} \N{SNOWMAN}".encode()
GROUPS: Final = {"w4g32": 32, "w4g64": 64}


def smallest_model() -> Values:
    """One layer with one expert, as narrow as can be."""
    return {
        "family": "f",
        "hidden": 1,
        "vocabulary": 1,
        "context_length": 1,
        "norm_epsilon": 0.0,
        "layers": [{"attention": 0, "experts": 0}],
        "attentions": [{"heads": 1, "key_value_heads": 1, "head_dim": 2, "rotary": {"theta": 1.0}}],
        "expert_blocks": [{"experts": 1, "intermediate": 1, "router": {"family": "softmax-topk", "top_k": 1}}],
    }


def full_model() -> Values:
    """Two layers of different shape classes, with every choice that the smallest one leaves at its default."""
    plain = {"heads": 4, "key_value_heads": 2, "head_dim": 6, "rotary": {"theta": 10000.0}}
    return {
        "family": "full",
        "hidden": 34,
        "vocabulary": 9,
        "context_length": 64,
        "norm_epsilon": 1e-5,
        "layers": [{"attention": 0, "experts": 1}, {"attention": 1, "experts": 0}, {"attention": 0, "experts": 0}],
        "attentions": [plain, {**plain, "head_dim": 4, "qk_norm": "full", "clip_qkv": 8.0}],
        "expert_blocks": [
            {"experts": 3, "intermediate": 6, "router": {"family": "softmax-topk-renormalise", "top_k": 2}},
            {"experts": 2, "intermediate": 40, "router": {"family": "softmax-topk", "top_k": 1}},
        ],
        "begin_token": 8,
        "end_tokens": [0, 7],
    }


def smallest() -> Draft:
    """The smallest package there is: all weights f32, no document."""
    return draft(smallest_model())


def full() -> Draft:
    """A package that has everything: quantised weights, a binary, both documents, a program, two sets of graphs."""
    encodings = {
        "embedding": "w8",
        **dict.fromkeys(("q", "k", "v", "o"), "w8"),
        "head": "w4g64",
        **dict.fromkeys(("gate", "up", "down"), "w4g32"),
    }
    made = draft(full_model(), encodings, activations="dynamic-int8")
    made.manifest["provenance"] = {
        "writer": "suite 1",
        "licence": "Apache-2.0",
        "sources": [{"name": "config.json", "length": 2, "sha256": bytes(range(32))}],
    }
    made.manifest["binaries"] = [
        {
            **binary(0),
            "graphs": [
                {"name": "experts", "role": "expert", "shape_class": 1, "tokens": 32, "encodings": ["w4g32"] * 3},
                {"name": "attend", "role": "attend", "shape_class": 0, "tokens": 32, "keys": 64},
            ],
            "options": "-O3",
        }
    ]
    made.manifest["extensions"] = {"a.example": b"\0\1", "b.example": b""}
    manifest = made.sections.pop()
    made.sections += [
        Section(SectionType.BINARY, b"binary 0"),
        Section(SectionType.TOKENIZER, TOKENIZER),
        Section(SectionType.CHAT_TEMPLATE, CHAT_TEMPLATE),
        Section(SectionType.SCHEDULE, paging(made, group_size=2, prefetch_depth=2).draft(PRE_ROUTING).encode()),
        manifest,
    ]
    return made


def binary(section: int, **changes: Any) -> Values:
    """A binary with one graph, for the smallest model."""
    graph = {"name": "g", "role": "attend", "shape_class": 0, "tokens": 1, "keys": 1}
    about = {"section": section, "target": "htp", "soc_model": 57, "architecture": 75, "sdk": "2.51.0"}
    return {**about, "compiler": "c", "graphs": [graph], **changes}


def paging(made: Draft, group_size: int = 1, prefetch_depth: int = 0) -> Paging:
    """What programs for a package depend on."""
    ranges = made.tables[SectionType.EXPERTS]
    longest = max(round_up(len(one.payloads[0]), 1 << made.page_shift) for one in ranges if one.payloads)
    model = made.model()
    dense = [number for number, layer in enumerate(model["layers"]) if "dense" in layer]
    routers = [
        model["expert_blocks"][layer["experts"]]["router"] if "experts" in layer else {} for layer in model["layers"]
    ]
    top_k = [router.get("top_k", 0) for router in routers]
    return Paging([len(one.payloads) for one in ranges], longest, group_size, prefetch_depth, dense, top_k)


def draft(
    model: Values, encodings: dict[str, str] | None = None, *, activations: str = "f32", page_shift: int = 12
) -> Draft:
    """A package of a model.

    Args:
        model: the model description.
        encodings: of matrices, by name; `f32` where there is none.
        activations: of its graphs.
        page_shift: of its pages.
    """
    given = encodings or {}
    dense = [embedding_layout(model, given)]
    dense += [layer_layout(model, number, given) for number in range(len(model["layers"]))]
    dense += [final_layout(model, given)]
    classes = [layer.get("experts") for layer in model["layers"]]
    experts = {each: expert_layout(model, each, given) for each in classes if each is not None}
    layouts: list[Values] = []
    for layout in [*dense, *experts.values()]:
        if layout not in layouts:
            layouts.append(layout)
    tables = {
        SectionType.DENSE: [Range(layouts.index(each), [payload(each)]) for each in dense],
        SectionType.EXPERTS: [
            Range(0, []) if each is None else _experts(layouts, experts[each], model["expert_blocks"][each]["experts"])
            for each in classes
        ],
    }
    graphs = graphs_of(model, given, activations)
    longest = max(round_up(each["payload_length"], 1 << page_shift) for each in experts.values())
    manifest = {
        "name": "n",
        "content_id": None,
        "model": model,
        "layouts": layouts,
        "graphs": graphs,
        "device_configurations": [
            {"name": "generic", "arena_bytes": longest, "group_size": 1, "prefetch_depth": 0},
        ],
        "provenance": {"writer": "w"},
    }
    sections = [
        Section(SectionType.DENSE, alignment_shift=page_shift),
        Section(SectionType.EXPERTS, alignment_shift=page_shift),
        Section(SectionType.DENSE_TABLE),
        Section(SectionType.EXPERT_TABLE),
        *(Section(SectionType.GRAPH, b"graph %d" % each["section"], id=each["section"]) for each in graphs),
        Section(SectionType.MANIFEST),
    ]
    return Draft(manifest, {int(key): value for key, value in tables.items()}, sections, page_shift)


def _experts(layouts: list[Values], layout: Values, count: int) -> Range:
    """The records of one layer's experts."""
    return Range(layouts.index(layout), [payload(layout, number) for number in range(count)])


def graphs_of(model: Values, encodings: dict[str, str], activations: str) -> list[Values]:
    """The manifest's graphs: for each role and shape class what its matrices' encoding asks for."""
    graphs: list[Values] = []
    for role, count in class_counts(model).items():
        for shape_class in range(count):
            first = next(iter(matrices_of(role, model, shape_class)), "")
            name = "embedding" if role == "head" and model.get("tied_head") else first
            kinds = [("f32", "f32")]
            if encodings.get(name, "f32") != "f32":
                kinds = [("int8", activations)] + ([("uint8", activations)] if activations != "f32" else [])
            for weights, own in kinds:
                graph = {"section": len(graphs), "target": "portable", "role": role, "shape_class": shape_class}
                graphs.append({**graph, "weights": weights, "activations": own})
    return graphs


def embedding_layout(model: Values, encodings: dict[str, str]) -> Values:
    """The record of the embedding."""
    return plan({"embedding": (model["vocabulary"], model["hidden"])}, encodings)


def layer_layout(model: Values, number: int, encodings: dict[str, str]) -> Values:
    """The dense record of a layer."""
    layer, hidden = model["layers"][number], model["hidden"]
    shapes: Shapes = {}
    vectors: dict[str, Sequence[int]] = {}
    if (experts := layer.get("experts")) is not None:
        shapes["router"] = (hidden, model["expert_blocks"][experts]["experts"])
    for role, shape_class in layer_roles(model, number).items():
        shapes |= matrices_of(role, model, shape_class)
        vectors |= {name: [length] for name, length in vectors_of(role, model, shape_class).items()}
    if (convolution := layer.get("convolution")) is not None:
        vectors["taps"] = [model["convolutions"][convolution]["taps"], hidden]
    if experts is not None and model["expert_blocks"][experts]["router"].get("selection_bias"):
        vectors["selection_bias"] = [model["expert_blocks"][experts]["experts"]]
    return plan(shapes, encodings, vectors)


def final_layout(model: Values, encodings: dict[str, str]) -> Values:
    """The last dense record."""
    shapes = {} if model.get("tied_head") else matrices_of("head", model, 0)
    return plan(shapes, encodings, {name: [length] for name, length in vectors_of("head", model, 0).items()})


def expert_layout(model: Values, shape_class: int, encodings: dict[str, str]) -> Values:
    """The record of an expert."""
    vectors = {name: [length] for name, length in vectors_of("expert", model, shape_class).items()}
    return plan(matrices_of("expert", model, shape_class), encodings, vectors)


def plan(shapes: Shapes, encodings: dict[str, str], vectors: Mapping[str, Sequence[int]] | None = None) -> Values:
    """A layout of kind 1."""
    matrices, parts = [], [(name, "f32", list(shape)) for name, shape in (vectors or {}).items()]
    for name, (rows, columns) in shapes.items():
        encoding = encodings.get(name, "f32")
        matrices.append({"name": name, "encoding": encoding, "rows": rows, "columns": columns})
        parts += parts_of(name, encoding, rows, columns)
    tensors, end = [], 0
    for name, dtype, shape in parts:
        offset = round_up(end, 128)
        tensors.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset})
        end = offset + bytes_of(dtype, shape)
    return {"payload_length": end, "matrices": matrices, "tensors": tensors}


def parts_of(name: str, encoding: str, rows: int, columns: int) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of what a matrix is stored as."""
    if encoding == "f32":
        return [(name, "f32", [rows, columns])]
    scale = (f"{name}.scale", "f32", [rows if name == "embedding" else columns])
    if encoding == "w8":
        return [(name, "i8", [rows, columns]), scale]
    group = GROUPS[encoding]
    padded = round_up(rows, group)
    nibbles = (f"{name}.nibbles", "u8", [padded // 2, columns])
    return [nibbles, (f"{name}.multipliers", "i8", [padded // group, columns]), scale]


def bytes_of(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor."""
    length = 4 if dtype == "f32" else 1
    for dimension in shape:
        length *= dimension
    return length


def payload(layout: Values, number: int = 0) -> bytearray:
    """A record's payload: legal numbers, other ones for each record."""
    data = bytearray(layout["payload_length"])
    for tensor in layout["tensors"]:
        length = bytes_of(tensor["dtype"], tensor["shape"])
        kind = tensor["name"].partition(".")[2]
        if tensor["dtype"] == "f32":
            filled = struct.pack("<f", 0.5 + number) * (length // 4)
        elif kind == "nibbles":
            filled = b"\x88" * length  # 0 everywhere, padding rows included
        else:
            filled = bytes([1 + number % 15]) * length
        data[tensor["offset"] : tensor["offset"] + length] = filled
    return data
