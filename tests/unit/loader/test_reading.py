"""Reading threads: whatever is submitted, given up or failing, each buffer holds its bytes or its wait says why not."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_loader import open_package, reading
from estream_loader.reading import Read, Reader, ReadState, Span
from estream_loader.records import RecordPlace
from estream_loader.source import FileSource
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.manifest import RecordLayout
from fixtures.packages import Draft
from fixtures.sources import CountingSource, FaultySource, GatedSource, fails_at

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PIECE = 4096
DATA = bytes(crc32c.crc32c(number.to_bytes(4, "little")) & 255 for number in range(20 * PIECE))
LAYOUT = RecordLayout(payload_length=1, matrices=(), tensors=())
UNTOUCHED = 0xAA


def memory(length: int) -> memoryview:
    return memoryview(bytearray([UNTOUCHED]) * length)


def record(offset: int, length: int, damage: int = 0) -> RecordPlace:
    checksum = crc32c.crc32c(DATA[offset : offset + length]) ^ damage
    return RecordPlace(offset, length, LAYOUT, checksum, b"", f"record at {offset}")


def prove(place: RecordPlace, data: memoryview) -> None:
    place.check(crc32c.crc32c(data))


class TestPieces:
    @pytest.mark.parametrize(
        ("length", "expected"),
        [
            (1, [1]),
            (PIECE - 1, [PIECE - 1]),
            (PIECE, [PIECE]),
            (2 * PIECE - 1, [PIECE, PIECE - 1]),
            (2 * PIECE, [PIECE, PIECE]),
            (3 * PIECE + 5, [PIECE, PIECE, PIECE, 5]),
        ],
    )
    @pytest.mark.parametrize("lanes", [1, 3])
    def test_a_read_is_cut(self, length: int, expected: list[int], lanes: int) -> None:
        source = CountingSource(DATA)
        buffer = memory(length)
        with Reader(source, lanes, piece=PIECE) as reader:
            read = reader.submit(100, buffer)
            read.wait()
            assert read.state.name == "DONE"
        assert buffer == DATA[100 : 100 + length]
        starts = [100 + number * PIECE for number in range(len(expected))]
        assert sorted(source.reads) == list(zip(starts, expected, strict=True))

    def test_into_one_for_each_lane_unless_told_otherwise(self) -> None:
        length = 5 << 20
        source = CountingSource(bytes(length))
        with Reader(source, 2) as reader:
            reader.submit(0, memory(length)).wait()
        assert sorted(source.reads) == [(0, 5 << 19), (5 << 19, 5 << 19)]

    def test_nothing_is_read_as_nothing(self) -> None:
        source = CountingSource(DATA)
        with Reader(source, 2) as reader:
            reader.submit(5, memory(0)).wait()
        assert source.reads == []

    def test_pieces_are_taken_in_order_of_submission(self) -> None:
        source = CountingSource(DATA)
        with Reader(source, 1, piece=PIECE) as reader:
            reads = [reader.submit(offset * PIECE, memory(2 * PIECE)) for offset in (8, 2, 5, 0)]
            for read in reads:
                read.wait()
        assert [offset // PIECE for offset, _ in source.reads] == [8, 9, 2, 3, 5, 6, 0, 1]

    def test_all_lanes_share_one_read(self) -> None:
        source = GatedSource(DATA)
        buffer = memory(5 * PIECE)
        with Reader(source, 3, piece=PIECE) as reader:
            read = reader.submit(0, buffer)
            assert source.arrived(3) == {0, PIECE, 2 * PIECE}
            assert source.nothing_arrived()
            source.let(PIECE)
            assert source.arrived(1) == {3 * PIECE}
            assert read.state.name == "READING"
            source.let_all()
            read.wait()
        assert buffer == DATA[: 5 * PIECE]

    def test_a_lane_without_work_goes_on_to_the_next_read(self) -> None:
        source = GatedSource(DATA)
        with Reader(source, 2, piece=PIECE) as reader:
            first, second = reader.submit(0, memory(PIECE)), reader.submit(9 * PIECE, memory(PIECE))
            assert source.arrived(2) == {0, 9 * PIECE}
            source.let(9 * PIECE)
            second.wait()
            assert (first.state, second.state) == (ReadState.READING, ReadState.DONE)
            source.let_all()


class TestCancelling:
    def test_before_the_first_piece_has_begun(self) -> None:
        source = GatedSource(DATA)
        buffers = [memory(2 * PIECE) for _ in range(3)]
        with Reader(source, 1, piece=PIECE) as reader:
            first, second, third = (reader.submit(0, buffer) for buffer in buffers)
            source.arrived(1)
            assert second.state.name == "QUEUED"
            assert second.cancel()
            assert second.cancel()
            assert second.state.name == "CANCELLED"
            with pytest.raises(LinkError, match="the read was cancelled"):
                second.wait()
            source.let_all()
            third.wait()
            assert not first.cancel()
            assert not third.cancel()
        assert buffers[1] == memory(2 * PIECE)
        assert buffers[2] == DATA[: 2 * PIECE]

    def test_not_after_the_first_piece_has_begun(self) -> None:
        source = GatedSource(DATA)
        buffer = memory(3 * PIECE)
        with Reader(source, 1, piece=PIECE) as reader:
            read = reader.submit(0, buffer)
            source.arrived(1)
            assert not read.cancel()
            source.let_all()
            read.wait()
        assert buffer == DATA[: 3 * PIECE]

    def test_wakes_who_waits(self) -> None:
        source = GatedSource(DATA)
        found: list[str] = []
        with Reader(source, 1) as reader:
            reader.submit(0, memory(PIECE))
            source.arrived(1)
            read = reader.submit(0, memory(PIECE))
            waiter = threading.Thread(target=lambda: found.append(outcome(read)))
            waiter.start()
            assert read.cancel()
            waiter.join()
            source.let_all()
        assert found == ["LinkError"]


def outcome(read: Read) -> str:
    try:
        read.wait()
    except Exception as error:
        return type(error).__name__
    return "done"


class TestFaults:
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.ENODEV])
    def test_device_fails_in_the_middle(self, number: int) -> None:
        source = FaultySource(DATA, fails_at(3 * PIECE + 17, number))
        with Reader(source, 2, piece=PIECE) as reader:
            reads = [reader.submit(offset, memory(2 * PIECE)) for offset in (0, 2 * PIECE, 4 * PIECE)]
            for read in (reads[0], reads[2]):
                read.wait()
            for _ in range(2):
                with pytest.raises(LinkError, match="reading failed: Input/output error: got 0 of 4096") as caught:
                    reads[1].wait()
                assert (caught.value.path, caught.value.offset) == ("package in memory", 3 * PIECE)
                assert isinstance(caught.value.__cause__, OSError)
                assert caught.value.__cause__.errno == number
        assert [read.state.name for read in reads] == ["DONE", "FAILED", "DONE"]

    def test_package_ends_early(self) -> None:
        with Reader(CountingSource(DATA), 2, piece=PIECE) as reader:
            read = reader.submit(len(DATA) - PIECE - 10, memory(3 * PIECE))
            with pytest.raises(IntegrityError, match="ends early") as caught:
                read.wait()
        assert caught.value.rule == "EMOE-SUP-011"

    def test_short_and_interrupted_reads(self) -> None:
        def fault(call: int, offset: int, length: int) -> int:
            if call % 3 == 0:
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            return 1000

        buffer = memory(7 * PIECE)
        with Reader(FaultySource(DATA, fault), 3, piece=PIECE) as reader:
            reader.submit(123, buffer).wait()
            assert reader.stats.bytes_read == 7 * PIECE
        assert buffer == DATA[123 : 123 + 7 * PIECE]

    def test_what_has_not_begun_is_given_up_and_what_has_is_waited_for(self) -> None:
        source = GatedSource(DATA, fails_at(0))
        failing, other = memory(4 * PIECE), memory(PIECE)
        with Reader(source, 2, piece=PIECE) as reader:
            first, second = reader.submit(0, failing), reader.submit(9 * PIECE, other)
            assert source.arrived(2) == {0, PIECE}
            source.let(0)
            assert source.arrived(1) == {9 * PIECE}
            assert first.state.name == "READING"
            source.let(PIECE)
            with pytest.raises(LinkError, match="Input/output error"):
                first.wait()
            assert first.state.name == "FAILED"
            source.let_all()
            second.wait()
        assert failing[PIECE : 2 * PIECE] == DATA[PIECE : 2 * PIECE]
        assert failing[2 * PIECE :] == memory(2 * PIECE)
        assert other == DATA[9 * PIECE : 10 * PIECE]

    def test_first_of_several_errors_is_told(self) -> None:
        def fault(call: int, offset: int, length: int) -> int:
            raise OSError(errno.EIO, f"piece {offset // PIECE}")

        source = GatedSource(DATA, fault)
        with Reader(source, 2, piece=PIECE) as reader:
            read = reader.submit(0, memory(2 * PIECE))
            other = reader.submit(9 * PIECE, memory(PIECE))
            source.arrived(2)
            source.let(PIECE)
            assert source.arrived(1) == {9 * PIECE}
            source.let_all()
            with pytest.raises(LinkError, match="piece 1"):
                read.wait()
            assert outcome(other) == "LinkError"

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
    def test_whatever_a_source_raises_reaches_who_waits(self, kind: type[BaseException]) -> None:
        def fault(call: int, offset: int, length: int) -> int | None:
            if call == 1:
                raise kind("odd")
            return None

        with Reader(FaultySource(DATA, fault), 1) as reader:
            with pytest.raises(kind, match="odd"):
                reader.submit(0, memory(PIECE)).wait()
            reader.submit(0, memory(PIECE)).wait()

    def test_file_truncated_while_open(self, tmp_path: Path) -> None:
        path = tmp_path / "a.emoe"
        path.write_bytes(DATA)
        source = FileSource.open(path)
        with Reader(source, 2, piece=PIECE) as reader:
            arena = memoryview(mmap.mmap(-1, 8 * PIECE))
            reader.submit(0, arena).wait()
            os.truncate(path, 5 * PIECE + 10)
            read = reader.submit(4 * PIECE, arena[: 4 * PIECE])
            with pytest.raises(IntegrityError, match="ends early") as caught:
                read.wait()
            assert (caught.value.rule, caught.value.path) == ("EMOE-SUP-011", str(path))
            reader.submit(0, arena[: 5 * PIECE]).wait()
            assert arena[: 5 * PIECE] == DATA[: 5 * PIECE]
        source.close()

    @pytest.mark.parametrize("fault", [fails_at(PIECE), lambda call, offset, length: None])
    def test_memory_can_be_released_afterwards(self, fault: object) -> None:
        """An error that is kept does not keep the arena."""
        arena = mmap.mmap(-1, 3 * PIECE)
        with Reader(FaultySource(DATA, fault), 2, check=prove, piece=PIECE) as reader:  # type: ignore[arg-type]
            read = reader.submit(0, memoryview(arena), [record(0, PIECE, damage=1)])
            with pytest.raises((LinkError, IntegrityError)) as caught:
                read.wait()
            arena.close()
        assert caught.value.offset is not None


class TestProving:
    RECORDS = ((0, 100), (100, PIECE), (100 + PIECE, 3 * PIECE), (100 + 4 * PIECE, 5000))

    @pytest.mark.parametrize("lanes", [1, 2, 5])
    def test_each_record_once_whole_and_beside_the_caller(self, lanes: int) -> None:
        seen: list[tuple[RecordPlace, bytes, str]] = []

        def check(place: RecordPlace, data: memoryview) -> None:
            seen.append((place, bytes(data), threading.current_thread().name))

        records = [record(300 + start, length) for start, length in self.RECORDS]
        with Reader(CountingSource(DATA), lanes, check=check, piece=PIECE) as reader:
            reader.submit(300, memory(12 * PIECE), records).wait()
        assert sorted(place.offset for place, _, _ in seen) == [place.offset for place in records]
        for place, data, thread in seen:
            assert data == DATA[place.offset : place.offset + place.length]
            assert thread.startswith("reading lane ")

    def test_as_soon_as_it_is_there(self) -> None:
        proven = threading.Event()
        source = GatedSource(DATA)
        with Reader(source, 1, check=lambda place, data: proven.set(), piece=PIECE) as reader:
            read = reader.submit(0, memory(3 * PIECE), [record(0, PIECE)])
            source.arrived(1)
            source.let(0)
            assert proven.wait(source.PATIENCE)
            assert read.state.name == "READING"
            source.let_all()

    def test_damaged_record(self) -> None:
        records = [record(0, PIECE), record(PIECE, 2 * PIECE, damage=4), record(3 * PIECE, PIECE)]
        with Reader(CountingSource(DATA), 2, check=prove, piece=PIECE) as reader:
            read, other = reader.submit(0, memory(4 * PIECE), records), reader.submit(0, memory(PIECE), records[:1])
            other.wait()
            with pytest.raises(IntegrityError, match="record has checksum") as caught:
                read.wait()
        assert (caught.value.rule, caught.value.path) == ("EMOE-REC-001", f"record at {PIECE}")

    def test_records_of_a_package(self) -> None:
        data = bytearray(Draft().seal())
        with open_package(bytes(data)) as package:
            places = [package.experts.place(1, expert) for expert in range(3)]
        start, stop = places[0].offset, places[-1].offset + places[-1].length
        with open_package(bytes(data)) as package, Reader(package.source, 2, check=package.check_record) as reader:
            reader.submit(start, memory(stop - start), places).wait()
        data[places[2].offset + 9] ^= 1
        with open_package(bytes(data)) as package, Reader(package.source, 2, check=package.check_record) as reader:
            reader.submit(start, memory(places[2].offset - start), places[:2]).wait()
            read = reader.submit(start, memory(stop - start), places)
            with pytest.raises(IntegrityError, match=r"experts\[1\]\[2\]"):
                read.wait()

    def test_record_outside_the_read_is_a_fault_of_the_program(self) -> None:
        with Reader(CountingSource(DATA), 1) as reader, pytest.raises(AssertionError):
            reader.submit(0, memory(PIECE), [record(1, PIECE)])


class TestClosing:
    def test_what_is_under_way_is_finished_and_nothing_else_begins(self) -> None:
        source = GatedSource(DATA)
        buffers = [memory(length * PIECE) for length in (1, 3, 2)]
        reader = Reader(source, 2, piece=PIECE)
        reads = [reader.submit(number * 4 * PIECE, buffer) for number, buffer in enumerate(buffers)]
        assert source.arrived(2) == {0, 4 * PIECE}
        closer = threading.Thread(target=reader.close)
        closer.start()
        with pytest.raises(LinkError, match="the reader was closed before a read was done"):
            reads[2].wait()
        assert closer.is_alive()
        source.let_all()
        closer.join()
        assert [read.state.name for read in reads] == ["DONE", "FAILED", "CANCELLED"]
        assert [outcome(read) for read in reads] == ["done", "LinkError", "LinkError"]
        assert buffers[0] == DATA[:PIECE]
        assert buffers[1][:PIECE] == DATA[4 * PIECE : 5 * PIECE]
        assert buffers[1][PIECE:] == memory(2 * PIECE)
        assert buffers[2] == memory(2 * PIECE)

    def test_twice_and_late(self) -> None:
        reader = Reader(CountingSource(DATA), 2)
        read = reader.submit(0, memory(PIECE))
        read.wait()
        reader.close()
        reader.close()
        read.wait()
        with pytest.raises(LinkError, match="the reader is closed"):
            reader.submit(0, memory(PIECE))

    def test_source_stays_the_callers(self) -> None:
        source = CountingSource(DATA)
        with Reader(source, 2):
            pass
        assert source.closed == 0

    def test_error_of_the_caller_ends_the_threads(self) -> None:
        with pytest.raises(ZeroDivisionError), Reader(CountingSource(DATA), 4) as reader:
            _ = reader.submit(0, memory(PIECE)).length / 0

    @pytest.mark.parametrize("lanes", [0, -1])
    def test_no_lanes(self, lanes: int) -> None:
        with pytest.raises(LinkError, match=f"{lanes} lanes"):
            Reader(CountingSource(DATA), lanes)

    def test_threads_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, begun = threading.Thread.start, list[threading.Thread]()

        def limited(thread: threading.Thread) -> None:
            if len(begun) == 2:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(LinkError, match="cannot start 3 reading threads: can't start new thread"):
            Reader(CountingSource(DATA), 3)
        assert not any(thread.is_alive() for thread in begun)


class TestStats:
    def test_counts(self) -> None:
        source = FaultySource(DATA, fails_at(5 * PIECE))
        with Reader(source, 1, piece=PIECE) as reader:
            reads = [reader.submit(0, memory(3 * PIECE + 1)), reader.submit(4 * PIECE, memory(3 * PIECE))]
            assert [outcome(read) for read in reads] == ["done", "LinkError"]
            stats = reader.stats
        assert (stats.reads, stats.pieces, stats.bytes_read) == (2, 5, 4 * PIECE + 1)

    def test_busy_is_when_any_lane_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(reading, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        source = GatedSource(DATA)
        with Reader(source, 2) as reader:
            first = reader.submit(0, memory(PIECE))
            source.arrived(1)
            clock.now = 1.0
            second = reader.submit(PIECE, memory(PIECE))
            source.arrived(1)
            clock.now = 3.0
            source.let(0)
            first.wait()
            assert reader.stats.io_busy_s == 3.0
            clock.now = 4.0
            source.let(PIECE)
            second.wait()
            clock.now = 10.0
            assert reader.stats.io_busy_s == 4.0
            third = reader.submit(0, memory(PIECE))
            source.arrived(1)
            clock.now = 11.0
            assert reader.stats.io_busy_s == 5.0
            source.let_all()
            third.wait()
            assert reader.stats.io_busy_s == 5.0

    def test_every_piece_is_told(self) -> None:
        spans: list[Span] = []
        with Reader(FaultySource(DATA, fails_at(9 * PIECE)), 2, piece=PIECE, on_piece=spans.append) as reader:
            reader.submit(0, memory(5 * PIECE)).wait()
            assert outcome(reader.submit(9 * PIECE, memory(PIECE))) == "LinkError"
        assert sorted(span.offset // PIECE for span in spans) == [0, 1, 2, 3, 4, 9]
        assert all(span.length == PIECE and span.lane in (0, 1) and span.begun <= span.ended for span in spans)
        for lane in (0, 1):
            mine = [span for span in spans if span.lane == lane]
            assert all(earlier.ended <= later.begun for earlier, later in pairwise(mine))


BAD = frozenset({3 * PIECE + 5, 11 * PIECE, 17 * PIECE - 1})
RANGES = st.tuples(st.just("submit"), st.integers(0, len(DATA) - 1), st.integers(0, 6 * PIECE))
ACTIONS = st.one_of(
    RANGES,
    RANGES,
    st.tuples(st.sampled_from(["cancel", "wait"]), st.integers(0, 20), st.just(0)),
)


@given(lanes=st.integers(1, 4), steps=st.lists(ACTIONS, max_size=25), close_early=st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_use_against_a_model(lanes: int, steps: list[tuple[str, int, int]], close_early: bool) -> None:
    """What each read must come to follows from its range alone, or from having been given up."""

    def fault(call: int, offset: int, length: int) -> int | None:
        if any(offset <= position < offset + length for position in BAD):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None if call % 5 else 1 + call % 97

    def expected(offset: int, length: int) -> str:
        stop = offset + length
        return "FAILED" if stop > len(DATA) or any(offset <= position < stop for position in BAD) else "DONE"

    model: list[tuple[Read, memoryview, int]] = []
    cancelled: set[int] = set()
    with Reader(FaultySource(DATA, fault), lanes, check=prove, piece=PIECE) as reader:
        for action, number, length in steps:
            if action == "submit":
                buffer = memory(length)
                inside = [record(number, length)] if 0 < length <= len(DATA) - number else []
                model.append((reader.submit(number, buffer, inside), buffer, number))
            elif number < len(model):
                read, buffer, offset = model[number]
                if action == "cancel" and read.cancel():
                    cancelled.add(number)
                elif action == "wait":
                    assert outcome(read) == ("done" if read.state is ReadState.DONE else type(read._error).__name__)
                    assert read.state.name == ("CANCELLED" if number in cancelled else expected(offset, len(buffer)))
        if not close_early:
            for read, _, _ in model:
                outcome(read)
    for number, (read, buffer, offset) in enumerate(model):
        what = expected(offset, len(buffer))
        if number in cancelled:
            assert read.state.name == "CANCELLED"
        else:
            assert read.state.name == what or (close_early and read.state.name in ("FAILED", "CANCELLED"))
        if read.state is ReadState.CANCELLED:
            assert buffer == memory(len(buffer))
        elif read.state is ReadState.DONE:
            assert buffer == DATA[offset : offset + len(buffer)]
        assert outcome(read) == "done" if read.state is ReadState.DONE else outcome(read) != "done"
