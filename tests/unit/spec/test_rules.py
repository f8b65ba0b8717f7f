"""What ties manifest, directory and tables together: each rule broken once, with digests that agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as set_fields

from estream_loader import open_package
from estream_spec.constants import TABLE_MAGIC, SectionType
from estream_spec.errors import EmoeError, IntegrityError, InvalidError, LimitError
from estream_spec.limits import MAX_RANGES, MAX_RECORD_LENGTH
from estream_spec.manifest import DeviceConfiguration, RecordLayout
from estream_spec.model import Attention, ExpertBlock, Layer, Rotary, Router
from estream_spec.records import TABLE_HEADER, RecordRange, RecordTable
from fixtures.packages import ENCODINGS, MODEL, Draft, Section, replace_table

ATTENTION, BLOCK = MODEL.attentions[0], MODEL.expert_blocks[0]
DENSE_TABLE, EXPERT_TABLE = SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE
Change = Callable[[Draft], Any]


def refused(change: Change, kind: type[EmoeError]) -> EmoeError:
    """What opening a changed package and reading its tables raises."""
    draft = Draft()
    change(draft)
    data = draft.seal()
    with pytest.raises(kind) as caught, open_package(data) as package:
        assert package.experts.table.ranges
    assert type(caught.value) is kind
    return caught.value


def test_nothing_changed_is_valid() -> None:
    with open_package(Draft().seal(), integrity="full") as package:
        assert len(list(package.experts.places())) == 6
        assert [place.path for place in package.dense.places()] == [f"dense[{index}][0]" for index in range(4)]


def test_valid_models_of_other_kinds() -> None:
    two = set_fields(
        MODEL,
        attentions=(ATTENTION, set_fields(ATTENTION, qk_norm="full", clip_qkv=4.0)),
        layers=(Layer(attention=0, experts=0), Layer(attention=1, experts=0)),
        tied_head=True,
        begin_token=15,
        end_tokens=(0, 15),
    )
    draft = Draft(model=two)
    graphs = draft.manifest.graphs
    extra = [set_fields(graph, shape_class=1, section=graph.section + 10) for graph in graphs[:3]]
    draft.change_manifest(graphs=(*graphs, *extra))
    draft.sections += [Section(SectionType.GRAPH, b"graph", id=graph.section) for graph in extra]
    open_package(draft.seal(), integrity="full").close()


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": ({"attentions": (set_fields(ATTENTION, heads=3, key_value_heads=2),)}, "attentions[0]"),
    "more key heads than heads": (
        {"attentions": (set_fields(ATTENTION, heads=1, key_value_heads=2),)},
        "attentions[0]",
    ),
    "odd head": ({"attentions": (set_fields(ATTENTION, head_dim=15),)}, "attentions[0]"),
    "heads too wide": ({"attentions": (set_fields(ATTENTION, heads=1 << 13, head_dim=1 << 12),)}, "attentions[0]"),
    "infinite theta": ({"attentions": (set_fields(ATTENTION, rotary=Rotary(theta=float("inf"))),)}, "attentions[0]"),
    "infinite clip": ({"attentions": (set_fields(ATTENTION, clip_qkv=float("inf")),)}, "attentions[0]"),
    "theta beyond f32": ({"attentions": (set_fields(ATTENTION, rotary=Rotary(theta=1e39)),)}, "attentions[0]"),
    "theta of 0 in f32": ({"attentions": (set_fields(ATTENTION, rotary=Rotary(theta=1e-50)),)}, "attentions[0]"),
    "clip of 0 in f32": ({"attentions": (set_fields(ATTENTION, clip_qkv=1e-50),)}, "attentions[0]"),
    "epsilon beyond f32": ({"norm_epsilon": 1e39}, ""),
    "infinite epsilon": ({"norm_epsilon": float("inf")}, ""),
    "more chosen than there are": (
        {"expert_blocks": (set_fields(BLOCK, router=Router(family="softmax-topk", top_k=4)),)},
        "expert_blocks[0]",
    ),
    "unused attention": ({"attentions": (ATTENTION, ATTENTION)}, "attentions"),
    "unused experts": ({"expert_blocks": (BLOCK, BLOCK)}, "expert_blocks"),
    "no such attention": ({"layers": (Layer(attention=1, experts=0),)}, "attentions"),
    "no such experts": ({"layers": (Layer(attention=0, experts=1),)}, "expert_blocks"),
    "begin token outside": ({"begin_token": 16}, ""),
    "end token outside": ({"end_tokens": (0, 16)}, ""),
}


@pytest.mark.parametrize(("changes", "path"), MODELS.values(), ids=MODELS)
def test_rule_of_the_model(changes: dict[str, Any], path: str) -> None:
    error = refused(lambda draft: draft.change_model(**changes), InvalidError)
    assert error.path == ".".join(filter(None, ["manifest.model", path]))


def graphs(change: Callable[[list[Any]], Any]) -> Change:
    def apply(draft: Draft) -> None:
        changed = list(draft.manifest.graphs)
        change(changed)
        draft.change_manifest(graphs=tuple(changed))

    return apply


def set_graph(index: int, **changes: Any) -> Change:
    return graphs(lambda each: each.__setitem__(index, set_fields(each[index], **changes)))


GRAPHS: dict[str, Change] = {
    "no such shape class": set_graph(0, shape_class=1),
    "no such head": set_graph(4, shape_class=1),
    "one missing": graphs(lambda each: each.pop(3)),
    "one twice": graphs(lambda each: each.append(each[0])),
    "undefined variant": set_graph(0, weights="uint8"),
    "half of a pair": set_graph(0, activations="dynamic-int8"),
    "attention that multiplies weights": set_graph(1, weights="int8"),
    "section that is not there": set_graph(0, section=9),
    "section of two graphs": set_graph(0, section=1),
    "section nobody names": lambda draft: draft.sections.append(Section(SectionType.GRAPH, b"x", id=9)),
    "f32 graph for stored integers": set_graph(0, weights="f32"),
    "f32 expert graph for stored integers": set_graph(3, weights="f32"),
    "f32 head graph for stored integers": set_graph(4, weights="f32"),
}


@pytest.mark.parametrize("change", GRAPHS.values(), ids=GRAPHS)
def test_rule_of_the_graphs(change: Change) -> None:
    error = refused(change, InvalidError)
    assert error.path is not None
    assert error.path.startswith("manifest.graphs")


def test_integer_graph_for_stored_floats() -> None:
    draft = Draft(encodings={**ENCODINGS, "gate": "f32"})
    with open_package(draft.seal()) as package, pytest.raises(InvalidError, match="'gate' as f32"):
        assert package.experts.table.ranges


def ranges(section_type: SectionType, index: int, **changes: Any) -> Change:
    def change(table: RecordTable) -> RecordTable:
        changed = list(table.ranges)
        changed[index] = replace(changed[index], **changes)
        return replace_table(table, ranges=tuple(changed))

    return lambda draft: draft.change_table(section_type, change)


def moved(table: RecordTable) -> RecordTable:
    """One record of the first layer given to the second; the sum stays."""
    first, second = table.ranges
    return replace_table(table, ranges=(replace(first, count=2), replace(second, base=8192, count=4)))


TABLES: dict[str, tuple[Change, type[EmoeError], str]] = {
    "base": (ranges(EXPERT_TABLE, 1, base=4096), InvalidError, "expert_table.ranges[1]"),
    "base beyond": (ranges(EXPERT_TABLE, 1, base=2**64 - 1), InvalidError, "expert_table.ranges[1]"),
    "first base": (ranges(DENSE_TABLE, 0, base=4096), InvalidError, "dense_table.ranges[0]"),
    "record length": (ranges(EXPERT_TABLE, 0, record_length=8192), InvalidError, "expert_table.ranges[0]"),
    "record too short": (ranges(DENSE_TABLE, 1, record_length=4096), InvalidError, "dense_table.ranges[1]"),
    "no record length": (ranges(EXPERT_TABLE, 0, record_length=0), InvalidError, "expert_table.ranges[0]"),
    "record at the limit": (
        ranges(EXPERT_TABLE, 0, record_length=MAX_RECORD_LENGTH),
        InvalidError,
        "expert_table.ranges[0]",
    ),
    "record above the limit": (
        ranges(EXPERT_TABLE, 0, record_length=MAX_RECORD_LENGTH + 1),
        LimitError,
        "expert_table.ranges[0]",
    ),
    "huge record": (ranges(EXPERT_TABLE, 0, record_length=2**64 - 1), LimitError, "expert_table.ranges[0]"),
    "no such layout": (ranges(EXPERT_TABLE, 0, layout=4), InvalidError, "manifest.layouts"),
    "huge layout": (ranges(EXPERT_TABLE, 0, layout=2**32 - 1), InvalidError, "manifest.layouts"),
    "layout of another record": (ranges(DENSE_TABLE, 1, layout=0), InvalidError, "dense_table.ranges[1]"),
    "counts": (lambda draft: draft.change_table(EXPERT_TABLE, moved), InvalidError, "expert_table.ranges[0]"),
}


@pytest.mark.parametrize(("change", "kind", "path"), TABLES.values(), ids=TABLES)
def test_rule_of_the_tables(change: Change, kind: type[EmoeError], path: str) -> None:
    assert refused(change, kind).path == path


def test_section_longer_than_its_table() -> None:
    def longer(draft: Draft) -> None:
        draft.section(SectionType.EXPERTS).data += bytes(4096)

    assert refused(longer, InvalidError).path == "expert_table"


@pytest.mark.parametrize("section_type", [SectionType.DENSE, SectionType.EXPERTS])
def test_section_digest_is_over_the_digests_of_its_records(section_type: SectionType) -> None:
    def other(draft: Draft) -> None:
        draft.section(section_type).sha256 = bytes(32)

    assert refused(other, IntegrityError).path == SectionType(section_type + 1).name.lower()


def layouts(change: Callable[[list[RecordLayout]], Any]) -> Change:
    def apply(draft: Draft) -> None:
        changed = list(draft.manifest.layouts)
        change(changed)
        draft.change_manifest(layouts=tuple(changed))

    return apply


def set_tensor(index: int, **changes: Any) -> Callable[[list[RecordLayout]], Any]:
    def change(each: list[RecordLayout]) -> None:
        tensors = list(each[index].tensors)
        tensors[0] = set_fields(tensors[0], **changes)
        each[index] = set_fields(each[index], tensors=tuple(tensors))

    return change


LAYOUTS: dict[str, Change] = {
    "unused": layouts(lambda each: each.append(set_fields(each[0], matrices=()))),
    "payload": layouts(lambda each: each.__setitem__(0, set_fields(each[0], payload_length=1))),
    "tensor moved": layouts(set_tensor(1, offset=64)),
    "tensor renamed": layouts(set_tensor(1, name="other")),
    "tensor reshaped": layouts(set_tensor(1, shape=(16,))),
    "tensor of another type": layouts(set_tensor(3, dtype="i8")),
    "tensor past the payload": layouts(set_tensor(1, offset=1 << 40)),
    "matrix of another width": layouts(
        lambda each: each.__setitem__(
            3, set_fields(each[3], matrices=(set_fields(each[3].matrices[0], columns=31), *each[3].matrices[1:]))
        )
    ),
    "matrix missing": layouts(lambda each: each.__setitem__(1, set_fields(each[1], matrices=each[1].matrices[1:]))),
    "no embedding": layouts(lambda each: each.__setitem__(0, set_fields(each[0], matrices=()))),
    "router not f32": layouts(
        lambda each: each.__setitem__(
            1, set_fields(each[1], matrices=(set_fields(each[1].matrices[0], encoding="w8"), *each[1].matrices[1:]))
        )
    ),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_rule_of_the_layouts(change: Change) -> None:
    error = refused(change, InvalidError)
    assert error.path is not None
    assert error.path.startswith("manifest.layouts")


def test_model_and_layouts_disagree() -> None:
    blocks = (set_fields(BLOCK, intermediate=64),)
    error = refused(lambda draft: draft.change_model(expert_blocks=blocks), InvalidError)
    assert error.path == "manifest.layouts[3]"


def test_arena_smaller_than_its_banks() -> None:
    def configured(arena_bytes: int) -> Change:
        choice = DeviceConfiguration(name="phone", arena_bytes=arena_bytes, group_size=2, prefetch_depth=1)
        return lambda draft: draft.change_manifest(
            device_configurations=(*draft.manifest.device_configurations, choice)
        )

    error = refused(configured(4 * 4096 - 1), InvalidError)
    assert error.path == "manifest.device_configurations[1].arena_bytes"
    assert "its banks take 16384" in str(error)
    draft = Draft()
    configured(4 * 4096)(draft)
    with open_package(draft.seal()) as package:
        assert package.experts.table.ranges


def test_expert_layers_of_different_sizes() -> None:
    wide = ExpertBlock(experts=2, intermediate=96, router=Router(family="softmax-topk-renormalise", top_k=1))
    model = set_fields(
        MODEL,
        expert_blocks=(BLOCK, wide),
        layers=(Layer(attention=0, experts=0), Layer(attention=0, experts=1)),
        attentions=(Attention(heads=2, key_value_heads=2, head_dim=16, rotary=Rotary(theta=1.0)),),
    )
    draft = Draft(model=model)
    given = draft.manifest.graphs
    more = [set_fields(graph, shape_class=1, section=graph.section + 10) for graph in given[2:4]]
    draft.change_manifest(graphs=(*given, *more))
    draft.sections += [Section(SectionType.GRAPH, b"graph", id=graph.section) for graph in more]
    with open_package(draft.seal(), integrity="full") as package:
        lengths = [each.record_length for each in package.experts.table.ranges]
        assert [place.path for place in package.experts.places()][-1] == "experts[1][1]"
        assert lengths[0] < lengths[1]


def test_a_table_of_too_many_empty_ranges_is_refused_by_its_count() -> None:
    """Ranges of no records cost next to nothing in a file, and each would have to be looked at · one short refusal."""

    def change(draft: Draft) -> None:
        header = TABLE_HEADER.pack(TABLE_MAGIC, MAX_RANGES + 1, 0)
        section = draft.section(EXPERT_TABLE)
        section.data = header + RecordRange(0, 4096, 0, 0).encode() * (MAX_RANGES + 1)

    error = refused(change, LimitError)
    assert str(error) == "1027 ranges, the limit is 1026 (at expert_table)"
