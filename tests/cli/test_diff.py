from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli.conftest import Built, Pack
from estream_spec.constants import SectionType
from estream_spec.manifest import BinaryGraph, content_id
from estream_spec.records import RecordTable
from fixtures.packages import TOKENIZER, Draft, Section, binary, with_binaries


def compared(pack: Pack, first: Path, second: Path) -> tuple[int, dict[str, Any]]:
    status, out, err = pack("diff", first, second, "--json")
    assert err == ""
    return status, json.loads(out)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other.emoe"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    path = tmp_path / "first.emoe"
    path.write_bytes(Draft().seal())
    return path


def test_same_file(first: Path, other: Path, pack: Pack) -> None:
    other.write_bytes(first.read_bytes())
    assert pack("diff", first, other) == (0, "same file\n", "")
    assert compared(pack, first, other) == (0, {"level": "same file", "fields": [], "records": [], "sections": {}})


def test_same_signed_content_with_what_was_added(first: Path, other: Path, pack: Pack) -> None:
    other.write_bytes(first.read_bytes())
    sizes = "--arena", "1M", "--group-size", "2", "--prefetch-depth"
    pack("configure", other, "--name", "phone", *sizes, "1")
    names = "schedule 0", "schedule 1", "device configuration 0"
    added = [f"{name}: only in the second" for name in names]
    assert pack("diff", first, other).out.splitlines() == [
        "same signed content",
        "",
        "sections",
        *map("  {}".format, added),
    ]
    pack("configure", first, "--name", "phone", *sizes, "2")
    status, found = compared(pack, first, other)
    assert (status, found["level"]) == (0, "same signed content")
    assert found["sections"] == {"device configuration 0": "differs", "schedule 0": "differs"}


def test_same_signed_content_and_other_bytes(first: Path, other: Path, pack: Pack) -> None:
    data = first.read_bytes()
    for changed in (data + b"trailing", data[:300] + b"\1" + data[301:]):
        other.write_bytes(changed)
        status, found = compared(pack, first, other)
        assert (status, found["level"]) == (0, "same signed content")
        assert found["sections"] == {"places of sections, or bytes of none": "differ"}


def test_same_content_in_another_layout(built: Built, pack: Pack) -> None:
    status, found = compared(pack, built(), built(page_shift=14))
    assert (status, found["level"], found["records"]) == (0, "same content", [])
    assert [field["path"] for field in found["fields"]] == [
        "device_configurations[0].arena_bytes",
    ]


def test_same_content_with_other_facts(first: Path, other: Path, pack: Pack) -> None:
    draft = Draft()
    draft.change_manifest(name="renamed", extensions={"org.example": b"\x01"})
    draft.section(SectionType.TOKENIZER).compress()
    draft.section(SectionType.GRAPH, 2).data = b"better graph"
    draft.sections.append(Section(99, b"x"))
    other.write_bytes(draft.seal())
    status, out, _ = pack("diff", first, other)
    assert status == 0
    assert out.splitlines() == [
        "same content",
        "",
        "manifest",
        "  name: 'tiny' → 'renamed'",
        "  extensions.org.example: nothing → '01'",
        "",
        "sections",
        "  graph 2: differs",
        "  unknown type 99, id 0: only in the second",
    ]


def test_binaries_are_compared_by_their_chips(first: Path, other: Path, pack: Pack) -> None:
    expert = BinaryGraph(name="e", role="expert", shape_class=0, tokens=64, encodings=("w8", "w8", "w8"))
    one, two = binary(3), binary(4, soc_model=69, architecture=79)
    first.write_bytes(with_binaries(two).seal())
    changed = replace(two, sdk="2.52.0", graphs=(expert, *two.graphs))
    draft = with_binaries(one, changed)
    draft.section(SectionType.BINARY, 4).data = b"compiled anew"
    other.write_bytes(draft.seal())
    status, found = compared(pack, first, other)
    assert (status, found["level"]) == (0, "same content")
    fields = {field["path"].removeprefix("binaries."): (field["first"], field["second"]) for field in found["fields"]}
    assert fields == {
        "htp sm8750.sdk": ("2.51.0", "2.52.0"),
        "htp sm8750.graphs.expert_0_w8_w8_w8_64": (None, "e"),
        "htp sm8650.section": (None, 3),
        "htp sm8650.sdk": (None, "2.51.0"),
        "htp sm8650.compiler": (None, "tests"),
        "htp sm8650.options": (None, ""),
        "htp sm8650.graphs.attend_0_32_64": (None, "attend"),
    }
    assert found["sections"] == {"binary 3": "only in the second", "binary 4": "differs"}


def test_one_changed_expert(first: Path, other: Path, pack: Pack) -> None:
    draft = Draft()
    layout = draft.manifest.layouts[3]
    places = {tensor.name: tensor.offset for tensor in layout.tensors}

    def change(record: bytearray) -> None:
        record[places["up.nibbles"]] ^= 1
        record[places["down.scale"]] ^= 1

    draft.change_record(SectionType.EXPERTS, 4, change)
    with_content_id(draft)
    other.write_bytes(draft.seal())
    status, found = compared(pack, first, other)
    assert (status, found["level"], found["fields"]) == (1, "different", [])
    assert found["records"] == [
        {
            "where": "experts of layer 1",
            "differing": 1,
            "first": 3,
            "second": 3,
            "indices": [1],
            "tensors": {"down": 1, "up": 1},
        }
    ]
    status, out, _ = pack("diff", first, other)
    assert "  experts of layer 1: 1 of 3 differ (up in 1, down in 1)" in out.splitlines()


def with_content_id(draft: Draft) -> None:
    """Mend the content id after a change to a record."""
    manifest = draft.manifest
    tables = [
        RecordTable.decode(draft.section(each).data, path="table")
        for each in (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE)
    ]
    draft.change_manifest(
        content_id=content_id(manifest.model, manifest.layouts, tables[0], tables[1], (TOKENIZER, b""))
    )


def test_other_encoding(built: Built, pack: Pack) -> None:
    status, found = compared(pack, built(), built(experts="w8"))
    assert status == 1
    assert {"path": "layouts[3].gate", "first": "w4g32 64x32", "second": "w8 64x32"} in found["fields"]
    assert [(each["where"], each["differing"], each["tensors"]) for each in found["records"]] == [
        ("experts of layer 0", 12, {}),
        ("experts of layer 1", 12, {}),
    ]
    assert found["sections"] == {"schedule 0": "differs", "schedule 1": "differs"}
    assert "experts of layer 0: 12 of 12 differ, stored differently" in pack("diff", built(), built(experts="w8"))[1]


def test_other_model(built: Built, pack: Pack) -> None:
    status, found = compared(pack, built(), built("tied"))
    assert status == 1
    assert {"path": "model.tied_head", "first": None, "second": True} in found["fields"]
    assert "final" in [each["where"] for each in found["records"]]


def test_forged_content_id_is_not_believed(first: Path, other: Path, pack: Pack) -> None:
    draft = Draft()
    draft.change_record(SectionType.EXPERTS, 0, lambda record: record.__setitem__(0, record[0] ^ 1))
    other.write_bytes(draft.seal())
    status, out, err = pack("diff", first, other)
    assert (status, out) == (1, "")
    assert "manifest.content_id" in err


def test_missing_file(first: Path, other: Path, pack: Pack) -> None:
    status, _, err = pack("diff", first, other)
    assert status == 1
    assert "file cannot be opened" in err
