from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from estream_loader import open_package
from estream_packer import journal
from estream_packer.build import build
from estream_packer.recipe import BuildOptions, CalibrationTable
from estream_packer.writer import scratch_folder
from estream_spec.errors import FormatError, PackError
from estream_spec.prefetch_router import decode_prefetch_router, encode_prefetch_router
from fixtures.olmoe import EXPERTS, LAYERS, CheckpointFactory, write_checkpoint
from fixtures.prefetching import prefetch_router_for

RECORDS: Final = LAYERS + 2 + LAYERS * EXPERTS
SHARES: Final = (0.1, 0.5, 0.95)
PLAIN: Final = BuildOptions(jobs=1)


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is noted at once, so that tiny packages have journals."""
    monkeypatch.setattr(journal, "STEP_BYTES", 1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, olmoe_checkpoint: CheckpointFactory) -> bytes:
    """The package that nothing interrupted."""
    output = tmp_path_factory.mktemp("whole") / "model.emoe"
    build(olmoe_checkpoint("base"), output, PLAIN)
    return output.read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Stop:
    """Progress that ends the build when a share of all records is written."""

    def __init__(self, share: float, error: type[BaseException] = KeyboardInterrupt):
        self._left, self._error = int(share * RECORDS), error

    def begin(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error


def stopped(source: Path, output: Path, share: float = 0.5, options: BuildOptions = PLAIN) -> Path:
    """The partial file of a build that was interrupted."""
    with pytest.raises(KeyboardInterrupt) as stop:
        build(source, output, options, Stop(share))
    [partial] = output.parent.glob(".*.partial")
    assert names(output.parent) == [partial.with_suffix(".journal").name, partial.name]
    assert stop.value.__notes__ == [f"what was made is kept in {partial}, and the same build goes on from there"]
    return partial


@pytest.mark.parametrize("share", SHARES)
def test_a_build_goes_on_where_it_was_interrupted_and_makes_the_same_bytes(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes, share: float
) -> None:
    output = tmp_path / "model.emoe"
    partial = stopped(olmoe_checkpoint("base"), output, share)
    with pytest.raises(FormatError):
        open_package(partial)
    made.clear()
    build(olmoe_checkpoint("base"), output, BuildOptions(jobs=3))
    assert len(made) == RECORDS - int(share * RECORDS)
    assert output.read_bytes() == expected
    assert names(tmp_path) == ["model.emoe"]


def test_a_build_may_be_interrupted_again_and_again(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes
) -> None:
    output = tmp_path / "model.emoe"
    first = stopped(olmoe_checkpoint("base"), output, 0.2)
    assert stopped(olmoe_checkpoint("base"), output, 0.6) == first
    made.clear()
    build(olmoe_checkpoint("base"), output, PLAIN)
    assert len(made) == RECORDS - int(0.6 * RECORDS)
    assert output.read_bytes() == expected


def test_a_build_interrupted_while_it_looks_at_what_is_there_loses_nothing(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes
) -> None:
    output = tmp_path / "model.emoe"
    first = stopped(olmoe_checkpoint("base"), output, 0.6)
    assert stopped(olmoe_checkpoint("base"), output, 0.1) == first
    made.clear()
    build(olmoe_checkpoint("base"), output, PLAIN)
    assert len(made) == RECORDS - int(0.6 * RECORDS)
    assert output.read_bytes() == expected


def test_a_build_goes_on_only_with_the_same_prefetch_router(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes
) -> None:
    source, output, path = olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe", tmp_path / "router.prefetch"
    output.parent.mkdir()
    options = BuildOptions(jobs=1, prefetch=str(path))
    with open_package(expected) as package:
        routers = [encode_prefetch_router(prefetch_router_for(package, seed)) for seed in range(2)]
    for begun, ended, redone in ((0, 0, RECORDS - RECORDS // 2), (0, 1, RECORDS)):
        path.write_bytes(routers[begun])
        stopped(source, output, options=options)
        path.write_bytes(routers[ended])
        made.clear()
        build(source, output, options)
        assert len(made) == redone
        assert names(output.parent) == ["model.emoe"]
        with open_package(output, integrity="full") as package:
            assert package.prefetch_router == decode_prefetch_router(routers[ended], "router")
        output.unlink()


def test_a_calibrated_build_goes_on_only_with_the_same_calibration(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int]
) -> None:
    class StopSecond(Stop):
        """Stops in the second packing, after calibration or within it."""

        def __init__(self, packing: int) -> None:
            super().__init__(0.5)
            self._packing = packing

        def begin(self, stage: str, total: int) -> None:
            self._packing -= stage == "packing"

        def advance(self, amount: int) -> None:
            if self._packing == 0:
                super().advance(amount)

    source, output, text = olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe", tmp_path / "text.txt"
    output.parent.mkdir()
    options = BuildOptions(jobs=1, calibration=CalibrationTable(text=str(text), tokens=64))
    words = ("the three thieves thought so " * 9, "a wholly other text, about nothing at all " * 9)
    for written, redone in ((words[0], RECORDS - RECORDS // 2), (words[1], RECORDS)):
        text.write_text(words[0])
        with pytest.raises(KeyboardInterrupt) as stop:
            build(source, output, options, StopSecond(2))
        assert len(stop.value.__notes__) == 1
        text.write_text(written)
        made.clear()
        build(source, output, options)
        assert len(made) == RECORDS + redone  # those that calibration runs, and then the package's
        assert names(output.parent) == ["model.emoe"]
        output.unlink()
    with pytest.raises(KeyboardInterrupt) as stop:
        build(source, output, options, StopSecond(1))
    assert (stop.value.__notes__, names(output.parent)) == ([], [])


KILLED: Final = """
import os, signal, sys
from estream_packer import build, journal, writer
from estream_packer.cli import main
journal.STEP_BYTES = 1
kind, left = getattr(signal, os.environ["KIND"]), int(os.environ["LEFT"])

