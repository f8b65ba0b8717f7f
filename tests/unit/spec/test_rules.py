"""What ties manifest, directory and tables together: each rule broken once, with digests that agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as set_fields

from estream_loader import open_package
from estream_spec.constants import TABLE_MAGIC, SectionType
from estream_spec.errors import EmoeError, IntegrityError, InvalidError, LimitError, MalformedError
from estream_spec.limits import MAX_INTEGER_ROWS, MAX_RANGES, MAX_RECORD_LENGTH
from estream_spec.manifest import Binary, BinaryGraph, DeviceConfiguration, RecordLayout
from estream_spec.model import Attention, DenseBlock, ExpertBlock, Latent, Layer, Rotary, Router
from estream_spec.records import TABLE_HEADER, RecordRange, RecordTable
from fixtures.packages import ENCODINGS, MODEL, Draft, Section, binary, replace_table

ATTENTION, BLOCK = MODEL.attentions[0], MODEL.expert_blocks[0]
DENSE_TABLE, EXPERT_TABLE = SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE
Change = Callable[[Draft], Any]


def refused(change: Change, kind: type[EmoeError], rule: str) -> EmoeError:
    """What opening a changed package and reading its tables raises: of this class, and this rule without `EMOE-`."""
    draft = Draft()
    change(draft)
    data = draft.seal()
    with pytest.raises(kind) as caught, open_package(data) as package:
        assert package.experts.table.ranges
    error = caught.value
    assert (type(error), error.rule) == (kind, f"EMOE-{rule}")
    assert error.offset is not None
    return error


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


def attention(**changes: Any) -> dict[str, Any]:
    return {"attentions": (set_fields(ATTENTION, **changes),)}


def routed(**changes: Any) -> dict[str, Any]:
    router = set_fields(BLOCK.router, top_k=2)
    return {"expert_blocks": (set_fields(BLOCK, router=set_fields(router, **changes)),)}


MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "epsilon beyond f32": ({"norm_epsilon": 1e39}, "MOD-001", "norm_epsilon"),
    "infinite epsilon": ({"norm_epsilon": float("inf")}, "MOD-001", "norm_epsilon"),
    "infinite theta": (attention(rotary=Rotary(theta=float("inf"))), "MOD-002", "attentions[0].rotary.theta"),
    "theta beyond f32": (attention(rotary=Rotary(theta=1e39)), "MOD-002", "attentions[0].rotary.theta"),
    "theta of 0 in f32": (attention(rotary=Rotary(theta=1e-50)), "MOD-002", "attentions[0].rotary.theta"),
    "infinite clip": (attention(clip_qkv=float("inf")), "MOD-003", "attentions[0].clip_qkv"),
    "clip of 0 in f32": (attention(clip_qkv=1e-50), "MOD-003", "attentions[0].clip_qkv"),
    "heads that do not divide": (
        attention(heads=3, key_value_heads=2),
        "MOD-004",
        "attentions[0].key_value_heads",
    ),
    "more key heads than heads": (
        attention(heads=1, key_value_heads=2),
        "MOD-004",
        "attentions[0].key_value_heads",
    ),
    "odd head": (attention(head_dim=15), "MOD-005", "attentions[0].head_dim"),
    "heads too wide": (attention(heads=1 << 13, head_dim=1 << 12), "MOD-006", "attentions[0]"),
    "more chosen than there are": (
        {"expert_blocks": (set_fields(BLOCK, router=Router(family="softmax-topk", top_k=4)),)},
        "MOD-007",
        "expert_blocks[0].router.top_k",
    ),
    "unused attention": ({"attentions": (ATTENTION, ATTENTION)}, "MOD-008", "attentions"),
    "unused experts": ({"expert_blocks": (BLOCK, BLOCK)}, "MOD-008", "expert_blocks"),
    "no such attention": ({"layers": (Layer(attention=1, experts=0),)}, "MOD-008", "attentions"),
    "no such experts": ({"layers": (Layer(attention=0, experts=1),)}, "MOD-008", "expert_blocks"),
    "begin token outside": ({"begin_token": 16}, "MOD-009", ""),
    "end token outside": ({"end_tokens": (0, 16)}, "MOD-009", ""),
    "frequencies of the whole head": (
        attention(rotary=Rotary(theta=1.0, width=4, frequencies=(1.0,) * 8)),
        "MOD-010",
        "attentions[0].rotary.frequencies",
    ),
    "rotated width past the head": (
        attention(rotary=Rotary(theta=1.0, width=18)),
        "MOD-005",
        "attentions[0].rotary.width",
    ),
    "latent attention with biases": (
        attention(latent=Latent(rank=2, norm_epsilon=0.0), bias=True, rotary=Rotary(theta=1.0, width=4)),
        "MOD-011",
        "attentions[0].latent",
    ),
    "groups that do not divide": (routed(groups=2), "MOD-012", "expert_blocks[0].router.groups"),
    "groups of one that count by two": (
        routed(groups=3, top_groups=3, group_score="two-largest"),
        "MOD-012",
        "expert_blocks[0].router.groups",
    ),
    "more groups than there are": (routed(groups=3, top_groups=4), "MOD-012", "expert_blocks[0].router.top_groups"),
    "too few experts left": (routed(groups=3), "MOD-012", "expert_blocks[0].router.top_groups"),
    "tolerance of a softmax": (routed(tolerance=0.1), "MOD-013", "expert_blocks[0].router.tolerance"),
    "sparsemixer with a selection bias": (
        routed(family="sparsemixer", selection_bias=True),
        "MOD-013",
        "expert_blocks[0].router",
    ),
    "scale of 0 in f32": (routed(scale=1e-50), "MOD-013", "expert_blocks[0].router.scale"),
    "silu with a limit": ({"expert_blocks": (set_fields(BLOCK, limit=7.0),)}, "MOD-014", "expert_blocks[0].limit"),
    "layer of attention alone": ({"layers": (Layer(attention=0),)}, "MOD-015", "layers[0]"),
    "layer of experts alone": ({"layers": (Layer(experts=0),)}, "MOD-015", "layers[0]"),
    "unused dense block": ({"dense_blocks": (DenseBlock(intermediate=1),)}, "MOD-008", "dense_blocks"),
    "no attention": ({"layers": (Layer(convolution=0, experts=0),)}, "MOD-008", "attentions"),
    "two faults": (
        {**attention(head_dim=15), "norm_epsilon": 1e39, "begin_token": 16},
        "MOD-001",
        "norm_epsilon",
    ),
}


@pytest.mark.parametrize(("changes", "rule", "path"), MODELS.values(), ids=MODELS)
def test_rule_of_the_model(changes: dict[str, Any], rule: str, path: str) -> None:
    error = refused(lambda draft: draft.change_model(**changes), InvalidError, rule)
    assert error.path == ".".join(filter(None, ["manifest.model", path]))


def graphs(change: Callable[[list[Any]], Any]) -> Change:
    def apply(draft: Draft) -> None:
        changed = list(draft.manifest.graphs)
        change(changed)
        draft.change_manifest(graphs=tuple(changed))

    return apply


def set_graph(index: int, **changes: Any) -> Change:
    return graphs(lambda each: each.__setitem__(index, set_fields(each[index], **changes)))


GRAPHS: dict[str, tuple[Change, str, str]] = {
    "no such shape class": (set_graph(0, shape_class=1), "GRA-001", "[0]"),
    "no such head": (set_graph(4, shape_class=1), "GRA-001", "[4]"),
    "one twice": (graphs(lambda each: each.append(each[0])), "GRA-002", "[5]"),
    "one missing": (graphs(lambda each: each.pop(3)), "GRA-003", ""),
    "undefined variant": (set_graph(0, weights="uint8"), "GRA-003", ""),
    "half of a pair": (set_graph(0, activations="dynamic-int8"), "GRA-003", ""),
    "attention that multiplies weights": (set_graph(1, weights="int8"), "GRA-003", ""),
    "section that is not there": (set_graph(0, section=9), "GRA-004", ""),
    "section of two graphs": (set_graph(0, section=1), "GRA-004", ""),
    "section nobody names": (
        lambda draft: draft.sections.append(Section(SectionType.GRAPH, b"x", id=9)),
        "GRA-004",
        "",
    ),
    "f32 graph for stored integers": (set_graph(0, weights="f32"), "GRA-005", ""),
    "f32 expert graph for stored integers": (set_graph(3, weights="f32"), "GRA-005", ""),
    "f32 head graph for stored integers": (set_graph(4, weights="f32"), "GRA-005", ""),
}


@pytest.mark.parametrize(("change", "rule", "path"), GRAPHS.values(), ids=GRAPHS)
def test_rule_of_the_graphs(change: Change, rule: str, path: str) -> None:
    assert refused(change, InvalidError, rule).path == f"manifest.graphs{path}"


def test_integer_graph_for_stored_floats() -> None:
    draft = Draft(encodings={**ENCODINGS, "gate": "f32"})
    with open_package(draft.seal()) as package, pytest.raises(InvalidError, match=r"'gate' as f32.*\[EMOE-GRA-005\]"):
        assert package.experts.table.ranges


ALIKE = binary(0, graphs=(*binary(0).graphs, *(set_fields(graph, name="other") for graph in binary(0).graphs)))
GRAPH = binary(0).graphs[0]


def of_graphs(*graphs: BinaryGraph) -> Change:
    return binaries(binary(0, graphs=graphs))


def binaries(*given: Binary, sections: tuple[int, ...] = (0, 1)) -> Change:
    def apply(draft: Draft) -> None:
        draft.change_manifest(binaries=given)
        draft.sections += [Section(SectionType.BINARY, b"x", id=each) for each in sections[: len(given) or None]]

    return apply


BINARIES: dict[str, tuple[Change, str, str]] = {
    "section nobody names": (binaries(sections=(7,)), "BIN-001", ""),
    "section that is not there": (binaries(binary(1), sections=(0,)), "BIN-001", ""),
    "section of two binaries": (binaries(binary(0), binary(0, soc_model=1), sections=(0,)), "BIN-001", ""),
    "two of one chip": (binaries(binary(0), binary(1, sdk="3", compiler="other")), "BIN-002", "[1]"),
    "no such shape class": (of_graphs(GRAPH, set_fields(GRAPH, shape_class=1)), "BIN-003", "[0].graphs[1]"),
    "an encoding for no matrix": (of_graphs(set_fields(GRAPH, encodings=("f32",))), "BIN-003", "[0].graphs[0]"),
    "a matrix without encoding": (of_graphs(set_fields(GRAPH, role="out", keys=0)), "BIN-003", "[0].graphs[0]"),
    "attention without keys": (of_graphs(set_fields(GRAPH, keys=0)), "BIN-003", "[0].graphs[0]"),
    "keys for a head": (of_graphs(set_fields(GRAPH, role="head", encodings=("w8",))), "BIN-003", "[0].graphs[0]"),
    "two alike": (binaries(ALIKE), "BIN-004", "[0].graphs[1]"),
    "two of one name": (of_graphs(GRAPH, set_fields(GRAPH, tokens=1)), "BIN-005", "[0].graphs[1]"),
}


def test_the_section_that_does_not_pair_off_is_named() -> None:
    for change, section in (
        (binaries(sections=(7,)), 7),
        (binaries(binary(1), sections=(0,)), 0),
        (binaries(binary(0), binary(5), binary(5), sections=(0, 5)), 5),
    ):
        assert f"first at section id {section}," in refused(change, InvalidError, "BIN-001").message


@pytest.mark.parametrize(("change", "rule", "path"), BINARIES.values(), ids=BINARIES)
def test_rule_of_binaries(change: Change, rule: str, path: str) -> None:
    assert refused(change, InvalidError, rule).path == f"manifest.binaries{path}"


def test_binaries_for_chips_that_differ_in_one_number() -> None:
    draft = Draft()
    binaries(binary(0), binary(1, architecture=79))(draft)
    with open_package(draft.seal(), integrity="full") as package:
        assert [each.architecture for each in package.manifest.binaries] == [75, 79]


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


def merged(table: RecordTable) -> RecordTable:
    """One range instead of two."""
    first, second = table.ranges
    return replace_table(table, ranges=(replace(first, count=first.count + second.count),))


TABLES: dict[str, tuple[Change, type[EmoeError], str, str]] = {
    "no such layout": (ranges(EXPERT_TABLE, 0, layout=4), InvalidError, "LAY-002", "manifest.layouts"),
    "huge layout": (ranges(EXPERT_TABLE, 0, layout=2**32 - 1), InvalidError, "LAY-002", "manifest.layouts"),
    "number of ranges": (
        lambda draft: draft.change_table(EXPERT_TABLE, merged),
        InvalidError,
        "TAB-007",
        "expert_table",
    ),
    "counts": (
        lambda draft: draft.change_table(EXPERT_TABLE, moved),
        InvalidError,
        "TAB-007",
        "expert_table.ranges[0].count",
    ),
    "record above the limit": (
        ranges(EXPERT_TABLE, 0, record_length=MAX_RECORD_LENGTH + 1),
        LimitError,
        "TAB-008",
        "expert_table.ranges[0]",
    ),
    "huge record": (ranges(EXPERT_TABLE, 0, record_length=2**64 - 1), LimitError, "TAB-008", "expert_table.ranges[0]"),
    "base": (ranges(EXPERT_TABLE, 1, base=4096), InvalidError, "TAB-009", "expert_table.ranges[1].base"),
    "base beyond": (ranges(EXPERT_TABLE, 1, base=2**64 - 1), InvalidError, "TAB-009", "expert_table.ranges[1].base"),
    "first base": (ranges(DENSE_TABLE, 0, base=4096), InvalidError, "TAB-009", "dense_table.ranges[0].base"),
    "record length": (
        ranges(EXPERT_TABLE, 0, record_length=8192),
        InvalidError,
        "TAB-010",
        "expert_table.ranges[0].record_length",
    ),
    "record too short": (
        ranges(DENSE_TABLE, 1, record_length=4096),
        InvalidError,
        "TAB-010",
        "dense_table.ranges[1].record_length",
    ),
    "no record length": (
        ranges(EXPERT_TABLE, 0, record_length=0),
        InvalidError,
        "TAB-010",
        "expert_table.ranges[0].record_length",
    ),
    "record at the limit": (
        ranges(EXPERT_TABLE, 0, record_length=MAX_RECORD_LENGTH),
        InvalidError,
        "TAB-010",
        "expert_table.ranges[0].record_length",
    ),
    "layout of another record": (
        ranges(DENSE_TABLE, 1, layout=0),
        InvalidError,
        "TAB-010",
        "dense_table.ranges[1].record_length",
    ),
}


@pytest.mark.parametrize(("change", "kind", "rule", "path"), TABLES.values(), ids=TABLES)
def test_rule_of_the_tables(change: Change, kind: type[EmoeError], rule: str, path: str) -> None:
    assert refused(change, kind, rule).path == path


def test_table_that_cannot_be_decoded_is_placed_where_its_section_begins() -> None:
    draft = Draft()
    draft.section(EXPERT_TABLE).data += b"\0"
    data = draft.seal()
    with open_package(data) as package, pytest.raises(MalformedError) as caught:
        assert package.experts.table.ranges
    error = caught.value
    assert (error.rule, error.path) == ("EMOE-TAB-003", "expert_table")
    assert error.offset == data.rindex(TABLE_MAGIC)


def test_section_longer_than_its_table() -> None:
    def longer(draft: Draft) -> None:
        draft.section(SectionType.EXPERTS).data += bytes(4096)

    assert refused(longer, InvalidError, "TAB-011").path == "expert_table"


@pytest.mark.parametrize("section_type", [SectionType.DENSE, SectionType.EXPERTS])
def test_section_digest_is_over_the_digests_of_its_records(section_type: SectionType) -> None:
    def other(draft: Draft) -> None:
        draft.section(section_type).sha256 = bytes(32)

    assert refused(other, IntegrityError, "TAB-012").path == SectionType(section_type + 1).name.lower()


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


def set_matrix(index: int, **changes: Any) -> Callable[[list[RecordLayout]], Any]:
    def change(each: list[RecordLayout]) -> None:
        first, *others = each[index].matrices
        each[index] = set_fields(each[index], matrices=(set_fields(first, **changes), *others))

    return change


LAYOUTS: dict[str, tuple[Change, str, str]] = {
    "payload": (
        layouts(lambda each: each.__setitem__(0, set_fields(each[0], payload_length=1))),
        "LAY-001",
        "[0].payload_length",
    ),
    "tensor past the payload": (layouts(set_tensor(1, offset=1 << 40)), "LAY-001", "[1].payload_length"),
    "unused": (layouts(lambda each: each.append(set_fields(each[0], matrices=()))), "LAY-002", ""),
    "more rows than sums have room for": (layouts(set_matrix(3, rows=MAX_INTEGER_ROWS + 1)), "LAY-003", "[3].gate"),
    "rows at the limit": (layouts(set_matrix(3, rows=MAX_INTEGER_ROWS)), "LAY-005", "[3]"),
    "many rows of f32": (layouts(set_matrix(1, encoding="f32", rows=MAX_INTEGER_ROWS + 1)), "LAY-005", "[1]"),
    "many rows of an embedding": (layouts(set_matrix(0, rows=MAX_INTEGER_ROWS + 1)), "LAY-005", "[0]"),
    "no embedding": (
        layouts(lambda each: each.__setitem__(0, set_fields(each[0], matrices=()))),
        "LAY-005",
        "[0]",
    ),
    "embedding in groups": (layouts(set_matrix(0, encoding="w4g32")), "LAY-004", "[0]"),
    "tensor moved": (layouts(set_tensor(1, offset=64)), "LAY-005", "[1]"),
    "tensor renamed": (layouts(set_tensor(1, name="other")), "LAY-005", "[1]"),
    "tensor reshaped": (layouts(set_tensor(1, shape=(16,))), "LAY-005", "[1]"),
    "tensor of another type": (layouts(set_tensor(3, dtype="i8")), "LAY-005", "[3]"),
    "matrix of another width": (layouts(set_matrix(3, columns=31)), "LAY-005", "[3]"),
    "matrix missing": (
        layouts(lambda each: each.__setitem__(1, set_fields(each[1], matrices=each[1].matrices[1:]))),
        "LAY-005",
        "[1]",
    ),
    "router not f32": (layouts(set_matrix(1, encoding="w8")), "LAY-005", "[1]"),
}


@pytest.mark.parametrize(("change", "rule", "path"), LAYOUTS.values(), ids=LAYOUTS)
def test_rule_of_the_layouts(change: Change, rule: str, path: str) -> None:
    assert refused(change, InvalidError, rule).path == f"manifest.layouts{path}"


def test_model_and_layouts_disagree() -> None:
    blocks = (set_fields(BLOCK, intermediate=64),)
    error = refused(lambda draft: draft.change_model(expert_blocks=blocks), InvalidError, "LAY-005")
    assert error.path == "manifest.layouts[3]"


def test_arena_smaller_than_its_banks() -> None:
    def configured(arena_bytes: int) -> Change:
        choice = DeviceConfiguration(name="phone", arena_bytes=arena_bytes, group_size=2, prefetch_depth=1)
        return lambda draft: draft.change_manifest(
            device_configurations=(*draft.manifest.device_configurations, choice)
        )

    error = refused(configured(4 * 4096 - 1), InvalidError, "CFG-001")
    assert error.path == "manifest.device_configurations[1].arena_bytes"
    assert "its banks take 16384" in str(error)
    draft = Draft()
    configured(4 * 4096)(draft)
    with open_package(draft.seal()) as package:
        assert package.experts.table.ranges


def with_configurations(*choices: dict[str, Any]) -> Change:
    given = {"name": "phone", "arena_bytes": 1 << 20, "group_size": 2, "prefetch_depth": 1}
    added = tuple(DeviceConfiguration(**{**given, **each}) for each in choices)
    return lambda draft: draft.change_manifest(device_configurations=added)


def test_too_few_banks_to_keep_all_experts() -> None:
    """Two layers of three experts are four groups of two."""
    error = refused(with_configurations({}, {"policy": "resident", "prefetch_depth": 2}), InvalidError, "CFG-002")
    assert error.path == "manifest.device_configurations[1].prefetch_depth"
    assert "3 banks cannot keep 4 groups resident" in str(error)
    for sizes in ({"prefetch_depth": 3}, {"prefetch_depth": 9}, {"group_size": 3, "prefetch_depth": 1}):
        draft = Draft()
        with_configurations({"policy": "resident", **sizes})(draft)
        with open_package(draft.seal()) as package:
            assert package.device()[0].policy == "resident"


def test_two_configurations_of_a_device_for_prompts_of_one_length() -> None:
    change = with_configurations({"prompt_tokens": 64}, {}, {"prompt_tokens": 64, "lanes": 3})
    error = refused(change, InvalidError, "CFG-003")
    assert error.path == "manifest.device_configurations[2].prompt_tokens"
    assert "second device configuration of 'phone' with prompt_tokens 64" in str(error)
    draft = Draft()
    with_configurations({"prompt_tokens": 64}, {}, {"prompt_tokens": 64, "name": "tablet"})(draft)
    with open_package(draft.seal()) as package:
        assert [each.prompt_tokens for each in package.device("phone")] == [64, 0]


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

    error = refused(change, LimitError, "TAB-002")
    assert (error.message, error.path) == ("1027 ranges, the limit is 1026", "expert_table")
