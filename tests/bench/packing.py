"""Measure packing: against the disk, against llama.cpp, within a limit of memory, and at the size of Mixtral 8x7B.

    python tests/bench/packing.py disk                      # w8 of 2 GB against reading and writing as many bytes
    python tests/bench/packing.py peers --python VENV/bin/python
    python tests/bench/packing.py shards                    # 4 GB in 40 and in 80 files, in an address space of 1 GB
    python tests/bench/packing.py large --seconds 300       # a part of 93 GB, interrupted; 0 packs the whole

`disk` and `peers` write their checkpoint in full and read it from the disk, not from memory. `peers` needs a Python
with torch, transformers, gguf and sentencepiece for llama.cpp's converter, and the programs of `peer_programs.py`.
Exits 1 if w8 takes more than 1.3 times the larger of reading its input and writing its output, if anything takes more
than 1 GB of memory, if llama.cpp is faster or takes less, or if memory grows with the number of files.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from bench.peer_programs import LLAMA, bench_program, converter
from estream_packer.journal import CHECK, ENTRY, HEADER
from fixtures.synthetic import fill, write_sparse_checkpoint, write_sparse_mixtral

PACK = (sys.executable, "-c", "from estream_packer.cli import main; main()", "build")
MAX_RATIO = 1.3
MAX_BYTES = 1_000_000_000
MAX_GROWTH = 1.1
MAX_DISK = 1.05
STEP = 1 << 24
# The converter knows tokenizers by a digest, and ours is of no published model.
CONVERT = "import sys, runpy; sys.path.insert(0, sys.argv[1]); from conversion.base import TextModel; \
TextModel.get_vocab_base_pre = lambda *_: 'olmo'; script = sys.argv[2]; sys.argv[:3] = [script]; \
runpy.run_path(script, run_name='__main__')"


@dataclass(frozen=True, slots=True)
class Run:
    """What a program took: seconds of the clock, of processors, and bytes of memory at most."""

    seconds: float
    processor: float
    peak: int


def run(command: Sequence[str], limit: int | None = None, stop_after: float = 0) -> Run:
    """Run a program to its end, or until it is interrupted, and see what it took.

    Args:
        command: the program and its arguments.
        limit: of its address space in bytes.
        stop_after: seconds after which it is interrupted; 0 never does.
    """

    def restrict() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in background jobs
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=restrict
    )
    timer = threading.Timer(stop_after, process.send_signal, (signal.SIGINT,))
    if stop_after:
        timer.start()
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    timer.cancel()
    code = os.waitstatus_to_exitcode(status)
    if code not in ((0, 130) if stop_after else (0,)):
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{said[-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def evict(folder: Path) -> int:
    """Drop a folder's files from memory. Returns their bytes."""
    length = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            length += os.fstat(file.fileno()).st_size
    return length


def seconds_to_read(folder: Path) -> float:
    """How long the disk takes to read a folder's files, one after another."""
    evict(folder)
    buffer = memoryview(bytearray(STEP))
    begun = time.perf_counter()
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def seconds_to_write(path: Path, length: int) -> float:
    """How long the disk takes to write a file."""
    data = memoryview(os.urandom(STEP))
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for offset in range(0, length, STEP):
            file.write(data[: length - offset])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


def real_checkpoint(folder: Path, gigabytes: float) -> Path:
    """A checkpoint whose weights lie on the disk."""
    fill(write_sparse_checkpoint(folder, gigabytes, 1))
    return folder


def disk(scratch: Path, arguments: argparse.Namespace) -> bool:
    """Packing w8 against the disk, in turns."""
    checkpoint, package = real_checkpoint(scratch / "checkpoint", arguments.gigabytes), scratch / "package.emoe"
    table = Table("read input", "write output", "pack w8", "ratio", "processor", "peak memory")
    ratios, peaks = [], []
    command = [*PACK, str(checkpoint), "-o", str(package), "--experts", "w8"]
    run(command)
    for _ in range(arguments.rounds):
        reading = seconds_to_read(checkpoint)
        writing = seconds_to_write(scratch / "raw", package.stat().st_size)
        package.unlink()
        evict(checkpoint)
        packed = run(command)
        ratios.append(packed.seconds / max(reading, writing))
        peaks.append(packed.peak)
        table.add_row(
            *(f"{seconds:.2f} s" for seconds in (reading, writing, packed.seconds)),
            f"{ratios[-1]:.2f}",
            f"{packed.processor:.1f} s",
            f"{packed.peak / 1e6:.0f} MB",
        )
    show(table, f"median ratio {statistics.median(ratios):.2f}, at most {MAX_RATIO} wanted")
    return statistics.median(ratios) <= MAX_RATIO and max(peaks) <= MAX_BYTES


