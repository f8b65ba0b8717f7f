"""Faults that other engines had in public, where no single module's tests would find them here."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from estream_loader import open_package
from estream_loader.records import tensors
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime import Session
from estream_runtime.backends.portable import PortableBackend
from estream_runtime.backends.reference import ReferenceBackend
from estream_runtime.interpreter import Interpreter
from estream_spec.errors import LinkError, PackError
from estream_spec.layout import matrix_tensors
from estream_spec.manifest import GraphRole
from estream_spec.weights import Encoding, dequantise
from fixtures.olmoe import (
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    CheckpointFactory,
    token_ids,
    write_checkpoint,
)
from fixtures.packed import UNQUANTISED, PackageFactory
from fixtures.sources import FaultySource

PROMPT: Final = token_ids("bug log", 33)
Backend = type[PortableBackend] | type[ReferenceBackend]
LARGEST_HALF: Final = 65504.0
"""The largest finite f16."""


def changed_checkpoint(folder: Path, changes: Mapping[str, npt.NDArray[Any]]) -> Path:
    """The base checkpoint with some tensors set to others."""
    write_checkpoint(folder, "base")
    held = load_file(folder / "model.safetensors")
    assert changes.keys() <= held.keys()
    save_file(held | dict(changes), folder / "model.safetensors", {"format": "pt"})
    return folder


# Query and key norms that span one head where the family's span all of them.


def test_norms_of_one_head_are_refused_by_name_and_shape(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{norm}_norm.weight" for norm in "qk"]
    one_head = np.ones(HEAD_DIM, ml_dtypes.bfloat16)
    checkpoint = changed_checkpoint(tmp_path / "checkpoint", dict.fromkeys(names, one_head))
    with pytest.raises(PackError) as refusal:
        build(checkpoint, tmp_path / "model.emoe")
    for name in names:
        assert f"'{name}' has [{HEAD_DIM}], expected [{HIDDEN}]" in str(refusal.value)
    assert not (tmp_path / "model.emoe").exists()


# Numbers beyond half precision.


@pytest.mark.parametrize("options", [UNQUANTISED, BuildOptions(experts="w8")], ids=["f32", "w8"])
@pytest.mark.parametrize("backend", [PortableBackend, ReferenceBackend])
def test_an_expert_beyond_half_precision_is_scaled_back_by_its_routing_weight(
    options: BuildOptions, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_file(write_checkpoint(tmp_path / "base", "base") / "model.safetensors")
    layer, expert = LAYERS - 1, 5
    at = f"model.layers.{layer}.mlp."
    # Sharper routing, so that the last of the chosen experts has next to no weight.
    router = (base[f"{at}gate.weight"].astype(np.float32) * 2).astype(ml_dtypes.bfloat16)
    down = (base[f"{at}experts.{expert}.down_proj.weight"].astype(np.float32) * 8e4).astype(ml_dtypes.bfloat16)
    changes = {f"{at}gate.weight": router, f"{at}experts.{expert}.down_proj.weight": down}
    build(changed_checkpoint(tmp_path / "checkpoint", changes), tmp_path / "model.emoe", options)

    shares: list[float] = []

    def on_route(routed: int, expert_ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        if routed == layer:
            shares.extend(weights[expert_ids == expert].tolist())

    outputs = watch_experts(monkeypatch, backend)
    with open_package(tmp_path / "model.emoe") as package, Session(package, backend.name) as session:
        logits = session.forward(PROMPT, on_route)
    assert np.isfinite(logits).all()
    # The rows of the call that gave most are the tokens that chose the expert, in their order.
    largest = max(outputs, key=max)
    assert any(share < 0.02 and size > LARGEST_HALF for share, size in zip(shares, largest, strict=True))


def watch_experts(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[list[float]]:
    """Collects, for each call of an expert graph, the largest magnitude in each row it gives."""
    largest: list[list[float]] = []
    run = backend.run

    def watched(
        self: Any, role: GraphRole, shape_class: int, feeds: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        outputs = run(self, role, shape_class, feeds)
        if role == "expert":
            [output] = outputs.values()
            largest.append(np.abs(output).max(axis=1).tolist())
        return outputs

    monkeypatch.setattr(backend, "run", watched)
    return largest


@pytest.mark.parametrize("experts", ["f32", "w8"])
def test_a_weight_beyond_half_precision_is_kept(experts: Encoding, tmp_path: Path) -> None:
    large = 70144.0
    weight = np.ones((INTERMEDIATE, HIDDEN), ml_dtypes.bfloat16)
    weight[3, 7] = large
    assert float(weight[3, 7]) == large > LARGEST_HALF
    checkpoint = changed_checkpoint(tmp_path / "checkpoint", {"model.layers.1.mlp.experts.11.up_proj.weight": weight})
    build(checkpoint, tmp_path / "model.emoe", BuildOptions(experts=experts))
    with open_package(tmp_path / "model.emoe") as package:
        place = package.experts.place(1, 11)
        record = memoryview(bytearray(place.length))
        package.read_record(place, record)
        [up] = [matrix for matrix in place.layout.matrices if matrix.name == "up"]
        parts = tensors(place.layout, record)
        named = {part.name.removeprefix("up").removeprefix("."): parts[part.name] for part in matrix_tensors(up)}
        stored = dequantise(experts, named, up.rows)
    half_step = 0.0 if experts == "f32" else float(named["scale"][3]) / 2
    assert abs(float(stored[7, 3]) - large) <= half_step
    assert half_step <= large / 127


# Two builds to one output.

MEETING: Final = """
import sys
from estream_packer.build import PackageWriter
from estream_packer.cli import main
commit = PackageWriter.commit

