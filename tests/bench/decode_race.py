"""Race llama.cpp and ik_llama.cpp in decoding, cold and in little memory, with OLMoE-1B-7B's shape in 4 bits.

    python tests/bench/decode_race.py
    python tests/bench/decode_race.py --tokens 8 --rounds 1 --json race.json

What is timed is decoding alone, one token at a time after a random prompt: random tokens, and with ours those that it
makes, which with random weights are as random. Tokens then go to all experts evenly, so that a cache finds little;
trained models are kinder to it.

- `little memory`: each run is a process in a memory cgroup that counts page cache too, and begins with an empty page
  cache. The others map their files, and what the kernel reads ahead of a mapped page decides how fast they are: they
  run with its setting as this machine has it, and with smaller ones, which is put back afterwards.
- `all in memory`: the model is in memory, and the same has been decoded before.
- `skewed routing`, with --skew: ours alone in little memory, where some experts are needed more often than others.

Programs take turns, and medians count. Exits 1 if a target is missed: in little memory 8 times as fast as either
program as the machine is configured, and 1.5 times at its best setting; all in memory 0.8 times as fast as llama.cpp.

Programs, models and the package are made as by `race.py`. Needs root for the cgroup and the setting, and quiet; takes
about a quarter of an hour.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

# The process that measures imports nothing of what is measured: what it has mapped stays in the page cache.
import click
from rich.console import Console
from rich.table import Table

import estream_spec
from bench.bounded import run_bounded
from bench.peer_programs import IK, LLAMA, UnavailableError, bench_program, on_demand_library
from bench.race import GIB, MIB, OURS, SHAPE, THREADS, conditions, empty_page_cache, gguf
from bench.readahead import can_change, changed
from bench.synthetic import made

CONFIGURED: Final = "little memory"
WARM: Final = "all in memory"
SKEWED: Final = "little memory, skewed routing"
PASSES: Final = 4
"""Times that each program decodes where all is in memory; the first does not count."""
AS_CONFIGURED: Final = 8.0
AT_BEST: Final = 1.5
IN_MEMORY: Final = 0.8
"""Least speeds of ours, as multiples of another program's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A program in the race, with one of its settings.

    Attributes:
        setting: which others it races.
        name: of the program.
        release: which version.
        how: how it runs, for people.
        model: the file it runs.
        command: what to run.
        rate: finds tokens a second in the JSON that it prints.
        readahead: KiB that the kernel reads ahead of its mapped pages; None for as many as it is set to.
    """

    setting: str
    name: str
    release: str
    how: str
    model: Path
    command: list[str]
    rate: Callable[[Any], float]
    readahead: int | None = None

    @property
    def warm(self) -> bool:
        """Whether it runs without bounds, its model in memory."""
        return self.setting == WARM


@dataclass(frozen=True, slots=True)
class Run:
    """What one run found.

    Attributes:
        setting: in which race.
        name: of the entrant.
        tokens_per_s: tokens decoded a second.
        seconds: of the whole process, prompt included.
        bytes_read: what storage brought in that time.
        peak_bytes: most memory, page cache included; None where it was not bounded.
        found: what the program itself printed.
    """

    setting: str
    name: str
    tokens_per_s: float
    seconds: float
    bytes_read: int
    peak_bytes: int | None
    found: Any


@dataclass(frozen=True, slots=True)
class Target:
    """How fast ours has to be.

    Attributes:
        what: against whom and where.
        ratio: of its tokens a second to the other's.
        least: what that has to be.
    """

    what: str
    ratio: float
    least: float

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.ratio >= self.least


def ours(prompt: int, tokens: int, arena_bytes: int, backend: str, skew: float) -> list[Entrant]:
    """This project's runtime: in little memory with an arena of so many bytes, and with one for all experts."""
    package = made(SHAPE, "w4g32").resolve()

    def entrant(setting: str, package: Path, arena_bytes: int, how: str) -> Entrant:
        child, options = Path(__file__).with_name("decode_race_ours.py"), {"arena_bytes": arena_bytes}
        first, passes = (1, PASSES) if setting == WARM else (0, 1)
        asked = [str(package), str(prompt), str(tokens), str(passes), json.dumps({**options, "backend": backend})]
        return Entrant(
            setting=setting,
            name=OURS,
            release=f"estream-pack {estream_spec.__version__}",
            how=f"{backend} backend, arena {how}",
            model=package,
            command=[sys.executable, str(child), *asked],
            rate=lambda found: statistics.median(each["tokens_per_s"] for each in found[first:]),
        )

    little = f"of {arena_bytes // MIB} MiB"
    found = [
        entrant(CONFIGURED, package, arena_bytes, little),
        entrant(WARM, package, package.stat().st_size, "for all experts"),
    ]
    if skew:
        found.append(entrant(SKEWED, made(SHAPE, "w4g32", skew).resolve(), arena_bytes, f"{little}, skew {skew:g}"))
    return found


