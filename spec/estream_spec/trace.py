"""What happened when in one prefill, as Chrome and Perfetto read it: the trace event format, in JSON.

Times are microseconds since the run began. A track does one thing at a time:

- `computing`: what `ACTIVITIES` names, and the time between them that is none of these;
- `lane N`: a `read` for each piece that the lane read;
- `bank N`: `filling` until the last piece is there, `ready`, and `in use`; between them the bank is available.

`estream-run trace` writes such a file and `estream-pack inspect --html` draws it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from estream_spec import limits
from estream_spec.errors import MalformedError
from estream_spec.json_text import decode_json

Activity = Literal["embed", "attention", "route", "dense", "wait", "expand", "gather", "products", "scatter", "head"]
"""What computing does: rows of the embedding; the graphs `qkv`, `attend`, `convolve` and `out`; choosing experts; the
graph `dense`; standing still until experts are in the arena; stored weights of an expert to what its graph takes; the
rows of its tokens; the graph `expert`; adding what it gave; the graph `head`."""
BankEvent = Literal["filling", "ready", "in use"]
Name = Literal[Activity, "read", BankEvent]
Category = Literal["computing", "reading", "bank"]
Amount = Annotated[int, Meta(ge=0, le=limits.MAX_FILE_LENGTH)]
Index = Annotated[int, Meta(ge=0, lt=limits.MAX_RECORDS)]
Identifier = Annotated[int, Meta(ge=0, lt=1 << 31)]
Text = Annotated[str, Meta(max_length=limits.MAX_TEXT)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Seconds = Annotated[float, Meta(ge=0, le=604_800)]
"""At most a week."""
Microseconds = Annotated[float, Meta(ge=0, le=604_800e6)]

ACTIVITIES: Final[tuple[Activity, ...]] = get_args(Activity)
WORDS: Final[dict[Activity, str]] = {
    "wait": "waiting for reads",
    "attention": "attention",
    "route": "routing",
    "dense": "dense blocks",
    "expand": "expansion of experts",
    "gather": "gather of rows",
    "products": "matrix products",
    "scatter": "scatter",
    "embed": "embedding",
    "head": "head",
}
"""What activities are called where people read of them, in the order of tables."""
BANK_EVENTS: Final[tuple[BankEvent, ...]] = get_args(BankEvent)
IDLE: Final = frozenset({"wait", "filling"})
"""What counts for nothing in the share of a track: computing is busy but for waiting, a bank is full once it is filled,
be its experts ready or in use."""
COMPUTING: Final = "computing"
"""The track of what computes; every trace has it."""
MAX_TRACE_LENGTH: Final = 1 << 27
"""128 MiB; an event takes some 150 bytes."""
MAX_TRACE_EVENTS: Final = 1 << 19
SLACK_US: Final = 1.0
"""By so many microseconds an event may begin before the one before it ends, or end after the run: clocks and
rounding."""
_TRACK: Final = re.compile(r"computing|(lane|bank) (0|[1-9]\d{0,4})", re.ASCII)
_KINDS: Final[dict[str, tuple[Category, frozenset[str]]]] = {
    "computing": ("computing", frozenset(ACTIVITIES)),
    "lane": ("reading", frozenset({"read"})),
    "bank": ("bank", frozenset(BANK_EVENTS)),
}
"""What each kind of track may have, by the first word of its name."""


class Details(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an event is about, as far as that makes sense for it.

    Attributes:
        layer: the layer.
        group: the group; of a read that brings several, the first.
        expert: the expert; of a read that brings several, the first.
        tokens: token rows taken.
        offset: first byte read, from the package's start.
        bytes: how many were read.
    """

    layer: Index | None = None
    group: Index | None = None
    expert: Index | None = None
    tokens: Amount | None = None
    offset: Amount | None = None
    bytes: Amount | None = None


