"""Programs that decode are proven for random models and arenas, and whatever is proven finds banks and computes right.

A simulator carries programs out on banks that hold names of experts. It shares nothing with the verifier: it counts no
shares, but moves records as SCHEDULE.md section 3.3 says, as badly as that allows: what is predicted is what is not
routed to, reads land as late as they can, and each layer keeps as much as it may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estream_spec.decode_compiler import compile_decode
from estream_spec.errors import InvalidError
from estream_spec.schedule import ExpertShape, Instruction, Opcode, Phase, Policy, Program, disassemble
from estream_spec.schedule_verifier import verify_program
from fixtures.program_edits import random_edits, single_edits

Routing = list[set[int]]
"""The routed experts of each layer."""


class WrongError(Exception):
    """A program computed something else than the model, or found no bank."""


@dataclass
class Bank:
    """Room for one record.

    Attributes:
        record: layer and expert of what it holds, or what is being read into it.
        holder: the layer that holds it, if any.
        flying: whether a read into it has not landed yet.
        ahead: whether that read began at this layer's turn, before it was routed.
    """

    record: tuple[int, int] | None = None
    holder: int | None = None
    flying: bool = False
    ahead: bool = False


class Simulator:
    """Banks, and a model whose values are lists of what went into them. It decodes several tokens, one after the other.

    Args:
        program: what to carry out.
        shape: of the model.
        late: reads land when nothing else helps, otherwise at once.
        random: chooses wherever a reader may.
    """

    def __init__(self, program: Program, shape: ExpertShape, *, late: bool, random: Random):
        self.program, self.shape, self.late, self.random = program, shape, late, random
        self.banks = [Bank() for _ in range(program.bank_count)]
        self.routing, self.value = Routing(), list[object]()
        # The layers whose experts are ranked, read ahead and asked for.
        self.ranked: int | None = None
        self.predicted: int | None = None
        self.asked: int | None = None
        self.computed, self.halted = set[int](), False
        self._fill_shares()

    def _fill_shares(self) -> None:
        """The fullest that the banks can be when a program begins: each layer keeps all that it may."""
        for layer, share in self.program.kept.items():
            for expert in range(min(share, self.shape.counts[layer])):
                bank = self.free_bank()
                bank.record, bank.holder = (layer, expert), layer

    def decode(self, routing: Routing) -> None:
        """One token, compared with what the model computes."""
        self.routing, self.value = routing, list[object]()
        self.ranked = self.predicted = self.asked = None
        self.computed, self.halted = set[int](), False
        for instruction in self.program.instructions:
            if self.halted:
                raise WrongError("goes on behind HALT")
            self.step(Opcode(instruction.opcode), instruction.layer, instruction.group)
        if self.value != list(self.model()) or not self.halted:
            raise WrongError(f"computed {self.value}")
        if any(bank.record and bank.holder not in (None, bank.record[0]) for bank in self.banks):
            raise WrongError("a layer holds another one's record")

    def model(self) -> Iterator[object]:
        """What the model computes."""
        yield "embedding"
        for layer, count in enumerate(self.shape.counts):
            yield "attend", layer
            if count:
                yield "route", layer
            if layer in self.shape.dense_layers:
                yield "dense", layer
            yield "sum", layer, sorted(self.routing[layer])
        yield "logits"

    def step(self, opcode: Opcode, layer: int, count: int) -> None:
        """One instruction."""
        match opcode:
            case Opcode.EMBED:
                self.value.append("embedding")
            case Opcode.ATTEND:
                self.value.append(("attend", layer))
            case Opcode.ROUTE:
                self.value.append(("route", layer))
            case Opcode.DENSE:
                if self.computed:
                    raise WrongError("experts were added before")
                self.value.append(("dense", layer))
            case Opcode.COMBINE:
                if self.asked is not None:
                    raise WrongError("banks are not given back")
                self.value.append(("sum", layer, sorted(self.computed)))
                self.computed = set()
            case Opcode.HEAD:
                self.value.append("logits")
            case Opcode.HALT:
                self.halted = True
            case Opcode.PREDICT:
                # It ranks by what enters the layer: what is there when the layer before is done.
                if self.value[-1:] not in (["embedding"], [("sum", layer - 1, sorted(self.routing[layer - 1]))]):
                    raise WrongError("nothing to predict from")
                self.ranked = layer
            case Opcode.PREFETCH:
                self.prefetch(layer, count)
            case Opcode.DEMAND_FILL:
                self.demand(layer)
            case Opcode.DEMAND_AWAIT:
                self.wait(layer, count)
            case Opcode.DEMAND_EXPERTS:
                self.compute(layer)
            case Opcode.DEMAND_RELEASE:
                self.release(layer, count)
            case _:
                raise WrongError(f"no such instruction as {opcode}")

    def prefetch(self, layer: int, count: int) -> None:
        """Read experts that are not routed to, as far as there are any, into free banks."""
        if self.ranked != layer or self.predicted == layer or ("route", layer) in self.value:
            raise WrongError("nothing to read ahead by")
        self.predicted = layer
        ranking = sorted(range(self.shape.counts[layer]), key=lambda each: each in self.routing[layer])
        wanted = [expert for expert in ranking if self.bank_of(layer, expert) is None][:count]
        for expert in wanted:
            bank = self.free_bank()
            self.read(layer, expert, bank)
            bank.ahead = True

    def demand(self, layer: int) -> None:
        """Give each routed expert a bank."""
        if ("route", layer) not in self.value or self.asked is not None:
            raise WrongError("nothing is routed yet")
        self.asked = layer
        for expert in sorted(self.routing[layer]):
            if (bank := self.bank_of(layer, expert)) is not None:
                bank.holder = layer
        for expert in sorted(self.routing[layer]):
            if self.bank_of(layer, expert) is None:
                self.read(layer, expert, self.own_bank(layer) or self.free_bank())

    def wait(self, layer: int, count: int) -> None:
        """Until so many routed experts are there: where they land late, no more than that."""
        self.check_asked(layer)
        banks = [self.bank_of(layer, expert) for expert in self.routing[layer]]
        if count > len(banks):
            raise WrongError("waits for ever")
        here = [bank for bank in banks if bank and not bank.flying]
        flying = [bank for bank in banks if bank and bank.flying]
        self.random.shuffle(flying)
        for bank in flying[: max(count - len(here), 0)]:
            bank.flying = False

    def compute(self, layer: int) -> None:
        """What is there."""
        self.check_asked(layer)
        if layer in self.shape.dense_layers and ("dense", layer) not in self.value:
            raise WrongError("the dense block comes first")
        for expert in self.routing[layer]:
            if (bank := self.bank_of(layer, expert)) is not None and not bank.flying:
                self.computed.add(expert)

    def release(self, layer: int, count: int) -> None:
        """Keep as many as may be, whichever they are."""
        self.check_asked(layer)
        if self.computed != self.routing[layer]:
            raise WrongError("some are not computed yet")
        self.asked = None
        held = [bank for bank in self.banks if bank.holder == layer]
        self.random.shuffle(held)
        for bank in held[count:]:
            bank.holder = None
        for bank in held:
            bank.ahead = False

    def check_asked(self, layer: int) -> None:
        if self.asked != layer:
            raise WrongError("not asked for")

    def bank_of(self, layer: int, expert: int) -> Bank | None:
        """Where a record is, or will be."""
        return next((bank for bank in self.banks if bank.record == (layer, expert)), None)

    def own_bank(self, layer: int) -> Bank | None:
        """One that the layer holds with a record that is not routed to, and that was not begun at its turn."""
        own = [bank for bank in self.banks if bank.holder == layer and not (bank.flying and bank.ahead)]
        return next((bank for bank in own if bank.record and bank.record[1] not in self.routing[layer]), None)

    def free_bank(self) -> Bank:
        """One that no layer holds; what is being read into it lands first."""
        free = [bank for bank in self.banks if bank.holder is None]
        if not free:
            raise WrongError("no bank is free")
        bank = min(free, key=lambda each: each.flying)
        bank.flying = False
        return bank

    def read(self, layer: int, expert: int, bank: Bank) -> None:
        bank.record, bank.holder, bank.flying, bank.ahead = (layer, expert), layer, self.late, False


def simulate(program: Program, shape: ExpertShape, routings: list[Routing], seed: int) -> None:
    """Decode tokens with reads that land at once, and with reads that land late.

    Raises:
        WrongError: one of the two went wrong.
    """
    for late in (False, True):
        simulator = Simulator(program, shape, late=late, random=Random(seed))
        for routing in routings:
            simulator.decode(routing)


@st.composite
def shapes(draw: st.DrawFn) -> ExpertShape:
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any))
    beside = draw(st.sets(st.integers(0, len(counts) - 1)))
    return ExpertShape(
        counts=tuple(counts),
        record_lengths=tuple(4096 if count else 0 for count in counts),
        top_k=tuple(draw(st.integers(1, count)) if count else 0 for count in counts),
        dense_layers=frozenset(beside | {layer for layer, count in enumerate(counts) if not count}),
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[ExpertShape, Program]:
    shape = draw(shapes())
    slots = draw(st.integers(max(shape.top_k), sum(shape.counts) + 1))
    policy = draw(st.sampled_from([Policy.POST_ROUTING, Policy.PRE_ROUTING]))
    return shape, compile_decode(shape, arena_bytes=slots * 4096, slots=slots, policy=policy)


@st.composite
def tokens(draw: st.DrawFn, shape: ExpertShape) -> list[Routing]:
    layers = list(zip(shape.counts, shape.top_k, strict=True))
    orders = st.tuples(*(st.permutations(range(count)) for count, _ in layers))
    return [[set(order[:top_k]) for order, (_, top_k) in zip(draw(orders), layers, strict=True)] for _ in range(3)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_compiled_programs_are_proven_and_right(data: st.DataObject) -> None:
    shape, program = data.draw(programs())
    proof = verify_program(program, shape)
    assert proof.phase == Phase.DECODE
    assert proof.peak_bytes <= proof.banks * 4096 <= program.arena_bytes
    assert sum(shape.top_k) <= proof.groups_read <= sum(shape.counts)
    assert proof.groups_kept <= proof.banks
    assert Program.decode(program.encode(), path="program") == program
    simulate(program, shape, data.draw(tokens(shape)), data.draw(st.integers(0, 99)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_edited_programs_are_refused_or_right(data: st.DataObject) -> None:
    shape, program = data.draw(programs())
    changed = data.draw(random_edits(program, operands=7, opcodes=max(Opcode)))
    assume(changed != program)
    try:
        verify_program(changed, shape)
    except InvalidError:
        return
    simulate(changed, shape, data.draw(tokens(shape)), data.draw(st.integers(0, 99)))


SHAPE = ExpertShape(counts=(3, 0, 2), record_lengths=(4096, 0, 4096), top_k=(2, 0, 1), dense_layers=frozenset({1, 2}))
EVERY: list[Routing] = [[set(first), set(), {last}] for first, last in product(combinations(range(3), 2), range(2))]
"""All that a token can be routed to."""
SMALL = [
    compile_decode(SHAPE, arena_bytes=1 << 16, slots=slots, policy=policy)
    for slots, policy in (
        (2, Policy.POST_ROUTING),
        (3, Policy.POST_ROUTING),
        (4, Policy.POST_ROUTING),
        (4, Policy.PRE_ROUTING),
        (5, Policy.PRE_ROUTING),
    )
]


@pytest.mark.parametrize("program", SMALL, ids=lambda each: disassemble(each).partition("\n")[0][2:])
def test_every_single_edit_is_refused_or_right(program: Program) -> None:
    proven, refused = 0, 0
    for instructions in set(single_edits(program.instructions, opcodes=max(Opcode))):
        changed = replace(program, instructions=instructions)
        try:
            verify_program(changed, SHAPE)
        except InvalidError:
            refused += 1
            continue
        proven += 1
        for seed in range(3):
            simulate(changed, SHAPE, EVERY[seed:] + EVERY[:seed], seed)
    assert refused > 10 * proven > 0


def test_the_simulator_finds_what_is_wrong() -> None:
    """A simulator that finds nothing would make the tests above hold for any verifier."""
    smallest = SMALL[0]
    harmless = {Instruction(Opcode.DEMAND_AWAIT, 0, 1), Instruction(Opcode.DEMAND_EXPERTS, 0)}
    for index, instruction in enumerate(smallest.instructions):
        if instruction not in harmless:
            changed = (*smallest.instructions[:index], *smallest.instructions[index + 1 :])
            with pytest.raises(WrongError):
                simulate(replace(smallest, instructions=changed), SHAPE, EVERY, 0)


@pytest.mark.parametrize("program", SMALL, ids=lambda each: disassemble(each).partition("\n")[0][2:])
def test_the_simulator_finds_that_a_bank_is_missing(program: Program) -> None:
    """What is proven is no more than what is needed: with a bank less, some token finds none."""
    fewer = replace(program, bank_count=program.bank_count - 1)
    with pytest.raises(WrongError, match="no bank is free"):
        simulate(fewer, SHAPE, EVERY * 3, 0)
