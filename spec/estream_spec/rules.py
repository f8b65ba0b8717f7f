"""What a manifest and its tables must satisfy together. FORMAT.md sections 5 to 8 and 10.

Structure and ranges of single values are checked where they are decoded; here stands what ties values to each other.
Each function raises the first fault it finds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest

from estream_spec import limits
from estream_spec.binary_rules import check_binaries
from estream_spec.constants import SectionType
from estream_spec.container import Container
from estream_spec.errors import located
from estream_spec.graph_interface import MATRICES, ROLES, VARIANTS, class_count, output_classes
from estream_spec.layout import embedding_layout, expert_layout, final_layout, layer_layout, round_up
from estream_spec.manifest import Activations, DeviceConfiguration, GraphRole, GraphWeights, Manifest, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.records import DirectoryEntry, RecordTable
from estream_spec.rulebook import refusal
from estream_spec.weights import Encoding


def check_manifest(manifest: Manifest, container: Container) -> None:
    """Judge the manifest by itself and against the directory.

    Raises:
        InvalidError: see FORMAT.md sections 6, 8 and 10.
    """
    _check_model(manifest.model)
    _check_graphs(manifest, container)
    check_binaries(manifest, (entry.id for entry in container.entries if entry.type == SectionType.BINARY))
    for index, layout in enumerate(manifest.layouts):
        _require(
            layout.payload_length == (end := max(tensor.offset + tensor.length for tensor in layout.tensors)),
            "EMOE-LAY-001",
            f"payload of {layout.payload_length} bytes, the last tensor ends at {end}",
            f"manifest.layouts[{index}].payload_length",
        )


def as_f32(value: float) -> float:
    """A number as models compute with it: rounded to f32, infinite where that is too large for it."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _require(condition: bool, rule: str, message: str, path: str) -> None:
    if not condition:
        raise refusal(rule, message, path=path)


def _check_model(model: ModelDescription) -> None:
    path = "manifest.model"
    finite = math.isfinite(as_f32(model.norm_epsilon))
    message = f"norm_epsilon {model.norm_epsilon}, expected a number that is finite as f32"
    _require(finite, "EMOE-MOD-001", message, f"{path}.norm_epsilon")
    for index, attention in enumerate(model.attentions):
        where = f"{path}.attentions[{index}]"
        for name, number, rule in (
            ("rotary.theta", attention.rotary.theta, "EMOE-MOD-002"),
            ("clip_qkv", attention.clip_qkv, "EMOE-MOD-003"),
        ):
            if number is not None:
                fits = 0 < as_f32(number) < math.inf
                message = f"{name} {number}, expected a number that is finite and above 0 as f32"
                _require(fits, rule, message, f"{where}.{name}")
        heads, shared = attention.heads, attention.key_value_heads
        message = f"{heads} heads and {shared} key_value_heads, expected a divisor"
        _require(heads % shared == 0, "EMOE-MOD-004", message, f"{where}.key_value_heads")
        message = f"head_dim {attention.head_dim} is odd, expected an even one"
        _require(attention.head_dim % 2 == 0, "EMOE-MOD-005", message, f"{where}.head_dim")
        width = heads * attention.head_dim
        message = f"heads are {width} wide, the limit is {limits.MAX_DIMENSION}"
        _require(width <= limits.MAX_DIMENSION, "EMOE-MOD-006", message, where)
    for index, block in enumerate(model.expert_blocks):
        top_k = block.router.top_k
        message, where = f"top_k {top_k} of {block.experts} experts", f"{path}.expert_blocks[{index}].router.top_k"
        _require(top_k <= block.experts, "EMOE-MOD-007", message, where)
    _check_classes((layer.attention for layer in model.layers), len(model.attentions), f"{path}.attentions")
    _check_classes((layer.experts for layer in model.layers), len(model.expert_blocks), f"{path}.expert_blocks")
    tokens = [*model.end_tokens, *([] if model.begin_token is None else [model.begin_token])]
    for token in tokens:
        message = f"token {token} in a vocabulary of {model.vocabulary}, expected a lower one"
        _require(token < model.vocabulary, "EMOE-MOD-009", message, path)


def _check_classes(used: Iterable[int], count: int, path: str) -> None:
    odd = sorted(set(used) ^ set(range(count)))
    message = f"shape class {odd[:1]} is used or defined, expected both; there are {count}"
    _require(not odd, "EMOE-MOD-008", message, path)


