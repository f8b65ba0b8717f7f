from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_packer.inspection import Inspection, describe_model, inspect_package
from estream_packer.schedules import programs_for
from estream_spec.constants import SectionType
from estream_spec.model import Layer
from fixtures.packages import MODEL, Draft, Section, binary, with_binaries
from fixtures.sources import CountingSource


def test_tables_name_what_a_reader_wants_to_know(built: Built, pack: Pack) -> None:
    path = built()
    status, out, err = pack("inspect", path)
    assert (status, err) == (0, "")
    with open_package(path) as package:
        assert package.file_id.hex() in out
        assert package.manifest.content_id.hex() in out
    for words in (
        "2 of width 64",
        "4 heads of 16, 4 key and value heads, rotary theta 10000, full norm of queries and keys",
        "3 of 12 chosen by softmax-topk, width 32, silu",
        "made from tensors",
        "bits per weight",
        "gate w4g32, up w4g32, down w4g32",
        "dynamic-int8",
        "generic",
    ):
        assert words in out
    assert f"{path.stat().st_size:,}" in out


def test_json_adds_up_to_the_file(built: Built, pack: Pack) -> None:
    path = built()
    status, out, _ = pack("inspect", path, "--json")
    found: dict[str, Any] = json.loads(out)
    assert status == 0
    end = 0
    for extent in found["extents"]:
        assert extent["offset"] == end
        end += extent["stored_length"]
    assert end == path.stat().st_size == sum(found["summary"]["space"].values())
    assert sum(extent["share"] for extent in found["extents"]) == pytest.approx(1)
    assert {role["role"] for role in found["summary"]["roles"]} == {
        "embedding",
        "attention",
        "router",
        "experts",
        "head",
        "norms",
    }
    assert [group["count"] for group in found["records"]] == [1, 2, 1, 24]
    assert [graph["role"] for graph in found["graphs"]].count("expert") == 2
    assert found["device_configurations"][0]["name"] == "generic"
    assert [len(source["sha256"]) for source in found["sources"]] == [64, 64, 64]
    assert found["notices"] == []


def inspected(draft: Draft) -> Inspection:
    with open_package(draft.seal()) as package:
        return inspect_package(package)


def test_no_record_is_read() -> None:
    source = CountingSource(Draft().seal())
    with open_package(source) as package:
        inspect_package(package)
        records = [package.container.section(each) for each in (SectionType.DENSE, SectionType.EXPERTS)]
    for offset, length in source.reads:
        assert not any(entry.offset < offset + length and offset < entry.end for entry in records)


def test_unknown_sections_codecs_and_notices_are_shown(tmp_path: Path, pack: Pack) -> None:
    draft = Draft()
    draft.sections.append(Section(99, b"x" * 10, id=7, codec=5))
    found = inspected(draft)
    extent = next(each for each in found.extents if each.name == "unknown type 99, id 7")
    assert (extent.codec, extent.stored_length) == ("5", 10)
    assert found.notices == ("section of unknown type 99 is skipped",)
    path = tmp_path / "a.emoe"
    path.write_bytes(draft.seal())
    status, out, _ = pack("inspect", path)
    assert status == 0
    assert "section of unknown type 99 is skipped" in out


def test_binaries_are_shown_with_what_they_are_for(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "a.emoe"
    other = binary(9, soc_model=99, architecture=80, sdk="2.9", compiler="\x1b[2Jmine", options="-O3")
    path.write_bytes(with_binaries(binary(3), other).seal())
    out = pack("inspect", path).out
    rows = [line.split("  ") for line in out.splitlines() if " htp v" in line]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["3", "sm8650, Snapdragon 8 Gen 3", "htp v75", "2.51.0", "tests", "1", "153"],
        ["9", "soc99-v80, chip 99", "htp v80", "2.9", "\\x1b[2Jmine", "1", "153"],
    ]
    found = json.loads(pack("inspect", path, "--json").out)
    assert found["binaries"][1] == {
        "section": 9,
        "target": "htp",
        "chip": "soc99-v80",
        "title": "chip 99",
        "soc_model": 99,
        "architecture": 80,
        "sdk": "2.9",
        "compiler": "\x1b[2Jmine",
        "options": "-O3",
        "length": 153,
        "graphs": [
            {"name": "attend", "role": "attend", "shape_class": 0, "tokens": 32, "keys": 64, "encodings": []},
        ],
    }
    assert found["summary"]["space"]["binaries"] == 2 * 153
    assert [each["name"] for each in found["extents"] if "binary" in each["name"]] == ["binary 3", "binary 9"]


def test_a_package_without_binaries_shows_none(built: Built, pack: Pack) -> None:
    path = built()
    assert "binary" not in pack("inspect", path).out
    assert json.loads(pack("inspect", path, "--json").out)["binaries"] == []


def test_text_of_a_package_cannot_command_the_terminal(tmp_path: Path, pack: Pack) -> None:
    draft = Draft()
    draft.change_manifest(name="\x1b[2Jgone\n[red]", extensions={"a\x07": b""})
    path = tmp_path / "a.emoe"
    path.write_bytes(draft.seal())
    status, out, _ = pack("inspect", path)
    assert status == 0
    assert "\\x1b[2Jgone\\n[red]" in out
    assert "\x1b" not in out
    assert "\x07" not in out


