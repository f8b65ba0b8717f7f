"""Carries out the demand forms of decode programs: which slot takes which expert, and which records a layer keeps.

In a decode program each bank is a slot for one record. A slot is *kept* while its record counts among those its layer
keeps from token to token, *held* from the moment its expert is demanded, or its reading begun ahead of that, until the
layer is done with it, and *free* otherwise: it may still hold a record, which is found there until something else takes
the slot. Reading ahead takes free slots alone. What is demanded takes free ones first, then those of the least valued
records that the layer keeps and has not demanded. SCHEDULE.md section 3.3; that slots suffice is proven beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from estream_loader.pager import Binding, Pager
from estream_loader.retention import AgeingFrequency, Retention
from estream_spec.schedule import BankState, ExpertShape


@dataclass(slots=True, kw_only=True)
class DemandStats:
    """What became of demanded and of prefetched experts so far, each counted once for each layer and token.

    Attributes:
        demanded: experts that were routed to.
        hits: of those, whose records were there from earlier tokens.
        timely: of those, which reading ahead had brought when they were demanded.
        late: of those, which were still being read ahead when they were demanded.
        prefetched: experts whose reading began before they were demanded.
        dropped: of those, whose reading was given up before it began, as they were not routed to.
        stalls: layers of which an expert had to be waited for.
        layers: layers that demanded experts.
    """

    demanded: int = 0
    hits: int = 0
    timely: int = 0
    late: int = 0
    prefetched: int = 0
    dropped: int = 0
    stalls: int = 0
    layers: int = 0


class Slots:
    """The slots of a pager's arena.

    Args:
        pager: divided into banks of one record each whenever anything but `seed` and `favourites` is called.
        shape: experts of each layer.
        retention: makes what ranks the records of a layer, given how many experts it has.

    Attributes:
        stats: what became of demands.
    """

    def __init__(self, pager: Pager, shape: ExpertShape, retention: Callable[[int], Retention] = AgeingFrequency):
        self._pager, self._counts, self.stats = pager, shape.counts, DemandStats()
        self._retention = {layer: retention(count) for layer, count in enumerate(shape.counts) if count}
        self._slots: dict[int, dict[int, int]] = {}
        """Of each layer the slots of experts that are there or on their way."""
        self._kept: dict[int, set[int]] = {}
        self._free: dict[int, None] = {}
        """Free slots, the first to be taken first."""
        self._ahead: dict[int, int] = {}
        """Experts of the layer at work that are read ahead, and their slots."""
        self._strays: list[int] = []
        """Slots with a read under way that nobody waits for."""
        self._demanded: dict[int, int] = {}
        """Experts of the layer at work that are demanded, and their slots; those that were there first."""
        self._awaited: list[int] = []
        """Of those, the ones that were waited for and not taken yet."""
        self._arrived = 0
        """How many of those were waited for."""
        self._known: int | None = None
        """The pager's `uses` when the last program ended well, so that nothing can have changed if it still is that."""

    def begin(self, kept: Mapping[int, int]) -> bool:
        """A decode program begins.

        Args:
            kept: records that each layer with experts keeps, at most.

        Returns:
            Whether it is the next after one that ended well: whatever was bound then is where it was.
        """
        goes_on = self._pager.uses == self._known
        if not goes_on:
            self._pager.begin()
            self._take_stock(kept)
        self._known = None
        self._pager.forget_routing()
        return goes_on

    def end(self) -> None:
        """The program has ended well. Where one did not, the next takes stock of the slots."""
        self._known = self._pager.uses

    def seed(self, layer: int, counts: Sequence[int]) -> None:
        """A prompt was routed.

        Args:
            layer: the layer.
            counts: tokens by expert.
        """
        self._retention[layer].seed(counts)

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """One more token was routed to these experts of a layer."""
        self._retention[layer].note(experts)

    def favourites(self, layer: int, count: int) -> list[int]:
        """The experts of a layer that are most worth keeping, at most `count`, the best first."""
        return self._retention[layer].order(range(self._counts[layer]))[::-1][:count]

    def ready(self, layer: int) -> set[int]:
        """Experts of a layer that could be computed with at once."""
        self._collect()
        slots, pager = self._of(layer), self._pager
        return {expert for expert, slot in slots.items() if pager.arrived(slot) and not pager.failed(slot)}

    def missing(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of some experts that are in no slot and not on their way."""
        slots = self._of(layer)
        return [expert for expert in experts if expert not in slots]

    def prefetch(self, layer: int, experts: Iterable[int]) -> None:
        """Begin to read experts that are in no slot, as long as slots are free.

        Raises:
            LinkError: the pager is closed.
        """
        self._collect()
        for expert in self.missing(layer, experts):
            if not self._free:
                return
            self._ahead[expert] = self._fill(layer, expert, self._take_free())
            self.stats.prefetched += 1

    def demand(self, layer: int, experts: Sequence[int], later: Sequence[int] = ()) -> None:
        """The layer is routed: each expert gets a slot, and those that are in none are read.

        Args:
            layer: the layer.
            experts: ascending ids.
            later: other experts that are to be read after these, as far as slots are free, and that nobody waits for.

        Raises:
            LinkError: the pager is closed.
        """
        wanted = set(experts)
        self._pager.route(layer, sorted(wanted.union(later)))
        self._let_go(layer, wanted)
        there, coming, absent = dict[int, int](), dict[int, int](), list[int]()
        for expert in experts:
            slot = self._of(layer).get(expert)
            if slot is None:
                absent.append(expert)
                continue
            arrived = self._pager.arrived(slot)
            self._count(expert, arrived)
            (there if arrived else coming)[expert] = slot
            if slot in self._strays:
                self._strays.remove(slot)
            self._free.pop(slot, None)
            if self._pager.arena.banks[slot].state is BankState.AVAILABLE:
                self._pager.fill(layer, expert, slot)
        self._ahead = {}
        self._demanded, self._awaited, self._arrived = there | coming, [], 0
        for expert in absent:
            self._demanded[expert] = self._fill(layer, expert, self._take_any(layer, wanted))
        for expert in self.missing(layer, later):
            if self._free:
                self._strays.append(self._fill(layer, expert, self._take_free()))
        self.stats.layers += 1
        self.stats.demanded += len(experts)
        self.stats.stalls += len(there) < len(experts)

    def await_(self, layer: int, count: int) -> None:
        """Wait until at least `count` of the demanded experts are there, whole and proven.

        Raises:
            IntegrityError: the checksum of a record differs or its bytes are missing.
            LinkError: the device failed.
        """
        if self._arrived == len(self._demanded):
            return
        for number, (expert, slot) in enumerate(self._demanded.items()):
            filling = self._pager.arena.banks[slot].state is BankState.FILLING
            if filling and (number < count or self._pager.arrived(slot)):
                self._pager.await_(layer, expert, slot)
                self._awaited.append(expert)
                self._arrived += 1

    def take(self) -> list[tuple[int, Binding]]:
        """The demanded experts that were waited for and not taken yet, with their slots, in use from now on."""
        taken = [(expert, self._pager.use(self._demanded[expert])) for expert in self._awaited]
        self._awaited = []
        return taken

    def release(self, layer: int, count: int, routed: Sequence[int]) -> None:
        """The layer is done with its experts; from now on it keeps at most `count` records.

        Args:
            layer: the layer.
            count: how many.
            routed: experts that the token was routed to, whatever was demanded in their place.
        """
        retention, kept = self._retention[layer], self._kept[layer]
        retention.note(routed)
        for slot in self._demanded.values():
            self._pager.release(slot)
        kept.update(self._demanded)
        self._demanded = {}
        if len(kept) > count:
            for expert in retention.order(kept)[: len(kept) - count]:
                kept.remove(expert)
                self._free[self._of(layer)[expert]] = None

    def _of(self, layer: int) -> dict[int, int]:
        return self._slots.setdefault(layer, {})

    def _take_stock(self, kept: Mapping[int, int]) -> None:
        """Find out what lies where, and what each layer keeps of it."""
        banks = self._pager.arena.banks
        self._slots, self._ahead, self._demanded, self._strays, self._awaited = {}, {}, {}, [], []
        owned = set[int]()
        for bank in banks:
            if bank.group is not None and bank.loaded:
                layer, expert = bank.group
                if expert in self._of(layer):  # twice in the arena: one is enough
                    bank.loaded.clear()
                else:
                    self._of(layer)[expert] = bank.index
        for layer, count in kept.items():
            order = self._retention[layer].order(self._of(layer))
            self._kept[layer] = set(order[max(len(order) - count, 0) :])
            owned.update(self._of(layer)[expert] for expert in self._kept[layer])
        vacant = [bank for bank in banks if bank.index not in owned]
        self._free = dict.fromkeys(bank.index for bank in sorted(vacant, key=lambda bank: len(bank.loaded)))

    def _let_go(self, layer: int, wanted: set[int]) -> None:
        """What was read ahead in vain becomes free, at once where its reading had not begun."""
        for expert, slot in self._ahead.items():
            if expert in wanted:
                continue
            if self._pager.arena.banks[slot].state is BankState.AVAILABLE:
                del self._of(layer)[expert]
                self._free = {slot: None, **self._free}
                self.stats.dropped += 1
            else:
                self._strays.append(slot)

    def _count(self, expert: int, arrived: bool) -> None:
        """Count a demanded expert that is there or on its way."""
        if expert in self._ahead:
            self.stats.timely += arrived
            self.stats.late += not arrived
        else:
            self.stats.hits += arrived

    def _fill(self, layer: int, expert: int, slot: int) -> int:
        """Begin to read an expert into a slot, where what was there is no longer."""
        before = self._pager.arena.banks[slot].group
        if before is not None and self._of(before[0]).get(before[1]) == slot:
            del self._slots[before[0]][before[1]]
        self._slots[layer][expert] = slot
        self._pager.fill(layer, expert, slot)
        return slot

    def _take_free(self) -> int:
        slot = next(iter(self._free))
        del self._free[slot]
        return slot

    def _take_any(self, layer: int, wanted: set[int]) -> int:
        """A slot for what is demanded."""
        self._collect()
        if self._free:
            return self._take_free()
        kept = self._kept[layer]
        if not kept <= wanted:
            victim = next(each for each in self._retention[layer].order(kept) if each not in wanted)
            kept.remove(victim)
            return self._of(layer)[victim]
        # Every other slot is kept by another layer, or being written to for nobody.
        self._abandon(self._strays[0])
        return self._take_free()

    def _collect(self) -> None:
        """Free the slots whose reads nobody waits for and which are over."""
        for slot in [each for each in self._strays if self._pager.arrived(each)]:
            self._abandon(slot)

    def _abandon(self, slot: int) -> None:
        """Wait for a read that nobody needs; its slot is free, and holds what has come."""
        self._strays.remove(slot)
        bank = self._pager.arena.banks[slot]
        if bank.state is BankState.FILLING:  # and not dropped when its layer was routed again before the read began
            self._pager.abandon(slot)
        self._free[slot] = None
        if bank.group is not None and not bank.loaded:
            self._of(bank.group[0]).pop(bank.group[1], None)
