"""`estream-run probe`, as a user sees it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from cli.conftest import Pack, Run
from estream_loader.reading import Reader
from estream_runtime import probe_computing, probe_reading
from estream_runtime.native.library import paths_here
from estream_spec.profile import decode_profile
from fixtures.packed import PackageFactory


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures next to nothing, believes that the page cache is bypassed, and does not mind noise."""
    monkeypatch.setattr("estream_runtime.commands.probe.NOISY", math.inf)
    monkeypatch.setattr(probe_reading, "ROUNDS", 1)
    monkeypatch.setattr(probe_reading, "CELL_S", 0.0)
    monkeypatch.setattr(probe_computing, "BUDGET_S", 0.0)
    monkeypatch.setattr(probe_computing, "LONGEST", 32)
    monkeypatch.setattr(Reader, "mode", "direct")


@pytest.mark.usefixtures("_quick")
def test_profile_is_written_and_planned_with(packed: PackageFactory, tmp_path: Path, run: Run, pack: Pack) -> None:
    path = tmp_path / "here.json"
    status, out, err = run("probe", packed(), "-o", path, "--name", "my-board", "--threads", "1")
    assert (status, err) == (0, "")
    assert out.startswith(f"backend native ({paths_here()[0].name}), 1 threads, experts stored as w4g32, ")
    assert "GB/s by request" in out
    assert out.splitlines()[-1] == f"wrote {path}"
    assert decode_profile(path.read_bytes(), "here").name == "my-board"
    status, out, err = pack("plan", packed(), "--profile", path, "--memory", "1G", "--prompt", "16", "--json")
    assert (status, err) == (0, "")
    planned = json.loads(out)
    assert (planned["profile"], planned["estimated"]) == ("my-board", [])


@pytest.mark.usefixtures("_quick")
def test_json_is_the_profile(packed: PackageFactory, run: Run) -> None:
    status, out, err = run("probe", packed(), "--threads", "1", "--json")
    assert (status, err) == (0, "")
    assert decode_profile(out.encode(), "stdout").name == "probed"


@pytest.mark.usefixtures("_quick")
def test_measurements_that_vary_are_told(packed: PackageFactory, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_runtime.commands.probe.NOISY", -1.0)
    status, out, err = run("probe", packed(), "--threads", "1", "--json")
    assert status == 0
    decode_profile(out.encode(), "stdout")
    assert re.fullmatch(r"notice: measurements vary by \d+%: probe again on a quiet device\n", err)


def test_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    packed: PackageFactory, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("estream_runtime.commands.probe.probe", never)
    status, out, err = run("probe", packed(), "-o", tmp_path / "none" / "here.json")
    assert (status, out) == (1, "")
    assert "error: file cannot be written: no such file or directory" in err
    assert "hint: make the folder first" in err
    assert run("probe", packed(), "-o", tmp_path)[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_refused_package_leaves_no_profile(tmp_path: Path, run: Run) -> None:
    package, output = tmp_path / "a.emoe", tmp_path / "here.json"
    package.write_bytes(b"not a package")
    status, out, err = run("probe", package, "-o", output)
    assert (status, out) == (1, "")
    assert err.startswith("estream-run: error: ")
    assert list(tmp_path.iterdir()) == [package]


def test_storage_that_cannot_be_measured_is_said_to_be(
    packed: PackageFactory, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "mode", "buffered: tmpfs keeps files in memory")
    status, out, err = run("probe", packed(), "-o", tmp_path / "here.json")
    assert (status, out) == (1, "")
    assert "error: the storage cannot be measured, reads are buffered: tmpfs keeps files in memory" in err
    assert "hint: probe a package on the storage it will be read from" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["My board", "", "a" * 200, "-"])
def test_names_are_those_of_profiles(name: str, packed: PackageFactory, run: Run) -> None:
    status, _, err = run("probe", packed(), "--name", name)
    assert status == 2
    assert "is not lower case with hyphens, such as my-phone" in err
