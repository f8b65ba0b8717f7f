"""Packs a checkpoint: plans, then makes records on all processors and writes them in order, a few at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from estream_loader.progress import Progress, Quiet
from estream_packer.assemble import WORKING_BYTES, assemble
from estream_packer.checkpoint import TOKENIZER, Checkpoint, open_checkpoint
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import NotFiniteError
from estream_packer.families import TensorSource, WeightMap, family_of
from estream_packer.graphs import build_graph
from estream_packer.plan import Plan, plan_package
from estream_packer.recipe import BuildOptions, check_options
from estream_packer.summary import Summary, summarise
from estream_packer.writer import PackageWriter, PackedRecord, check_output
from estream_spec import __version__
from estream_spec.constants import SectionType
from estream_spec.container import Container, check_entries
from estream_spec.errors import PackError
from estream_spec.manifest import Manifest, Provenance, content_id, decode_manifest
from estream_spec.messagepack import encode
from estream_spec.records import RecordRange, RecordTable
from estream_spec.rules import check_device_configurations, check_manifest, check_tables

IN_FLIGHT_BYTES: Final = 1 << 28
"""Memory for records being made or waiting to be written; a single larger record has it to itself."""
NO_TOKENIZER: Final = f"the checkpoint has no {TOKENIZER}, so the package takes token ids and no text"
WRITER: Final = f"estream-pack {__version__}"


class BuildResult(Struct, frozen=True, kw_only=True):
    """What a build made.

    Attributes:
        output: the package, as text: what of its name is not UTF-8 is replaced.
        file_id: digest of this very file, hexadecimal.
        content_id: digest of its logical content, hexadecimal.
        source_bytes: bytes of weights read.
        seconds: how long it took.
        summary: the package in figures.
        notices: what a user should know of the package although it is sound.
    """

    output: str
    file_id: str
    content_id: str
    source_bytes: int
    seconds: float
    summary: Summary
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """One record to make, what it takes in memory, and how much of the source it is."""

    make: Callable[[], PackedRecord]
    cost: int
    source_bytes: int


def build(
    source: Path, output: Path, options: BuildOptions | None = None, progress: Progress | None = None
) -> BuildResult:
    """Pack a checkpoint into one package.

    Everything about the checkpoint but the values of its weights is judged before anything is written. The package
    appears under its name when it is whole; until then, and after a failure, an older one stays as it was. Equal
    checkpoints and options give equal bytes, whatever the number of jobs, the place, or the time.

    Args:
        source: checkpoint folder.
        output: the package to write.
        options: how to pack; None takes the defaults.
        progress: told how far the build is.

    Raises:
        PackError: the checkpoint, the options or the output is refused.
    """
    begun = time.perf_counter()
    options, progress = options or BuildOptions(), progress or Quiet()
    check_options(options)
    check_output(output)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    # The checkpoint is closed before the workers are awaited, which ends a long read when the build fails.
    with _workers(1) as background, _workers(jobs) as workers, open_checkpoint(source) as checkpoint:
        _check_not_input(output, checkpoint)
        family = family_of(checkpoint.config)
        weights = family.weights(family.describe(checkpoint.config, checkpoint.generation_config))
        weights.check(checkpoint)
        plan = plan_package(weights.model, options)
        documents = checkpoint.tokenizer or b"", _utf8(checkpoint.chat_template or "", "chat template")
        graphs = [
            build_graph(graph.role, weights.model, graph.shape_class, graph.weights, graph.activations)
            for graph in plan.graphs
        ]
        sources = background.submit(checkpoint.sources)
        source_bytes = sum(_length(checkpoint, each) for each in weights.sources())
        progress.begin("packing", source_bytes)
        with _told_together(checkpoint, weights), PackageWriter(output, options.page_shift) as writer:
            dense_records = _made(_dense_tasks(checkpoint, weights, plan), workers, jobs, progress)
            dense = writer.add_records(SectionType.DENSE, plan.dense, dense_records)
            expert_records = _made(_expert_tasks(checkpoint, weights, plan), workers, jobs, progress)
            experts = writer.add_records(SectionType.EXPERTS, plan.experts, expert_records)
            writer.add(SectionType.DENSE_TABLE, dense.encode())
            writer.add(SectionType.EXPERT_TABLE, experts.encode())
            _add_documents(writer, plan, graphs, documents)
            manifest = Manifest(
                name=options.name or weights.model.family,
                content_id=content_id(weights.model, plan.layouts, dense, experts, documents),
                model=weights.model,
                layouts=plan.layouts,
                graphs=plan.graphs,
                device_configurations=(plan.device_configuration,),
                provenance=Provenance(writer=WRITER, licence=options.licence, sources=sources.result()),
            )
            writer.add(SectionType.MANIFEST, encode(manifest))
            container = writer.finish()
            _prove(container, manifest, dense, experts)
            # Weights and digests are read apart; only of files that stood still do they speak of the same bytes.
            checkpoint.check_unchanged()
            writer.commit()
    return BuildResult(
        output=os.fsencode(output).decode(errors="replace"),
        file_id=container.file_id().hex(),
        content_id=manifest.content_id.hex(),
        source_bytes=source_bytes,
        seconds=time.perf_counter() - begun,
        summary=summarise(container, plan.layouts, dense, experts),
        notices=() if checkpoint.tokenizer else (NO_TOKENIZER,),
    )


@contextlib.contextmanager
def _workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that drop what they have not begun when the build ends early."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _told_together(checkpoint: Checkpoint, weights: WeightMap) -> Iterator[None]:
    """When one tensor turns out not to be finite, look through all of them and refuse every such one in one message."""
    try:
        yield
    except NotFiniteError:
        problems = Problems()
        for name in sorted(source.name for source in weights.sources()):
            try:
                for rows in checkpoint.row_blocks(name):
                    checkpoint.read(name, rows)
            except NotFiniteError as fault:
                problems.add("tensors with numbers that are not finite", fault.message)
        problems.refuse("checkpoint cannot be packed", str(checkpoint.folder))
        raise


def _utf8(text: str, what: str) -> bytes:
    """A text's bytes; JSON can spell characters that have none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PackError(f"{what} has {error.object[error.start]!r}, which is no character") from None


