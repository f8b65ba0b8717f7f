"""`estream-run trace`, as a user sees it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cli.conftest import Run
from estream_loader import open_package
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime.backends import default_backend
from estream_runtime.cli import PROGRAM
from estream_spec.trace import ACTIVITIES, decode_trace
from fixtures.olmoe import CheckpointFactory
from fixtures.packed import PackageFactory

PROMPT = "in the beginning"


@pytest.fixture
def trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`trace(*arguments)`: `run("trace", *arguments)`, 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    return partial(run, "trace")


def test_table_and_picture(trace: Run, packed: PackageFactory) -> None:
    status, out, err = trace(packed(), "--tokens", "40", "--arena", "64K")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:] if not line.startswith("reading "))
    head = "generic: pre-routing, arena 64.0 KiB, 2 banks of 2, 2 lanes, "
    assert lines[0].startswith(head)
    assert lines[0].endswith(f" threads, {default_backend()}")
    lines = lines[2:]
    first = [line.split("  ")[0] or line.strip().split("  ")[0] for line in lines]
    assert first[:3] == ["start-up", "process", "package"]
    for words in ("prefill, 40 tokens", "waiting for reads", "attention", "expansion of experts", "other", "bubble"):
        assert words in first
    assert [line.split("|")[0].strip() for line in lines[-7:-1]] == [
        *("computing", "waiting", "lane 0", "lane 1", "bank 0", "bank 1"),
    ]


def test_picture_has_300_columns_at_most(trace: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30000000")
    status, out, _ = trace(packed(), "--tokens", "40", "--arena", "64K")
    assert status == 0
    assert 80 < max(map(len, out.splitlines())) <= 300


def test_the_file_is_a_trace_of_the_prompt(trace: Run, packed: PackageFactory, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    status, out, _ = trace(packed(), "--prompt", PROMPT, "-o", path)
    assert status == 0
    assert out.endswith(f"wrote {path}\n")
    with open_package(packed()) as package:
        tokens = len(package.tokenizer.encode(PROMPT).ids)
    assert decode_trace(path.read_bytes(), str(path)).other_data.tokens == tokens
    assert list(tmp_path.iterdir()) == [path]


def test_as_json(trace: Run, packed: PackageFactory, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    status, out, err = trace(packed(), "--tokens", "30", "--json", "-o", path, "--lanes", "3", "--arena", "48K")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["tokens"], found["lanes"], found["arena_bytes"]) == (30, 3, 48 << 10)
    stats = found["stats"]
    assert list(stats["lane_busy_s"]) == ["lane 0", "lane 1", "lane 2"]
    assert set(stats["activity_s"]) == set(ACTIVITIES)
    assert sum(stats["activity_s"].values()) + stats["other_s"] == pytest.approx(stats["total_s"])
    assert stats["floor_s"] == max(stats["io_busy_s"], stats["compute_busy_s"])
    assert stats["start_up_s"]["process"] > 0
    assert decode_trace(path.read_bytes(), "").other_data.stats.bytes_read == stats["bytes_read"]


def test_a_system_that_does_not_say_when_the_process_began(
    trace: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(path: Path, **_: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr("estream_runtime.stats.Path.read_text", hidden)
    status, out, err = trace(packed(), "--tokens", "3", "--json")
    assert (status, err) == (0, "")
    assert next(iter(json.loads(out)["stats"]["start_up_s"])) == "package"


def test_a_terminal_that_shows_ascii_only(packed: PackageFactory) -> None:
    program = "from estream_runtime.cli import main; main()"
    command = [sys.executable, "-c", program, "trace", str(packed()), "--tokens", "40"]
    found = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert found.stdout.isascii()
    assert b"\\u" not in found.stdout
    assert b"computing |" in found.stdout


def test_an_existing_file_is_replaced(trace: Run, packed: PackageFactory, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("something longer than a trace, or so it was" * 1000)
    held = path.open()
    assert trace(packed(), "--tokens", "3", "-o", path)[0] == 0
    decode_trace(path.read_bytes(), "")
    with held:
        assert held.read().startswith("something longer")  # another file took its name in one step


def test_damage_is_told_and_leaves_what_was_there(trace: Run, packed: PackageFactory, tmp_path: Path) -> None:
    data = bytearray(packed().read_bytes())
    with open_package(packed()) as package:
        for expert in range(package.experts.table.ranges[1].count):
            data[package.experts.place(1, expert).offset] ^= 1
    damaged, path = tmp_path / "damaged.emoe", tmp_path / "trace.json"
    damaged.write_bytes(data)
    status, out, err = trace(damaged, "--tokens", "40", "-o", path)
    assert (status, out) == (1, "")
    assert "record has checksum" in err
    assert list(tmp_path.iterdir()) == [damaged]
    path.write_text("before")
    assert trace(damaged, "--tokens", "40", "-o", path)[0] == 1
    assert path.read_text() == "before"


def test_a_place_that_cannot_be_written(trace: Run, packed: PackageFactory, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "trace.json"
    status, _, err = trace(packed(), "--tokens", "3", "-o", missing)
    assert status == 1
    assert err == (
        f"{PROGRAM}: error: file cannot be written: no such file or directory (at {missing})\n"
        f"{PROGRAM}: hint: make the folder first\n"
    )
    status, out, err = trace(packed(), "--tokens", "3", "-o", tmp_path)
    assert (status, out) == (1, "")  # before the run, which may take minutes
    assert "is a directory" in err
    assert list(tmp_path.iterdir()) == []


def test_without_a_tokenizer_there_are_random_tokens(
    trace: Run, olmoe_checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    shutil.copytree(olmoe_checkpoint("base"), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    path = tmp_path / "mute.emoe"
    build(tmp_path / "checkpoint", path, BuildOptions(jobs=1))
    assert trace(path, "--prompt", PROMPT) == (
        *(1, ""),
        f"{PROGRAM}: error: the package has no tokenizer (at {path})\n{PROGRAM}: hint: give --tokens N\n",
    )
    assert trace(path, "--tokens", "3").code == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "give --prompt or --tokens"),
        (["--prompt", "a", "--tokens", "3"], 2, "give --prompt or --tokens"),
        (["--tokens", "0"], 2, "0 is not in the range"),
        (["--prompt", ""], 1, "prompt has no tokens"),
        (["--tokens", "513"], 1, "prompt has 513 tokens, the context holds 512"),
    ],
)
def test_what_cannot_be_traced(
    arguments: list[str], status: int, message: str, trace: Run, packed: PackageFactory
) -> None:
    found, out, err = trace(packed(), *arguments)
    assert (found, out) == (status, "")
    assert message in err
