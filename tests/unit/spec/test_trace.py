"""A trace as a document: what is written is read back, and what is no trace of a run is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from estream_spec.errors import MalformedError
from estream_spec.trace import (
    ACTIVITIES,
    MAX_TRACE_LENGTH,
    WORDS,
    Category,
    Details,
    Event,
    Name,
    Run,
    RunStats,
    Trace,
    assemble,
    decode_trace,
    encode_trace,
)

Edit = Callable[[dict[str, Any]], object]


def event(name: Name, category: Category, ts: float, dur: float, **about: int) -> Event:
    return Event(name=name, cat=category, ts=ts, dur=dur, args=Details(**about))


def trace() -> Trace:
    stats = RunStats(
        start_up_s={"process": 0.25},
        total_s=0.001,
        activity_s={"wait": 0.0004, "attention": 0.0005},
        compute_busy_s=0.0005,
        io_busy_s=0.0003,
        bubble=0.4,
        bytes_read=4096,
        reads=1,
        pieces=1,
        peak_resident_bytes=200 << 20,
        reading_mode="direct",
    )
    run = Run(
        package="a model",
        file_id="5e" * 32,
        device="phone",
        backend="portable",
        threads=2,
        tokens=7,
        arena_bytes=8192,
        group_size=1,
        banks=2,
        policy="pre-routing",
        lanes=1,
        stats=stats,
    )
    tracks = {
        "computing": [
            event("attention", "computing", 0.0, 500.25, layer=0, tokens=7),
            event("wait", "computing", 500.25, 400.0, layer=0, group=1),
        ],
        "lane 0": [event("read", "reading", 100.0, 300.0, layer=0, group=1, expert=1, offset=65536, bytes=4096)],
        "bank 0": [],
        "bank 1": [event("filling", "bank", 90.0, 810.0, layer=0, group=1)],
    }
    return assemble(tracks, run)


def test_a_trace_survives_encoding() -> None:
    assert decode_trace(encode_trace(trace()), "trace.json") == trace()


def test_every_activity_has_words() -> None:
    assert set(WORDS) == set(ACTIVITIES)


def test_it_is_what_perfetto_and_chrome_read() -> None:
    document = json.loads(encode_trace(trace()))
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    assert events[0] == {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "a model"}}
    named = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert named == {1: "computing", 2: "lane 0", 3: "bank 0", 4: "bank 1"}
    [read] = [each for each in events if each["name"] == "read"]
    assert read.pop("args") == {"layer": 0, "group": 1, "expert": 1, "offset": 65536, "bytes": 4096}
    assert read == {"ph": "X", "name": "read", "cat": "reading", "ts": 100.0, "dur": 300.0, "pid": 1, "tid": 2}


def test_tracks_are_in_the_order_of_time() -> None:
    document = json.loads(encode_trace(trace()))
    document["traceEvents"].reverse()
    found = decode_trace(json.dumps(document).encode(), "trace.json").tracks()
    assert sorted(found) == sorted(trace().tracks())
    assert all(found[name] == events for name, events in trace().tracks().items())


def last(**change: object) -> Edit:
    """Changes the last event, bank 1's."""
    return lambda document: document["traceEvents"][-1].update(change)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda document: document.pop("otherData"), "missing required field `otherData`"),
        (lambda document: document.update(colour=1), "unknown field `colour`"),
        (lambda document: document["otherData"]["stats"].update(bubble=1.5), "`float` <= 1.0"),
        (lambda document: document["otherData"].update(file_id="5E" * 32), "regex"),
        (last(ph="B"), "value 'B'"),
        (last(name="sleeping"), "'sleeping'"),
        (last(ts=-1.0), "`float` >= 0.0"),
        (last(dur=1e300), "`float` <= 604800000000.0"),
        (last(ts=float("nan")), "JSON is malformed"),
        (last(ts=500.0), r"bank 1 at 1310.000 us: the run ended at 1000.000 us"),
        (last(name="wait"), r"bank 1 at 90.000 us: bank 'wait' does not belong there"),
        (last(cat="reading"), "reading 'filling' does not belong there"),
        (last(tid=9), "track 9 has no name"),
        (last(tid=2, name="read", cat="reading"), "lane 0 at 100.000 us: 'read' begins before 'read' ends"),
        (last(pid=2), "enum value 2"),
        (lambda document: document["traceEvents"][1]["args"].update(name="lane 1"), "no track 'computing'"),
        (lambda document: document["traceEvents"][4]["args"].update(name="bank 0"), "2 tracks have the name 'bank 0'"),
        (lambda document: document["traceEvents"][4].update(tid=3), "tracks 'bank 0' and 'bank 1' both have number 3"),
        (lambda document: document["traceEvents"][4]["args"].update(name="thread"), "track 'thread', expected"),
        (lambda document: document["traceEvents"][4]["args"].update(name="bank 01"), "track 'bank 01', expected"),
    ],
)
def test_what_is_no_trace_of_a_run_is_refused(edit: Edit, message: str) -> None:
    document = json.loads(encode_trace(trace()))
    edit(document)
    with pytest.raises(MalformedError, match=f"^not a trace of a run: .*{message}.*trace.json"):
        decode_trace(json.dumps(document).encode(), "trace.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b'{"traceEvents":[]}', b"emoe" * 9])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match=r"^not a trace of a run"):
        decode_trace(data, "trace.json")


def test_one_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(MalformedError, match="the limit is"):
        decode_trace(bytes(MAX_TRACE_LENGTH + 1), "trace.json")
