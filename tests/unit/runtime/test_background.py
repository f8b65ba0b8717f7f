"""Dense weights that are read while a session is open already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream_loader import Package, open_package
from estream_loader.dense import DenseRecords
from estream_loader.records import RecordPlace
from estream_runtime import Session
from estream_runtime.tracing import recorded
from estream_spec.errors import IntegrityError, LinkError
from fixtures.olmoe import LAYERS, VariantName, token_ids
from fixtures.packed import UNQUANTISED, PackageFactory
from fixtures.sources import FaultySource, GatedSource, fails_at, free_descriptor

PROMPT = token_ids("background", 33)
CALLS: dict[str, Callable[[Session], object]] = {
    "forward": lambda session: session.forward(PROMPT),
    "prefill": lambda session: session.prefill(PROMPT),
    "generate": lambda session: list(session.generate(PROMPT, max_new_tokens=1)),
    "score": lambda session: session.score(PROMPT, [[1, 2], [3]]),
    "log_likelihoods": lambda session: session.log_likelihoods(PROMPT),
    "trace": lambda session: session.trace(PROMPT),
}


def places(path: Path) -> list[RecordPlace]:
    """Of the embedding, of each layer, and of what follows the last."""
    with open_package(path) as package:
        return list(package.dense.places())


class HeldSource(FaultySource):
    """Bytes of which those from an offset on, up to another, are not read before the test lets them."""

    def __init__(self, data: bytes):
        super().__init__(data, self._hold)
        self.held = range(0)
        self.begun = threading.Event()
        self._let = threading.Event()

    def let(self) -> None:
        """Let everything be read."""
        self._let.set()

    def _hold(self, call: int, offset: int, length: int) -> None:
        if offset in self.held:
            self.begun.set()
            assert self._let.wait(GatedSource.PATIENCE)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [0, 1, LAYERS, LAYERS + 1])
def test_a_session_over_damaged_dense_weights_opens_and_gives_no_result(
    number: int, call: str, packed: PackageFactory
) -> None:
    data = bytearray(packed().read_bytes())
    place = places(packed())[number]
    data[place.offset + 9] ^= 1
    with open_package(bytes(data)) as package, Session(package) as session:
        for _ in range(2):
            with pytest.raises(IntegrityError, match=r"record has checksum") as caught:
                CALLS[call](session)
            error = caught.value
            assert (error.rule, error.path, error.offset) == ("EMOE-REC-001", place.path, place.offset)


@pytest.mark.parametrize("variant", ["base", "tied"])
@pytest.mark.parametrize("number", [0, 1, LAYERS, LAYERS + 1])
def test_a_device_that_fails_ends_the_call_and_not_the_session(
    number: int, variant: VariantName, packed: PackageFactory
) -> None:
    path = packed(variant)
    with open_package(path) as package, Session(package) as session:
        expected = session.forward(PROMPT)
    source = FaultySource(path.read_bytes(), lambda call, offset, length: None)
    with open_package(source) as package:
        source.fault = fails_at(package.dense.place(number).offset)
        with Session(package) as session:
            for _ in range(2):
                with pytest.raises(LinkError, match="reading failed: Input/output error: got 0 of"):
                    session.forward(PROMPT)
            source.fault = lambda call, offset, length: None
            # What failed in the background meanwhile, and nobody has waited for yet, is told once.
            untold = {"base": 1, "tied": 2}[variant] if number == 0 else 0
            for _ in range(untold):
                with pytest.raises(LinkError, match="reading failed: Input/output error: got 0 of"):
                    session.forward(PROMPT)
            assert np.array_equal(session.forward(PROMPT), expected)


def test_an_embedding_that_is_damaged_beyond_numbers_is_told_as_damaged(packed: PackageFactory) -> None:
    """Not a number in all rows, which the router finds first · what is wrong with the package is what is told."""
    data = bytearray(packed("base", UNQUANTISED).read_bytes())
    place = places(packed("base", UNQUANTISED))[0]
    rows = np.frombuffer(data, np.float32, place.length // 4, place.offset)
    rows[:] = np.nan
    with (
        open_package(bytes(data)) as package,
        Session(package) as session,
        pytest.raises(IntegrityError, match="record has checksum"),
    ):
        session.forward(PROMPT)


def test_computing_begins_while_later_layers_are_being_read(packed: PackageFactory) -> None:
    source = HeldSource(packed().read_bytes())
    later = places(packed())[2]
    routed: list[int] = []

    def on_route(layer: int, expert_ids: object, weights: object) -> None:
        routed.append(layer)
        source.let()

    with open_package(packed()) as package, Session(package) as session:
        expected = session.forward(PROMPT)
    with open_package(source) as package:
        source.held = range(later.offset, later.offset + later.length)
        with Session(package) as session:
            assert source.begun.wait(GatedSource.PATIENCE)
            assert np.array_equal(session.forward(PROMPT, on_route), expected)
    assert routed == list(range(LAYERS))


def test_waiting_for_dense_weights_counts_as_waiting(packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer is not read before somebody waits for it · the first call has waited, the second one has not."""
    source = HeldSource(packed().read_bytes())
    first = places(packed())[1]
    take = DenseRecords.take

    def let_and_take(records: DenseRecords, number: int) -> memoryview:
        source.let()
        return take(records, number)

    monkeypatch.setattr(DenseRecords, "take", let_and_take)
    with open_package(source) as package:
        source.held = range(first.offset, first.offset + first.length)
        with Session(package) as session:
            assert source.begun.wait(GatedSource.PATIENCE)
            waits = []
            for _ in range(2):
                with recorded(session.interpreter) as recording:
                    session.prefill(PROMPT)
                waits.append([each.layer for each in recording.activities if each[0] == "wait" and each.group is None])
    assert waits[0][0] == 0
    assert waits[1] == []


