"""An arena that is divided anew: what has a place in the new banks, or behind them, is not read again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_loader import open_package
from estream_loader.arena import Arena
from estream_spec.schedule import Phase, Policy
from fixtures.paging import divided_pager
from fixtures.seven import (
    EXPERTS,
    GROUP_SIZES,
    LANES,
    PACKAGE,
    RECORD,
    SHAPE,
    SOME,
    carry_out,
    compiled,
    gated,
    poison,
    use,
)
from fixtures.sources import GatedSource

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@given(
    lanes=LANES,
    runs=st.lists(st.tuples(st.integers(0, 14), GROUP_SIZES, st.sampled_from(Policy), SOME, SOME), max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_an_arena_is_divided_anew(lanes: int, runs: list[tuple[int, int, Policy, set[int], set[int]]]) -> None:
    """Programs of any sizes and policies one after the other in one arena, that of the largest."""
    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=1, group_size=1, lanes=lanes, arena_bytes=15 * EXPERTS * RECORD) as pager,
    ):
        poison(pager)
        for depth, group_size, policy, *routing in runs:
            resident = policy == Policy.RESIDENT
            program = compiled(group_size, sum(SHAPE.group_counts(group_size)) if resident else depth, policy)
            pager.divide(program.bank_count, group_size)
            if resident and not pager.full:
                load = compiled(group_size, program.prefetch_depth, policy, Phase.LOAD)
                carry_out(pager, load, [])
            carry_out(pager, program, routing)
        assert pager.arena.length == 15 * EXPERTS * RECORD


def test_dividing_forgets_only_what_has_no_place() -> None:
    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=2, group_size=2, arena_bytes=8 * RECORD) as pager,
    ):
        use(pager, 0, [0, 1, 2, 3])
        epochs = [bank.epoch for bank in pager.arena.banks]
        pager.divide(2, 2)
        use(pager, 0, [0, 1, 2, 3])
        pager.divide(2, 4)  # both groups are the first of this size
        assert min(bank.epoch for bank in pager.arena.banks) > max(epochs)
        use(pager, 0, [0, 1, 2, 3])
        assert pager.stats.bytes_read == 4 * RECORD
        pager.divide(1, 2)
        use(pager, 0, [5])
        assert pager.stats.bytes_read == 5 * RECORD
        pager.divide(1, 4)  # expert 5 lies in the second slot, where the second group of four has it, and 4 does not
        assert pager.arena.banks[0].loaded == {5}
        pager.divide(1, 3)  # and the second group of three has it in the third
        assert pager.arena.banks[0].loaded == set()
        use(pager, 0, [2, 5])
        assert pager.stats.bytes_read == 7 * RECORD


def test_what_lies_behind_the_banks_is_not_read() -> None:
    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=8, group_size=1, arena_bytes=8 * RECORD) as pager,
    ):
        use(pager, 0, range(EXPERTS))
        pager.divide(1, 2)
        assert set(pager.beyond) == {(0, expert) for expert in range(2, EXPERTS)}
        use(pager, 0, range(EXPERTS))
        assert pager.stats.bytes_read == EXPERTS * RECORD
        use(pager, 1, [0])
        pager.put_beyond((1, 0), pager.arena.banks[0].memory[:RECORD], 3)
        assert set(pager.beyond) == {(1, 0), *((0, expert) for expert in (2, 4, 5, 6))}
        use(pager, 1, [0])
        use(pager, 0, [3, 4])
        assert pager.stats.bytes_read == (EXPERTS + 2) * RECORD


def test_dividing_waits_for_what_is_on_its_way() -> None:
    gate = GatedSource(PACKAGE)
    with gated(gate) as package:
        offset = package.experts.place(0, 0).offset
        with divided_pager(package, bank_count=3, group_size=1, lanes=1) as pager:
            for group in range(3):
                pager.fill(0, group, group)
            assert gate.arrived(1) == {offset}
            gate.let_all()
            pager.divide(1, 3)
            assert [each for each, _ in gate.reads] == [offset]
            use(pager, 1, [1, 2])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("banks", "others"), [(2, 6), (6, 2)])
def test_an_interrupted_division_is_done_anew(
    late: bool, banks: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide = Arena.divide

    def interrupted(arena: Arena, bank_count: int, bank_bytes: int) -> None:
        if late:
            divide(arena, bank_count, bank_bytes)
        raise KeyboardInterrupt

    with (
        open_package(PACKAGE) as package,
        divided_pager(package, bank_count=banks, group_size=1, arena_bytes=6 * RECORD) as pager,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Arena, "divide", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pager.divide(others, 1)
        pager.divide(others, 1)
        for expert in range(EXPERTS):
            use(pager, 1, [expert])
