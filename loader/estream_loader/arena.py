"""The arena: one allocation for experts, divided into banks, and divided anew for programs that need other banks.

A bank goes `AVAILABLE -> FILLING -> READY -> IN_USE -> AVAILABLE`; one of a resident program goes from `IN_USE` back to
`READY`, and one that is given up goes to `AVAILABLE` from wherever it is. What it holds stays there while it is
available, so a group asked for again need not be read again. The epoch counts the groups a bank has begun to take: what
was bound to it under an earlier one is void. Banks of a new division begin above all epochs of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from estream_loader import rpcmem
from estream_loader.memory import Allocator, ArenaKind, page_aligned
from estream_spec.errors import LinkError
from estream_spec.schedule import BankState

_ALLOCATORS: Final[Mapping[ArenaKind, Allocator]] = {"ordinary": page_aligned, "rpcmem": rpcmem.allocate}
_NEXT: Final = {
    BankState.AVAILABLE: {BankState.FILLING},
    BankState.FILLING: {BankState.READY, BankState.AVAILABLE},
    BankState.READY: {BankState.IN_USE, BankState.AVAILABLE},
    BankState.IN_USE: {BankState.AVAILABLE, BankState.READY},
}


@dataclass(frozen=True, slots=True)
class Stay:
    """A bank in one state, from beginning to end as `time.perf_counter` counts seconds."""

    bank: int
    state: BankState
    group: tuple[int, int] | None
    """The group it held in the end."""
    begun: float
    ended: float


class Bank:
    """Room for one group.

    Attributes:
        index: position in the arena.
        memory: its bytes.
        epoch: how many groups it has taken, those of the banks before it included.
        group: the group it holds, as (layer, number of the group in that layer); None before the first.
        loaded: experts of that group whose records are here and proven.
    """

    def __init__(self, index: int, memory: memoryview, epoch: int):
        self.index, self.memory, self.epoch = index, memory, epoch
        self.group: tuple[int, int] | None = None
        self.loaded: set[int] = set()
        self._state = BankState.AVAILABLE
        self._on_stay: Callable[[Stay], None] | None = None
        self._since = 0.0

    @property
    def state(self) -> BankState:
        """Where the bank is in its round."""
        return self._state

    def move(self, state: BankState) -> None:
        """Go on to the next state; another step than the allowed ones is a fault in the program, hence an assert."""
        assert state in _NEXT[self._state], f"bank {self.index} from {self._state.value} to {state.value}"
        self._tell()
        self._state = state

    def take(self, group: tuple[int, int]) -> None:
        """Begin to hold another group: what was there is forgotten and earlier bindings are void."""
        self.group, self.loaded = group, set()
        self.epoch += 1

    def watch(self, on_stay: Callable[[Stay], None] | None) -> None:
        """Tell of each state from now on when it ends; None tells of the present one and of no further."""
        self._tell()
        self._on_stay, self._since = on_stay, time.perf_counter()

    def _tell(self) -> None:
        if self._on_stay is not None:
            now = time.perf_counter()
            self._on_stay(Stay(self.index, self._state, self.group, self._since, now))
            self._since = now


class Arena:
    """Fixed, page-aligned memory of `length` bytes, allocated once and never resized.

    Attributes:
        length: bytes of all of it.
        kind: what kind of memory it is.
        memory: all of it.
        banks: what it is divided into, nothing until `divide` is called.

    Raises:
        LinkError: the memory cannot be had.
    """

    def __init__(self, length: int, kind: ArenaKind = "ordinary"):
        self.length, self.kind = length, kind
        self.banks: tuple[Bank, ...] = ()
        self._on_stay: Callable[[Stay], None] | None = None
        try:
            self.memory = _ALLOCATORS[kind](length)
        except (OSError, OverflowError, ValueError) as error:
            raise LinkError(f"cannot allocate an arena of {self.length} bytes: {error}") from None

    def close(self) -> None:
        """Give the memory back, as soon as the last view of it is gone. Closing twice is harmless."""
        self.banks = ()
        self.memory.release()

    def divide(self, bank_count: int, bank_bytes: int) -> None:
        """Make other banks of the memory; what the banks before held is forgotten, and nothing may be on its way.

        Args:
            bank_count: how many.
            bank_bytes: room of each, a multiple of the page size; all together take no more than `length`.
        """
        assert bank_count * bank_bytes <= self.length
        assert all(bank.state is BankState.AVAILABLE for bank in self.banks)
        for bank in self.banks:
            bank.watch(None)
        epoch = max((bank.epoch + 1 for bank in self.banks), default=0)
        self.banks = tuple(
            Bank(index, self.memory[index * bank_bytes : (index + 1) * bank_bytes], epoch)
            for index in range(bank_count)
        )
        self.watch(self._on_stay)

    def watch(self, on_stay: Callable[[Stay], None] | None) -> None:
        """Tell of the states of all banks, see `Bank.watch`."""
        self._on_stay = on_stay
        for bank in self.banks:
            bank.watch(on_stay)
