from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from estream_loader import open_package
from estream_packer import distant, executors, journal
from estream_packer.build import build
from estream_packer.checkpoint import Checkpoint, open_checkpoint
from estream_packer.executors import open_executor
from estream_packer.journal import StoppedError
from estream_packer.recipe import BuildOptions, CalibrationTable
from estream_packer.writer import PackedRecord
from estream_spec.errors import PackError
from fixtures.olmoe import CheckpointFactory, VariantName
from fixtures.packed import PackageFactory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def dask_address() -> Iterator[str]:
    """A cluster of two workers, processes of their own, on this machine."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        yield cluster.scheduler_address.removeprefix("tcp://")


def test_a_dask_cluster_makes_the_same_bytes_though_a_worker_dies(
    tmp_path: Path, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory, dask_address: str
) -> None:
    output = tmp_path / "model.emoe"
    with open_executor(f"dask://{dask_address}", None) as executor:
        assert executor is not None
        workers = {executor.submit(os.getpid).result() for _ in range(10)}
        assert os.getpid() not in workers

        class Killer:
            """Kills a worker when some records are there."""

            def __init__(self) -> None:
                self.records = 0

            def begin(self, stage: str, total: int) -> None: ...

            def advance(self, amount: int) -> None:
                self.records += 1
                if self.records == 5:
                    os.kill(workers.pop(), signal.SIGKILL)

        build(olmoe_checkpoint("base"), output, progress=Killer(), executor=executor)
    assert output.read_bytes() == packed("base").read_bytes()
    assert names(tmp_path) == ["model.emoe"]


def test_processes_make_the_same_bytes(
    tmp_path: Path, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory
) -> None:
    with open_executor("processes", 2) as executor:
        build(olmoe_checkpoint("base"), tmp_path / "model.emoe", executor=executor)
    assert (tmp_path / "model.emoe").read_bytes() == packed("base").read_bytes()


class Sending(Executor):
    """Sends tasks and results as bytes, to a thread that is as far away as another machine."""

    def __init__(self, arrives: Callable[[Any], Any] = lambda result: result, protocol: int = 4):
        self._threads, self._arrives, self._protocol = ThreadPoolExecutor(2), arrives, protocol

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        sent = pickle.dumps((fn, args, kwargs), self._protocol)

        def work() -> Any:
            function, arguments, keywords = pickle.loads(sent)
            return self._arrives(pickle.loads(pickle.dumps(function(*arguments, **keywords), self._protocol)))

        return self._threads.submit(work)


def test_any_executor_makes_the_same_bytes_and_stays_open(
    tmp_path: Path, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory
) -> None:
    variants: tuple[tuple[VariantName, int], ...] = ("base", 4), ("tied", 5)
    for variant, protocol in variants:
        executor = Sending(protocol=protocol)
        build(olmoe_checkpoint(variant), tmp_path / "model.emoe", executor=executor)
        assert (tmp_path / "model.emoe").read_bytes() == packed(variant).read_bytes()
        assert executor.submit(len, "abc").result() == 3


def test_calibrated_records_are_the_same_bytes(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the three thieves thought that they threw the thimble there " * 4)
    options = BuildOptions(calibration=CalibrationTable(text=str(text), tokens=64))
    build(olmoe_checkpoint("base"), tmp_path / "threads.emoe", options)
    build(olmoe_checkpoint("base"), tmp_path / "model.emoe", options, executor=Sending())
    assert (tmp_path / "model.emoe").read_bytes() == (tmp_path / "threads.emoe").read_bytes()


def test_a_relative_path_is_the_same_for_workers_elsewhere(
    tmp_path: Path, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(olmoe_checkpoint("base"))

    class Elsewhere(Sending):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            monkeypatch.chdir(tmp_path)
            return super().submit(fn, *args, **kwargs)

    build(Path(), tmp_path / "model.emoe", executor=Elsewhere())
    assert (tmp_path / "model.emoe").read_bytes() == packed("base").read_bytes()


def test_few_records_are_in_flight_however_many_workers_there_are(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "IN_FLIGHT_BYTES", 1)
    waiting: list[Future[Any]] = []

    class Counting(Sending):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            assert all(future.done() for future in waiting)
            waiting.append(super().submit(fn, *args, **kwargs))
            return waiting[-1]

    build(olmoe_checkpoint("base"), tmp_path / "model.emoe", BuildOptions(jobs=16), executor=Counting())


def refused(source: Path, folder: Path, executor: Executor, message: str, error: type[PackError] = PackError) -> None:
    folder.mkdir()
    with pytest.raises(error, match=message):
        build(source, folder / "model.emoe", executor=executor)
    assert names(folder) == []


def test_workers_that_fail_are_told_and_leave_no_output(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no room")

    def damage(record: PackedRecord) -> PackedRecord:
        data = bytearray(record.data)
        data[5] ^= 1
        return PackedRecord(memoryview(data), record.checksum, record.digest)

    def cut(record: PackedRecord) -> PackedRecord:
        return PackedRecord.seal(record.data[:-1], 1)

    def misname(record: PackedRecord) -> PackedRecord:
        return PackedRecord(record.data, record.checksum, bytes(32))

    def garble(_: object) -> str:
        return "abc"

    for number, (arrives, message) in enumerate(
        (
            (fail, "a worker failed: MemoryError: no room"),
            (damage, "arrived damaged"),
            (cut, "arrived damaged"),
            (misname, "arrived damaged"),
            (garble, "a worker made str, expected a record"),
        )
    ):
        refused(olmoe_checkpoint("base"), tmp_path / str(number), Sending(arrives), message, StoppedError)


def test_a_process_that_ends_is_told(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    with open_executor("processes", 1) as executor:
        assert executor is not None
        executor.submit(os._exit, 1)
        refused(
            olmoe_checkpoint("base"), tmp_path / "out", executor, "a worker failed: BrokenProcessPool", StoppedError
        )


def test_an_executor_that_takes_no_more_tasks_is_told(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    message = "a worker failed: RuntimeError: cannot schedule new futures after shutdown"
    refused(olmoe_checkpoint("base"), tmp_path / "out", executor, message, StoppedError)


def test_a_tensor_that_a_worker_refuses_is_told_with_all_others(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    held = load_file(source / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        held[name][3] = float("inf")
    save_file(held, source / "model.safetensors")
    refused(source, tmp_path / "out", Sending(), "2 tensors with numbers that are not finite")


def test_a_worker_that_sees_another_checkpoint_or_is_another_version_is_refused(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)

    class Replaced(Sending):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            os.utime(source / "model.safetensors", ns=(0, 0))
            return super().submit(fn, *args, **kwargs)

    refused(source, tmp_path / "out", Replaced(), "a worker finds another checkpoint there", StoppedError)
    origin = distant.Origin(source, b"", "estream-pack 0.0 with numpy 1.26")
    with pytest.raises(StoppedError, match=r"a worker runs estream-pack .*, expected estream-pack 0.0"):
        distant._opened(origin)
    absent = distant.Origin(tmp_path / "absent", b"", distant.VERSIONS)
    with pytest.raises(StoppedError, match="a worker cannot open the checkpoint: folder cannot be read: no such file"):
        distant._opened(absent)


def test_one_wrong_worker_takes_nothing_of_what_others_made(
    tmp_path: Path, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEP_BYTES", 1)
    versions, sent = distant.VERSIONS, []

    class Mixed(Sending):
        """From the tenth task on, the worker is another version."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            sent.append(fn)
            if len(sent) == 10:
                distant.let_go(fn.args[0])  # type: ignore[attr-defined]
                monkeypatch.setattr(distant, "VERSIONS", "estream-pack 0.0 with numpy 1.26 on vax")
            return super().submit(fn, *args, **kwargs)

    output = tmp_path / "model.emoe"
    with pytest.raises(StoppedError, match=r"a worker runs estream-pack 0\.0") as stop:
        build(olmoe_checkpoint("base"), output, BuildOptions(jobs=1), executor=Mixed())
    assert "what was made is kept in" in stop.value.__notes__[0]
    monkeypatch.setattr(distant, "VERSIONS", versions)
    sent.clear()

    def noted(record: Any) -> Any:
        sent.append(record)
        return record

    build(olmoe_checkpoint("base"), output, executor=Sending(noted))
    assert output.read_bytes() == packed("base").read_bytes()
    with open_package(output) as package:
        assert 0 < len(sent) < len(package.dense.table.checksums) + len(package.experts.table.checksums)


