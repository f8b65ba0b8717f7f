"""Builds in processes of their own: other surroundings, and signals at any stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from estream_packer.build import build
from fixtures.olmoe import CheckpointFactory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


PROGRAM: Final = "import sys; from estream_packer.cli import main; main()"
KILLED: Final = """
import os, signal, sys
from estream_packer import build as module
from estream_packer.cli import main
signal.signal(signal.SIGHUP, getattr(signal, os.environ.get("HANGUP", "SIG_DFL")))
stage, number, count = os.environ["STAGE"], int(os.environ["SIGNAL"]), 0

def kill_before(function, calls):
    def wrapped(*arguments, **keywords):
        global count
        count += 1
        if count == calls:
            os.kill(os.getpid(), number)
        return function(*arguments, **keywords)
    return wrapped

writer = module.PackageWriter
if stage.isdigit():
    module.assemble = kill_before(module.assemble, int(stage))
elif stage == "finish":
    writer.finish = kill_before(writer.finish, 1)
elif stage == "commit":
    writer.commit = kill_before(writer.commit, 1)
main()
"""


def run_program(code: str, source: Path, output: Path, **surroundings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **surroundings}
    command = [sys.executable, "-c", code, "build", str(source), "-o", str(output), "--jobs", "2"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stage", ["1", "27", "finish", "commit"])
def test_a_killed_build_leaves_no_output_and_the_next_one_is_as_if_nothing_had_been(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, stage: str
) -> None:
    output = tmp_path / "model.emoe"
    killed = run_program(KILLED, olmoe_checkpoint("base"), output, STAGE=stage, SIGNAL=str(int(signal.SIGKILL)))
    assert killed.returncode == -signal.SIGKILL
    [leaving] = names(tmp_path)
    assert leaving.startswith(".model.emoe.")
    assert leaving.endswith(".partial")

    result = build(olmoe_checkpoint("base"), output)
    assert names(tmp_path) == ["model.emoe"]
    assert result.file_id == build(olmoe_checkpoint("base"), tmp_path / "other.emoe").file_id


@pytest.mark.parametrize("stage", ["27", "commit"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_build_cleans_up(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, stage: str, number: signal.Signals, status: int
) -> None:
    ended = run_program(KILLED, olmoe_checkpoint("base"), tmp_path / "model.emoe", STAGE=stage, SIGNAL=str(int(number)))
    assert (ended.returncode, ended.stdout, names(tmp_path)) == (status, "", [])
    assert "Traceback" not in ended.stderr


def test_a_build_that_is_to_outlive_its_terminal_does(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    surroundings = {"STAGE": "commit", "SIGNAL": str(int(signal.SIGHUP)), "HANGUP": "SIG_IGN"}
    ended = run_program(KILLED, olmoe_checkpoint("base"), tmp_path / "model.emoe", **surroundings)
    assert (ended.returncode, names(tmp_path)) == (0, ["model.emoe"])


@pytest.mark.parametrize(
    "surroundings",
    [{"PYTHONHASHSEED": "1", "LC_ALL": "C"}, {"PYTHONHASHSEED": "2", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Tokyo"}],
)
def test_the_bytes_do_not_depend_on_the_process(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, surroundings: dict[str, str]
) -> None:
    build(olmoe_checkpoint("base"), tmp_path / "here.emoe")
    process = run_program(PROGRAM, olmoe_checkpoint("base"), tmp_path / "there.emoe", **surroundings)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "there.emoe").read_bytes() == (tmp_path / "here.emoe").read_bytes()
