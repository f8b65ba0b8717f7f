"""Banks go round in one way only."""

from __future__ import annotations

from itertools import product

import pytest

from estream_loader.arena import Arena, Stay
from estream_spec.errors import LinkError
from estream_spec.schedule import BankState

ROUND = [BankState.FILLING, BankState.READY, BankState.IN_USE, BankState.AVAILABLE]
WAYS = {
    BankState.AVAILABLE: [],
    BankState.FILLING: ROUND[:1],
    BankState.READY: ROUND[:2],
    BankState.IN_USE: ROUND[:3],
}
ALLOWED = {
    *zip([BankState.AVAILABLE, *ROUND[:3]], ROUND, strict=True),
    (BankState.FILLING, BankState.AVAILABLE),
    (BankState.READY, BankState.AVAILABLE),
    (BankState.IN_USE, BankState.READY),
}


def divided(bank_count: int, bank_bytes: int) -> Arena:
    arena = Arena(bank_count * bank_bytes)
    arena.divide(bank_count, bank_bytes)
    return arena


@pytest.mark.parametrize(("start", "end"), list(product(BankState, BankState)))
def test_states(start: BankState, end: BankState) -> None:
    [bank] = divided(1, 4096).banks
    for state in WAYS[start]:
        bank.move(state)
    if (start, end) in ALLOWED:
        bank.move(end)
        assert bank.state is end
    else:
        with pytest.raises(AssertionError, match=r"bank 0 from .* to"):
            bank.move(end)


def test_banks_are_apart_and_aligned() -> None:
    arena = divided(3, 8192)
    assert arena.length == 3 * 8192
    for bank in arena.banks:
        bank.memory[:] = bytes([bank.index + 1]) * 8192
    assert [set(bank.memory) for bank in arena.banks] == [{1}, {2}, {3}]


def test_taking_another_group_voids_earlier_bindings() -> None:
    [bank] = divided(1, 4096).banks
    assert (bank.group, bank.epoch) == (None, 0)
    bank.take((0, 1))
    bank.loaded.add(4)
    bank.take((1, 0))
    assert (bank.group, bank.epoch, bank.loaded) == ((1, 0), 2, set())


def test_dividing_anew_forgets_what_was_held_and_voids_earlier_bindings() -> None:
    arena = Arena(4 * 4096)
    arena.divide(4, 4096)
    for bank in arena.banks:
        bank.take((0, bank.index))
        bank.take((1, bank.index))
        bank.memory[:] = b"x" * 4096
    arena.divide(1, 3 * 4096)
    [bank] = arena.banks
    assert (bank.index, bank.group, bank.loaded, bank.state) == (0, None, set(), BankState.AVAILABLE)
    assert (bank.epoch, len(bank.memory), bytes(bank.memory[-1:])) == (3, 3 * 4096, b"x")
    assert arena.length == 4 * 4096


def test_banks_of_a_new_division_are_watched_as_those_before() -> None:
    arena, stays = Arena(2 * 4096), list[Stay]()
    arena.divide(2, 4096)
    arena.watch(stays.append)
    arena.divide(1, 4096)
    arena.banks[0].move(BankState.FILLING)
    arena.banks[0].move(BankState.AVAILABLE)
    found = [(each.bank, each.state) for each in stays]
    assert found == [
        (0, BankState.AVAILABLE),
        (1, BankState.AVAILABLE),
        (0, BankState.AVAILABLE),
        (0, BankState.FILLING),
    ]
    arena.watch(None)
    arena.divide(2, 4096)
    arena.banks[0].move(BankState.FILLING)
    assert len(stays) == len(found) + 1


def test_only_what_is_free_is_divided_and_only_as_far_as_there_is_room() -> None:
    arena = divided(2, 4096)
    with pytest.raises(AssertionError):
        arena.divide(3, 4096)
    arena.banks[1].move(BankState.FILLING)
    with pytest.raises(AssertionError):
        arena.divide(1, 4096)


@pytest.mark.parametrize("length", [1 << 62, 1 << 64, 0])
def test_memory_that_cannot_be_had(length: int) -> None:
    with pytest.raises(LinkError, match=f"cannot allocate an arena of {length} bytes"):
        Arena(length)
