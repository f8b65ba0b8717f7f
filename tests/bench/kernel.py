"""Measure the native kernel: OLMoE's expert by tokens, against the most that its instructions can do.

    python tests/bench/kernel.py
    python tests/bench/kernel.py --threads 1 --tokens 1 --tokens 2
    python tests/bench/kernel.py --tokens 1 --experts 8

The peak is measured in between: the instructions that multiply, with nothing else around them (tests/bench/peak.c).
Experts take turns and are more than caches hold, as in a model; what is timed is everything an expert takes, from
gathering its rows to scattering its sums. For one token memory is the limit, and a layer's experts may be computed in
one call. Nothing else should run meanwhile.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, get_args

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from estream_loader.console import run_command
from estream_runtime.native.compiling import compile_path, find_compiler
from estream_runtime.native.library import Kernel, StoredExpert, StoredMatrix, paths_here
from estream_runtime.native.paths import KernelPath
from estream_spec.weights import GROUP_SIZES, Encoding

HIDDEN: Final = 2048
INTERMEDIATE: Final = 1024
EXPERTS: Final = 16
TOKENS: Final = (1, 2, 4, 16, 48, 64, 128, 256)
PEAK_S: Final = 0.005
"""About how long the peak is measured, each time."""
PEAK_EVERY: Final = 4
"""Experts between two looks at the peak, since clocks and neighbours change."""


class Peak:
    """The path's multiplying instructions, on so many cores."""

    def __init__(self, path: KernelPath, threads: int):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "peak.so")
            compile_path(path, output, find_compiler(), (str(Path(__file__).with_name("peak.c")),))
            self._function = ctypes.CDLL(str(output)).peak
        self._function.restype, self._function.argtypes = ctypes.c_int64, (ctypes.c_int64,)
        self._pool, self._threads, self._rounds = ThreadPoolExecutor(threads), threads, 1 << 10
        while self._timed()[0] < PEAK_S:
            self._rounds *= 2

    def __call__(self) -> float:
        """Operations a second now."""
        seconds, operations = self._timed()
        return operations / seconds

    def _timed(self) -> tuple[float, int]:
        begun = time.perf_counter()
        operations = sum(self._pool.map(self._function, [self._rounds] * self._threads))
        return time.perf_counter() - begun, operations


def random_matrix(generator: np.random.Generator, encoding: Encoding, rows: int, columns: int) -> StoredMatrix:
    """A matrix with random contents, legal ones."""
    scale = generator.random(columns, np.float32) / 1000
    if encoding == "w8":
        return StoredMatrix(generator.integers(-127, 128, (rows, columns), np.int8), None, scale)
    nibbles = generator.integers(0, 256, (rows // 2, columns), np.uint8)
    multipliers = generator.integers(1, 16, (rows // GROUP_SIZES[encoding], columns)).astype(np.int8)
    return StoredMatrix(nibbles, multipliers, scale)


def measure(
    kernel: Kernel, experts: list[StoredExpert], tokens: int, together: int, rounds: int, peak: Peak
) -> tuple[float, float]:
    """Medians of the seconds of experts in turn, so many at once, and of the peak."""
    x = np.random.default_rng(tokens).standard_normal((tokens, HIDDEN)).astype(np.float32)
    rows = kernel.quantise(x, experts[0].packed[0])
    chosen, shares, total = np.arange(tokens), np.ones(tokens, np.float32), np.zeros((tokens, HIDDEN), np.float32)
    out = np.empty((together, HIDDEN), np.float32)
    seconds, peaks = [], []
    for number in range(rounds):
        turn = [experts[(number * together + each) % len(experts)] for each in range(together)]
        begun = time.perf_counter()
        if together > 1:
            kernel.experts(x, turn, shares.repeat(together), None, out)
        else:
            kernel.add_expert(rows, rows, chosen, shares, turn[0], None, total)
        seconds.append(time.perf_counter() - begun)
        if number % PEAK_EVERY == 0:
            peaks.append(peak())
    return statistics.median(seconds), statistics.median(peaks)


@click.command(help=f"\b\n{__doc__}")
@click.option("--path", "name", help="The kernel's path.  [default: the fastest here]")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--encoding", type=click.Choice(get_args(Encoding)[1:]), default="w4g32", show_default=True)
@click.option("--tokens", type=click.IntRange(1), multiple=True, default=TOKENS, show_default=True)
@click.option("--experts", "together", type=click.IntRange(1), default=1, help="Experts at once, for one token.")
@click.option("--rounds", type=click.IntRange(1), default=60, show_default=True, help="Calls for each.")
def command(name: str | None, threads: int, encoding: Any, tokens: tuple[int, ...], together: int, rounds: int) -> None:
    """Measure and print."""
    if together > 1 and tokens != (1,):
        raise click.UsageError("several experts at once take one token: --tokens 1")
    paths = {path.name: path for path in paths_here()}
    if not paths or (name is not None and name not in paths):
        raise click.ClickException(f"the kernel's paths here are: {', '.join(paths) or 'none, it was not compiled'}")
    path = paths[name] if name else next(iter(paths.values()))
    generator = np.random.default_rng(0)
    shapes = ((HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))
    experts: list[StoredExpert] = [
        StoredExpert(*(random_matrix(generator, encoding, *shape) for shape in shapes)) for _ in range(EXPERTS)
    ]
    kernel, peak = Kernel(threads, path), Peak(path, threads)
    title = f"{path.name}, {encoding}, {threads} threads"
    table = Table("tokens", "ms", "GB/s", "GOP/s", "peak", "share", title=title)
    weights = 3 * HIDDEN * INTERMEDIATE * together
    group = GROUP_SIZES.get(encoding)
    stored = weights if group is None else weights / 2 + weights / group
    for each in tokens:
        seconds, most = measure(kernel, experts, each, together, rounds, peak)
        rate = 2 * weights * each / seconds
        shown = f"{stored / seconds / 1e9:.1f}", f"{rate / 1e9:.0f}", f"{most / 1e9:.0f}", f"{rate / most:.2f}"
        table.add_row(str(each), f"{seconds * 1e3:.3f}", *shown)
    kernel.close()
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run_command(command, "kernel.py"))
