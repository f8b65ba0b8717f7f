"""Measure how well reading hides behind computing, and in how much memory.

    python tests/bench/pipeline.py
    python tests/bench/pipeline.py --shape mixtral-8x7b --dense w4g32 --arena 256M --limit 2G --rounds 1 --part time

Each run is a process of its own in a memory cgroup, and prefills random tokens. Just before and just after it, the
package's experts are read by as many plain threads with O_DIRECT and nothing else, and the faster of both counts: disks
wander. The package, of 3.9 GB, is made in `build/bench` unless it is there already. All parts take about ten minutes on
two cores. Exits 1 if a target is missed.

- `time`: memory; total time and reading rate against what reading and computing take alone.
- `paging`: the reading rate where nothing computes: experts pass through the arena as fast as they come, each proven.
- `bubbles`: each policy, reading slowed down until it takes as long as computing.
- `logits`: whether they are the same for arenas, group sizes, depths, lanes and policies of all kinds.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bounded import run_bounded
from bench.synthetic import made
from estream_loader import open_package
from estream_loader.console import run_command, size
from estream_loader.direct import DirectFile
from estream_loader.memory import page_aligned
from estream_loader.pager import Pager
from estream_loader.source import FileSource
from estream_packer.recipe import DenseEncoding
from estream_runtime import Session
from estream_spec.manifest import LANES
from estream_spec.schedule import Opcode
from estream_spec.schedule_compiler import compile_program
from estream_spec.shapes import SHAPES

MIB: Final = 1 << 20
OVERHEAD: Final = 250 * MIB
"""What may be taken beside the arena and the dense weights."""
PIECE: Final = 4 * MIB
"""Bytes of one plain read."""
PAGING_GROUP: Final = 4
"""Experts read together where nothing computes."""
PAGING_ROUNDS: Final = 7
BALANCED_TOKENS: Final = 128
VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"policy": "post-routing"},
    {"policy": "on-demand"},
    {"lanes": 1, "group_size": 1, "prefetch_depth": 0},
    {"lanes": 4, "group_size": 2, "prefetch_depth": 1},
    {"lanes": 8, "group_size": 3, "prefetch_depth": 2, "arena_bytes": 64 * MIB},
    {"group_size": 16, "arena_bytes": 512 * MIB},
    {"group_size": 64, "arena_bytes": 512 * MIB, "policy": "post-routing"},
)


class SlowFile(DirectFile):
    """A file that brings no more than so many bytes a second, as storage of another device would."""

    def __init__(self, descriptor: int, base: int, rate: float):
        super().__init__(descriptor, base)
        self._rate, self._due, self._guard = rate, 0.0, threading.Lock()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Reads, and waits until those bytes are due."""
        count = super().read_into(buffer, offset)
        with self._guard:
            self._due = due = max(self._due, time.perf_counter()) + count / self._rate
        time.sleep(max(0.0, due - time.perf_counter()))
        return count


class SlowSource(FileSource):
    """A package on slow storage."""

    rate = 0.0

    def open_direct(self) -> DirectFile:
        """See `FileSource.open_direct`."""
        return SlowFile(self._descriptor, self._base, self.rate)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run found.

    Attributes:
        stats: of the prefill; empty where all logits were asked for.
        digest: of the logits.
        session_s: seconds to open package and session.
        resident_bytes: largest resident set of the process, which has shared libraries in it and no page cache.
        peak_bytes: most memory of the process, page cache included; None where nobody counted.
        plain_rate: bytes a second of plain reads around it; 0 where there were none.
    """

    stats: dict[str, Any]
    digest: str
    session_s: float
    resident_bytes: int
    peak_bytes: int | None = None
    plain_rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one run does.

    Attributes:
        package: the package's path.
        tokens: random tokens to take in.
        options: of the session.
        rate: bytes a second that reading is slowed down to; None for none.
        all_logits: take in the prompt for the logits after every token and not after the last alone.
    """

    package: str
    tokens: int
    options: dict[str, Any]
    rate: float | None = None
    all_logits: bool = False

    def __call__(self) -> Run:
        """Do it, in this process."""
        begun = time.perf_counter()
        source: FileSource | str = self.package
        if self.rate is not None:
            source = SlowSource.open(Path(self.package))
            source.rate = self.rate
        with open_package(source) as opened, Session(opened, **self.options) as session:
            ready = time.perf_counter() - begun
            token_ids = np.random.default_rng(0).integers(0, opened.manifest.model.vocabulary, self.tokens)
            if self.all_logits:
                stats, logits = {}, session.forward(token_ids)
            else:
                result = session.prefill(token_ids)
                stats, logits = asdict(result.stats), result.logits
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return Run(stats, sha256(logits.tobytes()).hexdigest(), ready, resident)

    def run(self, limit: int | None = None) -> Run:
        """Do it in a process and a cgroup of its own, with nothing of the package in the page cache."""
        with Path(self.package).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        finished = run_bounded([sys.executable, __file__, "--child", json.dumps(asdict(self))], limit)
        return replace(Run(**json.loads(finished.output)), peak_bytes=finished.peak_bytes)

    def run_beside_plain_reads(self, limit: int | None) -> Run:
        """The same, with plain reads just before and after."""
        lanes = self.options.get("lanes", LANES)
        before = plain_rate(Path(self.package), lanes)
        found = self.run(limit)
        return replace(found, plain_rate=max(before, plain_rate(Path(self.package), lanes)))