def test_no_result_is_given_before_the_embedding_is_proven(packed: PackageFactory) -> None:
    source = HeldSource(packed().read_bytes())
    embedding = places(packed())[0]
    with open_package(packed()) as package, Session(package) as session:
        expected = session.forward(PROMPT)
    given: list[np.ndarray] = []
    with open_package(source) as package:
        # The proof reads all of it at once; rows are read in pieces, the first of which holds the first rows.
        source.held = range(embedding.offset, embedding.offset + embedding.length)
        with Session(package) as session:
            assert source.begun.wait(GatedSource.PATIENCE)
            source.held = range(0)
            call = threading.Thread(target=lambda: given.append(session.forward(PROMPT)))
            call.start()
            call.join(0.5)
            assert call.is_alive()
            assert not given
            source.let()
            call.join()
    assert np.array_equal(given[0], expected)


def end_while_reading(package: Package, source: HeldSource, kind: type[BaseException]) -> None:
    """Leave a session with an exception while what the source holds is being read."""
    with Session(package):
        assert source.begun.wait(GatedSource.PATIENCE)
        source.let()
        raise kind


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("number", [0, 1, LAYERS + 1])
def test_a_session_that_ends_while_dense_weights_are_read_leaves_nothing_behind(
    number: int, kind: type[BaseException], packed: PackageFactory
) -> None:
    source = HeldSource(packed().read_bytes())
    place = places(packed())[number]
    threads = threading.active_count()
    with open_package(source) as package:
        source.held = range(place.offset, place.offset + place.length)
        with pytest.raises(kind):
            end_while_reading(package, source, kind)
    assert threading.active_count() == threads


@pytest.mark.parametrize("options", [{"device": "none"}, {"arena_bytes": 1}, {"backend": "none"}])
def test_a_session_that_does_not_open_leaves_nothing_behind(options: dict[str, Any], packed: PackageFactory) -> None:
    before = threading.active_count(), free_descriptor()
    with open_package(packed()) as package, pytest.raises(LinkError):
        Session(package, **options)
    assert (threading.active_count(), free_descriptor()) == before
