"""Damage a small package in many ways and report answers, time and memory.

    python tests/bench/mutations.py --count 100000
    python tests/bench/mutations.py --flips

Exits 1 if a mutation gets anything but a package or a refusal, if one takes longer
than a second, if the process grows above 200 MB, or if a flipped byte outside the superblocks goes unnoticed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from fixtures.mutations import answer, mutate, structure_of, subject

MAX_SECONDS = 1.0
MAX_BYTES = 200_000_000
SUPERBLOCKS = (range(128), range(16384, 16512))


def mutations(data: bytes, first: int, count: int) -> Iterator[tuple[int, bytes]]:
    """Seeds and the packages they damage."""
    structure = structure_of(data)
    for seed in range(first, first + count):
        yield seed, mutate(data, seed, structure)


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Positions and the package with that byte inverted."""
    for position in range(len(data)):
        yield position, data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


def run(cases: Iterable[tuple[int, bytes]], meaning: str) -> tuple[Counter[str], tuple[float, int], list[str], float]:
    """Answer every case: how often each answer came, the slowest case, faults, and seconds in all."""
    answers, slowest, faults, begun = Counter[str](), (0.0, 0), list[str](), time.perf_counter()
    for number, data in cases:
        started = time.perf_counter()
        try:
            found = answer(data)
        except Exception as error:  # that is what the search is for
            found = "crash"
            faults.append(f"{number}: {type(error).__name__}: {error}")
        slowest = max(slowest, (time.perf_counter() - started, number))
        answers["the same package" if found == meaning else found if len(found) < 64 else "another package"] += 1
    return answers, slowest, faults, time.perf_counter() - begun


def main() -> int:
    """Run, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Damage a small package in many ways.")
    parser.add_argument("--count", type=int, default=100_000, help="mutations to try")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--flips", action="store_true", help="invert every single byte instead")
    given = parser.parse_args()
    data = subject()
    cases = flips(data) if given.flips else mutations(data, given.first, given.count)
    answers, (seconds, number), faults, total = run(cases, answer(data))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    table = Table("answer", "cases", title=f"{answers.total()} cases of a package of {len(data)} bytes")
    for name, count in answers.most_common():
        table.add_row(name, str(count))
    console = Console()
    console.print(table)
    console.print(
        f"{total:.0f} s in all, {1000 * total / answers.total():.1f} ms a case, slowest {seconds:.3f} s ({number})"
    )
    console.print(f"peak memory of the process {peak / 1e6:.0f} MB")
    for fault in faults[:20]:
        console.print(fault, style="red", markup=False)
    unnoticed = answers["the same package"] + answers["another package"]
    missed = given.flips and unnoticed != sum(map(len, SUPERBLOCKS))
    if missed:
        console.print(f"{unnoticed} flipped bytes unnoticed, expected those of one superblock each", style="red")
    return int(bool(faults) or missed or seconds > MAX_SECONDS or peak > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