def plain_rate(package: Path, lanes: int) -> float:
    """Bytes a second at which the package's experts are read by plain threads."""
    with open_package(package, integrity="open") as opened:
        first = opened.experts.place(0, 0).offset
        length = sum(each.count * each.record_length for each in opened.experts.table.ranges) // PIECE * PIECE
    source = FileSource.open(package)
    file = source.open_direct()

    def read(offsets: range) -> None:
        buffer = page_aligned(PIECE)
        for offset in offsets:
            if file.read_into(buffer, offset) != PIECE:
                raise click.ClickException(f"{package} is shorter than it was")

    begun = time.perf_counter()
    with ThreadPoolExecutor(lanes) as threads:
        list(threads.map(read, [range(first + lane * PIECE, first + length, lanes * PIECE) for lane in range(lanes)]))
    seconds = time.perf_counter() - begun
    file.close()
    source.close()
    return length / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line says, see its help."""

    shape: str
    dense: str | None
    tokens: int
    arena: int
    limit: int | None
    ratio: float
    rounds: int


Figure = tuple[str, str, str, bool]
"""What it is, what it should be, what it is found to be, whether that is so."""


def time_figures(package: Path, given: Given, options: dict[str, Any]) -> Iterator[Figure]:
    """Memory, time and rate of whole runs."""
    task = Task(package=str(package), tokens=given.tokens, options=options)
    runs = [task.run_beside_plain_reads(given.limit) for _ in range(given.rounds)]
    with open_package(package, integrity="open") as opened:
        dense = sum(each.count * each.record_length for each in opened.dense.table.ranges[1:])
    arena = runs[0].stats["peak_arena_bytes"]
    allowed, peaks = arena + dense + OVERHEAD, [each.peak_bytes for each in runs if each.peak_bytes is not None]
    sizes = f"arena {arena / MIB:.0f} + dense {dense / MIB:.0f} + {OVERHEAD / MIB:.0f} MiB"
    found = f"{max(peaks) / MIB:.0f} MiB" if peaks else "not measured: no cgroup counts it"
    if given.limit is None:
        yield "peak memory", f"<= {allowed / MIB:.0f} MiB ({sizes})", found, max(peaks, default=0) <= allowed
    else:
        yield "peak memory", f"bounded to {given.limit / MIB:.0f} MiB ({sizes})", found, True
    resident = max(each.resident_bytes for each in runs)
    yield "resident set, shared libraries included", "", f"{resident / MIB:.0f} MiB", True
    total = median(runs, lambda each: each.stats["total_s"])
    yield "prefill", "", f"{total:.2f} s for {given.tokens} tokens", True
    yield "opening package and session", "", f"{median(runs, lambda each: each.session_s):.2f} s", True
    yield "computing busy", "", f"{median(runs, lambda each: each.stats['compute_busy_s']):.2f} s", True
    plain_s = median(runs, lambda each: each.stats["bytes_read"] / each.plain_rate)
    rate_alone = median(runs, lambda each: each.plain_rate)
    yield "plain reads of the same bytes", "", f"{plain_s:.2f} s ({rate_alone / 1e9:.2f} GB/s)", True
    ratio = median(
        runs,
        lambda each: (
            each.stats["total_s"] / max(each.stats["bytes_read"] / each.plain_rate, each.stats["compute_busy_s"])
        ),
    )
    yield "total / max(plain reads, computing busy)", f"<= {given.ratio}", f"{ratio:.3f}", ratio <= given.ratio
    rate = median(runs, lambda each: each.stats["bytes_read"] / each.stats["io_busy_s"] / each.plain_rate)
    yield "reading rate / that of plain reads", ">= 0.9", f"{rate:.2f}", rate >= 0.9
    yield "bubble", "", f"{median(runs, lambda each: each.stats['bubble']):.3f}", True
    yield "reading", "direct", runs[0].stats["reading_mode"], runs[0].stats["reading_mode"] == "direct"


def paging_figures(package: Path, given: Given, options: dict[str, Any]) -> Iterator[Figure]:
    """How fast a program pages all experts if nothing computes, against plain reads around it."""
    plain, ratios = [plain_rate(package, LANES)], []
    for _ in range(PAGING_ROUNDS):
        found = paging_rate(package, options["arena_bytes"])
        plain.append(plain_rate(package, LANES))
        ratios.append(found / statistics.mean(plain[-2:]))
    ratio, spread = statistics.median(ratios), f"plain reads {min(plain) / 1e9:.2f} to {max(plain) / 1e9:.2f} GB/s"
    what = f"paging without computing: rate / that of plain reads around it, median of {PAGING_ROUNDS}"
    yield what, "about 1, as far as the disk is steady", f"{ratio:.2f} ({spread})", True


def paging_rate(package: Path, arena_bytes: int) -> float:
    """Bytes a second at which experts pass through an arena by the program of a prefill."""
    with open_package(package) as opened:
        shape, group_size = opened.expert_shape, PAGING_GROUP
        depth = arena_bytes // shape.bank_bytes(group_size) - 1
        program = compile_program(shape, arena_bytes=arena_bytes, group_size=group_size, prefetch_depth=depth)
        with Pager(opened, arena_bytes=arena_bytes) as pager:
            pager.divide(program.bank_count, group_size)
            begun = time.perf_counter()
            for opcode, *place in program.instructions:
                if opcode == Opcode.FILL:
                    pager.fill(*place)
                elif opcode == Opcode.AWAIT:
                    pager.await_(*place)
                elif opcode == Opcode.RELEASE:
                    pager.use(place[-1])
                    pager.release(place[-1])
            return pager.stats.bytes_read / (time.perf_counter() - begun)


def bubble_figures(package: Path, given: Given, options: dict[str, Any]) -> Iterator[Figure]:
    """The bubble of each policy where reading takes as long as computing."""
    task = Task(package=str(package), tokens=BALANCED_TOKENS, options=options)
    alone = task.run()
    with open_package(package, integrity="open") as opened:  # dense weights are read beside computing, too
        dense = sum(each.count * each.record_length for each in opened.dense.table.ranges)
    rate = (alone.stats["bytes_read"] + dense) / alone.stats["compute_busy_s"]
    about = f"{BALANCED_TOKENS} tokens, reading slowed to {rate / 1e9:.2f} GB/s"
    bubbles, times = {}, {}
    for policy in ("on-demand", "post-routing", "pre-routing"):
        slow = replace(task, rate=rate, options=options | {"policy": policy})
        runs = [slow.run() for _ in range(given.rounds)]
        bubbles[policy] = median(runs, lambda each: each.stats["bubble"])
        times[policy] = median(runs, lambda each: each.stats["total_s"])
    demand, post, pre = bubbles.values()
    yield f"on demand: bubble ({about})", "", f"{demand:.3f}, {times['on-demand']:.2f} s", True
    yield "post-routing: bubble", "< on demand", f"{post:.3f}, {times['post-routing']:.2f} s", post < demand
    yield "pre-routing: bubble", "< post-routing", f"{pre:.3f}, {times['pre-routing']:.2f} s", pre < post
    yield "pre-routing / on demand", "<= 0.333", f"{pre / demand:.3f}", pre <= demand / 3


def logits_figures(package: Path, given: Given, options: dict[str, Any]) -> Iterator[Figure]:
    """Whether the logits after every token are the same however a prompt is run."""
    task = Task(package=str(package), tokens=given.tokens, options=options, all_logits=True)
    digests = {replace(task, options=options | variant).run().digest for variant in VARIANTS}
    found = f"{len(digests)} among {len(VARIANTS)} settings"
    yield "different logits", "1", found, len(digests) == 1


PARTS: Final = {"time": time_figures, "paging": paging_figures, "bubbles": bubble_figures, "logits": logits_figures}


def median(runs: list[Run], figure: Callable[[Run], float]) -> float:
    """The median of a figure."""
    return statistics.median(map(figure, runs))


@click.command(help=f"\b\n{__doc__.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}")
@click.option("--child", hidden=True)
@click.option("--shape", type=click.Choice(tuple(SHAPES)), default="olmoe-1b-7b", show_default=True)
@click.option("--dense", type=click.Choice(get_args(DenseEncoding)), help="Encoding of all but the experts.")
@click.option("--package", type=click.Path(path_type=Path), help="Use this package and make none.")
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--arena", type=size, metavar="SIZE", default="128M", show_default=True)
@click.option("--limit", type=size, metavar="SIZE", help="Memory of the cgroup.  [default: not bounded]")
@click.option("--ratio", default=1.15, show_default=True, help="Target of total / max(reading, computing).")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--part", "parts", type=click.Choice(tuple(PARTS)), multiple=True, help="Repeatable.  [default: all]")
def command(child: str | None, parts: tuple[str, ...], package: Path | None, **options: Any) -> None:
    """Measure, print the table, judge it."""
    if child is not None:
        print(json.dumps(asdict(Task(**json.loads(child))())))
        return
    given = Given(**options)
    path = package or made(given.shape, given.dense)
    with open_package(path, integrity="open") as opened:
        if opened.expert_shape.bank_bytes(PAGING_GROUP) < PIECE:
            raise click.ClickException(f"experts of {path} are too small for storage to be measured with them")
    table = Table("figure", "target", "measured", "", title=f"{path.stem}, medians of {given.rounds}")
    good = True
    for part in parts or PARTS:
        for what, target, found, holds in PARTS[part](path, given, {"arena_bytes": given.arena}):
            table.add_row(what, target, found, "" if holds else "MISSED")
            good = good and holds
    Console(width=150).print(table)
    click.get_current_context().exit(0 if good else 1)


if __name__ == "__main__":
    sys.exit(run_command(command, "pipeline.py"))
