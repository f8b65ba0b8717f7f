"""A trace says truly what a prefill did, and does not change it."""

from __future__ import annotations

import errno
import os
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import open_package
from estream_runtime import Session
from estream_runtime.backends import default_backend
from estream_runtime.breakdown import breakdown, lane_busy_s
from estream_runtime.host_processors import usable_processors
from estream_runtime.timeline import BLOCKS, LEAST_WIDTH, LETTERS, MOST_BANKS, shares, timeline
from estream_runtime.tracing import recorded
from estream_spec.errors import LinkError
from estream_spec.pieces import piece_count
from estream_spec.trace import ACTIVITIES, Event, Trace, decode_trace, encode_trace
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import PackageFactory
from fixtures.sources import FaultySource

PROMPT = token_ids("trace", 48)
RECORD = 16384
ARENA = 4 * RECORD


def traced(
    packed: PackageFactory,
    arena_bytes: int = ARENA,
    group_size: int = 1,
    lanes: int = 2,
    prefetch_depth: int | None = None,
) -> Trace:
    with (
        open_package(packed()) as package,
        Session(
            package, arena_bytes=arena_bytes, group_size=group_size, lanes=lanes, prefetch_depth=prefetch_depth
        ) as session,
    ):
        return session.trace(PROMPT)


def about(events: list[Event], name: str) -> list[tuple[int | None, int | None]]:
    return [(each.args.layer, each.args.expert) for each in events if each.name == name]


def test_tracks_are_sound_and_every_lane_and_bank_has_one(packed: PackageFactory) -> None:
    trace = traced(packed, group_size=2, lanes=3)
    assert decode_trace(encode_trace(trace), "trace") == trace
    assert list(trace.tracks()) == ["computing", "lane 0", "lane 1", "lane 2", "bank 0", "bank 1"]
    run = trace.other_data
    assert (run.package, run.tokens, run.arena_bytes) == ("olmoe", len(PROMPT), ARENA)
    assert (run.device, run.backend, run.threads) == ("generic", default_backend(), usable_processors())
    with open_package(packed()) as package:
        assert run.file_id == package.file_id.hex()
    assert (run.group_size, run.banks, run.lanes, run.policy) == (2, 2, 3, "pre-routing")


def test_numbers_of_numpy_are_as_good_as_any(packed: PackageFactory) -> None:
    with (
        open_package(packed()) as package,
        Session(package, arena_bytes=np.int64(ARENA), group_size=np.int32(2), lanes=np.int64(3)) as session,  # type: ignore[arg-type]
    ):
        trace = session.trace(PROMPT)
    assert decode_trace(encode_trace(trace), "trace") == trace
    with open_package(packed()) as package, pytest.raises(LinkError, match="lanes is True"):
        Session(package, lanes=True)


# The kernel takes rows and matrices where they lie, and adds to rows as it goes.
@pytest.mark.parametrize(
    ("backend", "activities"),
    [("portable", ("expand", "gather", "products", "scatter")), ("native", ("expand", "products"))],
)
def test_every_expert_with_tokens_goes_through_every_activity(
    packed: PackageFactory, backend: str, activities: tuple[str, ...]
) -> None:
    routes: list[npt.NDArray[np.int32]] = []
    with open_package(packed()) as package, Session(package, backend, arena_bytes=ARENA) as session:
        session.forward(PROMPT, lambda layer, ids, weights: routes.append(ids))
        events = session.trace(PROMPT).tracks()["computing"]
        top_k = package.manifest.model.expert_block(0).router.top_k
    routes[-1] = routes[-1][-1:]  # the last layer serves the last token alone
    chosen = [(layer, expert) for layer in range(LAYERS) for expert in sorted(set(routes[layer].ravel().tolist()))]
    for name in ("expand", "gather", "products", "scatter"):
        assert [each for each in about(events, name) if each[1] is not None] == (chosen if name in activities else [])
    for name in ("attention", "route"):
        assert about(events, name) == [(layer, None) for layer in range(LAYERS)]
    assert about(events, "embed") == about(events, "head") == [(None, None)]
    rows = Counter[int | None]()
    for each in events:
        if each.name == "products":
            assert each.args.tokens is not None
            rows[each.args.layer] += each.args.tokens
    assert rows == {layer: len(routes[layer]) * top_k for layer in range(LAYERS)}


def test_pieces_are_where_they_say(packed: PackageFactory) -> None:
    trace = traced(packed, group_size=2)
    assert piece_count(2 * RECORD, lanes=8) == 1
    reads = [each.args for name, events in trace.tracks().items() if name.startswith("lane") for each in events]
    with open_package(packed()) as package:
        for each in reads:
            assert each.layer is not None
            assert each.expert is not None
            assert each.offset == package.experts.place(each.layer, each.expert).offset
            assert each.group == each.expert // 2
    stats = trace.other_data.stats
    assert sum(each.bytes or 0 for each in reads) == stats.bytes_read > 0
    assert len(reads) == stats.pieces


