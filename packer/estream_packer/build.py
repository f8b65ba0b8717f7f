"""Packs a checkpoint: plans, then makes its records and writes them in order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from estream_loader import open_package
from estream_loader.progress import Progress, Quiet
from estream_packer.assemble import WORKING_BYTES, assemble
from estream_packer.calibration import (
    Calibration,
    CalibrationSummary,
    CalibrationText,
    calibrate,
    check_calibration_text,
    read_calibration_text,
    unreached_notices,
)
from estream_packer.checkpoint import TOKENIZER, TOKENIZER_MODEL, Checkpoint, open_checkpoint
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import NotFiniteError
from estream_packer.distant import VERSIONS, Origin, let_go, make_record
from estream_packer.executors import Task, open_workers, worker_threads
from estream_packer.families import TensorSource, WeightSources, family_of
from estream_packer.families.sources import BLOCK_WEIGHTS
from estream_packer.packing import (
    WRITER,
    PackResult,
    build_graphs,
    made,
    write_package,
)
from estream_packer.plan import Plan, plan_package
from estream_packer.prefetch.file import PrefetchFile, Subject, check_prefetch_file, read_prefetch_file
from estream_packer.recipe import BuildOptions, check_options
from estream_packer.remote import Location
from estream_packer.writer import PackageWriter, check_output, check_space, scratch_folder
from estream_spec.errors import PackError
from estream_spec.manifest import Provenance, Source
from estream_spec.records import RecordRange
from estream_spec.weights import Floats

if TYPE_CHECKING:
    from estream_packer.htp.targets import Target
    from estream_spec.chips import Chip

CALIBRATED: Final = ("attention", "shared", "head")
"""Roles besides the experts whose matrices calibration has something to say of."""
NO_TOKENIZER: Final = (
    f"the checkpoint has neither {TOKENIZER} nor {TOKENIZER_MODEL}, so the package takes token ids and no text"
)


class BuildResult(PackResult, frozen=True, kw_only=True):
    """What a build made.

    Attributes:
        source_bytes: bytes of weights read.
        compiled: what was compiled for accelerators, in words.
        calibration: what calibration saw; None where there was none.
    """

    source_bytes: int
    compiled: tuple[str, ...] = ()
    calibration: CalibrationSummary | None = None


def build(
    source: Location,
    output: Location,
    options: BuildOptions | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> BuildResult:
    """Pack a checkpoint into one package.

    Everything about the checkpoint but the values of its weights is judged before anything is written. The package
    appears under its name when it is whole; until then, and after a failure, an older one stays as it was. Equal
    checkpoints and options give equal bytes, whatever the number of jobs, the executor, the place, or the time; with
    targets, if the vendor's compiler is the same, and with calibration, if the processor and the libraries that run the
    model are.

    Calibration first packs the checkpoint with 8 bits a weight into a temporary folder beside the output, and lets that
    read the text.

    A large build that is interrupted, killed, or loses its workers or the room on its disk leaves what it made beside
    the output, in a file that ends in `.partial`. The same build goes on from there, after it has calibrated anew; a
    build of anything else removes it.

    Args:
        source: checkpoint folder; see `remote.location` for one that is elsewhere.
        output: the package to write. One that is elsewhere is made in the folder for temporary files, then uploaded.
        options: how to pack; None takes the defaults.
        progress: told how far the build is.
        executor: makes the records, and stays open; None takes threads of this process. Its workers must be able to
            open the checkpoint. With one that does not tell how many it has, `options.jobs` should.

    Raises:
        PackError: the checkpoint, the options or the output is refused, or a graph that was compiled.
        FormatError: the prefetch router is at fault, or for another checkpoint.
        StoppedError: workers failed, the disk is full, or what is not on this machine can no longer be reached.
        LinkError: there are targets, and their compiler or simulator does not run here.
        TrapError: calibration met a value that is not finite.
    """
    begun = time.perf_counter()
    options, progress = options or BuildOptions(), progress or Quiet()
    check_options(options)
    check_output(output)
    text, prefetch = _calibration_text(options, output), _prefetch_file(options, output)
    chips = _chips(options)
    # The checkpoint is closed before the workers are awaited, which ends a long read when the build fails.
    with (
        worker_threads(1) as background,
        open_workers(options.jobs, executor) as workers,
        open_checkpoint(source) as checkpoint,
        contextlib.ExitStack() as ends,
    ):
        ends.callback(let_go, Origin.of(checkpoint))  # where an executor's workers are threads of this process
        _check_not_input(output, checkpoint)
        if text is not None:
            check_calibration_text(text, checkpoint)
        family = family_of(checkpoint.config)
        weights = family.read(checkpoint.config, checkpoint.generation_config).resolve(checkpoint)
        plan = plan_package(weights.model, options)
        documents = checkpoint.tokenizer or b"", _utf8(checkpoint.chat_template or "", "chat template")
        graphs = build_graphs(plan)
        sources = background.submit(checkpoint.sources)
        if prefetch is not None:
            subject = Subject(plan.model, Provenance(writer=WRITER, sources=sources.result()))
            check_prefetch_file(prefetch, subject, weights.layers, checkpoint)
        calibration = None if text is None else _calibrated(source, output, options, text, progress, executor)
        targets = _compiled(plan, chips)
        source_bytes = sum(each.length for each in weights.sources())
        progress.begin("packing", source_bytes)
        tasks = _tasks(checkpoint, weights, plan, calibration, shared=workers.shared)
        ranges = (*plan.dense, *plan.experts)
        lengths = [(each.record_length, plan.layout(each).payload_length) for each in ranges for _ in range(each.count)]
        binding = _binding(checkpoint, weights, options, plan, calibration, prefetch)
        with (
            _told_together(checkpoint, weights),
            PackageWriter(output, options.page_shift, binding) as writer,
            contextlib.closing(made(tasks, workers, progress)) as records,
        ):
            kept = writer.keep(lengths, lambda: progress.advance(next(tasks).amount))
            check_space(output, sum(length for length, _ in lengths[kept:]))
            packed = write_package(
                writer,
                plan,
                graphs,
                records,
                name=options.name or weights.model.family,
                provenance=lambda: Provenance(
                    writer=WRITER, licence=options.licence, sources=(*sources.result(), *_sources(calibration))
                ),
                documents=documents,
                targets=targets,
                prefetch=b"" if prefetch is None else prefetch.data,
            )
            # Weights and digests are read apart; only of files that stood still do they speak of the same bytes.
            checkpoint.check_unchanged()
            writer.commit()
    summary = None if calibration is None else calibration.summary(weights.model)
    notices = [] if summary is None else unreached_notices(summary)
    return BuildResult(
        output=os.fsencode(str(output)).decode(errors="replace"),
        file_id=packed.file_id,
        content_id=packed.content_id,
        source_bytes=source_bytes,
        seconds=time.perf_counter() - begun,
        summary=packed.summary(),
        compiled=tuple(target.described() for target in targets),
        notices=(
            *weights.notices,
            *notices,
            *(() if checkpoint.tokenizer else (NO_TOKENIZER,)),
            *_template_notices(checkpoint.chat_template),
        ),
        calibration=summary,
    )


def _chips(options: BuildOptions) -> list[Chip]:
    """The chips to compile for, each once."""
    if not options.targets:
        return []
    from estream_packer.htp.targets import chip_of_target

    return list(dict.fromkeys(map(chip_of_target, options.targets)))


def _compiled(plan: Plan, chips: list[Chip]) -> list[Target]:
    """What the graphs of a plan are compiled into."""
    if not chips:
        return []
    # Imported when asked for: only who compiles needs the vendor's compiler.
    from estream_packer.htp.local import LocalCompiler
    from estream_packer.htp.targets import compile_targets
    from estream_packer.htp.tiles import Weights

    dense, experts = ([plan.layout(each) for each in ranges] for ranges in (plan.dense, plan.experts))
    return compile_targets(Weights(plan.model, dense, experts), chips, LocalCompiler(), Quiet())


@contextlib.contextmanager
def _told_together(checkpoint: Checkpoint, weights: WeightSources) -> Iterator[None]:
    """When one tensor turns out not to be finite, look through all of them and refuse every such one in one message."""
    try:
        yield
    except NotFiniteError:
        faults = set()
        for source in weights.sources():
            try:
                for _ in source.blocks(checkpoint, BLOCK_WEIGHTS):
                    pass
            except NotFiniteError as fault:  # the same one twice where two sources read one tensor
                faults.add(fault.message)
        problems = Problems()
        for message in sorted(faults):
            problems.add("tensors with numbers that are not finite", message)
        problems.refuse("checkpoint cannot be packed", str(checkpoint.folder))
        raise


def _utf8(text: str, what: str) -> bytes:
    """A text's bytes; JSON can spell characters that have none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PackError(f"{what} has {error.object[error.start]!r}, which is no character") from None