def kill_before(function):
    def wrapped(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), kind)
        return function(*arguments)
    return wrapped

if os.environ["CALL"] == "write":
    writer.PackageWriter._next_record = kill_before(writer.PackageWriter._next_record)
elif os.environ["CALL"] == "calibrate":
    build.calibrate = kill_before(build.calibrate)
else:
    writer.Path.replace = kill_before(writer.Path.replace)
main()
"""


def killed(
    source: Path, output: Path, kind: signal.Signals, call: str, left: int, *more: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, "build", str(source), "-o", str(output), "--jobs", "1", *more]
    surroundings = {"PYTHONPATH": os.pathsep.join(sys.path), "KIND": kind.name, "CALL": call, "LEFT": str(left)}
    return subprocess.run(command, env=os.environ | surroundings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("kind", "share", "status"),
    [
        *((signal.SIGKILL, share, -signal.SIGKILL) for share in SHARES),
        (signal.SIGINT, 0.5, 130),
        (signal.SIGTERM, 0.5, 143),
    ],
)
def test_whatever_kills_a_build_the_next_one_goes_on(
    tmp_path: Path,
    olmoe_checkpoint: CheckpointFactory,
    made: list[int],
    expected: bytes,
    kind: signal.Signals,
    share: float,
    status: int,
) -> None:
    output = tmp_path / "model.emoe"
    ended = killed(olmoe_checkpoint("base"), output, kind, "write", int(share * RECORDS))
    assert (ended.returncode, ended.stdout) == (status, "")
    assert "Traceback" not in ended.stderr
    assert not output.exists()
    if kind != signal.SIGKILL:
        assert "the same build goes on from there" in ended.stderr
    build(olmoe_checkpoint("base"), output, PLAIN)
    # Of the last record written, the entry may not have reached the journal.
    assert len(made) - (RECORDS - int(share * RECORDS)) in (0, 1)
    assert output.read_bytes() == expected
    assert names(tmp_path) == ["model.emoe"]


def test_a_build_killed_before_its_package_has_a_name_leaves_nothing_that_counts(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, expected: bytes
) -> None:
    output = tmp_path / "model.emoe"
    ended = killed(olmoe_checkpoint("base"), output, signal.SIGKILL, "rename", 0)
    assert ended.returncode == -signal.SIGKILL
    assert not output.exists()
    build(olmoe_checkpoint("base"), output, PLAIN)
    assert (names(tmp_path), output.read_bytes()) == (["model.emoe"], expected)


def test_a_build_killed_while_it_calibrates_is_swept_by_the_next(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, expected: bytes
) -> None:
    output, text = tmp_path / "out" / "model.emoe", tmp_path / "text.txt"
    output.parent.mkdir()
    text.write_text("the three thieves thought so " * 9)
    arguments = olmoe_checkpoint("base"), output, signal.SIGKILL, "calibrate", 0, "--calibrate", str(text)
    for _ in range(2):  # the second sweeps before it takes more room
        assert killed(*arguments).returncode == -signal.SIGKILL
        [scratch] = names(output.parent)
        assert scratch.endswith(".scratch")
    with scratch_folder(output) as at_work:
        assert names(output.parent) == [at_work.name]
        (at_work / "calibration.emoe").write_bytes(b"of another writer")
        build(olmoe_checkpoint("base"), output, PLAIN)
        assert names(output.parent) == [at_work.name, "model.emoe"]
        assert names(at_work) == ["calibration.emoe"]
    assert (names(output.parent), output.read_bytes()) == (["model.emoe"], expected)


@pytest.mark.parametrize("name", ["nowhere/model.emoe", f"{'n' * 250}.emoe", f"{'n' * 300}.emoe"])
def test_with_calibration_an_output_is_judged_as_without(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, name: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the three thieves thought so " * 9)
    said = []
    for calibration in (None, CalibrationTable(text=str(text), tokens=64)):
        try:
            build(olmoe_checkpoint("base"), tmp_path / name, BuildOptions(jobs=1, calibration=calibration))
        except PackError as error:
            said.append(str(error))
        else:
            said.append("")
            (tmp_path / name).unlink()
    assert said[0] == said[1]
    assert bool(said[0]) == (len(name) != 255)
    assert names(tmp_path) == ["text.txt"]


def other_options(source: Path, patch: pytest.MonkeyPatch) -> BuildOptions:
    return BuildOptions(experts="w4g64", jobs=1)


def written_anew(source: Path, patch: pytest.MonkeyPatch) -> BuildOptions:
    os.utime(source / "model.safetensors", ns=(0, 0))
    return PLAIN


def other_version(source: Path, patch: pytest.MonkeyPatch) -> BuildOptions:
    patch.setattr("estream_packer.build.VERSIONS", "estream-pack 0 with numpy 0")
    return PLAIN


@pytest.mark.parametrize("change", [other_options, written_anew, other_version])
def test_a_half_of_another_package_is_never_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[int], change: Any
) -> None:
    source, output = write_checkpoint(tmp_path / "checkpoint", "base"), tmp_path / "out" / "model.emoe"
    output.parent.mkdir()
    stopped(source, output)
    made.clear()
    options = change(source, monkeypatch)
    build(source, output, options)
    assert len(made) == RECORDS
    assert names(output.parent) == ["model.emoe"]
    build(source, tmp_path / "whole.emoe", options)
    assert output.read_bytes() == (tmp_path / "whole.emoe").read_bytes()


def flip_a_byte(partial: Path) -> None:
    with partial.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def cut_the_file(partial: Path) -> None:
    os.truncate(partial, partial.stat().st_size - 100)


def tear_the_journal(partial: Path) -> None:
    path = partial.with_suffix(".journal")
    os.truncate(path, path.stat().st_size - 3)


def spoil_the_journal(partial: Path) -> None:
    path = partial.with_suffix(".journal")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip_a_byte, cut_the_file, tear_the_journal, spoil_the_journal])
def test_what_is_damaged_is_made_again(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes, damage: Any
) -> None:
    output = tmp_path / "model.emoe"
    damage(stopped(olmoe_checkpoint("base"), output))
    made.clear()
    build(olmoe_checkpoint("base"), output, PLAIN)
    assert len(made) == RECORDS - RECORDS // 2 + 1
    assert (names(tmp_path), output.read_bytes()) == (["model.emoe"], expected)


def test_a_journal_that_is_a_link_or_lost_is_not_trusted(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes
) -> None:
    output = tmp_path / "model.emoe"
    for link in (True, False):
        path = stopped(olmoe_checkpoint("base"), output).with_suffix(".journal")
        elsewhere = path.rename(tmp_path / "elsewhere")
        if link:
            path.symlink_to(elsewhere)
        made.clear()
        build(olmoe_checkpoint("base"), output, PLAIN)
        assert len(made) == RECORDS
        assert (names(tmp_path), output.read_bytes()) == (["elsewhere", "model.emoe"], expected)
        output.unlink()
        elsewhere.unlink()


def test_of_several_leavings_the_one_with_most_records_is_gone_on_from(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int], expected: bytes
) -> None:
    output, away = tmp_path / "out" / "model.emoe", tmp_path / "away"
    output.parent.mkdir()
    away.mkdir()
    for number, share in enumerate((0.3, 0.6, 0.2)):
        partial = stopped(olmoe_checkpoint("base"), output, share)
        for each in (partial, partial.with_suffix(".journal")):
            each.rename(away / f".model.emoe.{number:08}{each.suffix}")
    for each in away.iterdir():
        each.rename(output.parent / each.name)
    made.clear()
    build(olmoe_checkpoint("base"), output, PLAIN)
    assert len(made) == RECORDS - int(0.6 * RECORDS)
    assert (names(output.parent), output.read_bytes()) == (["model.emoe"], expected)


def test_a_build_at_work_is_left_alone_by_another_of_the_same_package(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, expected: bytes
) -> None:
    source, output = olmoe_checkpoint("base"), tmp_path / "model.emoe"

    class Other(Stop):
        """Halfway through, a second build of the same package runs from its beginning to its end."""

        def __init__(self) -> None:
            super().__init__(0.5)

        def advance(self, amount: int) -> None:
            self._left -= 1
            if self._left == 0:
                build(source, output, PLAIN)
                assert output.read_bytes() == expected
                output.unlink()

    build(source, output, PLAIN, Other())
    assert (names(tmp_path), output.read_bytes()) == (["model.emoe"], expected)


def test_a_refused_build_leaves_nothing_however_far_it_came(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    class RefusedError(PackError):
        def __init__(self) -> None:
            super().__init__("refused")

    with pytest.raises(PackError):
        build(olmoe_checkpoint("base"), tmp_path / "model.emoe", PLAIN, Stop(0.9, RefusedError))
    assert names(tmp_path) == []


def test_an_interrupted_build_of_a_small_package_cleans_up(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEP_BYTES", 1 << 27)
    with pytest.raises(KeyboardInterrupt):
        build(olmoe_checkpoint("base"), tmp_path / "model.emoe", PLAIN, Stop(0.9))
    assert names(tmp_path) == []


def test_another_checkpoint_of_one_shape_and_age_is_never_gone_on_with(
    tmp_path: Path, made: list[int], expected: bytes
) -> None:
    first, second = (write_checkpoint(tmp_path / name, "base") for name in ("first", "second"))
    weights = second / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x80  # the sign of a weight
    weights.write_bytes(data)
    for path in (*first.iterdir(), *second.iterdir()):
        os.utime(path, ns=(1, 1))
    output = tmp_path / "out" / "model.emoe"
    output.parent.mkdir()
    stopped(first, output)
    # The second takes the first one's place, as a symlink to the newest download does.
    first.rename(tmp_path / "away")
    second.rename(first)
    made.clear()
    build(first, output, PLAIN)
    assert len(made) == RECORDS
    assert names(output.parent) == ["model.emoe"]
    assert output.read_bytes() != expected
