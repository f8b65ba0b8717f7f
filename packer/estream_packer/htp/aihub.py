"""The compiler in Qualcomm's cloud: every tile is compiled by a job of its own, then one job links them all.

A job runs for minutes, so each is noted as soon as it is submitted, and a run after an interruption takes up what the
last one left. Sources: the client's `submit_compile_job`, `submit_link_job` and `submit_compile_and_link_jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import onnx

from estream_loader.progress import Progress
from estream_packer.htp.aihub_jobs import SubmittedJobs, key_of
from estream_packer.htp.aihub_service import Job, Linked, Service
from estream_packer.htp.compiler import Compiled, Tile
from estream_packer.htp.context import sdk_build
from estream_runtime.npu.contents import holds_name
from estream_spec.chips import Chip
from estream_spec.errors import PackError
from estream_spec.manifest import BinaryGraph

COMPILE_OPTIONS: Final = "--target_runtime qnn_dlc"
"""What the service links are DLCs."""
PRECISION: Final = "default_graph_htp_precision=FLOAT16"
"""Told to both kinds of jobs: the converter keeps it with a graph, and the linker is who prepares the graph."""
POLL_SECONDS: Final = 10
"""Time between looks at jobs that run, as long as the client waits itself."""


@dataclass(frozen=True, slots=True)
class _Order:
    """One tile and what to ask for.

    Attributes:
        tile: what to compile.
        tensors: names of its inputs and outputs.
        options: what its job is told.
        key: digest of all that decides what the job makes.
    """

    tile: Tile
    tensors: frozenset[str]
    options: str
    key: str


class AiHubCompiler:
    """Compiles in AI Hub; see `estream_packer.htp.compiler.Compiler`."""

    def __init__(self, state_dir: Path):
        """Prepares; nothing is asked of the service yet.

        Args:
            state_dir: where submitted jobs are noted until they are forgotten.
        """
        self._state_dir = state_dir
        self._done: list[str] = []

    def compile(self, tiles: Sequence[Tile], chip: Chip, progress: Progress) -> Compiled:
        """Compiles.

        Args:
            tiles: what to compile.
            chip: for which chip.
            progress: told of the stages, and of jobs within them.

        Raises:
            LinkError: the client is not installed, has no token, or the service does not answer or has no such chip.
            PackError: the service refuses a tile, which the message names, or what it made is not what was asked for.
        """
        service = Service()
        notes = SubmittedJobs(self._state_dir)
        orders = [_order(tile, chip) for tile in tiles]
        link_options = f"--qnn_options {PRECISION}"
        link_key = key_of("link", link_options, *(order.key for order in orders))
        run = _Run(service, notes, progress)

        device = service.device(chip)
        link = service.job(notes[link_key])
        if link is None:
            jobs = run.submit(orders, device)
            run.wait(
                "compiling",
                [(f"to compile {order.tile.label}", order.key, job) for order, job in zip(orders, jobs, strict=True)],
            )
            link = service.link(jobs, device, f"estream-{chip.name}", link_options)
            notes.note(link_key, link.job_id)
        run.wait("linking", [("to link", link_key, link)])
        progress.begin("downloading", 1)
        linked = service.fetch(link)
        progress.advance(1)

        try:
            made = Compiled(
                sdk=sdk_build(linked.data),
                data=linked.data,
                graphs=_graphs(orders, linked),
                compiler=f"qai-hub {service.version}",
                options=f"{COMPILE_OPTIONS} {link_options}",
            )
            _check_chip(linked, chip)
        except PackError:
            notes.forget([link_key])  # another run links again what is compiled
            raise
        self._done += [link_key, *(order.key for order in orders)]
        return made

    def forget(self) -> None:
        """Drops the notes of all that was compiled.

        Raises:
            PackError: the notes cannot be read or written.
        """
        SubmittedJobs(self._state_dir).forget(self._done)
        self._done.clear()


class _Run:
    """What submitting and waiting share."""

    def __init__(self, service: Service, notes: SubmittedJobs, progress: Progress):
        self._service, self._notes, self._progress = service, notes, progress

    def submit(self, orders: Sequence[_Order], device: object) -> list[Job]:
        """A job for each order: that of an earlier run, or a new one."""
        self._progress.begin("uploading", len(orders))
        jobs = []
        for order in orders:
            job = self._service.job(self._notes[order.key])
            if job is None:
                job = self._service.compile(order.tile.label, order.tile.onnx, device, order.options)
                self._notes.note(order.key, job.job_id)
            jobs.append(job)
            self._progress.advance(1)
        return jobs

    def wait(self, stage: str, jobs: Sequence[tuple[str, str, Job]]) -> None:
        """Waits until all jobs are done.

        Args:
            stage: what progress calls it.
            jobs: what each was asked to do, the key it is noted under, and the job.

        Raises:
            PackError: one failed. It is forgotten, so that another run tries again.
        """
        self._progress.begin(stage, len(jobs))
        while jobs:
            running = []
            for what, key, job in jobs:
                status = self._service.status(job)
                if status.failure is not None:
                    self._notes.forget([key])
                    raise PackError(f"AI Hub failed {what}: {status.failure}", hint=f"see {job.url}")
                if status.finished:
                    self._progress.advance(1)
                else:
                    running.append((what, key, job))
            jobs = running
            if jobs:
                time.sleep(POLL_SECONDS)


def _order(tile: Tile, chip: Chip) -> _Order:
    graph = onnx.load_model_from_string(tile.onnx).graph
    outputs = [value.name for value in graph.output]
    # Outputs that are not named here are called `output_0` and so on. Inputs keep their names.
    names = f"--output_names {','.join(outputs)} --qnn_options context_enable_graphs={tile.graph.name};{PRECISION}"
    options = f"{COMPILE_OPTIONS} {names}"
    return _Order(
        tile,
        frozenset(outputs).union(value.name for value in graph.input),
        options,
        key_of("compile", tile.onnx, f"{chip.soc_model} {chip.architecture}", options),
    )


def _graphs(orders: Sequence[_Order], linked: Linked) -> tuple[BinaryGraph, ...]:
    """The tiles by the names that the binary calls them, told by their inputs and outputs, which no two share."""
    names = {tensors: name for name, tensors in linked.tensors.items()}
    graphs = []
    for order in orders:
        if order.tensors not in names:
            label = order.tile.label
            unlike = sorted(order.tensors ^ linked.tensors.get(order.tile.graph.name, frozenset()))
            raise PackError(f"AI Hub's binary lacks a graph like {label}: inputs and outputs differ in {unlike[:8]}")
        name = names[order.tensors] or order.tile.graph.name
        if not holds_name(linked.data, name):
            raise PackError(f"AI Hub's binary does not name the graph {name!r}, which the service says is in it")
        graphs.append(msgspec.structs.replace(order.tile.graph, name=name))
    return tuple(graphs)


def _check_chip(linked: Linked, chip: Chip) -> None:
    """Where the service says for which chip it compiled, it must be the one that was asked for."""
    asked = {
        "QNN_CONTEXT_BIN_SOC_MODEL": str(chip.soc_model),
        "QNN_CONTEXT_BIN_HEXAGON_VERSION": f"v{chip.architecture}",
    }
    for fact, expected in asked.items():
        found = linked.facts.get(fact, expected)
        if found != expected:
            raise PackError(f"AI Hub compiled for another chip: {fact} is {found!r}, expected {expected!r}")