def _binding(
    checkpoint: Checkpoint,
    weights: WeightSources,
    options: BuildOptions,
    plan: Plan,
    calibration: Calibration | None,
    prefetch: PrefetchFile | None,
) -> bytes | None:
    """Digest of what decides the bytes of records, and of the prefetch router: only what has the same is gone on from.

    None where the checkpoint cannot be told from another one: then nothing is.
    """
    identity = checkpoint.identity()
    if identity is None:
        return None
    placeless = msgspec.structs.replace(options, jobs=None, calibration=None, prefetch=None)
    router = b"" if prefetch is None else prefetch.digest
    chosen = msgspec.msgpack.encode((placeless, plan.layouts, router))
    digest = sha256(b"\0".join((VERSIONS.encode(), identity, chosen)))
    for record_range, sources, importance in _makings(weights, plan, calibration):
        digest.update(repr((record_range, sorted(sources.items()), sorted(importance))).encode())
        for _, known in sorted(importance.items()):
            digest.update(known.tobytes())
    return digest.digest()


def _check_not_input(output: Location, checkpoint: Checkpoint) -> None:
    """Refuse to replace a file of the checkpoint, under whatever name."""
    if any(_are_same(path, output) for path in checkpoint.paths()):
        raise PackError("output is a file of the checkpoint", path=str(output), hint="give another name")


