"""Bring expert records from the package into the arena's banks.

Each group has one bank it may be in, the one at its number modulo the number of banks. With a bank for every group the
model is resident; with one bank every group passes through it. Nothing computed depends on how many there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from estream_loader.arena import Arena, Bank, BankState
from estream_loader.package import Package
from estream_loader.source import read_exactly
from estream_spec.errors import LinkError


@dataclass(slots=True)
class PagerStats:
    """What reading has cost so far."""

    bytes_read: int = 0
    reads: int = 0
    io_busy_s: float = 0.0
    """Seconds in which a read was under way."""


class Pager:
    """Experts of one package in one arena.

    Args:
        package: the open package.
        arena_bytes: memory allowed for experts.
        group_size: experts read together; less where the arena holds fewer records.

    Raises:
        LinkError: the arena is smaller than one record.
    """

    def __init__(self, package: Package, *, arena_bytes: int, group_size: int):
        self._package, self._experts = package, package.experts
        ranges = self._experts.table.ranges
        self.record_bytes = max(each.record_length for each in ranges)
        """The largest record: what each slot of a bank has room for."""
        slots = arena_bytes // self.record_bytes
        if slots < 1:
            message = f"an arena of {arena_bytes} bytes holds no expert record"
            raise LinkError(message, hint=f"the smallest arena for this package is {self.record_bytes} bytes")
        self.group_size = min(group_size, slots, max(each.count for each in ranges))
        groups = [-(-each.count // self.group_size) for each in ranges]
        self._first_group = (*accumulate(groups, initial=0),)
        """Number of each layer's first group, counted through the model."""
        bank_count = min(slots // self.group_size, self._first_group[-1])
        self.arena = Arena(bank_count, self.group_size * self.record_bytes)
        self.stats = PagerStats()

    def groups(self, experts: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """Split ascending expert ids by group: (number of the group in its layer, its experts), ascending."""
        split: dict[int, list[int]] = {}
        for expert in experts:
            split.setdefault(expert // self.group_size, []).append(expert)
        yield from split.items()

    def acquire(self, layer: int, group: int, experts: Sequence[int]) -> Bank:
        """A bank that holds the given experts of a group, `IN_USE` until it is released.

        Args:
            layer: the layer.
            group: number of the group in the layer.
            experts: ascending ids of that group's experts that are wanted.

        Raises:
            IntegrityError: a record's checksum differs or its bytes are missing.
            LinkError: the device failed.
        """
        bank = self.arena.banks[(self._first_group[layer] + group) % len(self.arena.banks)]
        bank.move(BankState.FILLING)
        try:
            if bank.group != (layer, group):
                bank.take((layer, group))
            for run in _runs(expert for expert in experts if expert not in bank.loaded):
                self._read(bank, layer, run)
        except BaseException:
            bank.move(BankState.AVAILABLE)
            raise
        bank.move(BankState.READY)
        bank.move(BankState.IN_USE)
        return bank

    def release(self, bank: Bank) -> None:
        """Give a bank back after computing with it."""
        bank.move(BankState.AVAILABLE)

    def record(self, bank: Bank, expert: int) -> memoryview:
        """The bytes of one expert's record in a bank that is in use; no copy."""
        assert bank.state is BankState.IN_USE
        assert bank.group is not None
        assert expert in bank.loaded
        length = self._experts.table.ranges[bank.group[0]].record_length
        start = expert % self.group_size * length
        return bank.memory[start : start + length]

    def _read(self, bank: Bank, layer: int, run: range) -> None:
        """Read adjacent experts in one go, prove each, and only then count them as loaded."""
        places = [self._experts.place(layer, expert) for expert in run]
        length = places[0].length
        start = run.start % self.group_size * length
        landed = bank.memory[start : start + length * len(run)]
        started = time.perf_counter()
        read_exactly(self._package.source, landed, places[0].offset)
        self.stats.io_busy_s += time.perf_counter() - started
        self.stats.bytes_read += len(landed)
        self.stats.reads += 1
        for number, place in enumerate(places):
            self._package.check_record(place, landed[number * length : (number + 1) * length])
        bank.loaded.update(run)


def _runs(experts: Iterable[int]) -> Iterator[range]:
    """Ascending ids as ranges of adjacent ones."""
    run = range(0)
    for expert in experts:
        if run and expert == run.stop:
            run = range(run.start, expert + 1)
            continue
        if run:
            yield run
        run = range(expert, expert + 1)
    if run:
        yield run
