"""Damage packages in many ways and ask two readers, the loader and the one written from FORMAT.md alone.

    python tests/bench/readers.py --count 200000 --jobs 2

Exits 1 if they differ on a file: in the class or the rule of a refusal, or in any byte of what they read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fixtures.readers import compare

BATCH = 500


def ask(first: int) -> tuple[Counter[str], list[str]]:
    """How often each rule was the answer to a batch of mutants, and where the readers differ."""
    rules, faults = Counter[str](), []
    for seed, one, other in compare(first, BATCH):
        rules[one[1] if one[0] != "accepted" else "accepted"] += 1
        if one != other:
            faults.append(f"{seed}: the loader says {one[:2]}, the second reader {other[:2]}"[:400])
    return rules, faults


def main() -> int:
    """Run, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description="Ask two readers about damaged packages.")
    parser.add_argument("--count", type=int, default=200_000, help="mutants to try, in batches of 500")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    begun, rules, faults = time.perf_counter(), Counter[str](), list[str]()
    batches = range(given.first, given.first + given.count, BATCH)
    with ProcessPoolExecutor(given.jobs) as pool:
        for found, differing in track(pool.map(ask, batches), total=len(batches), transient=True):
            rules += found
            faults += differing
    table = Table("answer", "mutants", title=f"{rules.total()} damaged packages")
    for rule, count in rules.most_common():
        table.add_row(rule, str(count))
    console = Console()
    console.print(table)
    console.print(f"{len(faults)} on which the readers differ; {time.perf_counter() - begun:.0f} s in all")
    for fault in faults[:50]:
        console.print(fault, style="red", markup=False)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
