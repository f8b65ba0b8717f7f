"""Bring groups of experts from the package into the arena's banks while something else computes.

The pager does what the instructions about banks say: FILL, AWAIT, RELEASE, and what becomes of reads once a layer is
routed. SCHEDULE.md section 3. What a bank holds of a group already is not read again, so an arena with a bank for every
group reads each record once.

The arena is an array of slots, each of the longest record's length, and a bank is some slots in a row. Where all
records are of one length, dividing the arena anew forgets nothing that still has a place; records in slots behind the
banks stay there, and a program finds them there instead of reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from estream_loader.arena import Arena, Bank, Stay
from estream_loader.memory import ArenaKind
from estream_loader.package import Package
from estream_loader.reading import Read, Reader, ReadingStats, ReadState, Span
from estream_spec.errors import EmoeError, LinkError
from estream_spec.manifest import LANES
from estream_spec.schedule import BankState


@dataclass(frozen=True, slots=True)
class _Reading:
    """Adjacent experts on their way into a bank."""

    experts: range
    read: Read


Record = tuple[int, int]
"""An expert's record: layer and expert."""


class Binding(NamedTuple):
    """A bank to compute with, and its epoch then: void once the bank takes another group."""

    bank: Bank
    epoch: int


class Pager:
    """Experts of one package in one arena, without a bank until `divide` is called.

    Use it as a context manager; for one thread.

    Args:
        package: the open package.
        arena_bytes: memory for experts, as much as any division will need.
        lanes: reads outstanding at a time.
        arena_kind: what kind of memory that is.

    Attributes:
        shape: experts of each layer, and their records.
        arena: the memory.
        lanes: reads outstanding at a time.
        group_size: experts in a group.
        uses: how often a program has begun, or all banks were given up: what banks hold may be other than before.

    Raises:
        LinkError: the memory or the threads cannot be had.
    """

    def __init__(self, package: Package, *, arena_bytes: int, lanes: int = LANES, arena_kind: ArenaKind = "ordinary"):
        self._experts, self.shape, self.lanes = package.experts, package.expert_shape, lanes
        self.arena = Arena(arena_bytes, arena_kind)
        self.group_size = self.uses = 0
        self._closed = False
        self._wanted: dict[int, dict[int, list[int]]] = {}
        """Of each layer that is routed: its groups with tokens, and their experts that have any."""
        self._readings: list[list[_Reading]] = []
        """Of each bank: what is on its way there, until someone has waited for it."""
        self._filling: dict[int, Bank] = {}
        """Banks that are being filled, by number."""
        self._beyond: dict[Record, int] = {}
        """Slots of records that lie behind the banks."""
        lengths = {each.record_length for each in self._experts.table.ranges if each.count}
        self._slot_bytes = lengths.pop() if len(lengths) == 1 else None
        """Length of every record; None where they differ, and then slots are not told apart."""
        self._dropped = 0
        self._on_piece: Callable[[Span], None] | None = None
        check = None if package.integrity == "open" else package.check_record
        try:
            self._reader = Reader(package.source, lanes, check=check, on_piece=self._tell)
        except BaseException:
            self.arena.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all reading, then give the arena back; closing twice is harmless."""
        self._closed = True
        self._reader.close()
        self._filling.clear()
        self.arena.close()

    @property
    def stats(self) -> ReadingStats:
        """What reading has cost so far, reads that were dropped before they began left out."""
        stats = self._reader.stats
        return replace(stats, reads=stats.reads - self._dropped)

    @property
    def mode(self) -> str:
        """Whether the page cache is bypassed, see `Reader.mode`."""
        return self._reader.mode

    @property
    def full(self) -> bool:
        """Whether every bank is ready for a resident program."""
        return all(bank.state is BankState.READY for bank in self.arena.banks)

    def watch(self, on_piece: Callable[[Span], None] | None, on_stay: Callable[[Stay], None] | None) -> None:
        """From now on tell of each piece that is read, on its lane, and of each state of a bank when it ends; or stop.

        Args:
            on_piece: told of pieces; None stops that.
            on_stay: told of states; None tells of the present ones and stops that.
        """
        self._on_piece = on_piece
        self.arena.watch(on_stay)

    def divide(self, bank_count: int, group_size: int) -> None:
        """Divide the arena into other banks, all available; nothing happens where it is divided so already.

        What it holds stays, as far as it has a place in a bank of its group or lies behind all banks.

        Args:
            bank_count: banks, for which the arena has room.
            group_size: experts read together; a bank has room for so many of the largest records.

        Raises:
            LinkError: the pager is closed.
        """
        self._check_open()
        if (bank_count, group_size) == (len(self.arena.banks), self.group_size):
            return
        self.settle()
        held = self._held()
        self._wanted.clear()
        self._beyond.clear()
        self.group_size = 0  # until all is done: an interrupt in between must not leave half of it for the whole
        self._readings = [[] for _ in range(max(bank_count, len(self.arena.banks)))]
        self.arena.divide(bank_count, self.shape.bank_bytes(group_size))
        self.group_size = group_size
        for (layer, expert), slot in held.items():
            number, place = divmod(slot, group_size)
            if number >= bank_count:
                self._beyond[layer, expert] = slot
            elif place == expert % group_size:
                bank, group = self.arena.banks[number], (layer, expert // group_size)
                if bank.group is None:
                    bank.take(group)
                if bank.group == group:
                    bank.loaded.add(expert)

    def begin(self, *, resident: bool = False) -> None:
        """A program begins: no layer is routed, and all banks are available, or ready where it is resident."""
        self._wanted.clear()
        self.uses += 1
        if resident:
            assert self.full
        else:
            self.settle()

    def forget_routing(self) -> None:
        """No layer is routed any more, while what banks hold and read goes on: decoding goes on with the next token."""
        self._wanted.clear()

    def route(self, layer: int, experts: Iterable[int]) -> None:
        """A layer is routed. What is on its way to groups of it without tokens is dropped unless it has begun.

        Args:
            layer: the layer.
            experts: ascending ids of its experts that have tokens.
        """
        wanted: dict[int, list[int]] = {}
        for expert in experts:
            wanted.setdefault(expert // self.group_size, []).append(expert)
        self._wanted[layer] = wanted
        for bank in tuple(self._filling.values()):
            assert bank.group is not None
            filling, group = bank.group
            if filling == layer and group not in wanted and not self._drop(bank):
                self._end_filling(bank, BankState.AVAILABLE)

    def wanted(self, layer: int, group: int) -> Sequence[int]:
        """The experts of a group that have tokens, ascending; before its layer is routed, all of them."""
        if layer in self._wanted:
            return self._wanted[layer].get(group, ())
        first = group * self.group_size
        return range(first, min(first + self.group_size, self._experts.table.ranges[layer].count))

    def fill(self, layer: int, group: int, number: int) -> None:
        """Begin to read a group into a bank, as far as it is wanted and not there yet.

        Raises:
            LinkError: the pager is closed.
        """
        if not (wanted := self.wanted(layer, group)):
            return
        self._check_open()
        bank = self.arena.banks[number]
        bank.move(BankState.FILLING)
        self._filling[number] = bank
        if bank.group != (layer, group):
            bank.take((layer, group))
        self._submit(bank, layer, wanted)

    def await_(self, layer: int, group: int, number: int) -> None:
        """Wait until what is wanted of a group is in its bank, whole and proven.

        What fails and turns out not to be wanted does no harm.

        Raises:
            IntegrityError: the checksum of a record differs or its bytes are missing.
            LinkError: the device failed.
        """
        bank, wanted = self.arena.banks[number], self.wanted(layer, group)
        if not wanted:
            if bank.state is BankState.FILLING:  # its read had begun before the layer was routed
                self.abandon(number)
            return
        assert bank.group == (layer, group)
        if error := self._finish(bank):
            # Read together with what is wanted, something else may have failed alone. What is wanted now comes alone.
            if self._concerns(error, layer, wanted):
                raise error
            self._submit(bank, layer, wanted)
            if error := self._finish(bank):
                raise error
        self._end_filling(bank, BankState.READY)

    def arrived(self, number: int) -> bool:
        """Whether nothing is on its way to a bank any more, so that waiting for it would not take time."""
        return all(each.read.is_over for each in self._readings[number])

    def failed(self, number: int) -> bool:
        """Whether something that was on its way to a bank has not come whole, so that waiting for it would raise."""
        return any(each.read.state is ReadState.FAILED for each in self._readings[number])

    def abandon(self, number: int) -> None:
        """Wait for what is on its way to a bank that nobody needs; the bank is available and keeps what has come."""
        bank = self.arena.banks[number]
        self._finish(bank)
        self._end_filling(bank, BankState.AVAILABLE)

    def use(self, number: int) -> Binding:
        """Bind a bank for computing; one whose group was skipped stays as it is."""
        bank = self.arena.banks[number]
        if bank.state is BankState.READY:
            bank.move(BankState.IN_USE)
        return Binding(bank, bank.epoch)

    def record(self, binding: Binding, expert: int) -> memoryview:
        """The bytes of one expert's record in a bank that is in use; no copy."""
        bank, epoch = binding
        assert bank.epoch == epoch
        assert bank.state is BankState.IN_USE
        assert bank.group is not None
        if expert not in bank.loaded:
            slot = self._beyond.get((bank.group[0], expert))
            assert slot is not None
            return self._slot(slot)
        length = self._experts.table.ranges[bank.group[0]].record_length
        start = expert % self.group_size * length
        return bank.memory[start : start + length]

    def release(self, number: int, *, keep: bool = False) -> None:
        """Give a bank back after computing with it; one that is kept stays ready. One that was skipped is free."""
        bank = self.arena.banks[number]
        if bank.state is BankState.IN_USE:
            bank.move(BankState.READY if keep else BankState.AVAILABLE)

    def settle(self) -> None:
        """Give up all banks: reads that have not begun are dropped, the others finish, and every bank is available."""
        self.uses += 1
        busy = [bank for bank in self.arena.banks if bank.state is not BankState.AVAILABLE]
        for bank in reversed(busy):
            self._drop(bank)
        for bank in busy:
            self._finish(bank)
            bank.move(BankState.AVAILABLE)
        self._filling.clear()
        self._reader.drain()

    def forget(self) -> None:
        """Give up all banks and forget what the arena holds, as if nothing had been read yet."""
        self.settle()
        self._beyond.clear()
        for bank in self.arena.banks:
            bank.group, bank.loaded = None, set()

    @property
    def slots(self) -> int:
        """Records that the arena has room for, whatever its banks; 0 where records differ in length."""
        return 0 if self._slot_bytes is None else self.arena.length // self._slot_bytes

    @property
    def beyond(self) -> Mapping[Record, int]:
        """Records that lie behind the banks, by the number of their slot."""
        return self._beyond

    def put_beyond(self, record: Record, data: memoryview, slot: int) -> None:
        """Copy a record to a slot behind the banks; what was there is forgotten."""
        assert slot >= len(self.arena.banks) * self.group_size
        for other in [each for each, at in self._beyond.items() if at == slot or each == record]:
            del self._beyond[other]
        np.copyto(np.frombuffer(self._slot(slot), np.uint8), np.frombuffer(data, np.uint8))
        self._beyond[record] = slot

    def _slot(self, number: int) -> memoryview:
        assert self._slot_bytes is not None
        return self.arena.memory[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def _held(self) -> dict[Record, int]:
        """The slot of every record in the arena, whole and proven; nothing where records differ in length."""
        if self._slot_bytes is None:
            return {}
        found = dict[Record, int]()
        for bank in self.arena.banks:
            if bank.group is not None:
                first, layer = bank.index * self.group_size, bank.group[0]
                found |= {(layer, expert): first + expert % self.group_size for expert in bank.loaded}
        return found | self._beyond

    def _check_open(self) -> None:
        if self._closed:
            raise LinkError("the pager is closed")

    def _tell(self, piece: Span) -> None:
        if (on_piece := self._on_piece) is not None:
            on_piece(piece)

    def _submit(self, bank: Bank, layer: int, experts: Iterable[int]) -> None:
        """Begin to read experts that are not there yet, adjacent ones together."""
        missing = (each for each in experts if each not in bank.loaded and (layer, each) not in self._beyond)
        for run in _runs(missing):
            places = [self._experts.place(layer, expert) for expert in run]
            length = places[0].length
            start = run.start % self.group_size * length
            memory = bank.memory[start : start + length * len(run)]
            self._readings[bank.index].append(_Reading(run, self._reader.submit(places[0].offset, memory, places)))

    def _drop(self, bank: Bank) -> bool:
        """Drop what has not begun of a bank's reads; whether something is left to wait for."""
        readings = self._readings[bank.index]
        for reading in reversed(tuple(readings)):
            if reading.read.cancel():
                readings.remove(reading)
                self._dropped += 1
        return bool(readings)

    def _end_filling(self, bank: Bank, state: BankState) -> None:
        self._filling.pop(bank.index, None)
        bank.move(state)

    def _finish(self, bank: Bank) -> BaseException | None:
        """Wait until nothing is on its way to a bank, and note what has come; the first thing that went wrong."""
        error = None
        readings = self._readings[bank.index]
        while readings:
            found = readings[0].read.outcome()
            if found is None:
                bank.loaded.update(readings[0].experts)
            error = error or found
            del readings[0]
        return error

    def _concerns(self, error: BaseException, layer: int, experts: Sequence[int]) -> bool:
        """Whether an error lies in the record of one of these experts, or it is not known where it lies."""
        if not isinstance(error, EmoeError) or error.offset is None:
            return True
        places = (self._experts.place(layer, expert) for expert in experts)
        return any(place.offset <= error.offset < place.offset + place.length for place in places)


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
