"""What every way of making a package shares: records made a few at a time, and all that follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from estream_loader.progress import Progress
from estream_packer import executors
from estream_packer.executors import Task, Workers
from estream_packer.graphs import build_graph
from estream_packer.plan import Plan
from estream_packer.schedules import programs_for
from estream_packer.summary import Summary, summarise
from estream_packer.writer import PackageWriter, PackedRecord
from estream_spec import __version__
from estream_spec.constants import SectionType
from estream_spec.container import Container, check_entries
from estream_spec.manifest import Manifest, Provenance, content_id, decode_manifest
from estream_spec.messagepack import encode
from estream_spec.prefetch_router import check_prefetch_router, decode_prefetch_router
from estream_spec.records import RecordTable
from estream_spec.rules import check_device_configurations, check_manifest, check_tables
from estream_spec.schedule import ExpertShape, Program
from estream_spec.schedule_verifier import verify_program

if TYPE_CHECKING:
    from estream_packer.htp.targets import Target

WRITER: Final = f"estream-pack {__version__}"
NO_DOCUMENTS: Final = b"", b""


class PackResult(Struct, frozen=True, kw_only=True):
    """The package that was made.

    Attributes:
        output: the package, as text: what of its name is not UTF-8 is replaced.
        file_id: digest of this very file, hexadecimal.
        content_id: digest of its logical content, hexadecimal.
        seconds: how long it took.
        summary: the package in figures.
        notices: what a user should know of the package although it is sound.
    """

    output: str
    file_id: str
    content_id: str
    seconds: float
    summary: Summary
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Packed:
    """A whole package that has not got its name yet."""

    container: Container
    manifest: Manifest
    dense: RecordTable
    experts: RecordTable
    programs: tuple[Program, ...]

    @property
    def file_id(self) -> str:
        """Digest of this very file, hexadecimal."""
        return self.container.file_id().hex()

    @property
    def content_id(self) -> str:
        """Digest of its logical content, hexadecimal."""
        return self.manifest.content_id.hex()

    def summary(self) -> Summary:
        """The package in figures."""
        return summarise(self.container, self.manifest.layouts, self.dense, self.experts)


def made(tasks: Iterable[Task], workers: Workers, progress: Progress) -> Generator[PackedRecord]:
    """Records in the order of their tasks. Few are in flight at a time, and of about `IN_FLIGHT_BYTES`."""
    waiting = deque[tuple[Task, Future[PackedRecord]]]()
    in_flight = 0

    def oldest() -> PackedRecord:
        nonlocal in_flight
        task, future = waiting.popleft()
        record = workers.result(task, future)
        in_flight -= workers.cost(task)
        progress.advance(task.amount)
        return record

    try:
        for task in tasks:
            while waiting and (
                len(waiting) > workers.depth or in_flight + workers.cost(task) > executors.IN_FLIGHT_BYTES
            ):
                yield oldest()
            waiting.append((task, workers.submit(task)))
            in_flight += workers.cost(task)
        while waiting:
            yield oldest()
    finally:
        for _, future in waiting:
            future.cancel()


def build_graphs(plan: Plan) -> list[bytes]:
    """The graphs of a plan, in its order."""
    return [
        build_graph(graph.role, plan.model, graph.shape_class, graph.weights, graph.activations)
        for graph in plan.graphs
    ]


def write_package(
    writer: PackageWriter,
    plan: Plan,
    graphs: Sequence[bytes],
    records: Iterator[PackedRecord],
    *,
    name: str,
    provenance: Callable[[], Provenance],
    documents: tuple[bytes, bytes] = NO_DOCUMENTS,
    targets: Sequence[Target] = (),
    prefetch: bytes = b"",
) -> Packed:
    """Write everything a package holds, and hold it to the rules every reader holds it to.

    Args:
        writer: of the package; committing it is left to the caller.
        plan: what the package holds.
        graphs: of the plan, in its order.
        records: those that the writer does not keep: of the plan's dense ranges, then of its expert ranges, in order.
        name: the model's name, for people.
        provenance: asked for once all records are written.
        documents: tokenizer and chat template, empty where there is none.
        targets: what was compiled for accelerators.
        prefetch: a prefetch router, empty where there is none.

    Raises:
        FormatError: the prefetch router is for another model.
        PackError: it cannot be written.
    """
    dense = writer.add_records(SectionType.DENSE, plan.dense, records)
    experts = writer.add_records(SectionType.EXPERTS, plan.experts, records)
    writer.add(SectionType.DENSE_TABLE, dense.encode())
    writer.add(SectionType.EXPERT_TABLE, experts.encode())
    for graph, data in zip(plan.graphs, graphs, strict=True):
        writer.add(SectionType.GRAPH, data, graph.section, compress=True)
    for section, target in enumerate(targets):
        writer.add(SectionType.BINARY, target.compiled.data, section)
    for section_type, document in zip((SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE), documents, strict=True):
        if document:
            writer.add(section_type, document, compress=True)
    if prefetch:
        writer.add(SectionType.PREFETCH_ROUTER, prefetch)
    programs = programs_for(ExpertShape.of(plan.model, experts), plan.device_configuration, predicts=bool(prefetch))
    for number, program in enumerate(programs):
        writer.add(SectionType.SCHEDULE, program.encode(), number, compress=True)
    manifest = Manifest(
        name=name,
        content_id=content_id(plan.model, plan.layouts, dense, experts, documents),
        model=plan.model,
        layouts=plan.layouts,
        graphs=plan.graphs,
        device_configurations=(plan.device_configuration,),
        provenance=provenance(),
        binaries=tuple(target.binary(section) for section, target in enumerate(targets)),
    )
    writer.add(SectionType.MANIFEST, encode(manifest))
    packed = Packed(writer.finish(), manifest, dense, experts, programs)
    _prove(packed, prefetch)
    return packed


def _prove(packed: Packed, prefetch: bytes) -> None:
    """Hold the package to the rules before it gets its name."""
    container, manifest = packed.container, packed.manifest
    check_entries(container.superblock, container.entries)
    check_manifest(decode_manifest(encode(manifest)), container)
    check_tables(manifest, container, packed.dense, packed.experts)
    check_device_configurations(manifest, packed.experts)
    for program in packed.programs:
        verify_program(program, ExpertShape.of(packed.manifest.model, packed.experts))
    if prefetch:
        path = "prefetch router"
        check_prefetch_router(decode_prefetch_router(prefetch, path), manifest, path)
