"""What packages are to devices, on the command line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Pack
from estream_loader import open_package
from estream_runtime import device
from estream_spec.constants import DATA_START, SectionType
from estream_spec.manifest import Binary, BinaryGraph
from estream_spec.workload import RUNTIME_BYTES
from fixtures.packages import Draft, Section

BUILD = "2.51.0.260929181845"
FACTS: dict[str, Any] = {
    "page_bytes": 4096,
    "memory_bytes": 1 << 30,
    "soc_model": 57,
    "architecture": 75,
    "sdk": BUILD,
}
EXPERT = BinaryGraph(name="expert", role="expert", shape_class=0, tokens=32, encodings=("w4g32", "w4g32", "w4g32"))


def binary(section: int, soc_model: int, architecture: int, sdk: str = BUILD) -> Binary:
    return Binary(
        section=section,
        target="htp",
        soc_model=soc_model,
        architecture=architecture,
        sdk=sdk,
        compiler="a compiler",
        graphs=(EXPERT,),
    )


def draft(*binaries: Binary) -> Draft:
    made = Draft()
    made.sections += [Section(SectionType.BINARY, b"binary " * 99, id=each.section) for each in binaries]
    made.change_manifest(binaries=binaries)
    return made


Write = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path) -> Write:
    """`package(*binaries)`: a package with these."""

    def write(*binaries: Binary) -> Path:
        path = tmp_path / "a.emoe"
        path.write_bytes(draft(*binaries).seal())
        return path

    return write


@pytest.fixture
def facts(tmp_path: Path) -> Write:
    """`facts(**changes)`: a file of facts."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "phone.json"
        path.write_text(json.dumps({**FACTS, **changes}))
        return path

    return write


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here is an SDK of one build, and the chip of this machine is not known."""
    monkeypatch.setattr(device, "installed_sdk", lambda: BUILD)
    monkeypatch.setattr(device, "chip_here", lambda: None)


def test_exact(package: Write, facts: Write, pack: Pack) -> None:
    path = package(binary(0, 57, 75), binary(1, 69, 79))
    code, out, err = pack("match", path, "--device", facts())
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "exact: same-sdk"
    with open_package(path) as opened:
        container, [choice] = opened.container, opened.manifest.device_configurations
    assert lines[1] == f"arena {choice.arena_bytes:,} bytes"
    left_out = [container.section(SectionType.GRAPH, 3), container.section(SectionType.BINARY, 1)]
    needed = sum(each.stored_length for each in container.entries if each not in left_out)
    needed += DATA_START + container.superblock.directory_length
    file_bytes = container.superblock.file_length
    assert lines[2] == f"to fetch {needed:,} of {file_bytes:,} bytes, 11 of 13 sections"
    assert lines[3] == (
        f"the binary of section 0 is for Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK {BUILD}; "
        f"the device is Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK {BUILD}"
    )
    assert len(lines) == 4


def test_usable(package: Write, facts: Write, pack: Pack) -> None:
    code, out, err = pack("match", package(binary(0, 57, 75)), "--device", facts(sdk="2.60"))
    assert (code, err) == (0, "")
    assert out.startswith("usable: older-sdk\n")


def test_usable_on_the_cpu_is_told_with_what_helps(package: Write, facts: Write, pack: Pack) -> None:
    code, out, err = pack("match", package(binary(0, 57, 75)), "--device", facts(sdk=""))
    assert (code, err) == (0, "")
    assert out.startswith("usable: no-sdk\n")
    assert out.endswith(
        "the portable graphs run on its CPU\n"
        "hint: the vendor's library comes with pip install 'estream-pack[npu]'; "
        "--sdk names the build on another device\n"
    )


def test_recompile_says_how(package: Write, facts: Write, pack: Pack) -> None:
    path = package(binary(0, 57, 75), binary(1, 69, 79))
    code, out, err = pack("match", path, "--device", facts(soc_model=43, architecture=73))
    assert code == 1
    assert out.startswith("recompile: other-architecture\narena ")
    assert len(out.splitlines()) == 3
    assert err == (
        f"estream-pack: error: the binary of section 0 is for Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK {BUILD}; "
        f"the device is Snapdragon 8 Gen 2 (sm8550, Hexagon v73), SDK {BUILD} (at {path})\n"
        f"estream-pack: hint: compile for it: estream-pack compile {path} --target htp:sm8550\n"
    )


def test_refused(package: Write, facts: Write, pack: Pack) -> None:
    path = package()
    code, out, err = pack("match", path, "--device", facts(page_bytes=65536))
    assert (code, out) == (1, "refuse: page-size\n")
    assert err == (
        "estream-pack: error: the package has pages of 4096 bytes, expected a multiple of the device's, which have "
        f"65536 (at {path})\nestream-pack: hint: build it with page_shift = 16 in the recipe\n"
    )


@pytest.mark.parametrize(
    ("changes", "verdict", "code"),
    [
        ({}, "exact", 0),
        ({"sdk": "3"}, "usable", 0),
        ({"sdk": "2.9"}, "recompile", 1),
        ({"memory_bytes": 0}, "refuse", 1),
    ],
)
def test_json(package: Write, facts: Write, pack: Pack, changes: dict[str, Any], verdict: str, code: int) -> None:
    path = package(binary(7, 57, 75))
    status, out, err = pack("match", path, "--device", facts(**changes), "--json")
    found = json.loads(out)
    assert (status, err, found["verdict"]) == (code, "", verdict)
    assert found["device"] == {
        **FACTS,
        "npu_buffer_bytes": None,
        "npu_session_bytes": None,
        "configuration": "",
        **changes,
    }
    assert (found["advice"] is None) == (code == 0)
    assert found["explanation"]
    assert found["binary"] == (7 if code == 0 else None)
    named = {(each["name"], each["id"]) for each in found["sections"]}
    if verdict == "refuse":
        assert (named, found["arena_bytes"], found["fetch_bytes"]) == (set(), 0, 0)
    else:
        assert ("EXPERTS", 0) in named
        assert (("BINARY", 7) in named) == (("GRAPH", 3) not in named) == (code == 0)
        assert 0 < found["fetch_bytes"] < found["file_bytes"]


@pytest.mark.parametrize("name", ["sm8650", "8-gen-3", "V75", "soc57", "soc57-v75", "snapdragon-8-gen-3"])
def test_chips_by_name(package: Write, pack: Pack, name: str) -> None:
    code, out, _ = pack("match", package(binary(0, 57, 75)), "--device", name, "--json")
    found = json.loads(out)["device"]
    assert code == 0
    assert (found["soc_model"], found["architecture"], found["sdk"]) == (57, 75, BUILD)


def test_here(package: Write, pack: Pack) -> None:
    code, out, err = pack("match", package(binary(0, 57, 75)), "--device", "here")
    assert (code, err) == (0, "")
    assert out.startswith("usable: no-npu\n")
    assert "no NPU is known on the device; the portable graphs run on its CPU\n" in out


@pytest.mark.parametrize("name", ["here", "sm8650", "FILE"])
def test_sdk_and_memory_count_instead(package: Write, facts: Write, pack: Pack, name: str) -> None:
    named = facts() if name == "FILE" else name
    _, out, _ = pack("match", package(), "--device", named, "--sdk", "1.2.3", "--memory", "256M", "--json")
    found = json.loads(out)["device"]
    assert (found["sdk"], found["memory_bytes"]) == ("1.2.3", (256 << 20) - RUNTIME_BYTES)
    _, out, _ = pack("match", package(), "--device", named, "--sdk", "", "--json")
    assert json.loads(out)["device"]["sdk"] == ""


def test_a_wrong_build_is_a_usage_error(package: Write, pack: Pack) -> None:
    code, out, err = pack("match", package(), "--device", "sm8650", "--sdk", "v2.51")
    assert (code, out) == (2, "")
    assert "'v2.51' is not an SDK build such as 2.51.0.260929181845" in err


def test_no_such_device(package: Write, pack: Pack) -> None:
    code, out, err = pack("match", package(), "--device", "sm1")
    assert (code, out) == (1, "")
    assert err.startswith("estream-pack: error: unknown chip 'sm1'\nestream-pack: hint: known are sm8450, ")
    assert err.endswith("; a device is also 'here' or a JSON file of facts\n")


def test_a_chip_without_fp16_is_told(package: Write, pack: Pack) -> None:
    code, out, err = pack("match", package(), "--device", "soc30-v68")
    assert (code, out) == (1, "")
    assert "chip 'soc30-v68' cannot be compiled for" in err
    assert "hint: a device is also 'here' or a JSON file of facts\n" in err


def test_no_such_file_of_facts(package: Write, tmp_path: Path, pack: Pack) -> None:
    missing = tmp_path / "none.json"
    code, out, err = pack("match", package(), "--device", missing)
    assert (code, out) == (1, "")
    assert err.startswith("estream-pack: error: device facts cannot be read: file cannot be opened: no such file")
    assert str(missing) in err
    code, out, err = pack("match", package(), "--device", tmp_path)
    assert (code, out) == (1, "")
    assert "device facts cannot be read: not a regular file" in err


def test_a_file_that_is_no_facts(package: Write, facts: Write, pack: Pack) -> None:
    path = facts(speed=9)
    code, out, err = pack("match", package(), "--device", path)
    assert (code, out) == (1, "")
    assert err == f"estream-pack: error: not device facts: object contains unknown field `speed` (at {path})\n"


def test_no_such_package(tmp_path: Path, pack: Pack) -> None:
    code, out, err = pack("match", tmp_path / "none.emoe", "--device", "sm8650")
    assert (code, out) == (1, "")
    assert err.count("error: ") == 1


def test_nothing_but_the_header_is_read(package: Write, facts: Write, pack: Pack) -> None:
    """With every other section overwritten, the match is the same."""
    path = package(binary(0, 57, 75))
    expected = pack("match", path, "--device", facts(), "--json")
    with open_package(path) as opened:
        others = [each for each in opened.container.entries if each.type != SectionType.MANIFEST]
    data = bytearray(path.read_bytes())
    for entry in others:
        data[entry.offset : entry.end] = random.Random(entry.offset).randbytes(entry.stored_length)
    path.write_bytes(data)
    assert pack("match", path, "--device", facts(), "--json") == expected
    assert expected.code == 0
