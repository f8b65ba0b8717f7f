"""Measure how fast the reading threads bring a file into memory, as a multiple of plain direct reads of the same file.

    python tests/bench/reading.py --rounds 3

The file is cut into groups of 16 MiB that pass through a ring of eight buffers, as experts pass through an arena. A
group is four records, each proven as it lands unless `--no-check`. Plain reads are a loop of one `preadv` at a time
into one buffer, each of a whole group. Both bypass the page cache. Each figure is compared with plain reads just before
it, since disks wander.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import crc32c
from rich.console import Console
from rich.table import Table

from estream_loader.reading import Read, Reader
from estream_loader.records import RecordPlace
from estream_loader.source import FileSource
from estream_spec.manifest import RecordLayout

MIB = 1 << 20
RECORD, GROUP, BUFFERS = 4 * MIB, 16 * MIB, 8
LAYOUT = RecordLayout(payload_length=RECORD, matrices=(), tensors=())


def memory(length: int) -> memoryview:
    """Page-aligned memory whose pages are there before anything is timed."""
    whole = memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for at in range(0, length, mmap.PAGESIZE):
        whole[at] = 1
    return whole


def write(path: Path, length: int) -> list[list[RecordPlace]]:
    """A file of random bytes, all on the disk; its records by group."""
    records = []
    with path.open("wb") as file:
        for offset in range(0, length, RECORD):
            data = os.urandom(RECORD)
            file.write(data)
            records.append(RecordPlace(offset, RECORD, LAYOUT, crc32c.crc32c(data), b"", "record"))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return [records[first : first + GROUP // RECORD] for first in range(0, len(records), GROUP // RECORD)]


def plain(path: Path, groups: list[list[RecordPlace]]) -> float:
    """Bytes a second of single reads."""
    buffer, file = memory(GROUP), FileSource.open(path).open_direct()
    begun = time.perf_counter()
    for group in groups:
        assert file.read_into(buffer, group[0].offset) == GROUP
    rate = len(groups) * GROUP / (time.perf_counter() - begun)
    file.close()
    return rate


def pooled(path: Path, groups: list[list[RecordPlace]], lanes: int, piece: int, check: bool) -> float:
    """Bytes a second of the reading threads."""
    arena = memory(GROUP * BUFFERS)
    source = FileSource.open(path)

    def prove(record: RecordPlace, data: memoryview) -> None:
        record.check(crc32c.crc32c(data))

    with Reader(source, lanes, check=prove if check else None, piece=piece) as reader:
        begun = time.perf_counter()
        waiting: list[Read] = []
        for number, group in enumerate(groups):
            if number >= BUFFERS:
                waiting[number - BUFFERS].wait()
            buffer = arena[number % BUFFERS * GROUP :][:GROUP]
            waiting.append(reader.submit(group[0].offset, buffer, group))
        for read in waiting:
            read.wait()
        rate = len(groups) * GROUP / (time.perf_counter() - begun)
        assert reader.mode == "direct", reader.mode
    source.close()
    return rate


def compute(over: threading.Event) -> None:
    """Keep the interpreter busy, as a session between its graphs does at worst."""
    while not over.is_set():
        sum(range(1000))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the reading threads.")
    parser.add_argument("--folder", type=Path, help="where to put the file; the system's temporary folder if not given")
    parser.add_argument("--mib", type=int, default=1024, help="the file's size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 2, 4, 8], help="MiB")
    parser.add_argument("--no-check", action="store_true", help="prove no record")
    parser.add_argument("--busy", action="store_true", help="run Python code beside it all the time")
    given = parser.parse_args()
    single: list[float] = []
    ratios: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    over = threading.Event()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder, "file")
        groups = write(path, given.mib * MIB)
        for _ in range(given.rounds):
            for lanes in given.lanes:
                for piece in given.pieces:
                    single.append(plain(path, groups))
                    over.clear()
                    thread = threading.Thread(target=compute, args=(over,))
                    if given.busy:
                        thread.start()
                    rate = pooled(path, groups, lanes, piece * MIB, not given.no_check)
                    over.set()
                    if given.busy:
                        thread.join()
                    ratios[lanes, piece].append(rate / single[-1])
    columns = ["lanes", *(f"pieces of {piece} MiB" for piece in given.pieces)]
    rates = f"{min(single) / 1e9:.2f} to {max(single) / 1e9:.2f}, median {statistics.median(single) / 1e9:.2f} GB/s"
    table = Table(*columns, title=f"rate as a multiple of plain reads just before ({rates}); medians of {given.rounds}")
    for lanes in given.lanes:
        cells = (f"{statistics.median(ratios[lanes, piece]):.2f}" for piece in given.pieces)
        table.add_row(str(lanes), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
