"""Verbs over packages of which not all layers have experts: the first have a dense block alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Pack, Run
from estream_loader import open_package
from estream_loader.reading import Reader
from estream_runtime import probe_computing, probe_reading
from estream_spec.profile import decode_profile
from estream_spec.trace import decode_trace
from fixtures.packed import FamilyFactory
from fixtures.pages import Page


@pytest.fixture(params=["deepseek_v2", "lfm2_moe"])
def path(request: pytest.FixtureRequest, packed_family: FamilyFactory) -> Path:
    """Latent attention with shared experts, and convolutions."""
    return packed_family(request.param)


def expert_layers(path: Path) -> list[int]:
    with open_package(path) as package:
        layers = package.manifest.model.expert_layers
    assert layers[0] > 0
    return [*layers]


def test_records_are_listed_for_layers_that_have_experts(path: Path, pack: Pack) -> None:
    status, out, err = pack("inspect", path, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    experts = [each for each in found["ranges"] if each["section"] == "experts"]
    assert [each["layer"] for each in experts] == expert_layers(path)
    for each in experts:
        assert each["count"] > 0
        assert [name.split()[0] for name in each["matrices"]] == ["gate", "up", "down"]
    groups = [each for each in found["records"] if each["section"] == "experts"]
    assert sum(each["count"] for each in groups) == sum(each["count"] for each in experts)
    assert pack("inspect", path)[0] == 0


def test_a_page_with_a_run(path: Path, pack: Pack, run: Run, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    layers = expert_layers(path)
    with open_package(path) as package:
        count, arena = len(package.manifest.model.layers), 2 * max(package.expert_shape.record_lengths)
        section = package.experts.entry
    assert run("trace", path, "--tokens", "40", "--arena", f"{arena}", "-o", trace)[0] == 0
    tracks = decode_trace(trace.read_bytes(), "trace.json").tracks()
    reads = [event.args for name, events in tracks.items() if name.startswith("lane") for event in events]
    assert {each.layer for each in reads} == {*layers}
    assert all(each.offset is not None and section.offset <= each.offset < section.end for each in reads)
    assert pack("inspect", path, "--html", page, "--trace", trace) == (0, f"wrote {page}\n", "")
    written = page.read_text("utf-8")
    assert f"layers {count} experts" in " ".join(Page(written).text().split())
    assert f"layer {layers[0]}: " in written
    assert "0 experts of 0 bytes" not in written


def test_planning_and_configuring(path: Path, pack: Pack, run: Run, tmp_path: Path) -> None:
    own = tmp_path / "own.emoe"
    shutil.copy(path, own)
    asked = ("--profile", "ufs-4.0", "--memory", "1G", "--prompt", "16")
    assert pack("plan", own, *asked)[0] == 0
    assert pack("configure", own, *asked)[0] == 0
    assert pack("verify", own)[0] == 0
    texts = [run("generate", each, "--prompt", "hello", "--max-new-tokens", "4", "--json") for each in (path, own)]
    assert texts[0].code == texts[1].code == 0
    assert json.loads(texts[0].out)["text"] == json.loads(texts[1].out)["text"]


def test_a_device_is_measured_with_the_first_layer_that_has_experts(
    path: Path, pack: Pack, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estream_runtime.commands.probe.NOISY", math.inf)
    monkeypatch.setattr(probe_reading, "ROUNDS", 1)
    monkeypatch.setattr(probe_reading, "CELL_S", 0.0)
    monkeypatch.setattr(probe_computing, "BUDGET_S", 0.0)
    monkeypatch.setattr(probe_computing, "LONGEST", 32)
    monkeypatch.setattr(Reader, "mode", "direct")
    profile = tmp_path / "here.json"
    status, _, err = run("probe", path, "-o", profile, "--threads", "1")
    assert (status, err) == (0, "")
    with open_package(path) as package:
        block = package.manifest.model.expert_block(expert_layers(path)[0])
    assert decode_profile(profile.read_bytes(), "here").experts.flops.at == (block.intermediate,)
    assert pack("plan", path, "--profile", profile, "--memory", "1G", "--prompt", "16")[0] == 0