def llama(prompt: int, tokens: int, readaheads: Sequence[int | None]) -> list[Entrant]:
    """llama.cpp as it fits little memory best: what it repacks at start-up would not fit; and at its fastest."""
    program, model = bench_program(LLAMA), gguf("olmoe")
    bench = [str(program), "-m", str(model), "-p", "0", "-n", str(tokens), "-d", str(prompt), *_COMMON]
    return peer(
        LLAMA.name,
        LLAMA.release,
        model,
        readaheads,
        little=("mmap, no repacking", [*bench, "--no-warmup", "-r", "1", "-lm", "mmap", "--repack", "0"]),
        warm=("in memory, repacked", [*bench, "-r", str(PASSES - 1)]),
    )


def ik(prompt: int, tokens: int, readaheads: Sequence[int | None]) -> list[Entrant]:
    """ik_llama.cpp as it fits little memory best, its file not read before it is used, and at its fastest."""
    program, library, model = bench_program(IK), on_demand_library(IK), gguf("qwen3moe")
    bench = [str(program), "-m", str(model), "-p", "0", "-n", "0", "-gp", f"{prompt},{tokens}", *_COMMON]
    lazily = ["env", f"LD_PRELOAD={library}", *bench, "-w", "0", "-r", "1", "-mmp", "1"]
    return peer(
        IK.name,
        IK.release,
        model,
        readaheads,
        little=("mmap, pages come in as they are touched", lazily),
        warm=("in memory, repacked", [*bench, "-w", "1", "-r", str(PASSES - 1), "-rtr", "1"]),
    )


def peer(
    name: str,
    release: str,
    model: Path,
    readaheads: Sequence[int | None],
    *,
    little: tuple[str, list[str]],
    warm: tuple[str, list[str]],
) -> list[Entrant]:
    """Another program with each readahead, and warm; `little` and `warm` are how it runs then, and by which command."""

    def entrant(setting: str, how: tuple[str, list[str]], readahead: int | None = None) -> Entrant:
        words, command = how
        return Entrant(
            setting=setting,
            name=name,
            release=release,
            how=words,
            model=model,
            command=command,
            rate=lambda found: float(found[0]["avg_ts"]),
            readahead=readahead,
        )

    found = [entrant(WARM, warm)]
    for readahead in readaheads:
        found.append(entrant(CONFIGURED if readahead is None else _at(readahead), little, readahead))
    return found


def _at(readahead: int) -> str:
    return f"{CONFIGURED}, readahead {readahead} KiB"


_COMMON: Final = ("-t", str(THREADS), "-o", "json")


def measured(entrant: Entrant, limit: int) -> Run:
    """Run an entrant once."""
    with changed(entrant.model, entrant.readahead):
        if not entrant.warm:
            empty_page_cache(entrant.model)
        done = run_bounded(entrant.command, None if entrant.warm else limit)
    found = json.loads(done.output)
    peak = None if entrant.warm else done.peak_bytes
    return Run(entrant.setting, entrant.name, entrant.rate(found), done.seconds, done.bytes_read, peak, found)


def targets(runs: Sequence[Run]) -> list[Target]:
    """How ours compares, where both have run."""
    found = []
    for name in dict.fromkeys(run.name for run in runs if run.name != OURS):
        little = [each for each in dict.fromkeys(run.setting for run in runs if run.name == name) if each != WARM]
        as_configured = median(runs, CONFIGURED, OURS) / median(runs, CONFIGURED, name)
        best = max(median(runs, setting, name) for setting in little)
        found.append(Target(f"{CONFIGURED}, {name} as the machine is configured", as_configured, AS_CONFIGURED))
        found.append(
            Target(f"{CONFIGURED}, {name} at its best readahead", median(runs, CONFIGURED, OURS) / best, AT_BEST)
        )
        if name == LLAMA.name:
            warm = median(runs, WARM, OURS) / median(runs, WARM, name)
            found.append(Target(f"{WARM}, {name}", warm, IN_MEMORY))
    return found


