"""Race llama.cpp and ik_llama.cpp to the first token, cold and in little memory, with OLMoE-1B-7B's shape in 4 bits.

    python tests/bench/race.py
    python tests/bench/race.py --tokens 128 --tokens 512 --tokens 2048 --json race.json --picture race.svg

What is timed is a whole process from its start to its end: it opens the model and computes the logits that follow one
random prompt. Before each, the page cache is emptied (as far as this process has the right to: at least of the model);
each runs in a memory cgroup that counts page cache too, computes with all processors, and takes the prompt in at one
go. The programs take turns, and medians count. Beside them stands ik_llama.cpp with the model in memory and everything
warmed up, where the prompt alone is timed.

Programs (see `peer_programs.py`), models of 3.9 GB each (see `gguf_model.py`) and the package are made on the first
run, which takes half an hour and 12 GB; a program that cannot be had is left out. Needs root for the cgroup, and quiet.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

# The process that measures imports nothing of what is measured: what it has mapped stays in the page cache.
import click
from rich.console import Console
from rich.table import Table

import estream_spec
from bench.bars import Bar, bars_svg
from bench.bounded import run_bounded
from bench.peer_programs import IK, LLAMA, UnavailableError, bench_program, on_demand_library
from bench.readahead import readahead
from bench.synthetic import made

SHAPE: Final = "olmoe-1b-7b"
THREADS: Final = len(os.sched_getaffinity(0))
OURS: Final = "estream"
GROUP: Final = 8
"""Experts that ours reads together: few enough for any arena, enough for few calls."""
DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")
MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Entrant:
    """A program in the race.

    Attributes:
        name: of it.
        release: which version.
        how: its settings, for people.
        model: the file it runs.
        command: what to run for a number of tokens.
        warm: whether it runs often in one process and without bounds, and the prompt alone is timed.
    """

    name: str
    release: str
    how: str
    model: Path
    command: Callable[[int], list[str]]
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What one run found.

    Attributes:
        name: of the entrant.
        tokens: of the prompt.
        seconds: of the whole process, or of the prompt alone where everything was warm.
        prompt_s: seconds of the prompt alone, as the program itself says.
        processor_s: seconds that processors spent on the process, all together.
        bytes_read: what storage brought.
        peak_bytes: most memory, page cache included; None where it was not bounded.
    """

    name: str
    tokens: int
    seconds: float
    prompt_s: float
    processor_s: float
    bytes_read: int
    peak_bytes: int | None


def ours(arena_bytes: int, backend: str) -> Entrant:
    """This project's runtime, in an arena of so many bytes."""
    package, child = made(SHAPE, "w4g32"), str(Path(__file__).with_name("race_ours.py"))
    options = json.dumps({"arena_bytes": arena_bytes, "group_size": GROUP, "backend": backend})

    def command(tokens: int) -> list[str]:
        return [sys.executable, child, str(package), str(tokens), options]

    how = f"{backend} backend, arena of {arena_bytes // MIB} MiB in groups of {GROUP} experts"
    return Entrant(OURS, f"estream-pack {estream_spec.__version__}", how, package, command)


def llama() -> list[Entrant]:
    """llama.cpp as it fits little memory best: what it repacks at start-up would not fit."""
    program, model = bench_program(LLAMA), gguf("olmoe")
    cold = asked(program, model, "--no-warmup", "-r", "1", "-lm", "mmap", "--repack", "0")
    return [Entrant(LLAMA.name, LLAMA.release, "mmap, no repacking", model, cold)]


def ik() -> list[Entrant]:
    """ik_llama.cpp as it fits little memory best, its file not read before it is used, and at its fastest."""
    program, library, model = bench_program(IK), on_demand_library(IK), gguf("qwen3moe")
    cold = asked(program, model, "-w", "0", "-r", "1", "-mmp", "1", before=("env", f"LD_PRELOAD={library}"))
    warm = asked(program, model, "-w", "1", "-r", "3", "-rtr", "1")
    warm_name = f"{IK.name}, warm"
    return [
        Entrant(IK.name, IK.release, "mmap, pages come in as they are touched", model, cold),
        Entrant(warm_name, IK.release, "in memory, repacked, prompt alone", model, warm, warm=True),
    ]


def asked(program: Path, model: Path, *how: str, before: tuple[str, ...] = ()) -> Callable[[int], list[str]]:
    """What makes the command line of a `llama-bench` that takes in prompts at one go and makes nothing."""

    def command(tokens: int) -> list[str]:
        count = str(tokens)
        prompt = ["-p", count, "-n", "0", "-b", count, "-ub", count, "-t", str(THREADS), "-o", "json"]
        return [*before, str(program), "-m", str(model), *prompt, *how]

    return command


def gguf(label: str) -> Path:
    """The model as GGUF under a label, written unless it is there."""
    path = Path("build", "bench", f"{SHAPE}-{label}.gguf")
    if not path.exists():
        script = Path(__file__).with_name("gguf_model.py")
        subprocess.run([sys.executable, str(script), "--label", label, str(path)], check=True)
    return path.resolve()


