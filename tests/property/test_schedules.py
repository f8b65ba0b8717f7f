"""Programs of random models and sizes are proven, and whatever is proven computes the right thing.

A simulator carries programs out on an arena that holds names of groups instead of weights. It shares nothing with the
verifier: it knows no states of banks, only what lies in memory and when reads land.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estream_spec.errors import InvalidError
from estream_spec.schedule import ExpertShape, Opcode, Phase, Policy, Program, disassemble
from estream_spec.schedule_compiler import compile_program
from estream_spec.schedule_verifier import verify_program
from fixtures.program_edits import random_edits, single_edits

Group = tuple[int, int]
Landing = Literal["at once", "at the last moment"]
"""When a read reaches memory: with FILL, or only when AWAIT asks. Every other run lies between the two."""


class WrongError(Exception):
    """A program computed something else than the model, or could have."""


class Simulator:
    """An arena, reads that land early or late, and a model whose values are lists of what went into them.

    Args:
        program: what to carry out.
        groups: groups of each layer.
        dense: the layers with a dense block.
        landing: when reads land.
        tokens: the groups to which tokens are routed; the others are skipped where they may be.
        memory: what the arena holds before, by bank.
    """

    def __init__(
        self,
        program: Program,
        groups: list[int],
        dense: frozenset[int],
        landing: Landing,
        tokens: set[Group],
        memory: list[Group | None],
    ):
        self.program, self.groups, self.dense, self.landing, self.tokens = program, groups, dense, landing, tokens
        self.memory = memory
        self.flying: list[tuple[int, Group]] = []
        self.borrowed: dict[int, Group] = {}
        self.skipped: set[Group] = set()
        self.routed: int | None = None
        self.value: list[Any] = []
        self.sum: list[int | str] = []
        self.halted = False

    def run(self) -> None:
        """Carry out the program and compare what it computed."""
        for instruction in self.program.instructions:
            if self.halted:
                raise WrongError("goes on behind HALT")
            self.step(Opcode(instruction.opcode), (instruction.layer, instruction.group), instruction.bank)
        if not self.halted:
            raise WrongError("just stops")
        if self.flying or self.borrowed:
            raise WrongError("the arena is still at work")
        if self.program.phase == Phase.LOAD:
            if self.memory != [(layer, group) for layer, count in enumerate(self.groups) for group in range(count)]:
                raise WrongError("not everything is loaded")
        elif self.value != list(self.model()):
            raise WrongError(f"computed {self.value}")

    def model(self) -> Iterator[Any]:
        """What the model computes."""
        yield "embedding"
        for layer, count in enumerate(self.groups):
            yield "attend", layer
            if count:
                yield "route", layer
            first: list[int | str] = ["dense"] if layer in self.dense else []
            yield "sum", layer, first + [group for group in range(count) if (layer, group) in self.tokens]
        yield "logits"

    def step(self, opcode: Opcode, group: Group, bank: int) -> None:
        """One instruction."""
        match opcode:
            case Opcode.EMBED:
                self.value.append("embedding")
            case Opcode.ATTEND:
                self.value.append(("attend", group[0]))
            case Opcode.ROUTE:
                self.value.append(("route", group[0]))
                self.routed, self.sum = group[0], []
            case Opcode.DENSE:
                if group[0] not in self.dense:
                    raise WrongError("no dense block")
                self.sum = ["dense"]  # whatever was there
            case Opcode.COMBINE:
                self.value.append(("sum", group[0], self.sum))
                self.routed, self.sum = None, []
            case Opcode.HEAD:
                self.value.append("logits")
            case Opcode.HALT:
                self.halted = True
            case Opcode.FILL if self.routed == group[0] and group not in self.tokens:
                self.skipped.add(group)
            case _ if group in self.skipped:
                pass
            case Opcode.FILL:
                self.flying.append((bank, group))
                if self.landing == "at once":
                    self.land(bank, group)
            case Opcode.AWAIT:
                if self.landing == "at the last moment" and (bank, group) in self.flying:
                    self.land(bank, group)
                self.flying = [each for each in self.flying if each != (bank, group)]
            case Opcode.EXPERTS:
                self.compute(group, bank)
            case Opcode.RELEASE:
                if self.borrowed.pop(bank, None) != group:
                    raise WrongError("gives back what was not taken")
            case _:
                raise WrongError(f"no such instruction as {opcode}")

    def land(self, bank: int, group: Group) -> None:
        """A read reaches memory."""
        if bank in self.borrowed:
            raise WrongError(f"bank {bank} is overwritten in use")
        if not 0 <= bank < len(self.memory):
            raise WrongError("outside the arena")
        self.memory[bank] = group

    def compute(self, group: Group, bank: int) -> None:
        """Take the weights in a bank; they must stay until they are given back."""
        if self.memory[bank] != group or bank in self.borrowed or any(each == bank for each, _ in self.flying):
            raise WrongError(f"bank {bank} does not hold {group}")
        if self.routed != group[0]:
            raise WrongError("no tokens known")
        self.borrowed[bank] = group
        if group in self.tokens:
            self.sum.append(group[1])


def simulate(program: Program, shape: ExpertShape, tokens: set[Group]) -> None:
    """Carry a program out with reads that land early, and with reads that land late.

    Raises:
        WrongError: one of the two went wrong.
    """
    counts = [-(-count // program.group_size) for count in shape.counts]
    everything: list[Group | None] = [(layer, group) for layer, count in enumerate(counts) for group in range(count)]
    resident = program.policy == Policy.RESIDENT and program.phase == Phase.PREFILL
    empty: list[Group | None] = [None] * program.bank_count
    landings: tuple[Landing, ...] = ("at once", "at the last moment")
    for landing in landings:
        memory = list(everything if resident else empty)
        simulator = Simulator(program, counts, shape.dense_layers, landing, tokens, memory)
        try:
            simulator.run()
        except (IndexError, ValueError) as error:
            raise WrongError(str(error)) from error
        if resident and simulator.memory != everything:
            raise WrongError("what was resident is gone")


@st.composite
def shapes(draw: st.DrawFn) -> ExpertShape:
    counts = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any))
    lengths = draw(st.lists(st.sampled_from([4096, 8192]), min_size=len(counts), max_size=len(counts)))
    beside = draw(st.sets(st.integers(0, len(counts) - 1)))
    top_k = [draw(st.integers(1, count)) if count else 0 for count in counts]
    return ExpertShape(
        counts=tuple(counts),
        record_lengths=tuple(length if count else 0 for count, length in zip(counts, lengths, strict=True)),
        top_k=tuple(top_k),
        dense_layers=frozenset(beside | {layer for layer, count in enumerate(counts) if not count}),
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[ExpertShape, Program]:
    shape, group_size, policy = draw(shapes()), draw(st.integers(1, 8)), draw(st.sampled_from(Policy))
    groups = sum(shape.group_counts(group_size))
    depth = draw(st.integers(groups - 1, groups + 1) if policy == Policy.RESIDENT else st.integers(0, groups + 1))
    phase = draw(st.sampled_from([Phase.LOAD, Phase.PREFILL])) if policy == Policy.RESIDENT else Phase.PREFILL
    arena = min(depth + 1, groups) * shape.bank_bytes(group_size) + draw(st.integers(0, 1000))
    compiled = compile_program(
        shape, arena_bytes=arena, group_size=group_size, prefetch_depth=depth, policy=policy, phase=phase
    )
    return shape, compiled


@st.composite
def routings(draw: st.DrawFn, shape: ExpertShape, group_size: int) -> set[Group]:
    groups = [(layer, group) for layer, count in enumerate(shape.group_counts(group_size)) for group in range(count)]
    return draw(st.sets(st.sampled_from(groups)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_compiled_programs_are_proven_and_right(data: st.DataObject) -> None:
    shape, program = data.draw(programs())
    proof = verify_program(program, shape)
    assert proof.peak_bytes <= proof.banks * proof.bank_bytes <= program.arena_bytes
    reads = not (program.policy == Policy.RESIDENT and program.phase == Phase.PREFILL)
    assert proof.groups_read == (sum(shape.group_counts(program.group_size)) if reads else 0)
    weights = sum(count * length for count, length in zip(shape.counts, shape.record_lengths, strict=True))
    assert proof.bytes_read == (weights if reads else 0)
    ahead = {Policy.PRE_ROUTING: program.bank_count - 1, Policy.ON_DEMAND: 0}
    assert proof.furthest_ahead <= program.bank_count - 1
    assert proof.furthest_ahead == ahead.get(Policy(program.policy), proof.furthest_ahead)
    assert Program.decode(program.encode(), path="program") == program
    simulate(program, shape, data.draw(routings(shape, program.group_size)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_edited_programs_are_refused_or_right(data: st.DataObject) -> None:
    shape, program = data.draw(programs())
    changed = data.draw(random_edits(program, operands=4, opcodes=Opcode.DENSE))
    assume(changed != program)
    try:
        verify_program(changed, shape)
    except InvalidError:
        return
    simulate(changed, shape, data.draw(routings(shape, changed.group_size)))


SHAPE = ExpertShape(counts=(3, 0, 1), record_lengths=(4096, 0, 4096), top_k=(2, 0, 1), dense_layers=frozenset({1, 2}))
EVERY: set[Group] = {(0, 0), (0, 1), (2, 0)}
"""Its groups of two."""
SMALL = [
    compile_program(SHAPE, arena_bytes=3 * 8192, group_size=2, prefetch_depth=depth, policy=policy, phase=phase)
    for policy, depth, phase in (
        (Policy.ON_DEMAND, 0, Phase.PREFILL),
        (Policy.POST_ROUTING, 1, Phase.PREFILL),
        (Policy.PRE_ROUTING, 1, Phase.PREFILL),
        (Policy.PRE_ROUTING, 2, Phase.PREFILL),
        (Policy.RESIDENT, 2, Phase.LOAD),
        (Policy.RESIDENT, 2, Phase.PREFILL),
    )
]


@pytest.mark.parametrize("program", SMALL, ids=lambda each: disassemble(each).partition("\n")[0][2:])
def test_every_single_edit_is_refused_or_right(program: Program) -> None:
    routings = [{group for at, group in enumerate(sorted(EVERY)) if bits >> at & 1} for bits in range(8)]
    proven, refused = 0, 0
    for instructions in set(single_edits(program.instructions, opcodes=Opcode.DENSE)):
        changed = replace(program, instructions=instructions)
        try:
            verify_program(changed, SHAPE)
        except InvalidError:
            refused += 1
            continue
        proven += 1
        for tokens in routings:
            simulate(changed, SHAPE, tokens)
    assert refused > 10 * proven > 0


def test_the_simulator_finds_what_is_wrong() -> None:
    """A simulator that finds nothing would make the tests above hold for any verifier."""
    for program in SMALL:
        simulate(program, SHAPE, EVERY)
        for index in range(len(program.instructions)):
            instructions = (*program.instructions[:index], *program.instructions[index + 1 :])
            with pytest.raises(WrongError):
                simulate(replace(program, instructions=instructions), SHAPE, EVERY)