def peers(scratch: Path, arguments: argparse.Namespace) -> bool:
    """Packing w8 and w4g32 against converting and quantising to Q8_0 and Q4_0."""
    checkpoint = real_checkpoint(scratch / "checkpoint", arguments.gigabytes)
    script = converter(LLAMA)
    quantise = arguments.quantise or bench_program(LLAMA, "llama-quantize")
    whole, result = scratch / "bf16.gguf", scratch / "result"
    table = Table("program", "seconds", "processor", "peak memory", "result")
    good = True
    for encoding, theirs in (("w8", "Q8_0"), ("w4g32", "Q4_0")):
        evict(checkpoint)
        ours = run([*PACK, str(checkpoint), "-o", str(result), "--experts", encoding])
        ours_bytes = result.stat().st_size
        evict(checkpoint)
        convert = [arguments.python, "-c", CONVERT, str(script.parent), str(script), str(checkpoint)]
        converted = run([*convert, "--outtype", "bf16", "--outfile", str(whole)])
        quantised = run([str(quantise), str(whole), str(result), theirs])
        for name, taken, length in (
            (f"estream-pack build --experts {encoding}", ours, ours_bytes),
            ("convert_hf_to_gguf.py", converted, whole.stat().st_size),
            (f"llama-quantize {theirs}", quantised, result.stat().st_size),
        ):
            seconds, processor = f"{taken.seconds:.1f}", f"{taken.processor:.1f} s"
            table.add_row(name, seconds, processor, f"{taken.peak / 1e6:.0f} MB", f"{length / 1e6:.0f} MB")
        good &= ours.seconds < converted.seconds + quantised.seconds
        good &= ours.peak < max(converted.peak, quantised.peak)
        whole.unlink()
    show(table, "faster and in less memory" if good else "llama.cpp is faster, or takes less memory")
    return good


def shards(scratch: Path, arguments: argparse.Namespace) -> bool:
    """Packing in an address space of 1 GB, whatever the number of files."""
    table = Table("files", "seconds", "peak memory", "most disk besides the input, of the output")
    peaks, most = [], 0.0
    for count in (40, 80):
        checkpoint = write_sparse_checkpoint(scratch / str(count), arguments.gigabytes, count)
        folder = scratch / f"out{count}"
        folder.mkdir()
        with Disk(folder) as watched:
            taken = run([*PACK, str(checkpoint), "-o", str(folder / "package.emoe"), "--experts", "w8"], MAX_BYTES)
        share = watched.most / (folder / "package.emoe").stat().st_size
        peaks.append(taken.peak)
        most = max(most, share)
        table.add_row(str(count), f"{taken.seconds:.0f}", f"{taken.peak / 1e6:.0f} MB", f"{share:.3f}")
    good = max(peaks) <= MAX_BYTES and peaks[1] <= peaks[0] * MAX_GROWTH and most <= MAX_DISK
    show(table, "memory and disk stay within their bounds" if good else "memory or disk leave their bounds")
    return good


class Disk:
    """Watches how many bytes a folder takes on the disk."""

    def __init__(self, folder: Path):
        self.most = 0
        self._folder, self._done = folder, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Disk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            total = 0
            for path in self._folder.iterdir():
                try:
                    total += path.stat().st_size
                except FileNotFoundError:  # it got its name meanwhile
                    continue
            self.most = max(self.most, total)


def large(scratch: Path, arguments: argparse.Namespace) -> bool:
    """Packing a checkpoint of the shape of Mixtral 8x7B, or the part of it that a time allows."""
    checkpoint = write_sparse_mixtral(scratch / "checkpoint")
    package = scratch / "package.emoe"
    command = [*PACK, str(checkpoint), "-o", str(package), "--experts", arguments.experts]
    taken = run(command, stop_after=arguments.seconds)
    table = Table("records", "seconds", "records a second", "weights read", "read", "written", "peak memory")
    dense, experts, expert_bytes = 32 + 2, 32 * 8, 3 * 4096 * 14336 * 2
    dense_bytes = 2 * 32000 * 4096 * 2 + 32 * (2 * 4096 + 2 * 1024 + 8) * 4096 * 2
    kept = [*scratch.glob(".*.journal")]
    # An interrupted build says in its journal how far it came: the dense records, then experts.
    done = (kept[0].stat().st_size - len(HEADER) - 32) // (ENTRY.size + CHECK.size) if kept else dense + experts
    written = next(scratch.glob(".*.partial" if kept else "package.emoe")).stat().st_size
    assert done >= dense, "too little time for the dense records"
    source = dense_bytes + (done - dense) * expert_bytes
    table.add_row(
        f"{done} of {dense + experts}",
        f"{taken.seconds:.0f}",
        f"{done / taken.seconds:.2f}",
        f"{source / 2e9:.1f} billion",
        f"{source / taken.seconds / 1e6:.0f} MB/s",
        f"{written / taken.seconds / 1e6:.0f} MB/s",
        f"{taken.peak / 1e6:.0f} MB",
    )
    show(table, "of weights that are zero")
    return taken.peak <= MAX_BYTES


def show(table: Table, words: str) -> None:
    """Print a table and what it comes to."""
    console = Console(width=120)
    console.print(table)
    console.print(words)


PARTS: dict[str, Callable[[Path, argparse.Namespace], bool]] = {
    "disk": disk,
    "peers": peers,
    "shards": shards,
    "large": large,
}


def main() -> int:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--gigabytes", type=float, help="size of the checkpoint; 4 for shards, else 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="a Python that llama.cpp's converter runs on")
    parser.add_argument("--quantise", type=Path, help="a llama-quantize that is there already")
    parser.add_argument("--seconds", type=float, default=300, help="after which the large build is interrupted")
    parser.add_argument("--experts", default="w4g32")
    parser.add_argument("--scratch", type=Path, help="where to write; the folder for temporary files")
    arguments = parser.parse_args()
    arguments.gigabytes = arguments.gigabytes or (4.0 if arguments.part == "shards" else 2.0)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        return 0 if PARTS[arguments.part](Path(scratch), arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
