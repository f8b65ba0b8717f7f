"""Paging: whatever the arena, whoever asked before, and whatever failed, a bank holds the bytes of the file."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from estream_loader import Package, open_package
from estream_loader.arena import BankState
from estream_loader.pager import Pager
from estream_spec.constants import SectionType
from estream_spec.errors import IntegrityError, LinkError
from fixtures.packages import MODEL, PAGE_SHIFT, Draft
from fixtures.sources import CountingSource, FaultySource, fails_at

RECORD = 1 << PAGE_SHIFT
EXPERTS = 7
MODEL_OF_SEVEN = replace(MODEL, expert_blocks=(replace(MODEL.expert_blocks[0], experts=EXPERTS),))
PACKAGE = Draft(model=MODEL_OF_SEVEN).seal()


def stored() -> dict[tuple[int, int], bytes]:
    """Every record as it stands in the file, by layer and expert."""
    with open_package(PACKAGE) as package:
        return {
            (layer, expert): PACKAGE[place.offset : place.offset + place.length]
            for layer in range(2)
            for expert in range(EXPERTS)
            for place in [package.experts.place(layer, expert)]
        }


STORED = stored()


def poison(pager: Pager) -> None:
    """Fill every bank with NaN: what was not read afterwards shows."""
    for bank in pager.arena.banks:
        np.frombuffer(bank.memory, np.float32)[:] = np.nan


def use(pager: Pager, layer: int, experts: list[int]) -> None:
    """Page some experts of a layer in and compare each with the file."""
    for group, wanted in pager.groups(experts):
        bank = pager.acquire(layer, group, wanted)
        assert bank.state is BankState.IN_USE
        for expert in wanted:
            assert pager.record(bank, expert) == STORED[layer, expert]
        pager.release(bank)


Step = tuple[int, set[int]]
STEPS = st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, EXPERTS - 1), min_size=1)), max_size=12)


@given(records=st.integers(1, 20), group_size=st.integers(1, 9), steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_banks_hold_what_the_file_holds(records: int, group_size: int, steps: list[Step]) -> None:
    with open_package(PACKAGE) as package:
        pager = Pager(package, arena_bytes=records * RECORD, group_size=group_size)
        assert pager.arena.length <= records * RECORD
        poison(pager)
        for layer, experts in steps:
            use(pager, layer, sorted(experts))


@given(records=st.integers(1, 20), group_size=st.integers(1, 9), steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_reads_are_those_of_a_simple_model(records: int, group_size: int, steps: list[Step]) -> None:
    """A dict from bank to group and experts predicts which records are read, and which are not read again."""
    source = CountingSource(PACKAGE)
    with open_package(source) as package:
        pager = Pager(package, arena_bytes=records * RECORD, group_size=group_size)
        per_layer = -(-EXPERTS // pager.group_size)
        model: dict[int, tuple[tuple[int, int], set[int]]] = {}
        expected = 0
        for layer, experts in steps:
            source.reads.clear()
            for group, wanted in pager.groups(sorted(experts)):
                slot = (layer * per_layer + group) % len(pager.arena.banks)
                if slot not in model or model[slot][0] != (layer, group):
                    model[slot] = (layer, group), set()
                expected += len(set(wanted) - model[slot][1])
                model[slot][1].update(wanted)
                pager.release(pager.acquire(layer, group, wanted))
            assert pager.stats.bytes_read == expected * RECORD
        assert pager.stats.reads <= expected


def test_everything_resident_is_read_once() -> None:
    with open_package(PACKAGE) as package:
        pager = Pager(package, arena_bytes=2 * EXPERTS * RECORD, group_size=1)
        for _ in range(3):
            for layer in range(2):
                use(pager, layer, list(range(EXPERTS)))
        assert pager.stats.bytes_read == 2 * EXPERTS * RECORD


def test_adjacent_experts_come_in_one_read() -> None:
    source = CountingSource(PACKAGE)
    with open_package(source) as package:
        pager = Pager(package, arena_bytes=EXPERTS * RECORD, group_size=EXPERTS)
        first = package.experts.place(0, 0).offset
        source.reads.clear()
        use(pager, 0, [0, 1, 2, 4, 6])
    assert source.reads == [(first, 3 * RECORD), (first + 4 * RECORD, RECORD), (first + 6 * RECORD, RECORD)]
    assert pager.stats.reads == 3


@pytest.mark.parametrize("arena_bytes", [0, 1, RECORD - 1, -RECORD])
def test_arena_below_one_record(arena_bytes: int) -> None:
    with open_package(PACKAGE) as package, pytest.raises(LinkError) as caught:
        Pager(package, arena_bytes=arena_bytes, group_size=1)
    assert caught.value.hint == f"the smallest arena for this package is {RECORD} bytes"


@pytest.mark.parametrize(
    ("records", "group_size", "expected"),
    [(1, 4, (1, 1)), (3, 4, (3, 1)), (8, 4, (4, 2)), (9, 4, (4, 2)), (99, 4, (4, 4)), (99, 99, (7, 2)), (5, 1, (1, 5))],
)
def test_what_an_arena_is_divided_into(records: int, group_size: int, expected: tuple[int, int]) -> None:
    with open_package(PACKAGE) as package:
        pager = Pager(package, arena_bytes=records * RECORD, group_size=group_size)
    assert (pager.group_size, len(pager.arena.banks)) == expected


def test_bank_in_use_is_not_taken() -> None:
    with open_package(PACKAGE) as package:
        pager = Pager(package, arena_bytes=RECORD, group_size=1)
        bank = pager.acquire(0, 0, [0])
        with pytest.raises(AssertionError):
            pager.acquire(0, 1, [1])
        assert pager.record(bank, 0) == STORED[0, 0]
        pager.release(bank)
        use(pager, 0, [1])


def test_epoch_tells_when_a_bank_takes_another_group() -> None:
    with open_package(PACKAGE) as package:
        pager = Pager(package, arena_bytes=RECORD, group_size=1)
        epochs = []
        for layer, expert in [(0, 0), (0, 0), (0, 1), (1, 1), (0, 0)]:
            bank = pager.acquire(layer, expert, [expert])
            epochs.append(bank.epoch)
            pager.release(bank)
    assert epochs == [1, 1, 2, 3, 4]


def damaged() -> bytes:
    """The package with a flipped bit in expert 3 of layer 1."""
    with open_package(PACKAGE) as package:
        position = package.experts.place(1, 3).offset + 7
    return PACKAGE[:position] + bytes([PACKAGE[position] ^ 4]) + PACKAGE[position + 1 :]


class TestFaults:
    @pytest.fixture(params=[1, 4, 14], ids="{} records".format)
    def arena_bytes(self, request: pytest.FixtureRequest) -> int:
        return int(request.param) * RECORD

    def test_damaged_record_is_not_published(self, arena_bytes: int) -> None:
        with open_package(damaged()) as package:
            pager = Pager(package, arena_bytes=arena_bytes, group_size=4)
            use(pager, 0, list(range(EXPERTS)))
            group = 3 // pager.group_size
            for _ in range(2):
                with pytest.raises(IntegrityError, match="record has checksum") as caught:
                    pager.acquire(1, group, [3])
                assert (caught.value.rule, caught.value.path) == ("EMOE-REC-001", "experts[1][3]")
                assert all(bank.state is BankState.AVAILABLE for bank in pager.arena.banks)
                assert not any(bank.group == (1, group) and 3 in bank.loaded for bank in pager.arena.banks)
            use(pager, 1, [0, 1, 2, 4, 5, 6])
            use(pager, 0, list(range(EXPERTS)))

    def test_policy_open_does_not_look(self) -> None:
        with open_package(damaged(), integrity="open") as package:
            pager = Pager(package, arena_bytes=RECORD, group_size=1)
            bank = pager.acquire(1, 3, [3])
            assert pager.record(bank, 3) != STORED[1, 3]

    def test_device_that_fails_once(self, arena_bytes: int) -> None:
        broken = True

        def fault(call: int, offset: int, length: int) -> int | None:
            return fails_at(place.offset + 100)(call, offset, length) if broken else None

        with open_package(PACKAGE) as package:
            place = package.experts.place(0, 2)
        with open_package(FaultySource(PACKAGE, fault)) as package:
            pager = Pager(package, arena_bytes=arena_bytes, group_size=4)
            poison(pager)
            with pytest.raises(LinkError, match="Input/output error"):
                pager.acquire(0, 2 // pager.group_size, [2])
            broken = False
            use(pager, 0, list(range(EXPERTS)))

    def test_interruption_by_the_user_leaves_the_bank_free(self) -> None:
        interrupts = iter([KeyboardInterrupt])

        def fault(call: int, offset: int, length: int) -> int | None:
            if length == RECORD and (kind := next(interrupts, None)):
                raise kind
            return None

        with open_package(FaultySource(PACKAGE, fault)) as package:
            pager = Pager(package, arena_bytes=RECORD, group_size=1)
            with pytest.raises(KeyboardInterrupt):
                pager.acquire(0, 0, [0])
            use(pager, 0, [0])

    def test_short_and_interrupted_reads(self, arena_bytes: int) -> None:
        def fault(call: int, offset: int, length: int) -> int:
            if call % 3 == 0:
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            return 1000

        with open_package(FaultySource(PACKAGE, fault)) as package:
            pager = Pager(package, arena_bytes=arena_bytes, group_size=4)
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
        for pager in pagers(package, lengths[1]):
            for layer in (0, 1, 0, 1):
                for group, wanted in pager.groups(range(package.experts.table.ranges[layer].count)):
                    bank = pager.acquire(layer, group, wanted)
                    for expert in wanted:
                        place = package.experts.place(layer, expert)
                        assert pager.record(bank, expert) == data[place.offset : place.offset + place.length]
                    pager.release(bank)


def pagers(package: Package, record: int) -> Iterator[Pager]:
    for records in (1, 2, 3, 5, 8, 16):
        for group_size in (1, 2, 3, 8):
            yield Pager(package, arena_bytes=records * record, group_size=group_size)


def with_graphs_of_two_classes(draft: Draft) -> bytes:
    given_graphs = draft.manifest.graphs
    more = [replace(graph, shape_class=1, section=graph.section + 10) for graph in given_graphs[2:4]]
    draft.change_manifest(graphs=(*given_graphs, *more))
    graph = draft.section(SectionType.GRAPH)
    draft.sections += [type(graph)(SectionType.GRAPH, b"graph", id=each.section) for each in more]
    return draft.seal()
