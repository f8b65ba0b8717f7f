"""Reading runs beside computing: what begins when, what is left out, and what becomes of it all when a read fails."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import Package, open_package
from estream_runtime import Session
from estream_spec.errors import EmoeError, IntegrityError, LinkError
from estream_spec.schedule import BankState
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import PackageFactory
from fixtures.sources import FaultySource, GatedSource

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PROMPT = token_ids("pipeline", 48)
RECORD = 16384
PATIENCE = GatedSource.PATIENCE
Expert = tuple[int, int]


class Watch:
    """Which experts' reads have begun, in order; those that are held wait until they are let go."""

    def __init__(self, package: Package):
        places = {(layer, expert): package.experts.place(layer, expert) for layer, expert in all_experts()}
        self._experts = {place.offset: expert for expert, place in places.items()}
        self._change = threading.Condition()
        self.begun: list[Expert] = []
        self._held: set[Expert] = set()

    def __call__(self, call: int, offset: int, length: int) -> int | None:
        if (expert := self._experts.get(offset)) is not None:
            with self._change:
                self.begun.append(expert)
                self._change.notify_all()
                assert self._change.wait_for(lambda: expert not in self._held, PATIENCE)
        return None

    def hold(self, *experts: Expert) -> None:
        """Let the reads of these experts begin and not end."""
        self._held.update(experts)

    def let_all(self) -> None:
        """Let all reads end."""
        with self._change:
            self._held.clear()
            self._change.notify_all()

    def until_begun(self, *experts: Expert) -> None:
        """Wait until the reads of all these experts have begun."""
        with self._change:
            assert self._change.wait_for(lambda: set(experts) <= set(self.begun), PATIENCE)


def all_experts() -> list[Expert]:
    return [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def watched(path: Path) -> FaultySource:
    """The package in memory, and how its experts are read."""
    source = FaultySource(path.read_bytes(), lambda call, offset, length: None)
    with open_package(path) as package:
        source.fault = Watch(package)
    return source


def watch_of(source: FaultySource) -> Watch:
    assert isinstance(source.fault, Watch)
    return source.fault


def expected(path: Path, prompt: npt.NDArray[np.int64] = PROMPT) -> tuple[npt.NDArray[np.float32], list[set[int]]]:
    """Logits, and the experts of each layer that have tokens."""
    routes: list[set[int]] = []
    with open_package(path) as package, Session(package) as session:
        logits = session.forward(prompt, lambda layer, ids, weights: routes.append(set(ids.ravel().tolist())))
    return logits, routes


def test_reading_begins_before_routing_and_runs_across_layers(packed: PackageFactory) -> None:
    """With two banks the first two experts of a layer are on their way before it is routed, or this waits in vain."""
    source = watched(packed())
    watch = watch_of(source)
    logits, routes = expected(packed())
    assert routes == [set(range(EXPERTS))] * LAYERS
    with open_package(source) as package, Session(package, arena_bytes=2 * RECORD, group_size=1) as session:
        found = session.forward(PROMPT, lambda layer, ids, weights: watch.until_begun((layer, 0), (layer, 1)))
    assert np.array_equal(found, logits)
    assert sorted(watch.begun) == all_experts()


@pytest.mark.parametrize("policy", ["post-routing", "on-demand"])
def test_other_policies_read_nothing_before_routing(policy: str, packed: PackageFactory) -> None:
    source = watched(packed())
    watch = watch_of(source)
    layers: list[set[int]] = []
    with open_package(source) as package, Session(package, policy=policy) as session:
        session.forward(PROMPT, lambda layer, ids, weights: layers.append({each[0] for each in watch.begun}))
    assert layers == [set(), {0}]


def test_groups_without_tokens_whose_read_has_not_begun_are_skipped(packed: PackageFactory) -> None:
    path = packed("idle")
    logits, routes = expected(path)
    idle = [(0, expert) for expert in range(EXPERTS) if expert not in routes[0]]
    source = watched(path)
    watch = watch_of(source)
    everything = EXPERTS * LAYERS * RECORD
    watch.hold((0, 0))
    with (
        open_package(source) as package,
        Session(package, arena_bytes=everything, group_size=1, lanes=1) as session,
    ):
        found = session.forward(PROMPT, lambda layer, ids, weights: watch.let_all())
        reads = session.interpreter.pager.stats.reads
    assert np.array_equal(found, logits)
    assert idle
    assert (0, 0) not in idle
    assert not set(idle) & set(watch.begun)
    assert reads == len(watch.begun)


class Fault(Watch):
    """One expert goes wrong as soon as another one is being read, which comes to its end only after that."""

    def __init__(self, package: Package, failing: Expert, beside: Expert, kind: str):
        super().__init__(package)
        self._offset, self._beside, self._kind = package.experts.place(*failing).offset, beside, kind
        self.hold(beside)

    def __call__(self, call: int, offset: int, length: int) -> int | None:
        super().__call__(call, offset, length)
        if offset != self._offset:
            return None
        self.until_begun(self._beside)
        self.let_all()
        if self._kind == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 0 if self._kind == "cut" else None


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("EIO", LinkError, "reading failed: Input/output error: got 0 of 16384 bytes"),
        ("cut", IntegrityError, r"the package ends early: got 0 of 16384 bytes .*\[EMOE-SUP-011\]"),
        ("damaged", IntegrityError, r"record has checksum .* experts\[0\]\[3\]\) \[EMOE-REC-001\]"),
    ],
)
@pytest.mark.parametrize("policy", ["pre-routing", "post-routing"])
def test_a_read_that_fails_beside_others_ends_the_call_and_not_the_session(
    policy: str, kind: str, error: type[EmoeError], message: str, packed: PackageFactory
) -> None:
    failing, beside = (0, 3), (0, 4)
    logits, routes = expected(packed())
    assert {3, 4} <= routes[0]
    data = bytearray(packed().read_bytes())
    source = FaultySource(data, lambda call, offset, length: None)  # type: ignore[arg-type]
    with (
        open_package(source) as package,
        Session(package, arena_bytes=8 * RECORD, group_size=1, lanes=3, policy=policy) as session,
    ):
        place = package.experts.place(*failing)
        source.fault = fault = Fault(package, failing, beside, kind)
        data[place.offset + 5] ^= kind == "damaged"
        with pytest.raises(error, match=message):
            session.forward(PROMPT)
        assert {bank.state for bank in session.interpreter.pager.arena.banks} == {BankState.AVAILABLE}
        assert beside in fault.begun
        data[place.offset + 5] ^= kind == "damaged"
        source.fault = lambda call, offset, length: None
        assert np.array_equal(session.forward(PROMPT), logits)