def _check_graphs(manifest: Manifest, container: Container) -> None:
    path = "manifest.graphs"
    found: dict[tuple[GraphRole, int], list[tuple[Activations, GraphWeights]]] = {
        (role, shape_class): [] for role in ROLES for shape_class in range(class_count(role, manifest.model))
    }
    for index, graph in enumerate(manifest.graphs):
        where = f"{path}[{index}]"
        key = graph.role, graph.shape_class
        message = f"shape class {graph.shape_class} of role {graph.role!r}, expected one that the model has"
        _require(key in found, "EMOE-GRA-001", message, where)
        message = f"role {graph.role!r} and shape class {graph.shape_class} have the same graph twice, expected once"
        _require((graph.activations, graph.weights) not in found[key], "EMOE-GRA-002", message, where)
        found[key].append((graph.activations, graph.weights))
    for (role, shape_class), kinds in found.items():
        allowed = VARIANTS[:1] if role == "attend" else VARIANTS
        wanted = " or ".join(_spelled(each) for each in allowed)
        message = f"role {role!r} and shape class {shape_class} have {_spelled(kinds)}, expected {wanted}"
        _require(frozenset(kinds) in allowed, "EMOE-GRA-003", message, path)
    named = sorted(graph.section for graph in manifest.graphs)
    there = sorted(entry.id for entry in container.entries if entry.type == SectionType.GRAPH)
    odd = min(set(named) ^ set(there), default=None)
    message = f"graphs and GRAPH sections do not pair off, first at section id {odd}, expected each exactly once"
    _require(named == there, "EMOE-GRA-004", message, path)


def _spelled(kinds: Iterable[tuple[Activations, GraphWeights]]) -> str:
    return (
        ", and ".join(f"{weights} weights and {activations} activations" for activations, weights in sorted(kinds))
        or "no graph"
    )


def check_tables(manifest: Manifest, container: Container, dense: RecordTable, experts: RecordTable) -> None:
    """Judge both record tables against the manifest and the sections they describe.

    Raises:
        InvalidError: ranges that do not fit the model, the layouts or the section.
        IntegrityError: a section digest other than that over the records' digests.
        LimitError: a record longer than `MAX_RECORD_LENGTH`.
    """
    model, layouts = manifest.model, manifest.layouts
    used = {record_range.layout for table in (dense, experts) for record_range in table.ranges}
    odd = min(used ^ set(range(len(layouts))), default=None)
    message = f"layout {odd} is used or defined, expected both; there are {len(layouts)}"
    _require(odd is None, "EMOE-LAY-002", message, "manifest.layouts")
    dense_counts = [1] * (len(model.layers) + 2)
    expert_counts = [model.expert_block(layer).experts for layer in range(len(model.layers))]
    for table, section_type, counts in (
        (dense, SectionType.DENSE, dense_counts),
        (experts, SectionType.EXPERTS, expert_counts),
    ):
        own = SectionType(section_type + 1)
        path = own.name.lower()
        with located(container.section(own).offset):
            message = f"{len(table.ranges)} ranges, the model needs {len(counts)}"
            _require(len(table.ranges) == len(counts), "EMOE-TAB-007", message, path)
            for index, (record_range, count) in enumerate(zip(table.ranges, counts, strict=True)):
                message = f"{record_range.count} records, the model needs {count}"
                _require(record_range.count == count, "EMOE-TAB-007", message, f"{path}.ranges[{index}].count")
            _check_ranges(table, container.section(section_type), manifest, container.page_size, path)

    for index, layout in enumerate(layouts):
        for matrix in layout.matrices:
            summed = matrix.encoding != "f32" and matrix.name != "embedding"
            message = f"{matrix.rows} rows of {matrix.encoding}, the limit is {limits.MAX_INTEGER_ROWS}"
            where = f"manifest.layouts[{index}].{matrix.name}"
            _require(not summed or matrix.rows <= limits.MAX_INTEGER_ROWS, "EMOE-LAY-003", message, where)
    graphs = _graph_weights(manifest)
    encodings = [{matrix.name: matrix.encoding for matrix in layout.matrices} for layout in layouts]
    for number, record_range in enumerate(dense.ranges):
        given = encodings[record_range.layout]
        if number == 0:
            encoding = given.get("embedding", "f32")
            message = f"embedding is stored as {encoding!r}, expected 'f32' or 'w8'"
            where = f"manifest.layouts[{record_range.layout}]"
            _require(encoding in {"f32", "w8"}, "EMOE-LAY-004", message, where)
            expected = embedding_layout(model, given)
        elif number <= len(model.layers):
            expected = layer_layout(model, number - 1, given)
            _check_weights(graphs, "qkv", number - 1, given)
            _check_weights(graphs, "out", number - 1, given)
        else:
            expected = final_layout(model, given)
            source = encodings[dense.ranges[0].layout].get("embedding") if model.tied_head else given.get("head")
            _check_weights(graphs, "head", 0, {"head": source or "f32"})
        _check_layout(layouts[record_range.layout], expected, record_range.layout)
    for layer, record_range in enumerate(experts.ranges):
        given = encodings[record_range.layout]
        expected = expert_layout(model, model.layers[layer].experts, given)
        _check_weights(graphs, "expert", layer, given)
        _check_layout(layouts[record_range.layout], expected, record_range.layout)