def test_model_of_several_classes_in_words() -> None:
    attention, block = MODEL.attentions[0], MODEL.expert_blocks[0]
    described = describe_model(
        replace(
            MODEL,
            attentions=(attention, replace(attention, clip_qkv=8.0)),
            expert_blocks=(block, replace(block, experts=9)),
            layers=tuple(Layer(attention=int(n == 3), experts=int(n > 2)) for n in range(5)),
            tied_head=True,
            begin_token=1,
            end_tokens=(2, 3),
        )
    )
    assert described["attention of layers 0-2, 4"] == "2 heads of 16, 1 key and value heads, rotary theta 10000"
    assert described["attention of layers 3"].endswith("clipped at 8")
    assert described["experts of layers 0-2"].startswith("2 of 3 chosen")
    assert described["experts of layers 3-4"].startswith("2 of 9 chosen")
    assert described["vocabulary"] == "16 rows, tied head"
    assert described["tokens"] == "begin 1, end 2, 3"


def test_missing_and_faulty_files(tmp_path: Path, pack: Pack) -> None:
    status, out, err = pack("inspect", tmp_path / "none.emoe")
    assert (status, out) == (1, "")
    assert err.startswith("estream-pack: error: file cannot be opened")
    (tmp_path / "a.emoe").write_bytes(b"GGUF" * 99)
    status, _, err = pack("inspect", tmp_path / "a.emoe", "--json")
    assert status == 1
    assert "not an .emoe package: it starts with b'GGUFGGUF'" in err


def test_a_built_package_has_a_program_for_its_configuration(built: Built, pack: Pack) -> None:
    path = built()
    found = json.loads(pack("inspect", path, "--json")[1])
    program, decoding = found["schedules"]
    [generic] = found["device_configurations"]
    assert (program["phase"], program["policy"], program["configurations"]) == ("prefill", "pre-routing", ["generic"])
    sizes = "arena_bytes", "group_size", "prefetch_depth"
    assert [program[each] for each in sizes] == [generic[each] for each in sizes]
    assert program["peak_bytes"] <= program["arena_bytes"]
    assert (decoding["section"], decoding["phase"], decoding["policy"]) == (1, "decode", "post-routing")
    assert (decoding["arena_bytes"], decoding["configurations"]) == (generic["arena_bytes"], ["generic"])
    assert decoding["groups_kept"] == decoding["banks"] == decoding["prefetch_depth"] + 1
    assert found["summary"]["space"]["schedules"] > 0
    out = pack("inspect", path)[1]
    assert "schedule 0" in out
    assert "pre-routing" in out


def test_programs_are_shown_with_their_proof(built: Built, pack: Pack) -> None:
    path = built()
    status, out, err = pack("inspect", path, "--schedule")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "; schedule 0, for 'generic'"
    assert lines[1].startswith("; proven: prefill, pre-routing, ")
    assert lines[2].startswith("; memory: 2 banks of ")
    assert lines[3].startswith("; reads: ")
    assert lines[4].startswith("; prefill, pre-routing: groups of ")
    assert lines[5].split() == ["0", "FILL", "layer", "0", "group", "0", "bank", "0"]
    assert lines[-1].split()[1:] == ["HALT"]
    between = lines.index("")
    assert lines[between + 1] == "; schedule 1, for 'generic'"
    assert lines[between + 2].startswith("; proven: decode, post-routing, ")
    assert lines[between + 5].startswith("; decode, post-routing: ")
    prefill, decoding = json.loads(pack("inspect", path, "--schedule", "--json")[1])
    for listing, shown in ((prefill, lines[:between]), (decoding, lines[between + 1 :])):
        assert ["; " + line for line in listing["proof"]] == shown[1:4]
        assert listing["assembly"] == shown[4:]
        assert listing["instructions"] == len(shown) - 5


def test_programs_that_are_for_nothing_or_not_there(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "model.emoe"
    draft = Draft()
    path.write_bytes(draft.seal())
    assert pack("inspect", path, "--schedule") == (0, "no schedules: readers make their own\n", "")
    with open_package(path) as package:
        choice = replace(package.device_configurations[0], arena_bytes=1 << 30)
        program = programs_for(package.expert_shape, choice, predicts=False)[0]
    draft.sections += [Section(SectionType.SCHEDULE, program.encode(), id=number) for number in (0, 5)]
    path.write_bytes(draft.seal())
    out = pack("inspect", path, "--schedule")[1]
    assert "; schedule 0, for no device configuration that is there\n" in out
    assert "\n\n; schedule 5, for" in out


def test_a_program_that_is_wrong_is_refused(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "model.emoe"
    draft = Draft()
    draft.sections.append(Section(SectionType.SCHEDULE, b"EMOEPRG\0"))
    path.write_bytes(draft.seal())
    for arguments in (("inspect", path, "--schedule"), ("validate", path)):
        status, _, err = pack(*arguments)
        assert status == 1
        assert "[EMOE-SCH-001]" in err
