"""Search for bytes that break a reader.

    python tests/fuzz/fuzz.py --count 10000000 --jobs 2 --seed 1
    python tests/fuzz/fuzz.py --seconds 60
    python tests/fuzz/fuzz.py --again build/fuzz/manifest-0123456789ab.input

Exits 1 if an input gets anything but a value or a refusal, takes longer than a second, or if a process grows by
150 MB. Such inputs are written to a file, to be run again with `--again`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

# In its own folder this file would be found in place of the package of its name.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from estream_spec.rulebook import RULES
from fuzz.engine import MAX_GROWTH, Fuzzer, Report, Watchdog, execute
from fuzz.targets import TARGETS

PROGRESS_SECONDS = 60.0
ANSWERS = ("value", "malformed", "invalid", "integrity", "unsupported", "limit", "untrusted", "link", "fault")


def search(seed: str, folder: Path, count: int | None, seconds: float | None) -> Report:
    """One process's part: `count` inputs, or as many as fit into some seconds."""
    fuzzer = Fuzzer(seed, folder, MAX_GROWTH)
    begun = last = time.monotonic()

    def goes_on(number: int) -> bool:
        nonlocal last
        if number % 64:
            return number != count
        now = time.monotonic()
        if now - last > PROGRESS_SECONDS:
            last = now
            answers = sum(len(tally.distinct) for tally in fuzzer.report.tallies.values())
            note = f"seed {seed}: {number} inputs, {answers} answers, {len(fuzzer.report.faults)} faults"
            sys.stderr.write(f"{note}\n")
        return number != count and (seconds is None or now - begun < seconds)

    return fuzzer.run(goes_on)


def show(reports: list[Report], seconds: float, console: Console) -> None:
    """Print what was found."""
    total = sum(report.executions for report in reports)
    table = Table(
        "target", "inputs", "us each", "slowest ms", "answers", *ANSWERS, title=f"{total} inputs in {seconds:.0f} s"
    )
    for target in TARGETS:
        tallies = [report.tallies[target.name] for report in reports]
        count = sum(tally.answers.total() for tally in tallies)
        each = 1e6 * sum(tally.seconds for tally in tallies) / max(count, 1)
        slowest = 1e3 * max(tally.slowest for tally in tallies)
        distinct = len(set().union(*(tally.distinct for tally in tallies)))
        by_class = [sum(tally.answers[name] for tally in tallies) for name in ANSWERS]
        table.add_row(target.name, str(count), f"{each:.0f}", f"{slowest:.1f}", str(distinct), *map(str, by_class))
    console.print(table)
    reached = set().union(*(tally.rules for report in reports for tally in report.tallies.values()))
    missed = [rule for rule in RULES if rule not in reached]
    console.print(f"{len(RULES) - len(missed)} of {len(RULES)} rules found broken; not: {', '.join(missed) or 'none'}")
    for report in reports:
        console.print(
            f"peak memory {report.peak / 1e6:.0f} MB, {report.grown / 1e6:.0f} MB of it grown while searching"
        )
        for fault in report.faults:
            console.print(fault, style="red", markup=False)


def again(path: Path, console: Console) -> bool:
    """Run one input that was written to a file, and say whether it is answered as it should be."""
    target = next((each for each in TARGETS if path.name.startswith(each.name.replace(" ", "-"))), None)
    if target is None:
        console.print(f"{path}: its name begins with no target's", style="red", markup=False)
        return False
    with Watchdog() as watchdog:
        seconds, _, answer, fault = execute(target, path.read_bytes(), watchdog)
    console.print(f"{target.name}: {answer}, {seconds:.3f} s", markup=False)
    return fault is None


def main() -> int:
    """Search, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(description="Search for bytes that break a reader.")
    parser.add_argument("--count", type=int, help="inputs to run, all processes together")
    parser.add_argument("--seconds", type=float, help="how long to search")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="for inputs that found a fault")
    parser.add_argument("--again", type=Path, nargs="+", help="inputs to run again, and nothing else")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if given.again:
        answers = [again(path, console) for path in given.again]
        return int(not all(answers))
    if given.count is None and given.seconds is None:
        parser.error("give --count or --seconds")
    share = None if given.count is None else -(-given.count // given.jobs)
    begun = time.monotonic()
    # New processes, so that what they had in memory is their own.
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        seeds = [f"{given.seed}/{job}" for job in range(given.jobs)]
        parts = [pool.submit(search, seed, given.folder, share, given.seconds) for seed in seeds]
        try:
            reports = [part.result() for part in parts]
        except BrokenProcessPool:
            console.print(f"a process crashed; what it was running is in {given.folder}/last-*.input", style="red")
            return 1
    show(reports, time.monotonic() - begun, console)
    return int(any(report.faults or report.grown > MAX_GROWTH for report in reports))


if __name__ == "__main__":
    sys.exit(main())
