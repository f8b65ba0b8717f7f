"""Judge every vector of the conformance suite with both readers and report time and memory.

    python tests/bench/vectors.py

Exits 1 if one takes more than a second of processor time, or if a reader's process grows above 200 MB.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from conformance.test_both_readers import options_of
from estream_conformance.suite import load_vectors
from fixtures.readers import loader_answer, second_answer

MAX_SECONDS = 1.0
MAX_BYTES = 200_000_000
READERS = {"loader": loader_answer, "second reader": second_answer}


def write_all(folder: Path) -> list[str]:
    """Write every vector into a folder; returns their names."""
    vectors = load_vectors()
    for vector in vectors:
        vector.image.write(folder / vector.name)
    return [vector.name for vector in vectors]


def judge_all(reader: str, folder: Path, names: list[str]) -> tuple[list[tuple[float, str]], int]:
    """Processor time of each vector in seconds, the slowest first, and the most bytes that the process has had."""
    options = {vector.name: options_of(vector) for vector in load_vectors() if vector.arguments}
    seconds = []
    for name in names:
        begun = time.process_time()
        READERS[reader](folder / name, *options.get(name, ()))
        seconds.append((time.process_time() - begun, name))
    return sorted(seconds, reverse=True), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Run, print the table, and return the exit code."""
    table, good = Table("reader", "vectors", "CPU s in all", "slowest", "its CPU s", "peak MB"), True
    with tempfile.TemporaryDirectory(prefix="estream-vectors-") as name:
        folder = Path(name)
        with ProcessPoolExecutor(1) as pool:
            names = pool.submit(write_all, folder).result()
        for reader in READERS:
            with ProcessPoolExecutor(1) as pool:  # a process of its own, whose memory is measured
                seconds, peak = pool.submit(judge_all, reader, folder, names).result()
            worst, slowest = seconds[0]
            total = sum(each for each, _ in seconds)
            table.add_row(reader, str(len(names)), f"{total:.1f}", slowest, f"{worst:.2f}", f"{peak / 1e6:.0f}")
            good &= worst <= MAX_SECONDS and peak <= MAX_BYTES
    Console().print(table)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