class Event(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ph", tag="X"):
    """Something that took time.

    Attributes:
        name: what it was.
        cat: what kind of track it is on.
        ts: when it began, in microseconds since the run began.
        dur: how long it took, in microseconds.
        pid: the process, of which there is one.
        tid: the track's number.
        args: what it is about.
    """

    name: Name
    cat: Category
    ts: Microseconds
    dur: Microseconds
    pid: Literal[1] = 1
    tid: Identifier = 0
    args: Details = Details()


class Label(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process or a track is called."""

    name: Text


class Naming(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="ph", tag="M"):
    """Names the process or a track."""

    name: Literal["process_name", "thread_name"]
    pid: Literal[1] = 1
    tid: Identifier = 0
    args: Label


class RunStats(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run cost.

    Attributes:
        start_up_s: seconds it took to open the session, by part, what came before in the process as far as it is known.
        total_s: seconds the prefill took.
        activity_s: seconds of it by activity; what is missing to `total_s` is between activities.
        compute_busy_s: seconds of all activities but `wait`.
        io_busy_s: seconds in which at least one lane was reading.
        bubble: share of `total_s` in which computing waited, 0 to 1.
        bytes_read: bytes of expert records read.
        reads: reads of expert records.
        pieces: pieces they were read in.
        peak_resident_bytes: most memory that the process had resident until the end of the run.
        reading_mode: whether the page cache is bypassed.
    """

    start_up_s: Annotated[dict[Text, Seconds], Meta(max_length=16)]
    total_s: Seconds
    activity_s: dict[Activity, Seconds]
    compute_busy_s: Seconds
    io_busy_s: Seconds
    bubble: Annotated[float, Meta(ge=0, le=1)]
    bytes_read: Amount
    reads: Amount
    pieces: Amount
    peak_resident_bytes: Amount
    reading_mode: Text

    @property
    def other_s(self) -> float:
        """Seconds of the run that are none of its activities."""
        return max(0.0, self.total_s - sum(self.activity_s.values()))

    @property
    def floor_s(self) -> float:
        """Seconds that a run takes at least in which reading and computing each take what they took here."""
        return max(self.io_busy_s, self.compute_busy_s)

    @property
    def read_rate(self) -> float:
        """Bytes a second while at least one lane was reading; 0 where none was."""
        return self.bytes_read / self.io_busy_s if self.io_busy_s else 0.0


class Run(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ran.

    Attributes:
        package: the model's name, as the package gives it.
        file_id: of the package, hexadecimal.
        device: whose device configurations counted, where no sizes were asked for.
        backend: what ran graphs.
        threads: that it computed with.
        tokens: of the prompt.
        arena_bytes: memory for experts.
        group_size: experts read together.
        banks: banks of the arena.
        policy: when experts are read: `pre-routing`, `post-routing`, `on-demand` or `resident`.
        lanes: reads outstanding at a time, at most.
        stats: what it cost.
    """

    package: Text
    file_id: Digest
    device: Text
    backend: Text
    threads: Index
    tokens: Amount
    arena_bytes: Amount
    group_size: Index
    banks: Index
    policy: Text
    lanes: Index
    stats: RunStats


class Trace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One run."""

    display_time_unit: Literal["ms"] = "ms"
    trace_events: Annotated[tuple[Naming | Event, ...], Meta(max_length=MAX_TRACE_EVENTS)]
    other_data: Run

    def tracks(self) -> dict[str, list[Event]]:
        """The events of each track by its name, in the order of time; tracks in the order in which they are named."""
        found: dict[int, list[Event]] = {number: [] for number in _names(self)}
        for each in self.trace_events:
            if isinstance(each, Event):
                found[each.tid].append(each)
        return {
            name: sorted(found[number], key=lambda each: (each.ts, each.dur)) for number, name in _names(self).items()
        }


_decoder: Final = msgspec.json.Decoder(Trace)


def assemble(tracks: Mapping[str, Sequence[Event]], run: Run) -> Trace:
    """A trace with tracks in the order given.

    Args:
        tracks: events of each track by its name; they are given its number.
        run: what ran.
    """
    named: list[Naming | Event] = [Naming(name="process_name", args=Label(name=run.package))]
    timed: list[Event] = []
    for number, (name, events) in enumerate(tracks.items(), 1):
        named.append(Naming(name="thread_name", tid=number, args=Label(name=name)))
        timed += (msgspec.structs.replace(each, tid=number) for each in events)
    return Trace(trace_events=(*named, *timed), other_data=run)


def decode_trace(data: bytes, path: str) -> Trace:
    """Parse a trace and prove that every track is one of those described above.

    Args:
        data: JSON text.
        path: what messages call it.

    Raises:
        MalformedError: not JSON; a key unknown or missing; a value out of range; a track that has no name or an
            unknown one, has what belongs elsewhere, or does two things at a time; no track `computing`; an event after
            the run's end.
    """
    if len(data) > MAX_TRACE_LENGTH:
        raise MalformedError(f"trace has {len(data)} bytes, the limit is {MAX_TRACE_LENGTH}", path=path)
    trace = decode_json(_decoder, data, "a trace of a run", path)
    if fault := next(_faults(trace), None):
        raise MalformedError(f"not a trace of a run: {fault}", path=path)
    return trace


def encode_trace(trace: Trace) -> bytes:
    """A trace as JSON, an event a line."""
    run = msgspec.json.encode(trace.other_data)
    events = b",\n".join(map(msgspec.json.encode, trace.trace_events))
    return b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n%b\n]}\n' % (run, events)


def _names(trace: Trace) -> dict[int, str]:
    """Names of tracks by number."""
    named = (each for each in trace.trace_events if isinstance(each, Naming) and each.name == "thread_name")
    return {each.tid: each.args.name for each in named}


def _faults(trace: Trace) -> Iterator[str]:
    """What is wrong with the tracks of a trace."""
    named = [each for each in trace.trace_events if isinstance(each, Naming) and each.name == "thread_name"]
    names = [each.args.name for each in named]
    numbers: dict[int, str] = {}
    for each in named:
        if each.tid in numbers:
            yield f"tracks {numbers[each.tid]!r} and {each.args.name!r} both have number {each.tid}"
        numbers[each.tid] = each.args.name
    yield from (f"{count} tracks have the name {name!r}" for name, count in Counter(names).items() if count > 1)
    yield from (f"track {name!r}, expected computing, lane N or bank N" for name in names if not _TRACK.fullmatch(name))
    if COMPUTING not in names:
        yield f"no track {COMPUTING!r}"
    unnamed = (each for each in trace.trace_events if isinstance(each, Event) and each.tid not in numbers)
    yield from (f"track {each.tid} has no name" for each in unnamed)
    end = trace.other_data.stats.total_s * 1e6
    for name, events in trace.tracks().items():
        yield from (f"{name} at {fault}" for fault in _faults_on(_KINDS[name.split()[0]], events, end))


def _faults_on(kind: tuple[Category, frozenset[str]], events: Sequence[Event], end: float) -> Iterator[str]:
    """What is wrong with one track."""
    category, allowed = kind
    for event in events:
        if event.cat != category or event.name not in allowed:
            yield f"{event.ts:.3f} us: {event.cat} {event.name!r} does not belong there"
    for event, following in pairwise(events):
        if event.ts + event.dur > following.ts + SLACK_US:
            yield f"{following.ts:.3f} us: {following.name!r} begins before {event.name!r} ends"
    if events and (last := max(event.ts + event.dur for event in events)) > end + SLACK_US:
        yield f"{last:.3f} us: the run ended at {end:.3f} us"