def test_builds_that_share_workers_open_their_checkpoints_once_and_close_them(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def noted(folder: Path) -> Checkpoint:
        opened.append(folder)
        return open_checkpoint(folder)

    monkeypatch.setattr(distant, "open_checkpoint", noted)

    class Between(Sending):
        """Each task of the first build is followed by a record of the second."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            distant._opened(other)
            return super().submit(fn, *args, **kwargs)

    with open_checkpoint(olmoe_checkpoint("tied")) as checkpoint:
        other = distant.Origin.of(checkpoint)
    build(olmoe_checkpoint("base"), tmp_path / "model.emoe", executor=Between())
    assert sorted(opened) == sorted([olmoe_checkpoint("tied"), olmoe_checkpoint("base")])
    assert list(distant._open) == [other]
    for number in range(distant.KEPT_OPEN):
        shutil.copytree(olmoe_checkpoint("base"), tmp_path / str(number))
        with open_checkpoint(tmp_path / str(number)) as checkpoint:
            distant._opened(distant.Origin.of(checkpoint))
    assert len(distant._open) == distant.KEPT_OPEN
    assert other not in distant._open
    distant._open.clear()


def test_the_fingerprint_is_of_names_lengths_times_and_tensors(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    found = []
    variants: tuple[VariantName, ...] = "base", "tied"
    for variant in variants:
        for time in (1, 2):
            folder = tmp_path / f"{variant}{time}"
            shutil.copytree(olmoe_checkpoint(variant), folder)
            for path in folder.iterdir():
                os.utime(path, ns=(time, time))
            with open_checkpoint(folder) as checkpoint:
                found.append(checkpoint.fingerprint())
    assert len(set(found)) == 4
    shutil.copytree(tmp_path / "base1", tmp_path / "copy")  # with its times
    with open_checkpoint(tmp_path / "copy") as checkpoint:
        assert checkpoint.fingerprint() == found[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "unknown executor 'gpu', expected threads, processes or dask://HOST:PORT"),
        ("dask://127.0.0.1:1", "scheduler cannot be reached"),
        ("dask://nowhere", "scheduler cannot be reached"),
    ],
)
def test_an_executor_that_cannot_be_had_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 0.2)
    with pytest.raises(PackError, match=message), open_executor(name, None):
        pass


def test_a_machine_without_dask_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(PackError, match="Dask is not installed") as refusal, open_executor("dask://host:1", None):
        pass
    assert refusal.value.hint == "pip install 'estream-pack[dask]', here and on every worker"
