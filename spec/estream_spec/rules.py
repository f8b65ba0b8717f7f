"""What a manifest and its tables must satisfy together. FORMAT.md sections 5 to 8 and 10.

Structure and ranges of single values are checked where they are decoded; here stands what ties values to each other.
Each function raises the first fault it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest

from estream_spec import limits
from estream_spec.binary_rules import check_binaries
from estream_spec.constants import SectionType
from estream_spec.container import Container
from estream_spec.errors import located
from estream_spec.graph_interface import ROLES, VARIANTS, class_count, layer_classes, role_shape
from estream_spec.layout import embedding_layout, expert_layout, final_layout, layer_layout, round_up
from estream_spec.manifest import Activations, DeviceConfiguration, GraphRole, GraphWeights, Manifest, RecordLayout
from estream_spec.model_rules import check_model
from estream_spec.records import DirectoryEntry, RecordTable
from estream_spec.rulebook import refusal, require
from estream_spec.weights import Encoding


def check_manifest(manifest: Manifest, container: Container) -> None:
    """Judge the manifest by itself and against the directory.

    Raises:
        InvalidError: see FORMAT.md sections 6, 8 and 10.
    """
    check_model(manifest.model)
    _check_graphs(manifest, container)
    check_binaries(manifest, (entry.id for entry in container.entries if entry.type == SectionType.BINARY))
    for index, layout in enumerate(manifest.layouts):
        require(
            layout.payload_length == (end := max(tensor.offset + tensor.length for tensor in layout.tensors)),
            "EMOE-LAY-001",
            f"payload of {layout.payload_length} bytes, the last tensor ends at {end}",
            f"manifest.layouts[{index}].payload_length",
        )


def _check_graphs(manifest: Manifest, container: Container) -> None:
    path = "manifest.graphs"
    found: dict[tuple[GraphRole, int], list[tuple[Activations, GraphWeights]]] = {
        (role, shape_class): [] for role in ROLES for shape_class in range(class_count(role, manifest.model))
    }
    for index, graph in enumerate(manifest.graphs):
        where = f"{path}[{index}]"
        key = graph.role, graph.shape_class
        message = f"shape class {graph.shape_class} of role {graph.role!r}, expected one that the model has"
        require(key in found, "EMOE-GRA-001", message, where)
        message = f"role {graph.role!r} and shape class {graph.shape_class} have the same graph twice, expected once"
        require((graph.activations, graph.weights) not in found[key], "EMOE-GRA-002", message, where)
        found[key].append((graph.activations, graph.weights))
    for (role, shape_class), kinds in found.items():
        allowed = VARIANTS[:1] if role == "attend" else VARIANTS
        wanted = " or ".join(_spelled(each) for each in allowed)
        message = f"role {role!r} and shape class {shape_class} have {_spelled(kinds)}, expected {wanted}"
        require(frozenset(kinds) in allowed, "EMOE-GRA-003", message, path)
    named = sorted(graph.section for graph in manifest.graphs)
    there = sorted(entry.id for entry in container.entries if entry.type == SectionType.GRAPH)
    odd = min(set(named) ^ set(there), default=None)
    message = f"graphs and GRAPH sections do not pair off, first at section id {odd}, expected each exactly once"
    require(named == there, "EMOE-GRA-004", message, path)


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
    used = {each.layout for table in (dense, experts) for each in table.ranges if each.count}
    odd = min(used ^ set(range(len(layouts))), default=None)
    message = f"layout {odd} is used or defined, expected both; there are {len(layouts)}"
    require(odd is None, "EMOE-LAY-002", message, "manifest.layouts")
    dense_counts = [1] * (len(model.layers) + 2)
    for table, section_type, counts in (
        (dense, SectionType.DENSE, dense_counts),
        (experts, SectionType.EXPERTS, model.expert_counts),
    ):
        own = SectionType(section_type + 1)
        path = own.name.lower()
        with located(container.section(own).offset):
            message = f"{len(table.ranges)} ranges, the model needs {len(counts)}"
            require(len(table.ranges) == len(counts), "EMOE-TAB-007", message, path)
            for index, (record_range, count) in enumerate(zip(table.ranges, counts, strict=True)):
                message = f"{record_range.count} records, the model needs {count}"
                require(record_range.count == count, "EMOE-TAB-007", message, f"{path}.ranges[{index}].count")
            _check_ranges(table, container.section(section_type), manifest, container.page_size, path)

    for index, layout in enumerate(layouts):
        for matrix in layout.matrices:
            summed = matrix.encoding != "f32" and matrix.name != "embedding"
            message = f"{matrix.rows} rows of {matrix.encoding}, the limit is {limits.MAX_INTEGER_ROWS}"
            where = f"manifest.layouts[{index}].{matrix.name}"
            require(not summed or matrix.rows <= limits.MAX_INTEGER_ROWS, "EMOE-LAY-003", message, where)
    weights = {(graph.role, graph.shape_class): graph.weights for graph in manifest.graphs}
    encodings = [{matrix.name: matrix.encoding for matrix in layout.matrices} for layout in layouts]
    for number, record_range in enumerate(dense.ranges):
        given = encodings[record_range.layout]
        if number == 0:
            encoding = given.get("embedding", "f32")
            message = f"embedding is stored as {encoding!r}, expected 'f32' or 'w8'"
            where = f"manifest.layouts[{record_range.layout}]"
            require(encoding in {"f32", "w8"}, "EMOE-LAY-004", message, where)
            expected = embedding_layout(model, given)
        elif number <= len(model.layers):
            expected = layer_layout(model, number - 1, given)
            for role, shape_class in layer_classes(model, number - 1).items():
                if role != "expert":
                    _check_weights(manifest, weights, (role, shape_class), f"layer {number - 1}", given)
        else:
            expected = final_layout(model, given)
            source = encodings[dense.ranges[0].layout].get("embedding") if model.tied_head else given.get("head")
            _check_weights(manifest, weights, ("head", 0), "end", {"head": source or "f32"})
        _check_layout(layouts[record_range.layout], expected, record_range.layout)
    for number, record_range in enumerate(experts.ranges):
        expert_class = model.layers[number].experts
        if expert_class is not None:
            given = encodings[record_range.layout]
            expected = expert_layout(model, expert_class, given)
            _check_weights(manifest, weights, ("expert", expert_class), f"layer {number}", given)
            _check_layout(layouts[record_range.layout], expected, record_range.layout)


def _check_weights(
    manifest: Manifest,
    weights: Mapping[tuple[GraphRole, int], GraphWeights],
    graph: tuple[GraphRole, int],
    where: str,
    encodings: Mapping[str, Encoding],
) -> None:
    """Matrices a graph takes must be stored as f32 if it takes f32, and in no other case."""
    taken = weights[graph]
    for name in role_shape(graph[0], manifest.model, graph[1]).matrix_names:
        encoding = encodings.get(name, "f32")
        wanted = "expected f32" if taken == "f32" else "expected a quantised one"
        message = f"{where} stores {name!r} as {encoding}, its {graph[0]} graph takes {taken}: {wanted}"
        require((taken == "f32") == (encoding == "f32"), "EMOE-GRA-005", message, "manifest.graphs")


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
        require(record_range.record_length <= limits.MAX_RECORD_LENGTH, "EMOE-TAB-008", message, where)
        message = f"range begins at {record_range.base}, expected {end}"
        require(record_range.base == end, "EMOE-TAB-009", message, f"{where}.base")
        payload = manifest.layouts[record_range.layout].payload_length if record_range.count else 0
        expected = round_up(payload, page_size)
        message = f"record of {record_range.record_length} bytes for a payload of {payload}, expected {expected}"
        require(record_range.record_length == expected, "EMOE-TAB-010", message, f"{where}.record_length")
        message = f"layout {record_range.layout} of a range without records, expected 0"
        require(record_range.count > 0 or record_range.layout == 0, "EMOE-TAB-010", message, f"{where}.layout")
        end = record_range.end
    message = f"ranges end at {end}, the section has {section.length} bytes"
    require(end == section.length, "EMOE-TAB-011", message, path)
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
    require(choice.arena_bytes >= needed, "EMOE-CFG-001", message, f"{path}.arena_bytes")
    banks = choice.prefetch_depth + 1
    groups = sum(-(-record_range.count // choice.group_size) for record_range in experts.ranges)
    message = f"{banks} banks cannot keep {groups} groups resident, expected at least one for each"
    require(choice.policy != "resident" or banks >= groups, "EMOE-CFG-002", message, f"{path}.prefetch_depth")
    own = choice.name, choice.prompt_tokens
    message = f"second device configuration of {choice.name!r} with prompt_tokens {choice.prompt_tokens}, expected one"
    alone = all((other.name, other.prompt_tokens) != own for other in earlier)
    require(alone, "EMOE-CFG-003", message, f"{path}.prompt_tokens")


def banks_length(choice: DeviceConfiguration, experts: RecordTable) -> int:
    """Bytes of all banks of a device configuration."""
    largest = max(record_range.record_length for record_range in experts.ranges)
    return (choice.prefetch_depth + 1) * choice.group_size * largest


def check_device_configurations(manifest: Manifest, experts: RecordTable) -> None:
    """Judge the device configurations of the manifest. Raises as `check_device_configuration` does."""
    choices = manifest.device_configurations
    for index, choice in enumerate(choices):
        check_device_configuration(choice, choices[:index], experts, f"manifest.device_configurations[{index}]")
