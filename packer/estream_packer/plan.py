"""What a package will hold, decided from the model and the options alone, before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from estream_packer.recipe import BuildOptions
from estream_spec import limits
from estream_spec.errors import PackError
from estream_spec.graph_interface import ROLES, class_count, role_shape
from estream_spec.layout import embedding_layout, expert_layout, final_layout, layer_layout, round_up
from estream_spec.manifest import Activations, DeviceConfiguration, Graph, GraphRole, GraphWeights, RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.records import RecordRange
from estream_spec.weights import Encoding

GENERIC_GROUP_BYTES: Final = 1 << 22
"""A read of 4 MiB is near the full rate of phones and of disks alike."""
GENERIC_LAYER_SHARE: Final = 4
"""Two banks hold half a layer at most, however small the experts are: a small model is paged too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a package will hold.

    Attributes:
        model: what it computes.
        layouts: record layouts, each once.
        dense: ranges of the dense records: the embedding, each layer, what follows the last.
        experts: ranges of the expert records, one per layer, of no records where a layer has no experts.
        graphs: the graphs, by section id.
        device_configuration: the one that fits any device.
    """

    model: ModelDescription
    layouts: tuple[RecordLayout, ...]
    dense: tuple[RecordRange, ...]
    experts: tuple[RecordRange, ...]
    graphs: tuple[Graph, ...]
    device_configuration: DeviceConfiguration

    def layout(self, record_range: RecordRange) -> RecordLayout:
        """The layout of a range's records."""
        return self.layouts[record_range.layout]

    @property
    def record_bytes(self) -> int:
        """Bytes of all records, padding included: nearly the whole package."""
        return self.dense[-1].end + self.experts[-1].end


def plan_package(model: ModelDescription, options: BuildOptions) -> Plan:
    """Decide layouts, places, graphs and the default device configuration.

    Raises:
        PackError: a record or the number of them is above the format's limit, or the options speak of what the model
            has not.
    """
    _check_roles(model, options)
    encodings = _encodings(model, options)
    layers = range(len(model.layers))
    dense = [
        embedding_layout(model, encodings),
        *(layer_layout(model, layer, encodings) for layer in layers),
        final_layout(model, encodings),
    ]
    experts = [
        None if layer.experts is None else expert_layout(model, layer.experts, encodings) for layer in model.layers
    ]
    layouts = tuple(dict.fromkeys([*dense, *(each for each in experts if each is not None)]))
    page_size = 1 << options.page_shift
    _check_limits(model, layouts, page_size)
    expert_ranges = _ranges(experts, model.expert_counts, layouts, page_size)
    return Plan(
        model=model,
        layouts=layouts,
        dense=_ranges(dense, [1] * len(dense), layouts, page_size),
        experts=expert_ranges,
        graphs=_graphs(model, options),
        device_configuration=_generic_configuration(expert_ranges),
    )


def _encodings(model: ModelDescription, options: BuildOptions) -> dict[str, Encoding]:
    """The encoding of each matrix; the router, which is left out, stays f32."""
    encodings: dict[str, Encoding] = {"embedding": options.encoding_of("embedding")}
    for role in ROLES:
        for shape_class in range(class_count(role, model)):
            for name in role_shape(role, model, shape_class).matrix_names:
                encodings[name] = _encoding_for(role, model, options)
    return encodings


def _check_roles(model: ModelDescription, options: BuildOptions) -> None:
    """Refuse a width for a head that is the embedding: it would be ignored."""
    if model.tied_head and options.head not in (None, options.encoding_of("embedding")):
        found = options.encoding_of("embedding")
        message = f"head is to be stored as {options.head!r}, but it is the embedding, which is stored as {found!r}"
        raise PackError(message, hint="say how the embedding is stored, and leave the head out")


def _check_limits(model: ModelDescription, layouts: Sequence[RecordLayout], page_size: int) -> None:
    for layout in layouts:
        if (length := round_up(layout.payload_length, page_size)) > limits.MAX_RECORD_LENGTH:
            names = ", ".join(matrix.name for matrix in layout.matrices)
            message = f"record of {names} takes {length} bytes, the limit is {limits.MAX_RECORD_LENGTH}"
            raise PackError(message, hint="choose an encoding with fewer bits for them")
    records = sum(model.expert_counts)
    if records > limits.MAX_RECORDS:
        raise PackError(f"model has {records} experts in all its layers, the limit is {limits.MAX_RECORDS}")


def _ranges(
    each: Sequence[RecordLayout | None], counts: Sequence[int], layouts: Sequence[RecordLayout], page_size: int
) -> tuple[RecordRange, ...]:
    """Ranges one behind the other, the n-th of `counts[n]` records of layout `each[n]`; of none where there is none."""
    index = {layout: number for number, layout in enumerate(layouts)}
    ranges, base = [], 0
    for layout, count in zip(each, counts, strict=True):
        length = 0 if layout is None else round_up(layout.payload_length, page_size)
        number = 0 if layout is None else index[layout]
        ranges.append(RecordRange(base=base, record_length=length, count=count, layout=number))
        base = ranges[-1].end
    return tuple(ranges)


def _graphs(model: ModelDescription, options: BuildOptions) -> tuple[Graph, ...]:
    """Every graph the model needs, for each kind of weights it may be given."""
    wanted: list[tuple[GraphRole, int, GraphWeights, Activations]] = [
        (role, shape_class, weights, activations)
        for role in ROLES
        for shape_class in range(class_count(role, model))
        for weights, activations in _kinds(_encoding_for(role, model, options), options.activations)
    ]
    return tuple(
        Graph(
            section=section,
            target="portable",
            role=role,
            shape_class=shape_class,
            weights=weights,
            activations=activations,
        )
        for section, (role, shape_class, weights, activations) in enumerate(wanted)
    )


def _encoding_for(role: GraphRole, model: ModelDescription, options: BuildOptions) -> Encoding:
    """How the matrices that a role's graphs take are stored."""
    match role:
        case "attend":
            return "f32"  # it takes none
        case "expert":
            return options.experts
        case "head" if model.tied_head:
            return options.encoding_of("embedding")
        case "head":
            return options.encoding_of("head")
        case "dense":
            return options.encoding_of("shared")
        case "qkv" | "convolve" | "out":
            return options.encoding_of("attention")


def _kinds(encoding: Encoding, activations: Activations) -> tuple[tuple[GraphWeights, Activations], ...]:
    """The graphs that can take weights of an encoding.

    Integer products come twice: which of the two kinds of weights a processor multiplies exactly shows only there.
    """
    if encoding == "f32":
        return (("f32", "f32"),)
    if activations == "f32":
        return (("int8", "f32"),)
    return ("int8", activations), ("uint8", activations)


def _generic_configuration(experts: Sequence[RecordRange]) -> DeviceConfiguration:
    """Two banks of about one good read each."""
    largest = max(record_range.record_length for record_range in experts)
    fewest = min(record_range.count for record_range in experts if record_range.count)
    group_size = max(1, min(GENERIC_GROUP_BYTES // largest, fewest // GENERIC_LAYER_SHARE))
    return DeviceConfiguration(
        name="generic", arena_bytes=2 * group_size * largest, group_size=group_size, prefetch_depth=1
    )
