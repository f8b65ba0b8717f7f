"""Slots: whatever is routed, predicted and read in whatever order, what computes holds the bytes of the file."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace as changed
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from estream_loader import Package, open_package
from estream_loader.arena import Bank
from estream_loader.pager import Binding, Pager
from estream_loader.reading import Read, Reader
from estream_loader.slots import Slots
from estream_spec.constants import SectionType
from estream_spec.decode_compiler import compile_decode
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.graph_interface import ROLES, class_count
from estream_spec.model import DenseBlock, ExpertBlock, Layer, ModelDescription, Router
from estream_spec.schedule import BankState, Opcode, Policy, Program
from estream_spec.schedule_verifier import verify_program
from fixtures.packages import ENCODINGS, MODEL, Draft, Section
from fixtures.retentions import RETENTIONS
from fixtures.sources import ShuffledSource, fails_at

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
    EVEN,
    layers=(Layer(attention=0, experts=0), Layer(attention=0, experts=1)),
    expert_blocks=(block(5, 1), block(4, 2, 128)),
)
"""Records of two lengths."""
Record = tuple[int, int]


def package_of(model: ModelDescription) -> bytes:
    """A package with a graph, which is none, of each shape class."""
    draft = Draft(model=model, encodings={**ENCODINGS, **dict.fromkeys(("dense_gate", "dense_up", "dense_down"), "w8")})
    keys = [(role, each) for role in ROLES for each in range(class_count(role, model))]
    kinds = {"attend": "f32"}
    graphs = tuple(
        replace(
            draft.manifest.graphs[0],
            section=1000 + number,
            role=role,
            shape_class=each,
            weights=kinds.get(role, "int8"),
        )
        for number, (role, each) in enumerate(keys)
    )
    draft.sections = [each for each in draft.sections if each.type != SectionType.GRAPH]
    draft.sections += [Section(SectionType.GRAPH, b"graph" * 9, id=each.section) for each in graphs]
    draft.change_manifest(graphs=graphs)
    return draft.seal()


PACKAGES: Final = {name: package_of(model) for name, model in (("even", EVEN), ("uneven", UNEVEN), ("longer", LONGER))}


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
                yield Decoder(name, package, program, pager, gate, Slots(pager, shape, RETENTIONS[retention]))
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

    def __init__(self, name: str, package: Package, program: Program, pager: Pager, gate: ShuffledSource, slots: Slots):
        self.stored, self.shape = STORED[name], package.expert_shape
        self.places = {record: package.experts.place(*record).offset for record in self.stored}
        self.program, self.pager, self.gate, self.slots = program, pager, gate, slots
        self.kept = program.kept
        self.after_prefetch: Callable[[int], None] = lambda layer: None

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
                        self.after_prefetch(layer)
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

    def let_ahead(self) -> None:
        """Let all reads ahead of need come to their end."""
        with self.gate.flows():
            for slot in self.slots._ahead.values():
                for each in self.pager._readings[slot]:
                    each.read.outcome()

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
        self.slots.release(layer, count, self.demanded)
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
        if bank.memory[: len(data)] == data or bank.group in self.pager.beyond:
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
        assert all(len(slots._kept[layer]) <= count for layer, count in self.kept.items())
        assert all(self.pager.arena.banks[slot].state is BankState.AVAILABLE for slot in free)


def subset(random: np.random.Generator, count: int, size: int) -> list[int]:
    return [int(each) for each in random.permutation(count)[:size]]


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


@given(tokens=st.integers(1, 8), **{**CASES, "policy": st.just(Policy.POST_ROUTING), "retention": st.just("lru")})
@settings(max_examples=25, deadline=None)
def test_hits_and_reads_are_those_of_a_simple_model(
    name: str, share: float, seed: int, tokens: int, **options: Any
) -> None:
    """What lies in the arena, looked at, is found there; and by LRU what a layer keeps is what it used last."""
    random = np.random.default_rng(seed)
    with slotted(name, slots_of(name, share), seed=seed, **options) as decoder:
        used: dict[int, list[int]] = {layer: [] for layer in decoder.kept}
        hits = reads = 0
        for _ in range(tokens):
            routing = routings(decoder, random)

            def counting(layer: int, experts: Sequence[int], substitutes: bool, go_on: Any = decoder.demand) -> None:
                nonlocal hits, reads
                lying = {decoder.holds(slot) for slot in range(decoder.program.bank_count)}
                there = sum((layer, expert) in lying for expert in experts)
                hits, reads = hits + there, reads + len(experts) - there
                assert {(layer, expert) for expert in used[layer][: decoder.kept[layer]]} <= lying
                used[layer] = [*experts, *(each for each in used[layer] if each not in experts)]
                go_on(layer, experts, substitutes)

            with patch.object(decoder, "demand", counting):
                decoder.token(routing)
            for layer, latest in used.items():
                assert decoder.slots._kept[layer] == {*latest[: decoder.kept[layer]]}
        stats = decoder.slots.stats
        assert (stats.hits, stats.timely, stats.late, stats.prefetched) == (hits, 0, 0, 0)
        assert decoder.pager.stats.reads == len(decoder.gate.reads) == reads == stats.demanded - stats.hits


@given(nth=st.integers(1, 40), substitutes=st.booleans(), **CASES)
@settings(max_examples=25, deadline=None)
def test_a_token_whose_read_fails_raises_or_does_not_need_it_and_the_next_one_works(
    name: str, share: float, seed: int, nth: int, substitutes: bool, **options: Any
) -> None:
    random, failed = np.random.default_rng(seed), list[int]()

    def fault(call: int, offset: int, length: int) -> None:
        if call == nth:
            failed.append(offset)
            raise OSError(errno.EIO, "Input/output error")

    with slotted(name, slots_of(name, share), seed=seed, fault=fault, **options) as decoder:
        for _ in range(6):
            routing = routings(decoder, random)
            raised = list[int | None]()
            try:
                decoder.token(routing, predictions(decoder, random, routing), substitutes=substitutes)
            except LinkError as error:
                raised.append(error.offset)
            needed = {decoder.places[layer, each] for layer in routing for each in routing[layer]}
            assert raised in ([], failed)
            assert needed.issuperset(raised)


@given(nth=st.integers(1, 150), what=st.sampled_from(["move", "take", "submit", "outcome", "cancel"]), **CASES)
@settings(max_examples=40, deadline=None)
def test_an_interrupted_token_leaves_nothing_behind(
    name: str, share: float, seed: int, nth: int, what: str, **options: Any
) -> None:
    random, calls = np.random.default_rng(seed), 0
    owner: Any = {"move": Bank, "take": Bank, "submit": Reader}.get(what, Read)
    proper = getattr(owner, what)

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and seed % 2:
            raise KeyboardInterrupt
        found = proper(*arguments)
        if calls == nth:
            raise KeyboardInterrupt
        return found

    with slotted(name, slots_of(name, share), seed=seed, **options) as decoder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, what, interrupted)
        for _ in range(6):
            routing = routings(decoder, random)
            with suppress(KeyboardInterrupt):
                decoder.token(routing, predictions(decoder, random, routing))


def every(decoder: Decoder, experts: Sequence[int]) -> dict[int, Sequence[int]]:
    return dict.fromkeys(decoder.kept, experts)


def test_what_nobody_waits_for_may_not_have_begun_when_its_layer_is_routed_again() -> None:
    with slotted("even", 21, Policy.POST_ROUTING, lanes=1) as decoder:
        decoder.token(every(decoder, [0, 1]))
        decoder.token({**every(decoder, [0, 1]), 0: [2, 3]}, substitutes=True)  # 2 waits at the gate, and 3 for 2
        assert len(decoder.slots._strays) == 2
        decoder.gate.until_waiting(1)
        decoder.token(every(decoder, [0, 1]), substitutes=True)
        assert len(decoder.slots._strays) == 1
        decoder.token(every(decoder, [2, 3]))
        assert decoder.slots.stats.hits == 2 * 6


class TestPrefetching:
    """Three layers of seven experts, two for each token, in slots for 12: four or five are read ahead."""

    SLOTS: Final = 12

    def test_what_was_predicted_is_there_or_on_its_way(self) -> None:
        with slotted("even", self.SLOTS) as decoder:
            decoder.token(every(decoder, [0, 1]), every(decoder, [0, 1]))
            stats = decoder.slots.stats
            assert (stats.prefetched, stats.hits, stats.timely + stats.late) == (6, 0, 6)

    def test_wrong_predictions_take_nothing_that_is_kept(self) -> None:
        with slotted("even", self.SLOTS) as decoder:
            for _ in range(3):
                decoder.token(every(decoder, [0, 1]), every(decoder, [6, 5, 4, 3, 2]))
            assert decoder.slots.stats.hits == 2 * 6

    def test_reads_that_have_not_begun_are_dropped(self) -> None:
        with slotted("even", self.SLOTS, lanes=1) as decoder:
            decoder.after_prefetch = lambda layer: decoder.gate.until_waiting(not layer)
            decoder.token(every(decoder, [0, 1]), {0: [6, 5, 4, 3, 2]})
            assert (decoder.slots.stats.prefetched, decoder.slots.stats.dropped) == (4, 3)
            assert decoder.pager.stats.reads == 1 + 6

    @pytest.mark.parametrize("kind", ["device", "checksum"])
    @pytest.mark.parametrize("needed", [False, True])
    @pytest.mark.parametrize("substitutes", [False, True])
    def test_one_that_fails_is_harmful_only_if_it_is_needed(self, kind: str, needed: bool, substitutes: bool) -> None:
        with slotted("even", self.SLOTS) as decoder:
            decoder.token(every(decoder, [0, 1]))
            bad = decoder.places[0, 5]
            if kind == "device":
                decoder.gate.fault = fails_at(bad + 9)
            else:
                damaged = bytearray(PACKAGES["even"])
                damaged[bad + 9] ^= 1
                decoder.gate._data = memoryview(damaged)
            # Read ahead at leisure, so that its failing is known by the time that substitutes are looked for.
            decoder.after_prefetch = lambda layer: decoder.let_ahead()
            routing = {**every(decoder, [0, 1]), 0: [1, 5] if needed else [1, 6]}
            if needed and not substitutes:
                with pytest.raises(LinkError if kind == "device" else IntegrityError) as caught:
                    decoder.token(routing, {0: [5]})
                assert caught.value.offset is not None
                assert bad <= caught.value.offset < bad + 4096
            else:
                decoder.token(routing, {0: [5]}, substitutes=substitutes)
            decoder.gate.fault = lambda call, offset, length: None
            decoder.gate._data = memoryview(PACKAGES["even"])
            decoder.token(routing, {0: [5]})


def test_a_record_that_lies_there_twice_counts_once() -> None:
    """Two groups of two, dividing which anew leaves a record of each in both halves."""
    with slotted("even", 8, Policy.POST_ROUTING) as decoder:
        pager = decoder.pager
        pager.divide(2, 1)
        pager.begin()
        with decoder.gate.flows():
            for number in range(2):
                pager.fill(0, 3, number)
                pager.await_(0, 3, number)
                pager.release(pager.use(number).bank.index)
        decoder.token(every(decoder, [3, 4]))
        decoder.token(every(decoder, [3, 4]))
        assert decoder.slots.stats.hits == 1 + 6
