"""Measures how fast the package's own file is read past the page cache, by size of request and lanes."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Sequence
from itertools import count, cycle, islice
from statistics import median
from typing import Final

from estream_loader.memory import page_aligned
from estream_loader.package import Package
from estream_loader.progress import Progress
from estream_loader.reading import Read, Reader
from estream_spec.errors import LinkError
from estream_spec.pieces import MIN_PIECE

REQUESTS: Final = tuple(1 << shift for shift in range(18, 25))
"""Bytes of requests, 256 KiB to 16 MiB."""
LANES: Final = (1, 2, 4, 8)
ROUNDS: Final = 3
CELL_S: Final = 0.12
"""Seconds for each size, number of lanes and round."""
_STARTS: Final = 32
"""Reads of one page whose median is the time to start."""
_MEMORY_SHARE: Final = 4
"""A part of all memory that buffers take at most: a quarter."""
_TRIES: Final = 8
"""Records of which some is read for a proof that the page cache is bypassed; pages of the first ones may be cached."""


def require_direct(package: Package) -> None:
    """Refuse a package whose reads go through memory: they would tell of memory and not of storage.

    Raises:
        LinkError: it is in memory, or it is not proven that reads bypass the page cache.
        IntegrityError: the package ends early.
    """
    with Reader(package.source, 1) as reader:
        for place, _ in zip(package.experts.places(), range(_TRIES), strict=False):
            reader.submit(place.offset, _memory(min(place.length, MIN_PIECE))).wait()
            if reader.mode == "direct":
                return
        mode = reader.mode
    hint = "probe a package on the storage it will be read from, a file that you may write to"
    raise LinkError(f"the storage cannot be measured, reads are {mode}", path=package.source.name, hint=hint)


def read_rates(package: Package, memory_bytes: int, progress: Progress) -> dict[int, dict[int, float]]:
    """Bytes per second by lanes and by bytes of a request, with as many requests under way as there are lanes.

    Requests that are longer than all expert records together are left out, and those whose buffers would take more than
    a quarter of the memory.

    Raises:
        LinkError: the device failed, or a request was not read past the page cache.
        IntegrityError: the package ends early.
    """
    start, length = _experts(package)
    sizes = [size for size in REQUESTS if size <= length] or [length]
    found: dict[tuple[int, int], list[float]] = {}
    done = 0  # each cell goes on where the last one stopped: a drive may have in its memory what it read just now
    for _ in range(ROUNDS):
        for lanes in LANES:
            for size in sizes:
                if _buffers(lanes) * size > memory_bytes // _MEMORY_SHARE:
                    continue
                offsets = range(start, start + length - size + 1, size)
                first = -(-done // size) % len(offsets)
                rate, requests = _rate(package, (*offsets[first:], *offsets[:first]), lanes, size)
                done = (first + requests) % len(offsets) * size
                found.setdefault((lanes, size), []).append(rate)
                progress.advance(1)
    return {lanes: {size: median(found[lanes, size]) for size in sizes if (lanes, size) in found} for lanes in LANES}


def read_start_s(package: Package) -> float:
    """Seconds from asking for one page to having it. Raises as `read_rates` does."""
    start, length = _experts(package)
    page = package.container.page_size
    step = max(length // _STARTS // page, 1) * page
    buffer, seconds = _memory(page), []
    with Reader(package.source, 1) as reader:
        for offset in islice(cycle(range(start, start + length, step)), _STARTS):
            begun = time.perf_counter()
            reader.submit(offset, buffer).wait()
            seconds.append(time.perf_counter() - begun)
    return median(seconds)


def measurements() -> int:
    """How many steps `read_rates` reports to its progress, at most."""
    return ROUNDS * len(LANES) * len(REQUESTS)


def _rate(package: Package, offsets: Sequence[int], lanes: int, size: int) -> tuple[float, int]:
    """Bytes per second of requests of one size at some offsets, over and over until time is up, and their number."""
    buffers = [_memory(size) for _ in range(_buffers(lanes))]
    under_way: deque[Read] = deque()
    with Reader(package.source, lanes, piece=size) as reader:
        begun = time.perf_counter()
        for number in count():
            if len(under_way) == len(buffers):
                under_way.popleft().wait()
                if time.perf_counter() - begun > CELL_S:
                    break
            buffer = buffers[number % len(buffers)]
            under_way.append(reader.submit(offsets[number % len(offsets)], buffer))
        for read in under_way:
            read.wait()
        rate = number * size / (time.perf_counter() - begun)
        if reader.mode.startswith("buffered"):
            raise LinkError(f"the storage cannot be measured, reads are {reader.mode}", path=package.source.name)
    return rate, number


def _buffers(lanes: int) -> int:
    """Buffers that keep so many lanes busy."""
    return 2 * lanes


def _experts(package: Package) -> tuple[int, int]:
    """Offset and length of all expert records."""
    places = list(package.experts.places())
    start = places[0].offset
    return start, places[-1].offset + places[-1].length - start


def _memory(length: int) -> memoryview:
    """Page-aligned memory whose pages are there before anything is timed."""
    whole = page_aligned(length)
    for at in range(0, length, mmap.PAGESIZE):
        whole[at] = 0
    return whole
