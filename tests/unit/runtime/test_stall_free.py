"""The mode `stall-free`: experts that are late are replaced by the router's next best, as far as allowed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estream_loader import open_package
from estream_runtime import Session
from estream_runtime.routing import Substituted, route, substituted
from estream_spec.errors import LinkError
from estream_spec.model import Router
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import FamilyFactory, PackageFactory
from fixtures.sources import FaultySource

RECORD = 16384
PROMPT = token_ids("stall-free", 24)
TOP_K = 3
ROUTERS = {
    "plain": Router(family="softmax-topk", top_k=3),
    "renormalised": Router(family="softmax-topk-renormalise", top_k=3, scale=1.5),
    "sigmoid": Router(family="sigmoid-topk-renormalise", top_k=3, selection_bias=True),
    "grouped": Router(
        family="sigmoid-topk-renormalise", top_k=3, selection_bias=True, groups=4, top_groups=2, scale=2.5
    ),
}
SCORES = np.array([[3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5]], np.float32)
BIAS = np.zeros(8, np.float32)


def replace_late(
    ready: set[int], most_share: float = 1.0, router: Router = ROUTERS["plain"], bias: Any = None
) -> Substituted:
    return substituted(SCORES, router, bias, route(SCORES, router, bias), ready, most_share)


def test_the_next_best_that_is_there_takes_the_place() -> None:
    found = replace_late({0, 2, 4, 6})
    assert found.expert_ids.tolist() == [[0, 4, 2]]
    assert found.replaced == [1]
    softmax = np.exp(SCORES[0]) / np.exp(SCORES[0]).sum()
    assert found.weights[0] == pytest.approx(softmax[[0, 4, 2]])
    assert found.lost_share == pytest.approx(softmax[1] / softmax[:3].sum())


def test_of_too_few_that_are_there_the_least_of_the_late_ones_are_replaced() -> None:
    found = replace_late({5})
    assert (found.expert_ids.tolist(), found.replaced) == ([[0, 1, 5]], [2])
    assert replace_late(set()).replaced == []


def test_nobody_replaces_what_is_there_or_counts_too_much() -> None:
    assert replace_late({0, 1, 2, 3, 4}).replaced == []
    shares = np.exp(SCORES[0, :3]) / np.exp(SCORES[0, :3]).sum()
    assert replace_late({5, 6, 7}, float(shares[1]) - 1e-3).replaced == [2]
    assert replace_late({5, 6, 7}, float(shares[1]) + 1e-3).replaced == [2, 1]


def test_groups_that_are_left_out_give_no_substitute() -> None:
    found = replace_late({4, 5, 6, 7}, router=ROUTERS["grouped"], bias=BIAS)
    assert found.replaced == []
    assert replace_late({3, 7}, router=ROUTERS["grouped"], bias=BIAS).expert_ids.tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("router", ROUTERS.values(), ids=list(ROUTERS))
@given(
    scores=st.lists(st.floats(-4, 4, width=32), min_size=8, max_size=8),
    ready=st.sets(st.integers(0, 7)),
    share=st.floats(0.01, 1),
)
def test_what_is_taken_is_weighed_by_the_familys_rule(
    router: Router, scores: list[float], ready: set[int], share: float
) -> None:
    """As if the router had chosen it: raising the scores of those taken above all others gives the same choice."""
    rows, bias = np.array([scores], np.float32), BIAS if router.selection_bias else None
    expert_ids, weights = route(rows, router, bias)
    found = substituted(rows, router, bias, (expert_ids, weights), ready, share)
    taken, before = found.expert_ids[0].tolist(), expert_ids[0].tolist()
    assert len({*taken}) == router.top_k
    assert {*before}.difference(taken) == {*found.replaced}
    assert {*taken}.difference(before) <= ready
    assert not ready & {*found.replaced}
    parts = weights[0] / weights[0].sum()
    assert all(parts[before.index(each)] <= share for each in found.replaced)
    assert found.lost_share == pytest.approx(sum(parts[before.index(each)] for each in found.replaced), abs=1e-6)
    shares = 1 / (1 + np.exp(-rows[0])) if "sigmoid" in router.family else np.exp(rows[0]) / np.exp(rows[0]).sum()
    counted = shares[taken]
    if router.family.endswith("renormalise"):
        counted = counted / (counted.sum() + router.epsilon)
    assert found.weights[0] == pytest.approx(counted * router.scale, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast', expected one of: exact, stall-free"),
        ({"substitute_share": 0.5}, "substitute_share without the mode 'stall-free'"),
        ({"mode": "stall-free", "substitute_share": 0}, "substitute_share is 0, expected a number above 0 and up to 1"),
        ({"mode": "stall-free", "substitute_share": 1.5}, "substitute_share is 1.5, expected"),
        ({"mode": "stall-free", "substitute_share": float("nan")}, "substitute_share is nan, expected"),
        ({"mode": "stall-free", "substitute_share": "0.5"}, "substitute_share is '0.5', expected"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str, packed: PackageFactory) -> None:
    with open_package(packed()) as package, pytest.raises(LinkError) as caught:
        Session(package, **options)
    assert message in str(caught.value)


def test_models_that_lose_too_much_are_refused_unless_a_share_is_given(packed_family: FamilyFactory) -> None:
    with open_package(packed_family("mixtral")) as package:
        with pytest.raises(LinkError, match="routes to 2 experts"):
            Session(package, mode="stall-free")
        with Session(package, mode="stall-free", substitute_share=0.5, threads=1) as session:
            assert len(list(session.generate(PROMPT, 4))) == 4


def test_an_arena_without_room_to_decode_in_is_refused(packed: PackageFactory) -> None:
    """There every token would wait for all of its experts, and none would be replaced."""
    with open_package(packed()) as package:
        with pytest.raises(LinkError, match=f"arena of {(TOP_K - 1) * RECORD} bytes has no room") as caught:
            Session(package, arena_bytes=(TOP_K - 1) * RECORD, mode="stall-free")
        assert caught.value.hint == f"the smallest arena to decode in is {TOP_K * RECORD} bytes"
        with Session(package, threads=1, arena_bytes=TOP_K * RECORD, mode="stall-free") as session:
            assert len(list(session.generate(PROMPT, 4))) == 4


def test_sparsemixer_is_refused(packed_family: FamilyFactory) -> None:
    for share in (None, 0.5):
        with open_package(packed_family("phimoe")) as package, pytest.raises(LinkError, match="sparsemixer"):
            Session(package, mode="stall-free", substitute_share=share)


class Held(FaultySource):
    """Reads of experts stop while it is closed."""

    def __init__(self, data: bytes):
        super().__init__(data, self._wait)
        self.open = threading.Event()
        self.open.set()
        self.experts: set[int] = set()

    def _wait(self, call: int, offset: int, length: int) -> None:
        assert offset not in self.experts or self.open.wait(60)


def test_what_is_there_alone_decides_whatever_reads_do(packed: PackageFactory) -> None:
    """No read ends while ten tokens are decoded; each takes the best of what is ready, so two sessions agree."""
    data, found = packed().read_bytes(), []
    options: Any = {"mode": "stall-free", "substitute_share": 1.0, "group_size": 1, "prefetch_depth": 0}
    for _ in range(2):
        source = Held(data)
        with (
            open_package(source) as package,
            Session(package, threads=1, arena_bytes=12 * RECORD, **options) as session,
        ):
            places = [package.experts.place(layer, each) for layer in range(LAYERS) for each in range(EXPERTS)]
            source.experts = {each.offset for each in places}
            try:
                found.append(while_held(session, source))
            finally:
                source.open.set()
    assert found[0] == found[1]


def while_held(session: Session, source: Held) -> list[list[int]]:
    """Decode ten tokens; what was demanded of each layer."""
    slots, scores = session.interpreter.decoding.slots, dict[int, Any]()
    ready, demand, demanded = slots.ready, slots.demand, list[list[int]]()
    there = set[int]()

    def noting_ready(layer: int) -> set[int]:
        nonlocal there
        there = ready(layer)
        return there

    def noting(layer: int, experts: Sequence[int], later: Sequence[int] = ()) -> None:
        ranked = np.argsort(-scores[layer], kind="stable").tolist()
        chosen, spare = ranked[:TOP_K], [each for each in ranked[TOP_K:] if each in there]
        late = [each for each in chosen if each not in there]
        assert sorted({*chosen}.difference(late).union(spare[: len(late)])) == [*experts]
        assert sorted(later) == sorted(late)
        demanded.append([*experts])
        demand(layer, experts, later)

    context = session.new_context()
    session._next_logits(PROMPT, context.cache)
    slots.ready, slots.demand = noting_ready, noting  # type: ignore[method-assign]
    session.interpreter.on_layer = lambda layer, x, row, ids: scores.update({layer: row[0]})
    before = session.interpreter.pager.stats.bytes_read
    source.open.clear()
    for token in range(10):
        session._next_logits(np.array([20 * token + 3]), context.cache)
    assert session.interpreter.pager.stats.bytes_read == before
    assert session.interpreter.decoding.stats.substituted > 0
    return demanded


def test_without_anything_late_it_is_exact(packed: PackageFactory) -> None:
    """Where all experts are in memory once they were needed, a second pass replaces none."""
    with open_package(packed()) as package:
        with Session(package, threads=1, arena_bytes=1 << 40) as session:
            expected = list(session.generate(PROMPT, 20))
        with Session(package, threads=1, arena_bytes=1 << 40, mode="stall-free", substitute_share=1.0) as session:
            session.forward(token_ids("all of them", 200))
            run = session.generate(PROMPT, 20)
            assert list(run) == expected
    assert run.stats.decoding is not None
    assert run.stats.decoding.substituted == 0


def test_what_is_replaced_is_counted(packed: PackageFactory) -> None:
    with (
        open_package(packed()) as package,
        Session(package, threads=1, arena_bytes=12 * RECORD, mode="stall-free", substitute_share=1.0) as session,
    ):
        run = session.generate(PROMPT, 30)
        assert len(list(run)) == 30
        stats = run.stats.decoding
    assert stats is not None
    assert stats.demanded == 29 * LAYERS * TOP_K
    assert 0 < stats.substituted < stats.demanded
    assert 0 < stats.lost_share < stats.layers


def test_an_expert_above_the_share_is_waited_for(packed: PackageFactory) -> None:
    """With a share that none is below, the mode is exact."""
    with open_package(packed()) as package:
        texts = []
        for options in ({}, {"mode": "stall-free", "substitute_share": 1e-9}):
            with Session(package, threads=1, arena_bytes=9 * RECORD, **options) as session:  # type: ignore[arg-type]
                run = session.generate(PROMPT, 20)
                texts.append(list(run))
                assert run.stats.decoding is not None
                assert run.stats.decoding.substituted == 0
    assert texts[0] == texts[1]
