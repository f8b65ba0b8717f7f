"""A trace as a table: where the time of a prefill went, and what reading did beside it."""

from __future__ import annotations

from itertools import zip_longest
from typing import Final

from estream_spec.errors import printable
from estream_spec.sizes import bytes_text
from estream_spec.trace import WORDS, Run, RunStats, Trace

_LEFT: Final = 44
"""Characters of the left column."""


def lane_busy_s(trace: Trace) -> dict[str, float]:
    """Seconds in which each lane was reading."""
    lanes = {name: events for name, events in trace.tracks().items() if name.startswith("lane ")}
    return {name: sum(each.dur for each in events) / 1e6 for name, events in lanes.items()}


def breakdown(trace: Trace) -> list[str]:
    """The table, line by line, in 80 characters or less but for how bytes were read and a device's long name."""
    run = trace.other_data
    left, right = _computing(run), _reading(trace)
    beside = [f"{one or '':{_LEFT}}{other or ''}".rstrip() for one, other in zip_longest(left, right)]
    return [_setting(run), "", *_start_up(run.stats), "", *beside, "", *_in_words(run.stats)]


def _setting(run: Run) -> str:
    """What ran and how, in a line."""
    arena = f"arena {bytes_text(run.arena_bytes)}, {run.banks:,} banks of {run.group_size}"
    how = f"{run.lanes} lanes, {run.threads} threads, {run.backend}"
    return f"{printable(run.device)}: {run.policy}, {arena}, {how}"


def _start_up(stats: RunStats) -> list[str]:
    total = sum(stats.start_up_s.values())
    return [_row("start-up", total), *(_row(f"  {part}", each, total) for part, each in stats.start_up_s.items())]


def _computing(run: Run) -> list[str]:
    stats = run.stats
    parts = {words: stats.activity_s.get(activity, 0.0) for activity, words in WORDS.items()}
    parts["other"] = stats.other_s
    rows = [_row(f"  {words}", seconds, stats.total_s) for words, seconds in parts.items()]
    return [_row(f"prefill, {run.tokens:,} tokens", stats.total_s), *rows]


def _reading(trace: Trace) -> list[str]:
    stats = trace.other_data.stats
    lanes = [f"  {name:8}{_share(seconds, stats.total_s):>20}" for name, seconds in lane_busy_s(trace).items()]
    return [
        f"reading {stats.io_busy_s:12.3f} s{_share(stats.io_busy_s, stats.total_s):>8}",
        f"  bytes {stats.bytes_read:14,}",
        f"  rate  {stats.read_rate / 1e6:14,.0f} MB/s",
        f"  reads {stats.reads:14,}",
        f"  pieces{stats.pieces:14,}",
        *lanes,
    ]


def _in_words(stats: RunStats) -> list[str]:
    floor = stats.floor_s
    return [
        f"bubble   {stats.bubble:.1%} of the prefill went by waiting for reads",
        f"floor    {floor:.3f} s, the longer of computing, {stats.compute_busy_s:.3f} s, and reading, "
        f"{stats.io_busy_s:.3f} s",
        f"total    {stats.total_s:.3f} s" + (f", {stats.total_s / floor:.2f} times the floor" if floor else ""),
        f"memory   {bytes_text(stats.peak_resident_bytes)} resident at most, all that plan --memory counts",
        f"reading  {printable(stats.reading_mode)}",
    ]


def _row(words: str, seconds: float, of: float | None = None) -> str:
    return f"{words:24}{seconds:8.3f} s" + ("" if of is None else f"{_share(seconds, of):>7}")


def _share(seconds: float, of: float) -> str:
    return f"{seconds / of:.1%}" if of else ""
