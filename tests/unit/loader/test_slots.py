"""Slots: whatever is routed, predicted and read in whatever order, what computes holds the bytes of the file."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace as changed
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from estream_loader import Package, open_package
from estream_loader.pager import Binding, Pager
from estream_loader.retention import RETENTIONS
from estream_loader.slots import Slots
from estream_spec.constants import SectionType
from estream_spec.decode_compiler import compile_decode
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.graph_interface import ROLES, class_count
from estream_spec.model import DenseBlock, ExpertBlock, Layer, ModelDescription, Router
from estream_spec.schedule import BankState, Opcode, Policy, Program
from estream_spec.schedule_verifier import verify_program
from fixtures.packages import ENCODINGS, MODEL, Draft, Section
from fixtures.sources import FaultySource, ShuffledSource, fails_at


def block(experts: int, top_k: int, intermediate: int = 32) -> ExpertBlock:
    return ExpertBlock(experts=experts, intermediate=intermediate, router=Router(family="softmax-topk", top_k=top_k))


EVEN: Final = replace(MODEL, layers=(Layer(attention=0, experts=0),) * 3, expert_blocks=(block(7, 2),))
"""Layers alike."""
UNEVEN: Final = replace(
    MODEL,
    layers=(Layer(attention=0, experts=0), Layer(attention=0, dense=0), Layer(attention=0, experts=1, dense=0)),
    expert_blocks=(block(3, 3), block(9, 4)),
    dense_blocks=(DenseBlock(intermediate=32),),
)
"""A token takes all experts of one layer, another layer has none."""
LONGER: Final = replace(
    EVEN, layers=(Layer(attention=0, experts=0), Layer(attention=0, experts=1)), expert_blocks=(block(5, 1), block(4, 2, 128))
)
"""Records of two lengths."""
Record = tuple[int, int]


def package_of(model: ModelDescription) -> bytes:
    """A package with a graph, which is none, of each shape class."""
    draft = Draft(model=model, encodings={**ENCODINGS, **dict.fromkeys(("dense_gate", "dense_up", "dense_down"), "w8")})
    keys = [(role, each) for role in ROLES for each in range(class_count(role, model))]
    kinds = {"attend": "f32"}
    graphs = tuple(
        replace(draft.manifest.graphs[0], section=1000 + number, role=role, shape_class=each, weights=kinds.get(role, "int8"))
        for number, (role, each) in enumerate(keys)
    )
    draft.sections = [each for each in draft.sections if each.type != SectionType.GRAPH]
    draft.sections += [Section(SectionType.GRAPH, b"graph" * 9, id=each.section) for each in graphs]
    draft.change_manifest(graphs=graphs)
    return draft.seal()


PACKAGES: Final = {
    name: package_of(model) for name, model in (("even", EVEN), ("uneven", UNEVEN), ("longer", LONGER))
}


def stored(data: bytes) -> dict[Record, bytes]:
    """Every record as it stands in the file, by layer and expert."""
    with open_package(data) as package:
        places = {
            (layer, expert): package.experts.place(layer, expert)
            for layer, count in enumerate(package.expert_shape.counts)
            for expert in range(count)
        }
    return {record: data[place.offset : place.offset + place.length] for record, place in places.items()}


STORED: Final = {name: stored(data) for name, data in PACKAGES.items()}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever a test does, its threads end with it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@contextmanager
def slotted(
    name: str,
    slots: int,
    policy: Policy = Policy.PRE_ROUTING,
    *,
    retention: str = "lru",
    lanes: int = 2,
    seed: int = 0,
    extra: int = 0,
    **options: Any,
) -> Iterator[Decoder]:
    """A decode program of a package, and slots to carry it out in; `extra` more than it asks for."""
    with open_package(PACKAGES[name]) as package:
        shape = package.expert_shape
        arena_bytes = (slots + extra) * shape.bank_bytes(1)
        program = compile_decode(shape, arena_bytes=arena_bytes, slots=slots, policy=policy)
        verify_program(program, shape)
        package.source = gate = ShuffledSource(PACKAGES[name], seed, **options)
        with Pager(package, arena_bytes=arena_bytes, lanes=lanes) as pager:
            np.frombuffer(pager.arena.memory, np.uint8)[:] = 0xEE
            try:
                yield Decoder(name, package, program, pager, gate, Slots(pager, shape, retention))
            finally:
                gate.let_all()


class Decoder:
    """Carries out decode programs as an interpreter does, and watches that slots keep their promises.

    Args:
        name: of the package.
        package: it.
        program: what to carry out.
        pager: its arena.
        gate: where its reads wait while the decoder does not.
        slots: what is tried.
    """

    def __init__(
        self, name: str, package: Package, program: Program, pager: Pager, gate: ShuffledSource, slots: Slots
    ):
        self.stored, self.shape = STORED[name], package.expert_shape
        self.places = {record: package.experts.place(*record).offset for record in self.stored}
        self.program, self.pager, self.gate, self.slots = program, pager, gate, slots
        releases = [each for each in program.instructions if each.opcode == Opcode.DEMAND_RELEASE]
        self.kept = {each.layer: each.group for each in releases}

    def token(
        self,
        routing: Mapping[int, Sequence[int]],
        predicted: Mapping[int, Sequence[int]] | None = None,
        *,
        substitutes: bool = False,
    ) -> None:
        """One pass through the layers; when it fails, all is given up, as an interpreter does.

        Args:
            routing: ascending experts of each layer.
            predicted: what to read ahead, likewise in order.
            substitutes: take others that are ready in place of those that are not, which come later.
        """
        with self.reading(self.pager.uses != self.slots._known):
            self.pager.divide(self.program.bank_count, 1)
            self.slots.begin(self.kept)
        try:
            for opcode, layer, count, _ in self.program.instructions:
                match opcode:
                    case Opcode.PREFETCH:
                        before = self.kept_records()
                        ranked = (predicted or {}).get(layer, ())
                        self.slots.prefetch(layer, self.slots.missing(layer, ranked)[:count])
                        assert self.kept_records() == before
                    case Opcode.DEMAND_FILL:
                        self.demand(layer, routing[layer], substitutes)
                    case Opcode.DEMAND_AWAIT:
                        with self.reading(not all(map(self.pager.arrived, self.slots._demanded.values()))):
                            self.slots.await_(layer, count)
                    case Opcode.DEMAND_EXPERTS:
                        self.compute(layer)
                    case Opcode.DEMAND_RELEASE:
                        self.release(layer, count)
                if opcode >= Opcode.PREFETCH:
                    self.check()
            self.slots.end()
        except BaseException:
            with self.gate.flows():
                self.pager.settle()
            raise

    def reading(self, needed: bool) -> AbstractContextManager[None]:
        """Lets reads go on where something may wait for them; otherwise they stay at the gate."""
        return self.gate.flows() if needed else nullcontext()

    def demand(self, layer: int, experts: Sequence[int], substitutes: bool) -> None:
        later: list[int] = []
        if substitutes:
            ready = self.slots.ready(layer)
            spare = [each for each in sorted(ready) if each not in experts]
            later = [each for each in experts if each not in ready][: len(spare)]
            experts = sorted({*experts, *spare[: len(later)]}.difference(later))
        others = {(own, expert) for own, expert in self.kept_records() if own != layer}
        stats = changed(self.slots.stats)
        with self.reading(len(self.slots.missing(layer, experts)) > len(self.slots._free)):
            self.slots.demand(layer, experts, later)
        if substitutes:
            found = changed(self.slots.stats)
            there = found.hits + found.timely - stats.hits - stats.timely
            assert there >= len(ready.intersection(experts))
        assert self.kept_records() >= others
        self.demanded, self.taken = experts, dict[int, Binding]()

    def compute(self, layer: int) -> None:
        for expert, binding in self.slots.take():
            assert expert not in self.taken
            assert binding.bank.state is BankState.IN_USE
            self.taken[expert] = binding
            assert self.pager.record(binding, expert) == self.stored[layer, expert]

    def release(self, layer: int, count: int) -> None:
        assert sorted(self.taken) == [*self.demanded]
        for expert, binding in self.taken.items():  # they lie where they lay
            assert self.pager.record(binding, expert) == self.stored[layer, expert]
        self.slots.release(layer, count)
        self.taken = {}

    def kept_records(self) -> set[Record]:
        """What layers count on, each looked at in its slot."""
        kept = {(layer, expert) for layer, experts in self.slots._kept.items() for expert in experts}
        assert {record for record in kept if self.holds(self.slots._slots[record[0]][record[1]]) == record} == kept
        return kept

    def holds(self, slot: int) -> Record | None:
        """The record whose bytes lie in a slot, or where it finds them."""
        bank = self.pager.arena.banks[slot]
        if bank.group is None:
            return None
        data = self.stored[bank.group]
        if bank.memory[: len(data)] == data or bank.group in self.pager.kept:
            return bank.group
        return None

    def check(self) -> None:
        """Every slot is of one kind, and no two experts share one."""
        slots = self.slots
        placed = [slot for experts in slots._slots.values() for slot in experts.values()]
        assert len({*placed}) == len(placed)
        kept = {slots._slots[layer][expert] for layer, expert in self.kept_records()}
        held = {*slots._demanded.values()}
        ahead, free, strays = {*slots._ahead.values()}, {*slots._free}, {*slots._strays}
        assert kept | held | ahead | free | strays == set(range(self.program.bank_count))
        assert not free & (kept | held | ahead | strays)
        assert not strays & (kept | held | ahead)
        assert not ahead & (kept | held)
        for layer, count in self.kept.items():
            assert len(slots._kept[layer]) <= count or self.demanded_in(layer)
        assert all(self.pager.arena.banks[slot].state is BankState.AVAILABLE for slot in free)

    def demanded_in(self, layer: int) -> bool:
        return False


def subset(random: np.random.Generator, count: int, size: int) -> list[int]:
    return random.permutation(count)[:size].tolist()


def routings(decoder: Decoder, random: np.random.Generator) -> dict[int, list[int]]:
    """Of each layer, as many experts as a token is routed to; some far more often than others."""
    found = {}
    for layer in decoder.kept:
        count, top_k = decoder.shape.counts[layer], decoder.shape.top_k[layer]
        favoured = 1 / np.arange(1, count + 1)
        found[layer] = sorted(random.choice(count, top_k, replace=False, p=favoured / favoured.sum()).tolist())
    return found


def predictions(
    decoder: Decoder, random: np.random.Generator, routing: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Right, wrong, or anything."""
    found = {}
    for layer, experts in routing.items():
        others = [each for each in random.permutation(decoder.shape.counts[layer]).tolist() if each not in experts]
        right = random.permutation(experts).tolist()
        found[layer] = [[*right, *others], [*others, *right], subset(random, decoder.shape.counts[layer], 99), []][
            random.integers(4)
        ]
    return found


