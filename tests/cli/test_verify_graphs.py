"""`verify --graphs`: the graphs of any package, proven again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli.conftest import Pack
from estream_packer.htp.proof import Proof
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.binary_interface import label_of
from estream_spec.manifest import Binary
from fixtures.npu import binary_for, with_compiled
from fixtures.packages import Draft, with_binaries
from fixtures.packages import binary as described

GEN_3 = "Snapdragon 8 Gen 3 (sm8650, Hexagon v75)"
ELITE = "Snapdragon 8 Elite (sm8750, Hexagon v79)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(with_compiled("sm8650").seal())
    return path


def never(*_: object) -> None:
    raise AssertionError("called in vain")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs without proving, each graph as far off as its binary's section says."""

    def proofs(binary: Binary, *_: Any) -> list[Proof]:
        return [Proof(graph, "attended", (binary.section + 1) / 1000) for graph in binary.graphs]

    monkeypatch.setattr("estream_packer.htp.proof.prove_binary", proofs)


def test_graphs_are_proven(package: Path, pack: Pack) -> None:
    """In the simulator, each of them."""
    status, out, err = pack("verify", package, "--graphs", "--json")
    assert (status, err) == (0, "")
    [found] = json.loads(out)["graphs"]
    binary = binary_for("sm8650")
    assert [each["graph"] for each in found["graphs"]] == [label_of(graph) for graph in binary.graphs]
    errors = [each["error"] for each in found["graphs"]]
    assert all(0 < error < 1e-2 for error in errors)
    assert found["error"] == max(errors)
    assert (found["section"], found["soc_model"], found["architecture"]) == (0, 57, 75)
    assert found["sdk"] == installed_sdk()


def test_each_chip_has_its_graphs(package: Path, pack: Pack, told: None) -> None:
    package.write_bytes(with_binaries(described(0), described(1, soc_model=69, architecture=79)).seal())
    status, out, err = pack("verify", package, "--graphs")
    assert (status, err) == (0, "")
    lines = [re.sub(" +", " ", line.strip()) for line in out.splitlines()]
    assert lines[0].endswith("every digest and every checksum is right")
    assert lines[2:] == [
        f"proven for {GEN_3}: 1 graph, in the simulator off by at most 1.0e-03",
        "graph output off by",
        "attend_0_32_64 attended 1.0e-03",
        f"proven for {ELITE}: 1 graph, in the simulator off by at most 2.0e-03",
        "graph output off by",
        "attend_0_32_64 attended 2.0e-03",
    ]


def test_a_package_without_binaries_says_so(package: Path, pack: Pack) -> None:
    package.write_bytes(Draft().seal())
    status, out, err = pack("verify", package, "--graphs")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "no graphs to prove: nothing in the package is compiled for an NPU"
    assert json.loads(pack("verify", package, "--graphs", "--json").out)["graphs"] == []


def test_nobody_is_asked_for_proofs_without_being_told_to(package: Path, pack: Pack) -> None:
    status, out, _ = pack("verify", package, "--json")
    assert (status, json.loads(out)["graphs"]) == (0, None)


def test_a_graph_that_is_off(package: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_packer.htp.proof.MOST_ERROR", 1e-9)
    status, out, err = pack("verify", package, "--graphs")
    assert (status, out) == (1, "refused: pack\n")
    first, hint = err.splitlines()
    assert re.fullmatch(
        r"estream-pack: error: output '\w+' is off by 0\.0\d+ of a row's size, expected at most 1e-09"
        r" \(at graph \w+ for sm8650\)",
        first,
    )
    assert hint.startswith("estream-pack: hint: the compiler computes something else")


def test_a_binary_that_a_newer_sdk_made(package: Path, pack: Pack) -> None:
    draft = with_compiled("sm8650")
    [binary] = draft.manifest.binaries
    draft.change_manifest(binaries=(replace(binary, sdk="3.0"),))
    package.write_bytes(draft.seal())
    status, out, err = pack("verify", package, "--graphs")
    assert (status, out) == (1, "refused: link\n")
    assert f"the binary for {GEN_3} was made by SDK 3.0, which is newer than the one here, {installed_sdk()}" in err
    assert "hint: install onnxruntime-qnn with SDK 3.0 or later to prove it" in err
    assert pack("verify", package).code == 0


def test_a_damaged_binary_is_refused_before_anyone_runs_it(
    package: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = package.read_bytes()
    at = data.index(b"v" + installed_sdk().encode())
    package.write_bytes(data[:at] + b"\0" + data[at + 1 :])
    monkeypatch.setattr("estream_packer.htp.proof.prove_binary", never)
    status, out, err = pack("verify", package, "--graphs")
    assert (status, out) == (1, "refused: integrity\n")
    assert "EMOE-SEC-018" in err


def test_without_the_library_nothing_is_read_for_long(
    package: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estream_packer.htp.proof.installed_sdk", str)
    monkeypatch.setattr("estream_packer.proving.prove", never)
    status, out, err = pack("verify", package, "--graphs", "--json")
    assert (status, err) == (1, "")
    found = json.loads(out)
    assert (found["class"], found["hint"]) == ("link", "pip install 'estream-pack[npu]'")
    assert found["message"] == "compiling and proving graphs needs onnxruntime-qnn, which is not installed"