def test_a_file_that_is_cut_off_while_it_is_read(packed: PackageFactory, tmp_path: Path) -> None:
    path = tmp_path / "model.emoe"
    shutil.copy(packed(), path)
    with open_package(path) as package, Session(package, arena_bytes=2 * RECORD, lanes=3) as session:
        middle = package.experts.place(1, EXPERTS // 2).offset + 100
        with pytest.raises(IntegrityError, match=r"the package ends early: got \d+ of \d+ bytes"):
            session.forward(PROMPT, lambda layer, ids, weights: os.truncate(path, middle))
        with pytest.raises(IntegrityError, match="the package ends early"):
            session.forward(PROMPT)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_a_call_reading_ends_with_it(kind: type[BaseException], packed: PackageFactory) -> None:
    def stop(layer: int, expert_ids: object, weights: object) -> None:
        if layer == 1:
            raise kind

    logits, _ = expected(packed())
    source = watched(packed())
    with open_package(source) as package, Session(package, arena_bytes=6 * RECORD, group_size=2) as session:
        with pytest.raises(kind):
            session.forward(PROMPT, stop)
        begun = len(watch_of(source).begun)
        assert {bank.state for bank in session.interpreter.pager.arena.banks} == {BankState.AVAILABLE}
        assert np.array_equal(session.forward(PROMPT), logits)
        assert len(watch_of(source).begun) > begun


def test_closing_ends_the_reading_threads(packed: PackageFactory) -> None:
    before = threading.active_count()
    with open_package(packed()) as package:
        session = Session(package, lanes=5)
        session.forward(PROMPT)  # until then, dense weights are being read
        assert threading.active_count() == before + 5
        session.close()
        assert threading.active_count() == before
        with pytest.raises(LinkError, match="unknown backend"):
            Session(package, "none")
        assert threading.active_count() == before
