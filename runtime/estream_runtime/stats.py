"""What a run cost, measured."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from estream_runtime.backends import Backend
from estream_runtime.decoding import DecodeStats
from estream_runtime.interpreter import Interpreter
from estream_spec.trace import Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one run cost.

    Attributes:
        backend: what computed.
        backend_detail: the kernel's instructions, or the chip and whether it was simulated; may be empty.
        notice: why that was not the fast one, where none was asked for; None where it was.
        prompt_tokens: tokens given.
        new_tokens: tokens made.
        ttft_s: seconds from the call to the first token, or to its logits where none is made; opening the package and
            the session, and starting the process, do not count.
        total_s: seconds the run took; what a caller does between two tokens does not count.
        io_busy_s: seconds in which a read of expert records was under way.
        activity_s: seconds by activity, see `estream_spec.trace`; what is missing to `total_s` is between activities.
        compute_busy_s: seconds of all activities but `wait`.
        bubble: share of `total_s`, 0 to 1, in which computing waited for weights to be read and checked.
        bytes_read: bytes of expert records read.
        reads: reads of expert records.
        peak_arena_bytes: the arena's size; it never grows.
        arena_kind: what kind of memory the arena is: `ordinary` or `rpcmem`.
        peak_resident_bytes: most memory that the process has had resident so far, everything included. A process takes
            over the peak of the one that started it, where that is higher.
        policy: when experts of the prompt are read: `pre-routing`, `post-routing`, `on-demand` or `resident`.
        lanes: reads outstanding at a time, at most.
        tile_rows: rows that graphs computed which take fixed numbers of rows, whatever for; 0 where none do.
        padded_rows: how many of those stood for none.
        reading_mode: whether the page cache is bypassed: `direct`, `direct, unproven: REASON` or `buffered: REASON`.
        decoding: what became of single tokens that went through the layers in the arena's slots: those made after the
            first, and the first itself where only one token of the prompt was new; None where there were none, or is no
            room for that.
        prefetching: whether experts are read before it is known which are needed: `on`, and what is known of its use,
            or `off`, and why.
    """

    backend: str
    backend_detail: str
    notice: str | None
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    total_s: float
    io_busy_s: float
    activity_s: dict[Activity, float]
    compute_busy_s: float
    bubble: float
    bytes_read: int
    reads: int
    peak_arena_bytes: int
    arena_kind: str
    peak_resident_bytes: int
    policy: str
    lanes: int
    tile_rows: int
    padded_rows: int
    reading_mode: str
    decoding: DecodeStats | None
    prefetching: str

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first; None before there is a second one."""
        seconds = self.total_s - self.ttft_s
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else None


def process_age_s() -> float | None:
    """Seconds since this process was started, to a hundredth; None where the system does not say."""
    # The command's name comes second, in brackets, and may hold anything; the start is the 22nd field, in ticks.
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)


class Laps:
    """Measures steps that follow each other.

    Attributes:
        seconds: of each step that has ended.
    """

    def __init__(self) -> None:
        self.seconds: Final = dict[str, float]()
        self._last = time.perf_counter()

    def end(self, step: str) -> None:
        """The step that began when the one before it ended, or with all of this, is over."""
        now = time.perf_counter()
        self.seconds[step] = now - self._last
        self._last = now


class Meter:
    """Adds up what the stretches of one run cost; runs of one session may alternate."""

    def __init__(
        self, interpreter: Interpreter, prompt_tokens: int, *, policy: str, backend: Backend, notice: str | None
    ):
        self._interpreter: Final = interpreter
        self._backend: Final = backend
        self._notice: Final = notice
        self._policy: Final = policy
        self._prompt_tokens, self._new_tokens = prompt_tokens, 0
        self._ttft: float | None = None
        self._spent = [0.0] * len(self._readings())
        self._decoded = interpreter.decoding.stats - interpreter.decoding.stats

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        before, decoded = self._readings(), self._interpreter.decoding.stats
        try:
            yield
        finally:
            self._decoded += self._interpreter.decoding.stats - decoded
            stretch = zip(self._spent, before, self._readings(), strict=True)
            self._spent = [sum_ + after - start for sum_, start, after in stretch]

    def token_made(self) -> None:
        """One more token has been made, in the stretches so far."""
        self._new_tokens += 1
        if self._ttft is None:
            self._ttft = self._spent[0]

    def stats(self) -> Stats:
        """What the run cost so far."""
        total, io_busy, bytes_read, reads, tile_rows, padded_rows, *spent = self._spent
        activities = dict(zip(self._interpreter.recorder.seconds, spent, strict=True))
        waiting = activities["wait"]
        arena = self._interpreter.pager.arena
        return Stats(
            backend=self._backend.name,
            backend_detail=self._backend.detail,
            notice=self._notice,
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_s=total if self._ttft is None else self._ttft,
            total_s=total,
            io_busy_s=io_busy,
            activity_s=activities,
            compute_busy_s=sum(activities.values()) - waiting,
            bubble=waiting / total if total > 0 else 0.0,
            bytes_read=int(bytes_read),
            reads=int(reads),
            peak_arena_bytes=arena.length,
            arena_kind=arena.kind,
            peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            policy=self._policy,
            lanes=self._interpreter.pager.lanes,
            tile_rows=int(tile_rows),
            padded_rows=int(padded_rows),
            reading_mode=self._interpreter.pager.mode,
            decoding=self._decoded if self._decoded.tokens else None,
            prefetching=self._interpreter.decoding.prefetching,
        )

    def _readings(self) -> tuple[float, ...]:
        paged, activities = self._interpreter.pager.stats, self._interpreter.recorder.seconds
        rows = self._backend.tile_rows, self._backend.padded_rows
        return time.perf_counter(), paged.io_busy_s, paged.bytes_read, paged.reads, *rows, *activities.values()
