"""Keeps what happens in a run: what computes, what lanes read, what becomes of banks; and tells it as a trace."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from estream_loader.arena import Stay
from estream_loader.package import Package
from estream_loader.pager import Pager
from estream_loader.reading import Span
from estream_loader.records import RecordSection
from estream_runtime.interpreter import Interpreter
from estream_runtime.recorder import Timed
from estream_runtime.stats import Stats
from estream_spec.schedule import BankState
from estream_spec.trace import BANK_EVENTS, COMPUTING, Category, Details, Event, Name, Run, RunStats, Trace, assemble


@dataclass(slots=True)
class Recording:
    """What happened, in seconds as `time.perf_counter` counts them.

    Attributes:
        begun: when the recording began.
        ended: when it ended.
        activities: what computed, in the order of time.
        pieces: what was read, in the order of its end.
        stays: states of banks, in the order of their end.
    """

    begun: float = 0.0
    ended: float = 0.0
    activities: list[Timed] = field(default_factory=list)
    pieces: list[Span] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)


@contextmanager
def recorded(interpreter: Interpreter) -> Iterator[Recording]:
    """Keep what happens inside, as far as nobody divides the arena anew. One of these must not be inside another.

    Args:
        interpreter: what runs inside.
    """
    found, recorder, pager = Recording(), interpreter.recorder, interpreter.pager
    recorder.events = found.activities
    pager.watch(found.pieces.append, found.stays.append)
    found.begun = time.perf_counter()
    try:
        yield found
    finally:
        found.ended = time.perf_counter()
        recorder.events = None
        pager.watch(None, None)


def trace_of(
    recording: Recording,
    package: Package,
    pager: Pager,
    stats: Stats,
    start_up_s: Mapping[str, float],
    *,
    device: str,
    backend: str,
    threads: int,
) -> Trace:
    """The recording of one prefill as a trace.

    Args:
        recording: what happened.
        package: what ran.
        pager: where its experts were.
        stats: what it cost.
        start_up_s: seconds before it, by part.
        device: whose device configurations counted.
        backend: what ran graphs.
        threads: that it computed with.
    """
    run = Run(
        package=package.manifest.name,
        file_id=package.file_id.hex(),
        device=device,
        backend=backend,
        threads=threads,
        tokens=stats.prompt_tokens,
        arena_bytes=stats.peak_arena_bytes,
        group_size=pager.group_size,
        banks=len(pager.arena.banks),
        policy=stats.policy,
        lanes=stats.lanes,
        stats=RunStats(
            start_up_s=dict(start_up_s),
            total_s=recording.ended - recording.begun,
            activity_s=stats.activity_s,
            compute_busy_s=stats.compute_busy_s,
            io_busy_s=stats.io_busy_s,
            bubble=stats.bubble,
            bytes_read=stats.bytes_read,
            reads=stats.reads,
            pieces=len(recording.pieces),
            peak_resident_bytes=stats.peak_resident_bytes,
            reading_mode=stats.reading_mode,
        ),
    )
    lanes, banks = (f"lane {lane}" for lane in range(run.lanes)), (f"bank {bank}" for bank in range(run.banks))
    tracks: dict[str, list[Event]] = {name: [] for name in (COMPUTING, *lanes, *banks)}
    for track, event in _events(recording, _Places(package.experts, pager.group_size)):
        tracks[track].append(event)
    return assemble(tracks, run)


class _Places:
    """Says what lies where in a package."""

    def __init__(self, experts: RecordSection, group_size: int):
        self._ranges, self._group_size = experts.table.ranges, group_size
        self._layers = sorted(
            (experts.entry.offset + each.base, layer) for layer, each in enumerate(self._ranges) if each.count
        )
        self._starts = [start for start, _ in self._layers]

    def expert(self, offset: int) -> tuple[int, int]:
        """The layer and the expert whose record has the byte at an offset."""
        start, layer = self._layers[bisect_right(self._starts, offset) - 1]
        return layer, (offset - start) // self._ranges[layer].record_length

    def group(self, offset: int) -> tuple[int, int]:
        """The layer and the group of that expert."""
        layer, expert = self.expert(offset)
        return layer, expert // self._group_size

    def details(self, piece: Span) -> Details:
        """What a piece brings."""
        layer, expert = self.expert(piece.offset)
        group = expert // self._group_size
        return Details(layer=layer, group=group, expert=expert, offset=piece.offset, bytes=piece.length)


def _events(recording: Recording, places: _Places) -> Iterator[tuple[str, Event]]:
    """Everything that happened, each with the name of its track."""

    def event(name: Name, category: Category, begun: float, ended: float, about: Details) -> Event:
        first, last = (min(max(at, recording.begun), recording.ended) for at in (begun, ended))
        start = _microseconds(first - recording.begun)
        return Event(name=name, cat=category, ts=start, dur=_microseconds(last - first), args=about)

    for activity, begun, ended, layer, group, expert, tokens in recording.activities:
        about = Details(layer=layer, group=group, expert=expert, tokens=tokens)
        yield COMPUTING, event(activity, "computing", begun, ended, about)
    for piece in recording.pieces:
        yield f"lane {piece.lane}", event("read", "reading", piece.begun, piece.ended, places.details(piece))
    for stay in _landed(recording, places):
        name = next((each for each in BANK_EVENTS if each == stay.state.value), None)
        if name is not None and stay.group is not None and stay.ended > stay.begun:
            layer, group = stay.group
            yield f"bank {stay.bank}", event(name, "bank", stay.begun, stay.ended, Details(layer=layer, group=group))


def _landed(recording: Recording, places: _Places) -> Iterator[Stay]:
    """States of banks, each ready from the moment on at which the last piece of its group was there.

    To the pager it is ready when somebody has waited for it, which may be much later.
    """
    pieces: dict[tuple[int, int], list[Span]] = {}
    for piece in recording.pieces:
        pieces.setdefault(places.group(piece.offset), []).append(piece)
    ready: dict[int, float] = {}
    for stay in recording.stays:
        if stay.state is BankState.FILLING and stay.group is not None:
            last = max((each.ended for each in pieces.get(stay.group, ()) if each.begun >= stay.begun), default=0.0)
            ready[stay.bank] = min(max(last, stay.begun), stay.ended)
            yield replace(stay, ended=ready[stay.bank])
        elif stay.state is BankState.READY:
            yield replace(stay, begun=ready.pop(stay.bank, stay.begun))
        else:
            yield stay


def _microseconds(seconds: float) -> float:
    """Seconds as microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