def divide_anew(decoder: Decoder, random: np.random.Generator) -> None:
    """Something else runs in other banks, and reads a group or two."""
    pager, shape = decoder.pager, decoder.shape
    group_size = int(random.integers(1, 4))
    banks = pager.arena.length // shape.bank_bytes(group_size)
    if not banks:
        return
    with decoder.gate.flows():
        pager.divide(int(random.integers(1, banks + 1)), group_size)
        pager.begin()
    for number in range(min(2, len(pager.arena.banks))):
        layer = int(random.choice([*decoder.kept]))
        group = int(random.integers(shape.group_counts(group_size)[layer]))
        pager.fill(layer, group, number)
        with decoder.gate.flows():
            pager.await_(layer, group, number)
        bound = pager.use(number)
        for expert in pager.wanted(layer, group):
            assert pager.record(bound, expert) == decoder.stored[layer, expert]
        pager.release(number)


NAMES: Final = st.sampled_from(sorted(PACKAGES))
SEEDS: Final = st.integers(0, 2**32 - 1)
CASES: Final = {
    "name": NAMES,
    "share": st.floats(0, 1),
    "policy": st.sampled_from([Policy.PRE_ROUTING, Policy.POST_ROUTING]),
    "retention": st.sampled_from(sorted(RETENTIONS)),
    "lanes": st.integers(1, 3),
    "extra": st.integers(0, 3),
    "seed": SEEDS,
}


