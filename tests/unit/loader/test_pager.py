"""Paging: whatever the program, whoever asked before, and whatever failed, a bank holds the bytes of the file."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from estream_loader import Package, open_package
from estream_loader.pager import Binding, Pager
from estream_loader.reading import Reader
from estream_spec.constants import SectionType
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.schedule import BankState, Phase, Policy
from fixtures.packages import MODEL, Draft
from fixtures.paging import divided_pager
from fixtures.seven import (
    EXPERTS,
    GROUP_SIZES,
    LANES,
    PACKAGE,
    RECORD,
    SHAPE,
    SOME,
    STORED,
    bank_of,
    carry_out,
    compiled,
    gated,
    poison,
    use,
)
from fixtures.sources import CountingSource, FaultySource, GatedSource, fails_at

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

BANKS = st.integers(1, 14)
Step = tuple[int, set[int]]
STEPS = st.lists(st.tuples(st.integers(0, 1), SOME), max_size=12)


@given(banks=BANKS, group_size=GROUP_SIZES, lanes=LANES, steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_banks_hold_what_the_file_holds(banks: int, group_size: int, lanes: int, steps: list[Step]) -> None:
    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=banks, group_size=group_size, lanes=lanes) as pager,
    ):
        assert pager.arena.length == banks * group_size * RECORD
        poison(pager)
        for layer, experts in steps:
            use(pager, layer, sorted(experts))


@given(
    depth=st.integers(0, 14),
    group_size=GROUP_SIZES,
    lanes=LANES,
    runs=st.lists(st.tuples(st.sampled_from([*Policy][:3]), SOME, SOME), max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_programs_find_what_the_file_holds(
    depth: int, group_size: int, lanes: int, runs: list[tuple[Policy, set[int], set[int]]]
) -> None:
    """Programs of different policies one after the other, whatever is routed where."""
    banks = min(depth + 1, sum(SHAPE.group_counts(group_size)))
    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=banks, group_size=group_size, lanes=lanes) as pager,
    ):
        poison(pager)
        for policy, *routing in runs:
            carry_out(pager, compiled(group_size, depth, policy), routing)


@given(group_size=GROUP_SIZES, lanes=LANES, runs=st.lists(st.tuples(SOME, SOME), max_size=3))
@settings(max_examples=50, deadline=None)
def test_resident_programs_read_once(group_size: int, lanes: int, runs: list[tuple[set[int], set[int]]]) -> None:
    banks = sum(SHAPE.group_counts(group_size))
    load, prefill = (compiled(group_size, banks - 1, Policy.RESIDENT, phase) for phase in (Phase.LOAD, Phase.PREFILL))
    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=banks, group_size=group_size, lanes=lanes) as pager,
    ):
        poison(pager)
        assert not pager.full
        carry_out(pager, load, [])
        for routing in runs:
            carry_out(pager, prefill, routing)
        assert pager.stats.bytes_read == 2 * EXPERTS * RECORD
        pager.settle()
        carry_out(pager, load, [])
        assert pager.stats.bytes_read == 2 * EXPERTS * RECORD


def test_a_read_whose_submitter_was_interrupted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, gate = Reader.submit, GatedSource(PACKAGE)

    def interrupted(*arguments: Any) -> None:
        submit(*arguments)
        raise KeyboardInterrupt

    with gated(gate) as package, divided_pager(package, bank_count=1, group_size=1, lanes=1) as pager:
        with monkeypatch.context() as patched:
            patched.setattr(Reader, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pager.fill(0, 0, 0)
        gate.arrived(1)
        settling = threading.Thread(target=pager.settle)
        settling.start()
        settling.join(0.05)
        assert settling.is_alive()  # the lane may still write into the bank
        gate.let_all()
        settling.join()
        use(pager, 1, [3])


@given(banks=BANKS, group_size=GROUP_SIZES, steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_reads_are_those_of_a_simple_model(banks: int, group_size: int, steps: list[Step]) -> None:
    """A dict from bank to group and experts predicts which records are read, and which are not read again."""
    with open_package(PACKAGE) as package, divided_pager(package, bank_count=banks, group_size=group_size) as pager:
        model: dict[int, tuple[tuple[int, int], set[int]]] = {}
        expected = 0
        for layer, experts in steps:
            for group in sorted({expert // group_size for expert in experts}):
                number = bank_of(pager, layer, group)
                if number not in model or model[number][0] != (layer, group):
                    model[number] = (layer, group), set()
                wanted = {expert for expert in experts if expert // group_size == group}
                expected += len(wanted - model[number][1])
                model[number][1].update(wanted)
            use(pager, layer, sorted(experts))
            assert pager.stats.bytes_read == expected * RECORD
        assert pager.stats.reads <= expected


def test_everything_resident_is_read_once() -> None:
    with open_package(PACKAGE) as package, divided_pager(package, bank_count=2 * EXPERTS, group_size=1) as pager:
        for _ in range(3):
            for layer in range(2):
                use(pager, layer, list(range(EXPERTS)))
        assert pager.stats.bytes_read == 2 * EXPERTS * RECORD


def test_adjacent_experts_come_in_one_read() -> None:
    source = CountingSource(PACKAGE)
    with open_package(source) as package, divided_pager(package, bank_count=1, group_size=EXPERTS, lanes=1) as pager:
        first = package.experts.place(0, 0).offset
        source.reads.clear()
        use(pager, 0, [0, 1, 2, 4, 6])
        assert source.reads == [(first, 3 * RECORD), (first + 4 * RECORD, RECORD), (first + 6 * RECORD, RECORD)]
        assert pager.stats.reads == 3


def test_before_routing_a_group_is_read_whole_and_afterwards_only_what_is_wanted() -> None:
    with open_package(PACKAGE) as package, divided_pager(package, bank_count=2, group_size=4) as pager:
        pager.fill(0, 0, 0)
        pager.await_(0, 0, 0)
        assert pager.arena.banks[0].loaded == {0, 1, 2, 3}
        pager.route(0, [2, 5])
        pager.fill(0, 1, 1)
        pager.await_(0, 1, 1)
        assert pager.arena.banks[1].loaded == {5}
        assert (pager.wanted(0, 0), pager.wanted(0, 1), pager.wanted(1, 1)) == ([2], [5], range(4, 7))


class TestSkipping:
    """One lane waits at a gate with expert 0, so that nothing behind it has begun."""

    def test_reads_that_have_not_begun_are_dropped_for_groups_without_tokens(self) -> None:
        gate = GatedSource(PACKAGE)
        with gated(gate) as package:
            starts = [package.experts.place(0, expert).offset for expert in range(4)]
            with divided_pager(package, bank_count=4, group_size=1, lanes=1) as pager:
                for group in range(4):
                    pager.fill(0, group, group)
                assert gate.arrived(1) == {starts[0]}
                pager.route(0, [2])
                states = [bank.state.value for bank in pager.arena.banks]
                assert states == ["filling", "available", "filling", "available"]
                gate.let_all()
                for group in range(4):
                    pager.await_(0, group, group)
                states = [bank.state.value for bank in pager.arena.banks]
                assert states == ["available", "available", "ready", "available"]
                assert pager.record(pager.use(2), 2) == STORED[0, 2]
                assert [pager.use(group).bank.state.value for group in (0, 1, 3)] == ["available"] * 3
                for group in range(4):
                    pager.release(group)
                assert pager.stats.reads == 2
            assert [offset for offset, _ in gate.reads] == [starts[0], starts[2]]

    def test_groups_of_other_layers_are_not(self) -> None:
        gate = GatedSource(PACKAGE)
        with gated(gate) as package, divided_pager(package, bank_count=2, group_size=1, lanes=1) as pager:
            pager.fill(0, 0, 0)
            pager.fill(1, 5, 1)
            gate.arrived(1)
            pager.route(0, [0])
            gate.let_all()
            pager.await_(1, 5, 1)
            assert pager.record(pager.use(1), 5) == STORED[1, 5]
            pager.await_(0, 0, 0)

    def test_an_idle_group_whose_read_has_begun_may_fail(self) -> None:
        with open_package(damaged()) as package, divided_pager(package, bank_count=1, group_size=2) as pager:
            pager.fill(1, 1, 0)
            pager.route(1, [4])
            pager.await_(1, 1, 0)
            assert pager.arena.banks[0].state is BankState.AVAILABLE
            pager.fill(1, 2, 0)
            pager.await_(1, 2, 0)
            assert pager.record(pager.use(0), 4) == STORED[1, 4]

    def test_a_group_that_was_awaited_before_routing_left_it_idle(self) -> None:
        with open_package(PACKAGE) as package, divided_pager(package, bank_count=1, group_size=2) as pager:
            pager.fill(0, 0, 0)
            pager.await_(0, 0, 0)
            pager.route(0, [3])
            pager.use(0)
            pager.release(0)
            assert pager.arena.banks[0].state is BankState.AVAILABLE


def test_bank_in_use_is_not_taken() -> None:
    with open_package(PACKAGE) as package, divided_pager(package, bank_count=1, group_size=1) as pager:
        pager.fill(0, 0, 0)
        with pytest.raises(AssertionError):
            pager.fill(0, 1, 0)
        pager.await_(0, 0, 0)
        with pytest.raises(AssertionError):
            pager.fill(0, 1, 0)
        bound = pager.use(0)
        with pytest.raises(AssertionError):
            pager.fill(0, 1, 0)
        assert pager.record(bound, 0) == STORED[0, 0]
        pager.release(0)
        use(pager, 0, [1])


def test_what_was_not_awaited_is_not_given_out() -> None:
    with open_package(PACKAGE) as package, divided_pager(package, bank_count=1, group_size=2) as pager:
        pager.route(0, [0])
        pager.fill(0, 0, 0)
        with pytest.raises(AssertionError):
            pager.record(pager.use(0), 0)
        pager.await_(0, 0, 0)
        with pytest.raises(AssertionError):
            pager.record(pager.use(0), 1)


def test_binding_is_void_once_its_bank_takes_another_group() -> None:
    def bound(layer: int) -> Binding:
        pager.fill(layer, 0, 0)
        pager.await_(layer, 0, 0)
        return pager.use(0)

    with open_package(PACKAGE) as package, divided_pager(package, bank_count=1, group_size=1) as pager:
        first = bound(0)
        pager.release(0)
        assert pager.record(bound(0), 0) == pager.record(first, 0) == STORED[0, 0]
        pager.release(0)
        assert pager.record(bound(1), 0) == STORED[1, 0]
        with pytest.raises(AssertionError):
            pager.record(first, 0)


def test_closing_with_reads_under_way() -> None:
    gate = GatedSource(PACKAGE)
    with gated(gate) as package:
        pager = divided_pager(package, bank_count=2, group_size=1, lanes=1)
        pager.fill(0, 0, 0)
        pager.fill(0, 1, 1)
        gate.arrived(1)
        gate.let_all()
        pager.close()
        pager.close()
        pager.settle()
        with pytest.raises(LinkError, match="the pager is closed"):
            pager.fill(1, 0, 0)
        with pytest.raises(LinkError, match="the pager is closed"):
            pager.divide(2, 1)


def damaged() -> bytes:
    """The package with a flipped bit in expert 3 of layer 1."""
    with open_package(PACKAGE) as package:
        position = package.experts.place(1, 3).offset + 7
    return PACKAGE[:position] + bytes([PACKAGE[position] ^ 4]) + PACKAGE[position + 1 :]


class TestFaults:
    @pytest.fixture(params=[(1, 1), (1, 4), (4, 4)], ids="{0[0]} banks of {0[1]}".format)
    def sizes(self, request: pytest.FixtureRequest) -> tuple[int, int]:
        found: tuple[int, int] = request.param
        return found

    def test_damaged_record_is_not_published(self, sizes: tuple[int, int]) -> None:
        banks, group_size = sizes
        with (
            open_package(damaged()) as package,
            divided_pager(package, bank_count=banks, group_size=group_size) as pager,
        ):
            use(pager, 0, list(range(EXPERTS)))
            group = 3 // group_size
            for _ in range(2):
                with pytest.raises(IntegrityError, match="record has checksum") as caught:
                    use(pager, 1, [3])
                assert (caught.value.rule, caught.value.path) == ("EMOE-REC-001", "experts[1][3]")
                pager.settle()
                assert all(bank.state is BankState.AVAILABLE for bank in pager.arena.banks)
                assert not any(bank.group == (1, group) and 3 in bank.loaded for bank in pager.arena.banks)
            use(pager, 1, [0, 1, 2, 4, 5, 6])
            use(pager, 0, list(range(EXPERTS)))

    def test_read_before_routing_it_harms_only_who_wants_it(self) -> None:
        with open_package(damaged()) as package, divided_pager(package, bank_count=2, group_size=4) as pager:
            pager.fill(1, 0, 0)
            pager.route(1, [0, 2])
            pager.await_(1, 0, 0)
            assert [pager.record(pager.use(0), expert) for expert in (0, 2)] == [STORED[1, 0], STORED[1, 2]]
            assert 3 not in pager.arena.banks[0].loaded
            pager.begin()
            pager.fill(1, 0, 0)
            pager.route(1, [2, 3])
            with pytest.raises(IntegrityError, match="record has checksum"):
                pager.await_(1, 0, 0)

    def test_policy_open_does_not_look(self) -> None:
        with (
            open_package(damaged(), integrity="open") as package,
            divided_pager(package, bank_count=1, group_size=1) as pager,
        ):
            pager.fill(1, 3, 0)
            pager.await_(1, 3, 0)
            assert pager.record(pager.use(0), 3) != STORED[1, 3]

    def test_device_that_fails_once(self, sizes: tuple[int, int]) -> None:
        banks, group_size = sizes
        broken = True

        def fault(call: int, offset: int, length: int) -> int | None:
            return fails_at(place.offset + 100)(call, offset, length) if broken else None

        with open_package(PACKAGE) as package:
            place = package.experts.place(0, 2)
        with (
            open_package(FaultySource(PACKAGE, fault)) as package,
            divided_pager(package, bank_count=banks, group_size=group_size) as pager,
        ):
            poison(pager)
            with pytest.raises(LinkError, match="Input/output error"):
                use(pager, 0, [2])
            broken = False
            use(pager, 0, list(range(EXPERTS)))

    def test_interruption_by_the_user_leaves_the_bank_free(self) -> None:
        interrupts = iter([KeyboardInterrupt])

        def fault(call: int, offset: int, length: int) -> int | None:
            if length == RECORD and (kind := next(interrupts, None)):
                raise kind
            return None

        with (
            open_package(FaultySource(PACKAGE, fault)) as package,
            divided_pager(package, bank_count=1, group_size=1) as pager,
        ):
            with pytest.raises(KeyboardInterrupt):
                use(pager, 0, [0])
            use(pager, 0, [0])

    def test_short_and_interrupted_reads(self, sizes: tuple[int, int]) -> None:
        banks, group_size = sizes

        def fault(call: int, offset: int, length: int) -> int:
            if call % 3 == 0:
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            return 1000

        with (
            open_package(FaultySource(PACKAGE, fault)) as package,
            divided_pager(package, bank_count=banks, group_size=group_size) as pager,
        ):
            poison(pager)
            for layer in range(2):
                use(pager, layer, list(range(EXPERTS)))


def test_layers_of_different_sizes() -> None:
    """Slots have room for the largest record; smaller ones lie close together within theirs."""
    block = MODEL.expert_blocks[0]
    model = replace(
        MODEL,
        layers=(replace(MODEL.layers[0], experts=0), replace(MODEL.layers[1], experts=1)),
        expert_blocks=(block, replace(block, experts=5, intermediate=128)),
    )
    data = with_graphs_of_two_classes(Draft(model=model))
    with open_package(data) as package:
        lengths = [each.record_length for each in package.experts.table.ranges]
        assert lengths[0] < lengths[1]
        for group_size in (1, 2, 3, 8):
            with divided_pager(package, bank_count=2, group_size=group_size) as pager:
                assert pager.arena.length == 2 * group_size * lengths[1]
                for layer in (0, 1, 0, 1):
                    compare_layer(package, pager, layer, data)


def compare_layer(package: Package, pager: Pager, layer: int, data: bytes) -> None:
    for group in range(package.expert_shape.group_counts(pager.group_size)[layer]):
        pager.fill(layer, group, group % 2)
        pager.await_(layer, group, group % 2)
        bound = pager.use(group % 2)
        for expert in pager.wanted(layer, group):
            place = package.experts.place(layer, expert)
            assert pager.record(bound, expert) == data[place.offset : place.offset + place.length]
        pager.release(group % 2)


def with_graphs_of_two_classes(draft: Draft) -> bytes:
    given_graphs = draft.manifest.graphs
    more = [replace(graph, shape_class=1, section=graph.section + 10) for graph in given_graphs[2:4]]
    draft.change_manifest(graphs=(*given_graphs, *more))
    graph = draft.section(SectionType.GRAPH)
    draft.sections += [type(graph)(SectionType.GRAPH, b"graph", id=each.section) for each in more]
    return draft.seal()
