"""Makes a package of a model's shape with random weights: for benchmarks and for planning, without a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from estream_loader.progress import Progress, Quiet
from estream_packer.executors import Task, open_workers
from estream_packer.favourites import MAX_SKEW
from estream_packer.packing import (
    WRITER,
    PackResult,
    build_graphs,
    made,
    write_package,
)
from estream_packer.plan import Plan, plan_package
from estream_packer.random_weights import MAX_SEED, RandomRecords
from estream_packer.recipe import BuildOptions, check_options
from estream_packer.writer import PackageWriter, check_output, check_space
from estream_spec.manifest import Provenance
from estream_spec.model import ModelDescription

NO_MEANING: Final = "the weights are random: good for measuring, and what the model says means nothing"
NO_TOKENIZER: Final = "a synthetic package has no tokenizer, so it takes token ids and no text"


class SynthResult(PackResult, frozen=True, kw_only=True):
    """The synthetic package that was made.

    Attributes:
        seed: what its weights were drawn from.
        skew: of the experts' popularity.
    """

    seed: int
    skew: float


def synthesise(
    model: ModelDescription,
    output: Path,
    options: BuildOptions | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    skew: float = 0,
) -> SynthResult:
    """Write a package of random weights that route evenly, or prefer some experts.

    It is a package like any other, and says in its name and its provenance what it is. Equal arguments give equal
    bytes. As with a build, it appears under its name when it is whole.

    Args:
        model: its shape.
        output: the package to write.
        options: how weights are stored, as for a build; None takes the defaults.
        seed: 0 to `MAX_SEED`; picks the weights.
        progress: told how far it is.
        skew: 0 to `MAX_SKEW`; the n-th most popular expert of a layer gets about `n ** -skew` of what the first gets.

    Raises:
        PackError: the options or the output are refused, or the disk has too little room.
    """
    begun = time.perf_counter()
    options, progress = options or BuildOptions(), progress or Quiet()
    assert 0 <= seed <= MAX_SEED, seed
    assert 0 <= skew <= MAX_SKEW, skew
    check_options(options)
    check_output(output)
    plan = plan_package(model, options)
    weights = f"synthetic weights of seed {seed}" + (f", skew {skew:g}" if skew else "")
    check_space(output, plan.record_bytes)
    graphs = build_graphs(plan)
    progress.begin("writing", plan.record_bytes)
    with open_workers(options.jobs) as workers, PackageWriter(output, options.page_shift) as writer:
        records = RandomRecords(seed, model, skew)
        packed = write_package(
            writer,
            plan,
            graphs,
            made(_tasks(records, plan), workers, progress),
            name=options.name or f"synthetic {model.family}",
            provenance=lambda: Provenance(writer=f"{WRITER}, {weights}", licence=options.licence),
        )
        writer.commit()
    return SynthResult(
        output=os.fsencode(output).decode(errors="replace"),
        file_id=packed.file_id,
        content_id=packed.content_id,
        seed=seed,
        skew=skew,
        seconds=time.perf_counter() - begun,
        summary=packed.summary(),
        notices=(NO_MEANING, NO_TOKENIZER),
    )


def _tasks(records: RandomRecords, plan: Plan) -> Iterator[Task]:
    """A task for each record, dense ones first."""
    each = [record_range for record_range in (*plan.dense, *plan.experts) for _ in range(record_range.count)]
    for number, record_range in enumerate(each):
        length = record_range.record_length
        layout = plan.layout(record_range)
        make = partial(records.make, number, layout, length)
        yield Task(make, length, layout.payload_length, working_bytes=0, amount=length)