def test_banks_go_round(packed: PackageFactory) -> None:
    tracks = traced(packed, group_size=2).tracks()
    brought: dict[tuple[int | None, int | None], list[Event]] = {}
    for name in ("lane 0", "lane 1"):
        for each in tracks[name]:
            brought.setdefault((each.args.layer, each.args.group), []).append(each)
    used = []
    for name in ("bank 0", "bank 1"):
        needed = {(each.args.layer, each.args.group) for each in tracks[name] if each.name == "in use"}
        events = [each for each in tracks[name] if (each.args.layer, each.args.group) in needed]
        for filling, ready, in_use in zip(*[iter(events)] * 3, strict=True):
            assert (filling.name, ready.name, in_use.name) == ("filling", "ready", "in use")
            assert filling.args == ready.args == in_use.args
            ends = [each.ts + each.dur for each in brought[in_use.args.layer, in_use.args.group]]
            assert ready.ts == pytest.approx(filling.ts + filling.dur) == pytest.approx(max(ends))
            used.append((in_use.args.layer, in_use.args.group))
    groups = [(layer, group) for layer in range(LAYERS) for group in range(EXPERTS // 2)]
    assert sorted(used) == [each for each in groups if each in used]
    assert set(groups[: -EXPERTS // 2]) < set(used)  # and of the last layer those that the last token needs


def test_experts_that_stay_in_the_arena_are_ready_from_the_start(packed: PackageFactory) -> None:
    everything = LAYERS * EXPERTS * RECORD
    with open_package(packed()) as package, Session(package, arena_bytes=everything, group_size=EXPERTS) as session:
        session.prefill(PROMPT)
        trace = session.trace(PROMPT)
    assert trace.other_data.stats.bytes_read == 0
    assert not any(events for name, events in trace.tracks().items() if name.startswith("lane"))
    assert [each.name for each in trace.tracks()["bank 0"]] == ["ready", "in use"]


def test_parts_add_up(packed: PackageFactory) -> None:
    trace = traced(packed)
    stats, computing = trace.other_data.stats, trace.tracks()["computing"]
    assert set(stats.activity_s) == set(ACTIVITIES)
    for activity, seconds in stats.activity_s.items():
        kept = sum(each.dur for each in computing if each.name == activity) / 1e6
        assert seconds == pytest.approx(kept, abs=1e-6)
    assert sum(stats.activity_s.values()) + stats.other_s == pytest.approx(stats.total_s)
    assert 0 <= stats.other_s < stats.total_s
    assert stats.compute_busy_s == pytest.approx(sum(stats.activity_s.values()) - stats.activity_s["wait"])
    assert stats.peak_resident_bytes > ARENA
    assert stats.floor_s <= stats.total_s
    assert sum(lane_busy_s(trace).values()) >= stats.io_busy_s * 0.99
    session = ["tables", "programs", "backend", "arena", "graphs chosen"]
    assert list(stats.start_up_s) == [*session, "dense weights", "embedding"]


def test_results_do_not_change(packed: PackageFactory) -> None:
    with open_package(packed()) as package, Session(package, arena_bytes=ARENA) as session:
        expected = session.forward(PROMPT)
        with recorded(session.interpreter) as recording:
            assert np.array_equal(session.forward(PROMPT), expected)
        kept = len(recording.activities), len(recording.pieces), len(recording.stays)
        assert np.array_equal(session.forward(PROMPT), expected)
    assert min(kept) > 0
    assert kept == (len(recording.activities), len(recording.pieces), len(recording.stays))


def test_a_read_that_fails_midway_ends_the_trace_and_not_the_session(packed: PackageFactory) -> None:
    source = FaultySource(packed().read_bytes(), lambda call, offset, length: None)
    with open_package(source) as package, Session(package, arena_bytes=ARENA) as session:
        bad = package.experts.place(0, 5).offset

        def fail(call: int, offset: int, length: int) -> None:
            if offset <= bad < offset + length:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        source.fault = fail
        with pytest.raises(LinkError, match="reading failed"):
            session.trace(PROMPT)
        source.fault = lambda call, offset, length: None
        assert session.interpreter.recorder.events is None
        assert decode_trace(encode_trace(session.trace(PROMPT)), "trace").tracks()["computing"]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [0, 0, 0, 0]),
        ([(0, 40)], [1, 1, 1, 1]),
        ([(5, 15), (15, 20)], [0.5, 1, 0, 0]),
        ([(0, 1), (2, 3), (39, 41)], [0.2, 0, 0, 0.1]),
        ([(25, 25)], [0, 0, 0, 0]),
    ],
)
def test_shares_of_slices(spans: list[tuple[float, float]], expected: list[float]) -> None:
    events = [Event(name="wait", cat="computing", ts=begin, dur=end - begin) for begin, end in spans]
    assert shares(events, 40.0, 4).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("marks", [BLOCKS, LETTERS])
@pytest.mark.parametrize("width", [1, 80, 200])
def test_the_picture_has_a_line_for_each_track_and_fits(width: int, marks: str, packed: PackageFactory) -> None:
    trace = traced(packed, group_size=2)
    lines = timeline(trace, width, marks)
    assert max(map(len, lines)) == max(width, LEAST_WIDTH)
    labels = [each.partition("|")[0].strip() for each in lines[1:-1]]
    assert labels == ["computing", "waiting", "lane 0", "lane 1", "bank 0", "bank 1"]
    assert all(set(each.split("|")[1]) <= set(marks) for each in lines[1:-1])


def test_many_banks_do_not_fill_the_screen(packed: PackageFactory) -> None:
    trace = traced(packed, prefetch_depth=MOST_BANKS + 2, arena_bytes=(MOST_BANKS + 3) * RECORD)
    lines = timeline(trace, 80, BLOCKS)
    assert sum(each.startswith("bank ") for each in lines) == MOST_BANKS
    assert lines[-1].endswith("and 3 more of them")


def test_the_table_fits_80_columns(packed: PackageFactory) -> None:
    lines = breakdown(traced(packed))
    assert all(len(each) <= 80 for each in lines[1:] if not each.startswith("reading"))
    assert any(each.startswith(f"prefill, {len(PROMPT)} tokens") for each in lines)