def _are_same(path: Location, output: Location) -> bool:
    if isinstance(path, Path) and isinstance(output, Path):
        return output.exists() and path.samefile(output)
    return path == output


def _calibration_text(options: BuildOptions, output: Location) -> CalibrationText | None:
    """What to calibrate on."""
    table = options.calibration
    if table is None:
        return None
    path = Path(table.text)
    if options.experts == "f32" and all(options.encoding_of(role) == "f32" for role in CALIBRATED):
        message = "calibration has nothing to choose: every matrix is stored as it is"
        raise PackError(message, hint="leave it out, or choose fewer bits for the weights")
    text = read_calibration_text(path)
    if _are_same(path, output):
        raise PackError("output is the calibration text", path=str(output), hint="give another name")
    return text


def _prefetch_file(options: BuildOptions, output: Location) -> PrefetchFile | None:
    """The prefetch router to pack."""
    if options.prefetch is None:
        return None
    file = read_prefetch_file(Path(options.prefetch))
    if _are_same(file.path, output):
        raise PackError("output is the prefetch router", path=str(output), hint="give another name")
    return file


def _calibrated(
    source: Location,
    output: Location,
    options: BuildOptions,
    text: CalibrationText,
    progress: Progress,
    executor: Executor | None,
) -> Calibration:
    """What the checkpoint's model shows when it reads a text."""
    assert options.calibration is not None
    # 8 bits are near enough, and take a quarter of the room of f32. They stand where the package will find room.
    nearly = BuildOptions(experts="w8", dense="w8", activations="f32", jobs=options.jobs)
    with scratch_folder(output) as folder:
        path = folder / "calibration.emoe"
        try:
            build(source, path, nearly, progress, executor)
        except BaseException as error:
            error.__notes__ = []  # what it says is kept goes with the folder
            raise
        with open_package(path) as package:
            return calibrate(package, text, options.calibration.tokens, progress)


def _template_notices(chat_template: str | None) -> list[str]:
    """What to tell of a chat template that this project's own runtime would refuse; others may know how to use it."""
    if chat_template is None:
        return []
    from estream_packer.running import chat_template_fault

    fault = chat_template_fault(chat_template)
    return [] if fault is None else [f"'estream-run chat' cannot use this package: {fault}"]


def _sources(calibration: Calibration | None) -> tuple[Source, ...]:
    """What a package was made from besides the checkpoint."""
    return () if calibration is None else (calibration.source,)


class _Making(NamedTuple):
    """What a record is made from besides the checkpoint's bytes.

    Attributes:
        record_range: the range it belongs to.
        sources: where its tensors come from, by stored name.
        importance: what a squared error counts in each input channel, by matrix, where that is known.
    """

    record_range: RecordRange
    sources: Mapping[str, TensorSource]
    importance: Mapping[str, Floats]


def _makings(weights: WeightSources, plan: Plan, calibration: Calibration | None) -> Iterator[_Making]:
    """Of each record: the embedding, each layer, and what follows the last; then every expert, layer by layer."""

    def importance(layer: int | None, expert: int | None = None) -> Mapping[str, Floats]:
        return {} if calibration is None else calibration.importance(layer, expert)

    layers = [(weights.layers[layer], importance(layer)) for layer in range(len(weights.layers))]
    dense = [({"embedding": weights.embedding}, {}), *layers, (weights.final, importance(None))]
    for record_range, (sources, known) in zip(plan.dense, dense, strict=True):
        yield _Making(record_range, sources, known)
    for layer, record_range in enumerate(plan.experts):
        for expert in range(record_range.count):
            yield _Making(record_range, weights.expert(layer, expert), importance(layer, expert))


def _tasks(
    checkpoint: Checkpoint, weights: WeightSources, plan: Plan, calibration: Calibration | None, *, shared: bool
) -> Iterator[Task]:
    """A task for each record."""
    make = partial(assemble, checkpoint) if shared else partial(make_record, Origin.of(checkpoint))
    for record_range, sources, importance in _makings(weights, plan, calibration):
        length = record_range.record_length
        yield Task(
            make=partial(make, plan.layout(record_range), length, dict(sources), importance),
            length=length,
            payload_length=plan.layout(record_range).payload_length,
            working_bytes=WORKING_BYTES + max(source.held_bytes for source in sources.values()),
            amount=sum(source.length for source in sources.values()),
        )
