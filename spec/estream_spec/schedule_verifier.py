"""Proves a program before it runs, in one pass over its instructions. SCHEDULE.md sections 4 and 5.

A program without jumps is proven by carrying it out on the states of its banks alone: what holds for the states holds
for every run, whatever is routed where. The first rule that is broken is reported, in the order of SCHEDULE.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final, NoReturn

from estream_spec.decode_verifier import DEMANDS, Demands
from estream_spec.limits import MAX_EXPERTS, MAX_FILE_LENGTH, MAX_RECORDS
from estream_spec.rulebook import refusal
from estream_spec.schedule import (
    OPERANDS,
    POLICY_NAMES,
    BankState,
    ExpertShape,
    Instruction,
    Opcode,
    Phase,
    Policy,
    Program,
    assembly,
)

_PAGING: Final = frozenset({Opcode.FILL, Opcode.AWAIT, Opcode.EXPERTS, Opcode.RELEASE})
"""Opcodes about groups in banks that the program names."""
_STEPS: Final = frozenset(
    {Opcode.EMBED, Opcode.ATTEND, Opcode.ROUTE, Opcode.DENSE, Opcode.COMBINE, Opcode.HEAD, Opcode.HALT}
)
"""Opcodes that have one order in every program; the others are about banks."""
OPCODES: Final[dict[int, frozenset[Opcode]]] = {
    Phase.LOAD: frozenset({Opcode.FILL, Opcode.AWAIT, Opcode.HALT}),
    Phase.PREFILL: _STEPS | _PAGING,
    Phase.DECODE: _STEPS | DEMANDS,
}
"""What programs of each phase may do."""
_POLICIES: Final[dict[int, tuple[Policy, ...]]] = {
    Phase.LOAD: (Policy.RESIDENT,),
    Phase.PREFILL: tuple(Policy),
    Phase.DECODE: (Policy.POST_ROUTING, Policy.PRE_ROUTING),
}
"""The policies of each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found of a program that holds to every rule.

    Attributes:
        phase: what it is for.
        policy: when it reads.
        instructions: how many it has.
        banks: how many it needs.
        bank_bytes: room of each.
        arena_bytes: memory for experts.
        peak_bytes: most of it that holds groups, or waits for them, at one time.
        groups_read: groups it reads where routing leaves none out; of a program that decodes, the most that it can.
        bytes_read: their records' bytes.
        furthest_ahead: most groups whose reading has begun beyond the one that computes, or before they are routed to.
        groups_kept: most that are kept for the next run.
    """

    phase: Phase
    policy: Policy
    instructions: int
    banks: int
    bank_bytes: int
    arena_bytes: int
    peak_bytes: int
    groups_read: int
    bytes_read: int
    furthest_ahead: int
    groups_kept: int

    def lines(self) -> list[str]:
        """The proof in words."""
        what = "experts" if self.phase == Phase.DECODE else "groups"
        reads = f"{self.groups_read:,} {what}, {self.bytes_read:,} bytes" if self.groups_read else "nothing"
        if self.groups_read and self.phase == Phase.PREFILL:
            reads += f" less what routing leaves out, at most {self.furthest_ahead:,} ahead"
        if self.phase == Phase.DECODE:
            reads = f"at most {reads}, {self.furthest_ahead:,} ahead; keeps at most {self.groups_kept:,}"
        banks = f"{self.banks:,} bank{'s' * (self.banks != 1)} of {self.bank_bytes:,} bytes"
        return [
            f"proven: {self.phase.name.lower()}, {POLICY_NAMES[self.policy]}, {self.instructions:,} instructions",
            f"memory: {banks}, at most {self.peak_bytes:,} in use of an arena of {self.arena_bytes:,}",
            f"reads: {reads}",
        ]


def verify_program(program: Program, shape: ExpertShape, path: str = "program") -> Proof:
    """Prove that a program computes what the model describes, within its arena, whatever is routed where.

    Args:
        program: the program.
        shape: experts and record lengths of the model.
        path: what messages call it.

    Raises:
        InvalidError: the first rule it breaks.
    """
    _check_header(program, shape, path)
    machine = _Machine(program, shape, path)
    for index, instruction in enumerate(program.instructions):
        machine.step(index, instruction)
    machine.end()
    return Proof(
        phase=Phase(program.phase),
        policy=Policy(program.policy),
        instructions=len(program.instructions),
        banks=program.bank_count,
        bank_bytes=shape.bank_bytes(program.group_size),
        arena_bytes=program.arena_bytes,
        peak_bytes=machine.most_full * shape.bank_bytes(program.group_size),
        groups_read=len(machine.filled) + sum(machine.demands.most_read),
        bytes_read=sum(shape.group_bytes(*group, program.group_size) for group in machine.filled)
        + sum(map(mul, machine.demands.most_read, shape.record_lengths)),
        furthest_ahead=max(machine.furthest_ahead, *machine.demands.ahead),
        groups_kept=machine.kept + sum(machine.demands.kept),
    )


def _check_header(program: Program, shape: ExpertShape, path: str) -> None:
    def require(condition: bool, rule: str, message: str, field: str) -> None:
        if not condition:
            raise refusal(rule, message, path=f"{path}.{field}")

    group_size, depth, banks = program.group_size, program.prefetch_depth, program.bank_count
    phases = " or ".join(str(each.value) for each in Phase)
    require(program.phase in list(Phase), "EMOE-SCH-005", f"phase {program.phase}, expected {phases}", "phase")
    policies = _POLICIES[program.phase]
    message = f"policy {program.policy}, expected {' or '.join(str(each.value) for each in policies)}"
    require(program.policy in policies, "EMOE-SCH-006", message, "policy")
    decodes = program.phase == Phase.DECODE
    largest, deepest = (1, MAX_RECORDS) if decodes else (MAX_EXPERTS, MAX_EXPERTS)
    message = f"group size {group_size}, expected 1{'' if decodes else f' to {largest}'}"
    require(1 <= group_size <= largest, "EMOE-SCH-007", message, "group_size")
    message = f"prefetch depth {depth}, expected 0 to {deepest}"
    require(depth <= deepest, "EMOE-SCH-007", message, "prefetch_depth")
    message = f"arena of {program.arena_bytes} bytes, the limit is {MAX_FILE_LENGTH}"
    require(program.arena_bytes <= MAX_FILE_LENGTH, "EMOE-SCH-007", message, "arena_bytes")
    groups = sum(shape.group_counts(group_size))
    expected = min(depth + 1, groups)
    message = f"{banks} banks for prefetch depth {depth} and {groups} groups, expected {expected}"
    require(banks == expected, "EMOE-SCH-008", message, "bank_count")
    message = f"resident program of {banks} banks for {groups} groups, expected one for each"
    require(program.policy != Policy.RESIDENT or banks == groups, "EMOE-SCH-009", message, "bank_count")
    needed = banks * shape.bank_bytes(group_size)
    message = f"arena of {program.arena_bytes} bytes, its banks take {needed}"
    require(needed <= program.arena_bytes, "EMOE-SCH-010", message, "arena_bytes")


class _Machine:
    """A program being carried out on the states of its banks.

    Attributes:
        filled: the groups read so far, each as (layer, number in it).
        most_full: most banks that were not available at one time.
        furthest_ahead: most groups that were in banks, or on their way, beyond one that was computed with.
        kept: groups that stay in their banks.
        demands: what a program that decodes has asked for.
    """

    def __init__(self, program: Program, shape: ExpertShape, path: str):
        self._path = path
        self._shape = shape
        self._loads = program.phase == Phase.LOAD
        self._decodes = program.phase == Phase.DECODE
        self._allowed = OPCODES[program.phase]
        self._counts = shape.group_counts(program.group_size)
        self._first = (0, *accumulate(self._counts))
        """Number of each layer's first group, counted through the model; behind them the number of all."""
        kept = program.policy == Policy.RESIDENT
        self._released = BankState.READY if kept else BankState.AVAILABLE
        full = kept and not self._loads
        self._states = [BankState.READY if full else BankState.AVAILABLE] * program.bank_count
        groups = [(layer, group) for layer, count in enumerate(self._counts) for group in range(count)]
        self._holds = list[tuple[int, int] | None](groups if full else [None] * program.bank_count)
        self.filled = set[tuple[int, int]]()
        self._full = self.most_full = self.kept = program.bank_count if full else 0
        self.demands = Demands(shape, program.bank_count, self._refuse)
        self._waiting = self.furthest_ahead = 0
        # The step that must come next, and how the layer at work stands.
        self._expected = Instruction(Opcode.HALT if self._loads else Opcode.EMBED)
        self._computing: int | None = None
        self._computed, self._last_group = 0, -1
        self._halted = False
        self._at: tuple[int, Instruction] | None = None

    def step(self, index: int, instruction: Instruction) -> None:
        """Carry out one instruction, or refuse it."""
        self._at = index, instruction
        self._check(instruction)
        opcode = instruction.opcode
        if opcode in _STEPS:
            self._take_turn(instruction)
        elif opcode == Opcode.FILL:
            self._fill(instruction)
        elif opcode == Opcode.AWAIT:
            self._move(instruction, BankState.FILLING, BankState.READY, "EMOE-SCH-024")
        elif opcode == Opcode.EXPERTS:
            self._compute(instruction)
        elif opcode in DEMANDS:
            if opcode == Opcode.DEMAND_EXPERTS:
                self._check_place(instruction)
            self.demands.step(instruction, self._expected)
        else:
            self._move(instruction, BankState.IN_USE, self._released, "EMOE-SCH-026")
            self._full -= self._released == BankState.AVAILABLE

    def end(self) -> None:
        """Refuse a program that just stops."""
        if not self._halted:
            raise refusal("EMOE-SCH-033", "program does not end in HALT, expected it last", path=self._path)

    def _refuse(self, rule: str, message: str) -> NoReturn:
        assert self._at is not None
        index, instruction = self._at
        raise refusal(rule, f"{assembly(instruction)}: {message}", path=f"{self._path}[{index}]")

    def _check(self, instruction: Instruction) -> None:
        """What an instruction must be by itself."""
        opcode, layer, group, bank = instruction
        if self._halted:
            self._refuse("EMOE-SCH-011", "behind HALT, expected nothing there")
        operands = OPERANDS.get(opcode)
        if operands is None:
            self._refuse("EMOE-SCH-012", f"opcode {opcode}, expected one that this version defines")
        if opcode not in self._allowed:
            names = ", ".join(each.name for each in Opcode if each in self._allowed)
            self._refuse("EMOE-SCH-013", f"not in a program of this phase, expected one of {names}")
        if instruction.has_stray_operand:
            self._refuse("EMOE-SCH-014", f"operands are {layer}, {group}, {bank}, expected 0 where they are not used")
        if layer >= len(self._counts):
            self._refuse("EMOE-SCH-015", f"model has {len(self._counts)} layers, expected one that it has")
        if "group" in operands and group >= self._counts[layer]:
            self._refuse("EMOE-SCH-016", f"layer has {self._counts[layer]} groups, expected one that it has")
        if "count" in operands and group > self._counts[layer]:
            self._refuse("EMOE-SCH-016", f"layer has {self._counts[layer]} experts, expected at most as many")
        if bank >= len(self._states):
            self._refuse("EMOE-SCH-017", f"program has {len(self._states)} banks, expected one that it has")

    def _take_turn(self, instruction: Instruction) -> None:
        """One of the steps that have one order in every program."""
        opcode, layer, *_ = instruction
        expected = self._expected
        if opcode == Opcode.HEAD and expected.opcode not in (Opcode.HEAD, Opcode.HALT):
            self._refuse("EMOE-SCH-018", f"before the last layer is done, expected {assembly(expected)}")
        if opcode != expected.opcode:
            self._refuse("EMOE-SCH-019", f"out of turn, expected {assembly(expected)}")
        if layer != expected.layer:
            self._refuse("EMOE-SCH-020", f"layer out of order, expected {assembly(expected)}")
        match opcode:
            case Opcode.EMBED:
                self._expected = Instruction(Opcode.ATTEND, 0)
            case Opcode.COMBINE:
                if not self._decodes and self._computed < self._counts[layer]:
                    self._refuse("EMOE-SCH-030", f"{self._computed} of {self._counts[layer]} groups are computed")
                if self._decodes:
                    self.demands.end_layer(layer)
                last = layer + 1 == len(self._counts)
                self._expected = Instruction(Opcode.HEAD) if last else Instruction(Opcode.ATTEND, layer + 1)
                self._computing = None
            case Opcode.ATTEND | Opcode.ROUTE | Opcode.DENSE:
                steps = self._shape.steps(layer)
                following = steps[steps.index(Opcode(opcode)) + 1]
                self._expected = Instruction(following, layer)
                if following == Opcode.COMBINE:
                    self._computing, self._computed, self._last_group = layer, 0, -1
            case Opcode.HEAD:
                self._expected = Instruction(Opcode.HALT)
            case _:
                self._halt()

    def _fill(self, instruction: Instruction) -> None:
        _, layer, group, bank = instruction
        if self._states[bank] != BankState.AVAILABLE:
            self._refuse("EMOE-SCH-021", f"bank is {self._states[bank].value}, expected available")
        if (layer, group) in self.filled:
            self._refuse("EMOE-SCH-022", "group is filled a second time, expected once")
        if self._loads and bank != (number := self._first[layer] + group):
            self._refuse("EMOE-SCH-023", f"expected bank {number}, the group's number in the model")
        self._states[bank], self._holds[bank] = BankState.FILLING, (layer, group)
        self.filled.add((layer, group))
        self._full += 1
        self._waiting += 1
        self.most_full = max(self.most_full, self._full)

    def _compute(self, instruction: Instruction) -> None:
        _, layer, group, _ = instruction
        self._move(instruction, BankState.READY, BankState.IN_USE, "EMOE-SCH-025")
        self._check_place(instruction)
        if group <= self._last_group:
            self._refuse("EMOE-SCH-029", f"behind group {self._last_group}, expected a higher one")
        self._computed, self._last_group = self._computed + 1, group
        if (layer, group) in self.filled:
            self._waiting -= 1
            self.furthest_ahead = max(self.furthest_ahead, self._waiting)

    def _check_place(self, instruction: Instruction) -> None:
        """Experts are computed between what comes before them and the end of their layer."""
        if self._computing != instruction.layer:
            before = self._shape.steps(instruction.layer)[-2].name
            self._refuse("EMOE-SCH-028", f"out of place, expected between {before} and COMBINE of its layer")

    def _move(self, instruction: Instruction, before: BankState, after: BankState, rule: str) -> None:
        """Take a bank that holds the group named from one state to the next."""
        _, layer, group, bank = instruction
        if self._states[bank] != before:
            self._refuse(rule, f"bank is {self._states[bank].value}, expected {before.value}")
        if (held := self._holds[bank]) != (layer, group):
            assert held is not None
            self._refuse("EMOE-SCH-027", f"bank holds group {held[1]} of layer {held[0]}, expected the one named")
        self._states[bank] = after

    def _halt(self) -> None:
        if self._loads and len(self.filled) < self._first[-1]:
            self._refuse("EMOE-SCH-031", f"{len(self.filled)} of {self._first[-1]} groups are loaded")
        for bank, state in enumerate(self._states):
            if state != self._released:
                self._refuse("EMOE-SCH-032", f"bank {bank} is {state.value}, expected {self._released.value}")
        if self._decodes:
            self.most_full = self.demands.end()
        self._halted = True