def slots_of(name: str, share: float) -> int:
    """A number of slots, from just enough to more than there are experts."""
    with open_package(PACKAGES[name]) as package:
        fewest, all_of_them = max(package.expert_shape.top_k), sum(package.expert_shape.counts)
    return fewest + round(share * (all_of_them + 2 - fewest))


@given(substitutes=st.booleans(), tokens=st.integers(1, 8), **CASES)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_records_are_those_of_the_file(
    name: str, share: float, seed: int, substitutes: bool, tokens: int, **options: Any
) -> None:
    random = np.random.default_rng(seed)
    with slotted(name, slots_of(name, share), seed=seed, **options) as decoder:
        for _ in range(tokens):
            if random.random() < 0.2:
                divide_anew(decoder, random)
            routing = routings(decoder, random)
            decoder.token(routing, predictions(decoder, random, routing), substitutes=substitutes)
        stats = decoder.slots.stats
        assert stats.layers == tokens * len(decoder.kept)
        assert stats.demanded == tokens * sum(decoder.shape.top_k)
        assert stats.hits + stats.timely + stats.late <= stats.demanded
        assert stats.stalls <= stats.layers
        assert stats.dropped <= stats.prefetched


def every(decoder: Decoder, experts: Sequence[int]) -> dict[int, Sequence[int]]:
    return dict.fromkeys(decoder.kept, experts)


def test_what_nobody_waits_for_may_not_have_begun_when_its_layer_is_routed_again() -> None:
    with slotted("even", 21, Policy.POST_ROUTING, lanes=1) as decoder:
        decoder.token(every(decoder, [0, 1]))
        decoder.token({**every(decoder, [0, 1]), 0: [2, 3]}, substitutes=True)  # 2 waits at the gate, and 3 for 2
        decoder.token(every(decoder, [0, 1]), substitutes=True)
        decoder.token(every(decoder, [2, 3]))