def meet_then_commit(self):
    print("ready", flush=True)
    sys.stdin.readline()
    commit(self)

PackageWriter.commit = meet_then_commit
main()
"""
"""`estream-pack` that says when its package is whole, and waits for a line before it gives it its name."""


def test_two_builds_to_one_output_leave_one_whole_package(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    source, output = olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe"
    output.parent.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEETING, "build", str(source), "-o", str(output), "--jobs", "1"]
    start = partial(
        subprocess.Popen[str],
        command,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with ExitStack() as stack:  # which closes the pipes, so that a build that waits goes on
        builds = [stack.enter_context(start()) for _ in range(2)]
        for each in builds:  # so that a build that stalls fails the test
            limit = Timer(60, each.kill)
            limit.start()
            stack.callback(limit.cancel)
        for each in builds:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        unnamed = [path.name for path in output.parent.iterdir()]
        assert len(unnamed) == 2
        assert all(name.endswith(".partial") for name in unnamed)
        # Both are told to go on before either is waited for.
        for each in builds:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        errors = [each.communicate(timeout=60)[1] for each in builds]
    assert [each.returncode for each in builds] == [0, 0], errors
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    build(source, tmp_path / "alone.emoe")
    assert output.read_bytes() == (tmp_path / "alone.emoe").read_bytes()


# A device that would make the reader wait.


def test_a_read_that_would_block_ends_the_call_and_not_the_session(packed: PackageFactory) -> None:
    """A regular file never says so, so nothing here could wait for one that does: the caller hears of it at once."""
    wanted: list[int] = []
    with open_package(packed()) as package, Session(package) as session:
        expected = session.forward(PROMPT, lambda layer, expert_ids, weights: wanted.append(int(expert_ids[0, 0])))
        place = package.experts.place(1, wanted[1])
    failed: list[int] = []

    def once(call: int, offset: int, length: int) -> int | None:
        if offset <= place.offset < offset + length and not failed:
            failed.append(call)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return None

    source = FaultySource(packed().read_bytes(), once)
    with open_package(source) as package, Session(package) as session:
        with pytest.raises(LinkError, match="reading failed: Resource temporarily unavailable: got 0 of"):
            session.forward(PROMPT)
        assert np.array_equal(session.forward(PROMPT), expected)


# Output that drifts with the size of the arena.


@pytest.mark.parametrize("options", [UNQUANTISED, BuildOptions()], ids=["f32", "w4"])
def test_a_long_continuation_is_the_same_in_every_arena(
    options: BuildOptions, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[npt.NDArray[np.float32]] = []
    last_logits = Interpreter.last_logits

    def noted(self: Interpreter, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        steps.append(last_logits(self, x))
        return steps[-1]

    monkeypatch.setattr(Interpreter, "last_logits", noted)
    path = packed("base", options)
    runs = []
    with open_package(path) as package:
        slot = package.experts.table.ranges[0].record_length
        for slots in (1, EXPERTS * LAYERS // 2, EXPERTS * LAYERS):
            with Session(package, arena_bytes=slot * slots, group_size=1, threads=1) as session:
                tokens = list(session.generate(PROMPT, 256))
            runs.append((tokens, np.stack(steps)))
            steps.clear()
    (expected_tokens, expected_logits), *others = runs
    assert len(expected_tokens) == len(expected_logits) >= 200
    for tokens, logits in others:
        assert tokens == expected_tokens
        assert np.array_equal(logits, expected_logits)


# Pages of 16 KiB and more.


def test_records_begin_on_pages_of_every_kernel(packed: PackageFactory) -> None:
    logits = []
    for options, page in ((BuildOptions(), 16384), (BuildOptions(page_shift=16), 65536)):
        with open_package(packed("base", options)) as package, Session(package, threads=1) as session:
            places = [*package.dense.places(), *package.experts.places()]
            assert len(places) == LAYERS + 2 + LAYERS * EXPERTS
            assert [place.path for place in places if place.offset % page] == []
            logits.append(session.forward(PROMPT))
    assert np.array_equal(logits[0], logits[1])