def _graph_weights(manifest: Manifest) -> dict[GraphRole, list[GraphWeights]]:
    """What the graph of each role that serves a layer takes as matrices, by layer; for the head once."""
    model = manifest.model
    weights = {(graph.role, graph.shape_class): graph.weights for graph in manifest.graphs}
    pairs = {pair: index for index, pair in enumerate(output_classes(model))}
    return {
        "qkv": [weights["qkv", layer.attention] for layer in model.layers],
        "out": [weights["out", pairs[layer.attention, layer.experts]] for layer in model.layers],
        "expert": [weights["expert", layer.experts] for layer in model.layers],
        "head": [weights["head", 0]],
    }


def _check_weights(
    graphs: Mapping[GraphRole, Sequence[GraphWeights]], role: GraphRole, layer: int, encodings: Mapping[str, Encoding]
) -> None:
    """Matrices a graph takes must be stored as f32 if it takes f32, and in no other case."""
    taken = graphs[role][layer]
    for name in MATRICES[role]:
        encoding = encodings.get(name, "f32")
        wanted = "expected f32" if taken == "f32" else "expected a quantised one"
        message = f"layer {layer} stores {name!r} as {encoding}, its {role} graph takes {taken}: {wanted}"
        _require((taken == "f32") == (encoding == "f32"), "EMOE-GRA-005", message, "manifest.graphs")


def _check_layout(layout: RecordLayout, expected: RecordLayout, index: int) -> None:
    if layout == expected:
        return
    pairs = zip_longest(layout.tensors, expected.tensors)
    odd = next((pair for pair in pairs if pair[0] != pair[1]), (layout.matrices, expected.matrices))
    message = f"layout has {odd[0]}, the model and the encodings ask for {odd[1]}"
    raise refusal("EMOE-LAY-005", message, path=f"manifest.layouts[{index}]")


def _check_ranges(table: RecordTable, section: DirectoryEntry, manifest: Manifest, page_size: int, path: str) -> None:
    end = 0
    for index, record_range in enumerate(table.ranges):
        where = f"{path}.ranges[{index}]"
        message = f"record of {record_range.record_length} bytes, the limit is {limits.MAX_RECORD_LENGTH}"
        _require(record_range.record_length <= limits.MAX_RECORD_LENGTH, "EMOE-TAB-008", message, where)
        message = f"range begins at {record_range.base}, expected {end}"
        _require(record_range.base == end, "EMOE-TAB-009", message, f"{where}.base")
        payload = manifest.layouts[record_range.layout].payload_length
        expected = round_up(payload, page_size)
        message = f"record of {record_range.record_length} bytes for a payload of {payload}, expected {expected}"
        _require(record_range.record_length == expected, "EMOE-TAB-010", message, f"{where}.record_length")
        end = record_range.end
    message = f"ranges end at {end}, the section has {section.length} bytes"
    _require(end == section.length, "EMOE-TAB-011", message, path)
    if (found := sha256(b"".join(table.digests)).digest()) != section.sha256:
        message = f"digest over the records' digests is {found.hex()}, the directory says {section.sha256.hex()}"
        raise refusal("EMOE-TAB-012", message, path=path)


def check_device_configuration(
    choice: DeviceConfiguration, earlier: Sequence[DeviceConfiguration], experts: RecordTable, path: str
) -> None:
    """Judge a device configuration.

    Args:
        choice: the configuration.
        earlier: those that stand before it, in the manifest or among those that were added.
        experts: the table of expert records.
        path: what messages call it.

    Raises:
        InvalidError: an arena too small for its own banks, too few banks to keep all experts, or a second one of its
            device for prompts of one length.
    """
    needed = banks_length(choice, experts)
    message = f"arena of {choice.arena_bytes} bytes, its banks take {needed}"
    _require(choice.arena_bytes >= needed, "EMOE-CFG-001", message, f"{path}.arena_bytes")
    banks = choice.prefetch_depth + 1
    groups = sum(-(-record_range.count // choice.group_size) for record_range in experts.ranges)
    message = f"{banks} banks cannot keep {groups} groups resident, expected at least one for each"
    _require(choice.policy != "resident" or banks >= groups, "EMOE-CFG-002", message, f"{path}.prefetch_depth")
    own = choice.name, choice.prompt_tokens
    message = f"second device configuration of {choice.name!r} with prompt_tokens {choice.prompt_tokens}, expected one"
    alone = all((other.name, other.prompt_tokens) != own for other in earlier)
    _require(alone, "EMOE-CFG-003", message, f"{path}.prompt_tokens")


def banks_length(choice: DeviceConfiguration, experts: RecordTable) -> int:
    """Bytes of all banks of a device configuration."""
    largest = max(record_range.record_length for record_range in experts.ranges)
    return (choice.prefetch_depth + 1) * choice.group_size * largest


def check_device_configurations(manifest: Manifest, experts: RecordTable) -> None:
    """Judge the device configurations of the manifest. Raises as `check_device_configuration` does."""
    choices = manifest.device_configurations
    for index, choice in enumerate(choices):
        check_device_configuration(choice, choices[:index], experts, f"manifest.device_configurations[{index}]")