def measured(entrant: Entrant, tokens: int, limit: int) -> Run:
    """Run an entrant once."""
    if not entrant.warm:
        empty_page_cache(entrant.model)
    done = run_bounded(entrant.command(tokens), None if entrant.warm else limit)
    found = json.loads(done.output)
    prompt_s = found["prompt_s"] if entrant.name == OURS else found[0]["avg_ns"] / 1e9
    seconds, peak = (prompt_s, None) if entrant.warm else (done.seconds, done.peak_bytes)
    return Run(entrant.name, tokens, seconds, prompt_s, done.processor_s, done.bytes_read, peak)


def empty_page_cache(model: Path) -> None:
    """Leave nothing of a model in memory, nor of any other file where this process may order that."""
    with model.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.access(DROP_CACHES, os.W_OK):
        os.sync()
        DROP_CACHES.write_text("3")


def conditions(model: Path, limit: int, programs: Mapping[str, str]) -> dict[str, str]:
    """Under what the figures were found; `programs` says of each what it is and how it runs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    emptied = "emptied wholly" if os.access(DROP_CACHES, os.W_OK) else "emptied of the model's file alone"
    return {
        "processor": f"{processor}, {THREADS} threads",
        "kernel": platform.release(),
        "memory": f"cgroup of {limit // MIB} MiB, page cache counted",
        "page cache": f"{emptied} before each run",
        "readahead": readahead(model),
        **programs,
    }


def report(runs: list[Run], entrants: list[Entrant]) -> Table:
    """One row for each program and length."""
    table = Table(
        "prompt", "program", "seconds", "lowest to highest", "processor s", "peak MiB", "GiB read", "ours / it"
    )
    for tokens in sorted({each.tokens for each in runs}):
        ours_s = median(runs, OURS, tokens)
        for entrant in entrants:
            own = [each for each in runs if (each.name, each.tokens) == (entrant.name, tokens)]
            seconds = median(runs, entrant.name, tokens)
            peaks = [each.peak_bytes for each in own if each.peak_bytes is not None]
            processor_s = statistics.median(each.processor_s for each in own)
            bytes_read = statistics.median(each.bytes_read for each in own)
            table.add_row(
                f"{tokens} tokens",
                entrant.name,
                f"{seconds:.2f}",
                f"{min(each.seconds for each in own):.2f} to {max(each.seconds for each in own):.2f}",
                "" if entrant.warm else f"{processor_s:.1f}",
                f"{max(peaks) / MIB:.0f}" if peaks else "",
                "" if entrant.warm else f"{bytes_read / GIB:.1f}",
                "" if entrant.name == OURS else f"{ours_s / seconds:.2f}",
            )
        table.add_section()
    return table


def median(runs: list[Run], name: str, tokens: int) -> float:
    """Seconds of an entrant."""
    return statistics.median(each.seconds for each in runs if (each.name, each.tokens) == (name, tokens))


@click.command(help=f"\b\n{__doc__.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}")
@click.option("--tokens", "lengths", type=click.IntRange(1), multiple=True, default=(512,), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=1024, show_default=True, help="MiB of the cgroup.")
@click.option("--arena", type=click.IntRange(1), default=128, show_default=True, help="MiB of our arena.")
@click.option("--backend", default="native", show_default=True, help="Of ours.")
@click.option("--json", "json_file", type=click.File("w", lazy=False), help="Write all runs there.")
@click.option("--picture", type=click.File("w", lazy=False), help="Write a chart there, as SVG.")
def main(
    lengths: tuple[int, ...],
    rounds: int,
    limit: int,
    arena: int,
    backend: str,
    json_file: TextIO | None,
    picture: TextIO | None,
) -> None:
    """Measure, print the table."""
    console = Console(width=150)
    entrants = [ours(arena * MIB, backend)]
    for peer in (llama, ik):
        try:
            entrants += peer()
        except UnavailableError as error:
            console.print(f"left out: {error}")
    programs = {each.name: f"{each.release}; {each.how}" for each in entrants}
    around = conditions(entrants[0].model, limit * MIB, programs)
    runs: list[Run] = []
    for tokens in lengths:
        for number in range(rounds):
            for each in entrants:
                runs.append(measured(each, tokens, limit * MIB))
                console.print(
                    f"{tokens} tokens, round {number + 1}, {each.name}: {runs[-1].seconds:.2f} s", highlight=False
                )
        if json_file is not None:  # after each length: the next one may not end well
            json_file.seek(0)
            json.dump({"conditions": around, "runs": [asdict(each) for each in runs]}, json_file, indent=1)
            json_file.flush()
    console.print(report(runs, entrants))
    for what, text in around.items():
        console.print(f"{what}: {text}", highlight=False)
    if picture is not None:
        bars = {
            f"{tokens} tokens": [
                Bar(each.name, median(runs, each.name, tokens), each.name == OURS) for each in entrants
            ]
            for tokens in lengths
        }
        title = f"Seconds to the first token, cold, in {limit} MiB of memory"
        picture.write(bars_svg(title, "OLMoE-1B-7B's shape in 4 bits, whole process; warm: the prompt alone", bars))


if __name__ == "__main__":
    main()