def median(runs: Sequence[Run], setting: str, name: str) -> float:
    """Tokens a second of an entrant."""
    return statistics.median(run.tokens_per_s for run in runs if (run.setting, run.name) == (setting, name))


def report(runs: Sequence[Run]) -> Table:
    """One row for each program and setting."""
    table = Table("setting", "program", "tokens/s", "lowest to highest", "GiB read", "peak MiB", "ours / it")
    for setting, name in dict.fromkeys((run.setting, run.name) for run in sorted(runs, key=lambda run: run.setting)):
        own = [run for run in runs if (run.setting, run.name) == (setting, name)]
        rates, peaks = [run.tokens_per_s for run in own], [run.peak_bytes for run in own if run.peak_bytes is not None]
        rival = WARM if setting == WARM else CONFIGURED
        table.add_row(
            setting,
            name,
            f"{statistics.median(rates):.2f}",
            f"{min(rates):.2f} to {max(rates):.2f}",
            f"{statistics.median(run.bytes_read for run in own) / GIB:.1f}",
            f"{max(peaks) / MIB:.0f}" if peaks else "",
            "" if name == OURS else f"{median(runs, rival, OURS) / statistics.median(rates):.2f}",
        )
    return table


@click.command(help=f"\b\n{__doc__.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}")
@click.option("--prompt", type=click.IntRange(2), default=64, show_default=True, help="Tokens of the prompt.")
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True, help="Tokens to decode.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=1024, show_default=True, help="MiB of the cgroup.")
@click.option("--arena", type=click.IntRange(1), default=700, show_default=True, help="MiB of our arena.")
@click.option("--skew", type=click.FloatRange(0), default=0, help="Also run ours on a package made with that skew.")
@click.option("--backend", default="native", show_default=True, help="Of ours.")
@click.option(
    "--readahead",
    "readaheads",
    type=click.IntRange(4),
    multiple=True,
    default=(128, 64),
    show_default=True,
    help="KiB that the kernel is set to read ahead, beside what it is set to; repeatable.",
)
@click.option("--json", "json_file", type=click.File("w", lazy=False), help="Write all runs there.")
def main(
    prompt: int,
    tokens: int,
    rounds: int,
    limit: int,
    arena: int,
    skew: float,
    backend: str,
    readaheads: tuple[int, ...],
    json_file: TextIO | None,
) -> None:
    """Measure, print the table, and say which targets are met."""
    console = Console(width=150)
    entrants = ours(prompt, tokens, arena * MIB, backend, skew)
    settings: list[int | None] = [None, *readaheads]
    if not can_change(entrants[0].model):
        console.print("left out: other settings of the readahead, which this process may not change")
        settings = [None]
    for others in (llama, ik):
        try:
            entrants += others(prompt, tokens, settings)
        except UnavailableError as error:
            console.print(f"left out: {error}")
    programs = {f"{each.name}, {each.setting}": f"{each.release}; {each.how}" for each in entrants}
    around = conditions(entrants[0].model, limit * MIB, programs)
    runs: list[Run] = []
    for number in range(rounds):
        for each in entrants:
            runs.append(measured(each, limit * MIB))
            said = f"round {number + 1}, {each.setting}, {each.name}: {runs[-1].tokens_per_s:.2f} tokens/s"
            console.print(said, highlight=False)
        found = targets(runs)
        if json_file is not None:  # after each round: the next one may not end well
            compared = [{**asdict(target), "met": target.met} for target in found]
            json_file.seek(0)
            json_file.truncate()
            ran = [asdict(each) for each in runs]
            json.dump({"conditions": around, "targets": compared, "runs": ran}, json_file, indent=1)
            json_file.flush()
    console.print(report(runs))
    for what, text in around.items():
        console.print(f"{what}: {text}", highlight=False)
    for target in found:
        verdict = "met" if target.met else "MISSED"
        console.print(f"{verdict}: {target.what}: {target.ratio:.2f} times, at least {target.least:g}", highlight=False)
    sys.exit(not all(target.met for target in found))


if __name__ == "__main__":
    main()
