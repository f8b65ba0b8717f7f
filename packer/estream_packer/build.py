"""Packs a checkpoint: plans, then makes its records and writes them in order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from estream_loader.progress import Progress, Quiet
from estream_packer.assemble import BLOCK_WEIGHTS, WORKING_BYTES, assemble
from estream_packer.checkpoint import TOKENIZER, TOKENIZER_MODEL, Checkpoint, open_checkpoint
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import NotFiniteError
from estream_packer.families import TensorSource, WeightSources, family_of
from estream_packer.packing import (
    WRITER,
    PackResult,
    Task,
    build_graphs,
    job_count,
    made,
    worker_threads,
    write_package,
)
from estream_packer.plan import Plan, plan_package
from estream_packer.recipe import BuildOptions, check_options
from estream_packer.writer import PackageWriter, check_output
from estream_spec.errors import PackError
from estream_spec.manifest import Provenance
from estream_spec.records import RecordRange

if TYPE_CHECKING:
    from estream_packer.htp.targets import Target
    from estream_spec.chips import Chip

NO_TOKENIZER: Final = (
    f"the checkpoint has neither {TOKENIZER} nor {TOKENIZER_MODEL}, so the package takes token ids and no text"
)


class BuildResult(PackResult, frozen=True, kw_only=True):
    """What a build made.

    Attributes:
        source_bytes: bytes of weights read.
        compiled: what was compiled for accelerators, in words.
    """

    source_bytes: int
    compiled: tuple[str, ...] = ()


def build(
    source: Path, output: Path, options: BuildOptions | None = None, progress: Progress | None = None
) -> BuildResult:
    """Pack a checkpoint into one package.

    Everything about the checkpoint but the values of its weights is judged before anything is written. The package
    appears under its name when it is whole; until then, and after a failure, an older one stays as it was. Equal
    checkpoints and options give equal bytes, whatever the number of jobs, the place, or the time; with targets, if the
    vendor's compiler is the same.

    Args:
        source: checkpoint folder.
        output: the package to write.
        options: how to pack; None takes the defaults.
        progress: told how far the build is.

    Raises:
        PackError: the checkpoint, the options or the output is refused, or a graph that was compiled.
        LinkError: there are targets, and their compiler or simulator does not run here.
    """
    begun = time.perf_counter()
    options, progress = options or BuildOptions(), progress or Quiet()
    check_options(options)
    check_output(output)
    chips = _chips(options)
    jobs = job_count(options)
    # The checkpoint is closed before the workers are awaited, which ends a long read when the build fails.
    with worker_threads(1) as background, worker_threads(jobs) as workers, open_checkpoint(source) as checkpoint:
        _check_not_input(output, checkpoint)
        family = family_of(checkpoint.config)
        weights = family.read(checkpoint.config, checkpoint.generation_config).resolve(checkpoint)
        plan = plan_package(weights.model, options)
        documents = checkpoint.tokenizer or b"", _utf8(checkpoint.chat_template or "", "chat template")
        graphs = build_graphs(plan)
        targets = _compiled(plan, chips)
        sources = background.submit(checkpoint.sources)
        source_bytes = sum(each.length for each in weights.sources())
        progress.begin("packing", source_bytes)
        with _told_together(checkpoint, weights), PackageWriter(output, options.page_shift) as writer:
            packed = write_package(
                writer,
                plan,
                graphs,
                made(_dense_tasks(checkpoint, weights, plan), workers, jobs, progress),
                made(_expert_tasks(checkpoint, weights, plan), workers, jobs, progress),
                name=options.name or weights.model.family,
                provenance=lambda: Provenance(writer=WRITER, licence=options.licence, sources=sources.result()),
                documents=documents,
                targets=targets,
            )
            # Weights and digests are read apart; only of files that stood still do they speak of the same bytes.
            checkpoint.check_unchanged()
            writer.commit()
    return BuildResult(
        output=os.fsencode(output).decode(errors="replace"),
        file_id=packed.file_id,
        content_id=packed.content_id,
        source_bytes=source_bytes,
        seconds=time.perf_counter() - begun,
        summary=packed.summary(),
        compiled=tuple(target.described() for target in targets),
        notices=(*weights.notices, *(() if checkpoint.tokenizer else (NO_TOKENIZER,))),
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


def _check_not_input(output: Path, checkpoint: Checkpoint) -> None:
    """Refuse to replace a file of the checkpoint, under whatever name."""
    if output.exists() and any(path.samefile(output) for path in checkpoint.paths()):
        raise PackError("output is a file of the checkpoint", path=str(output), hint="give another name")


def _dense_tasks(checkpoint: Checkpoint, weights: WeightSources, plan: Plan) -> Iterator[Task]:
    """The embedding, each layer, and what follows the last."""
    each = [{"embedding": weights.embedding}, *weights.layers, weights.final]
    for record_range, sources in zip(plan.dense, each, strict=True):
        yield _task(checkpoint, plan, record_range, dict(sources))


def _expert_tasks(checkpoint: Checkpoint, weights: WeightSources, plan: Plan) -> Iterator[Task]:
    """Every expert, layer by layer."""
    for layer, record_range in enumerate(plan.experts):
        for expert in range(record_range.count):
            yield _task(checkpoint, plan, record_range, dict(weights.expert(layer, expert)))


def _task(checkpoint: Checkpoint, plan: Plan, record_range: RecordRange, sources: dict[str, TensorSource]) -> Task:
    return Task(
        make=partial(assemble, checkpoint, plan.layout(record_range), record_range.record_length, sources),
        cost=record_range.record_length + WORKING_BYTES + max(source.held_bytes for source in sources.values()),
        amount=sum(source.length for source in sources.values()),
    )