def _add_documents(writer: PackageWriter, plan: Plan, graphs: Iterable[bytes], documents: tuple[bytes, bytes]) -> None:
    """Write the graphs, then tokenizer and chat template where there are any."""
    for graph, data in zip(plan.graphs, graphs, strict=True):
        writer.add(SectionType.GRAPH, data, graph.section, compress=True)
    for section_type, document in zip((SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE), documents, strict=True):
        if document:
            writer.add(section_type, document, compress=True)


def _check_not_input(output: Path, checkpoint: Checkpoint) -> None:
    """Refuse to replace a file of the checkpoint, under whatever name."""
    if output.exists() and any(path.samefile(output) for path in checkpoint.paths()):
        raise PackError("output is a file of the checkpoint", path=str(output), hint="give another name")


def _dense_tasks(checkpoint: Checkpoint, weights: WeightMap, plan: Plan) -> Iterator[_Task]:
    """The embedding, each layer, and what follows the last."""
    each = [{"embedding": weights.embedding}, *weights.layers, weights.final]
    for record_range, sources in zip(plan.dense, each, strict=True):
        yield _task(checkpoint, plan, record_range, dict(sources))


def _expert_tasks(checkpoint: Checkpoint, weights: WeightMap, plan: Plan) -> Iterator[_Task]:
    """Every expert, layer by layer."""
    for layer, record_range in enumerate(plan.experts):
        for expert in range(record_range.count):
            yield _task(checkpoint, plan, record_range, dict(weights.expert(layer, expert)))


def _task(checkpoint: Checkpoint, plan: Plan, record_range: RecordRange, sources: dict[str, TensorSource]) -> _Task:
    return _Task(
        make=partial(assemble, checkpoint, plan.layout(record_range), record_range.record_length, sources),
        cost=record_range.record_length + WORKING_BYTES,
        source_bytes=sum(_length(checkpoint, source) for source in sources.values()),
    )


def _length(checkpoint: Checkpoint, source: TensorSource) -> int:
    """Bytes of a tensor in the checkpoint."""
    tensor = checkpoint.tensors[source.name]
    return tensor.end - tensor.begin


def _made(tasks: Iterable[_Task], workers: ThreadPoolExecutor, jobs: int, progress: Progress) -> Iterator[PackedRecord]:
    """Records in the order of their tasks. At most `jobs + 1` are in flight, and about `IN_FLIGHT_BYTES`."""
    waiting = deque[tuple[_Task, Future[PackedRecord]]]()
    in_flight = 0

    def oldest() -> PackedRecord:
        nonlocal in_flight
        task, future = waiting.popleft()
        record = future.result()
        in_flight -= task.cost
        progress.advance(task.source_bytes)
        return record

    for task in tasks:
        while waiting and (len(waiting) > jobs or in_flight + task.cost > IN_FLIGHT_BYTES):
            yield oldest()
        waiting.append((task, workers.submit(task.make)))
        in_flight += task.cost
    while waiting:
        yield oldest()


def _prove(container: Container, manifest: Manifest, dense: RecordTable, experts: RecordTable) -> None:
    """Hold the package to the rules every reader holds it to, before it gets its name."""
    check_entries(container.superblock, container.entries)
    check_manifest(decode_manifest(encode(manifest)), container)
    check_tables(manifest, container, dense, experts)
    check_device_configurations(manifest, experts)
