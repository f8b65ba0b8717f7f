"""Programs: what a run does, instruction by instruction, and their bytes. SCHEDULE.md sections 2 and 3.

`decode` only parses; `estream_spec.schedule_verifier` judges, and `estream_spec.schedule_compiler` makes programs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import ClassVar, Final, NamedTuple, Self

from estream_spec.constants import PROGRAM_MAGIC
from estream_spec.limits import MAX_INSTRUCTIONS
from estream_spec.manifest import DeviceConfiguration, PolicyName
from estream_spec.model import ModelDescription
from estream_spec.records import RecordTable, Structure
from estream_spec.rulebook import refusal


class Phase(IntEnum):
    """What a program is for."""

    LOAD = 1
    """Brings every group into a bank of its own, once, before resident programs run."""
    PREFILL = 2
    """Takes all rows of a batch through the model."""
    DECODE = 3
    """Takes one row through the model, reading the experts that it is routed to."""


class Policy(IntEnum):
    """When groups are read. It informs, save that a resident program keeps its banks."""

    ON_DEMAND = 1
    """One group at a time, when the layer's routing is known and the group before is done with."""
    POST_ROUTING = 2
    """As soon as the layer's routing is known and a bank is free."""
    PRE_ROUTING = 3
    """As soon as a bank is free, whether the layer's routing is known or not."""
    RESIDENT = 4
    """Once, before everything."""


POLICY_NAMES: Final[dict[Policy, PolicyName]] = {
    Policy.ON_DEMAND: "on-demand",
    Policy.POST_ROUTING: "post-routing",
    Policy.PRE_ROUTING: "pre-routing",
    Policy.RESIDENT: "resident",
}
"""What people, and device configurations, call each policy."""
POLICIES_BY_NAME: Final = {name: policy for policy, name in POLICY_NAMES.items()}
"""The policy of each name."""


class Opcode(IntEnum):
    """What an instruction does. Those that `OPERANDS` does not list are reserved."""

    EMBED = 1
    """Look up the embedding of every row."""
    ATTEND = 2
    """The attention block of a layer, up to the router's scores."""
    ROUTE = 3
    """Choose the experts of every row."""
    FILL = 4
    """Start reading a group into a bank."""
    AWAIT = 5
    """Wait until the group is in the bank, whole and proven."""
    EXPERTS = 6
    """Compute every routed expert of the group."""
    RELEASE = 7
    """Give the bank back when nothing computes with it any more."""
    COMBINE = 8
    """Add what the layer's experts gave to every row."""
    HEAD = 9
    """The final norm and the head."""
    HALT = 10
    SHARED = 11
    DENSE = 12
    """Compute the dense block of a layer, of every row."""
    PREDICT = 13
    """Rank the experts of a layer by how likely they will be routed to."""
    PREFETCH = 14
    """Start reading at most `count` predicted experts of a layer."""
    DEMAND_FILL = 15
    """Give every routed expert of a layer a bank, and start reading those that are in none."""
    DEMAND_AWAIT = 16
    """Wait until at least `count` routed experts of a layer are in banks, whole and proven."""
    DEMAND_EXPERTS = 17
    """Compute every routed expert of a layer that is there and was not computed yet."""
    DEMAND_RELEASE = 18
    """Give the banks of a layer back, but for at most `count` records, which it keeps."""


_PLACE: Final = ("layer", "group", "bank")
OPERANDS: Final[dict[int, tuple[str, ...]]] = {
    Opcode.EMBED: (),
    Opcode.ATTEND: ("layer",),
    Opcode.ROUTE: ("layer",),
    Opcode.FILL: _PLACE,
    Opcode.AWAIT: _PLACE,
    Opcode.EXPERTS: _PLACE,
    Opcode.RELEASE: _PLACE,
    Opcode.COMBINE: ("layer",),
    Opcode.DENSE: ("layer",),
    Opcode.HEAD: (),
    Opcode.HALT: (),
    Opcode.PREDICT: ("layer",),
    Opcode.PREFETCH: ("layer", "count"),
    Opcode.DEMAND_FILL: ("layer",),
    Opcode.DEMAND_AWAIT: ("layer", "count"),
    Opcode.DEMAND_EXPERTS: ("layer",),
    Opcode.DEMAND_RELEASE: ("layer", "count"),
}
"""Operands of the opcodes that this version defines; the others are zero. A `count` is in the field `group`."""


class BankState(Enum):
    """Where a bank is in its round."""

    AVAILABLE = "available"
    FILLING = "filling"
    READY = "ready"
    IN_USE = "in use"


class Instruction(NamedTuple):
    """One step of a program. `group` is a group's number in its layer, or a count of experts."""

    opcode: int
    layer: int = 0
    group: int = 0
    bank: int = 0

    @property
    def has_stray_operand(self) -> bool:
        """Whether a field is set that stands for no operand of its opcode, which is one that is defined."""
        fields = zip(_names(self.opcode), self[1:], strict=True)
        return any(value for name, value in fields if name not in OPERANDS[self.opcode])


INSTRUCTION: Final = struct.Struct("<BBHIII")
"""Opcode, reserved, layer, group, bank, reserved."""


@dataclass(frozen=True, slots=True)
class ProgramHeader(Structure):
    """What stands before a program's instructions. SCHEDULE.md section 2.1."""

    LAYOUT: ClassVar = struct.Struct("<8sBB2xIIII4xQ")
    SIZE: ClassVar = 40
    RULE: ClassVar = "EMOE-SCH-001"

    magic: bytes
    phase: int
    policy: int
    group_size: int
    prefetch_depth: int
    bank_count: int
    instruction_count: int
    arena_bytes: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """One phase of a run under one device configuration.

    Attributes:
        phase: a `Phase`, once verified.
        policy: a `Policy`, once verified.
        group_size: experts read together.
        prefetch_depth: groups read ahead.
        bank_count: banks it needs, `prefetch_depth + 1` or as many as there are groups.
        arena_bytes: memory for experts it was made for.
        instructions: in order.
    """

    phase: int
    policy: int
    group_size: int
    prefetch_depth: int
    bank_count: int
    arena_bytes: int
    instructions: tuple[Instruction, ...]

    @property
    def header(self) -> ProgramHeader:
        """The structure before the instructions."""
        return ProgramHeader(
            magic=PROGRAM_MAGIC,
            phase=self.phase,
            policy=self.policy,
            group_size=self.group_size,
            prefetch_depth=self.prefetch_depth,
            bank_count=self.bank_count,
            instruction_count=len(self.instructions),
            arena_bytes=self.arena_bytes,
        )

    @cached_property
    def kept(self) -> Mapping[int, int]:
        """By layer with experts, the most records that it keeps when a program that decodes is done with it."""
        return {each.layer: each.group for each in self.instructions if each.opcode == Opcode.DEMAND_RELEASE}

    @cached_property
    def reads_ahead(self) -> bool:
        """Whether a program that decodes reads any expert before its layer is routed."""
        return any(each.opcode == Opcode.PREFETCH for each in self.instructions)

    def matches(self, choice: DeviceConfiguration) -> bool:
        """Whether it is a program for a device configuration."""
        if self.phase == Phase.DECODE:  # all else that a configuration says is about prompts
            return self.arena_bytes == choice.arena_bytes
        own = self.arena_bytes, self.group_size, self.prefetch_depth, self.policy
        return own == (choice.arena_bytes, choice.group_size, choice.prefetch_depth, POLICIES_BY_NAME[choice.policy])

    def encode(self) -> bytes:
        """The bytes of its section."""
        packed = (INSTRUCTION.pack(opcode, 0, *operands, 0) for opcode, *operands in self.instructions)
        return self.header.encode() + b"".join(packed)

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> Self:
        """Parse a program.

        Raises:
            MalformedError: wrong magic, reserved bytes set, or a length other than the count asks for.
            LimitError: more instructions than `MAX_INSTRUCTIONS`.
        """
        header = ProgramHeader.decode(data, path=path)
        if header.magic != PROGRAM_MAGIC:
            message = f"program starts with {header.magic!r}, expected {PROGRAM_MAGIC!r}"
            raise refusal("EMOE-SCH-001", message, path=path)
        count = header.instruction_count
        if count > MAX_INSTRUCTIONS:
            raise refusal("EMOE-SCH-002", f"{count} instructions, the limit is {MAX_INSTRUCTIONS}", path=path)
        if len(data) != (expected := ProgramHeader.SIZE + INSTRUCTION.size * count):
            message = f"program of {count} instructions has {len(data)} bytes, expected {expected}"
            raise refusal("EMOE-SCH-003", message, path=path)
        return cls(
            phase=header.phase,
            policy=header.policy,
            group_size=header.group_size,
            prefetch_depth=header.prefetch_depth,
            bank_count=header.bank_count,
            arena_bytes=header.arena_bytes,
            instructions=tuple(_instructions(memoryview(data)[ProgramHeader.SIZE :], path)),
        )


def _instructions(data: memoryview, path: str) -> Iterator[Instruction]:
    for index, (opcode, first, layer, group, bank, second) in enumerate(INSTRUCTION.iter_unpack(data)):
        if first or second:
            message = "reserved bytes of an instruction are not zero"
            raise refusal("EMOE-SCH-004", message, path=f"{path}[{index}]")
        yield Instruction(opcode, layer, group, bank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """All that programs depend on in a model and its records.

    Attributes:
        counts: experts of each layer, 0 where it has none.
        record_lengths: bytes of an expert record of each layer, padding included.
        top_k: experts that a token is routed to in each layer, 0 where it has none.
        dense_layers: the layers that have a dense block.
    """

    counts: tuple[int, ...]
    record_lengths: tuple[int, ...]
    top_k: tuple[int, ...]
    dense_layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: ModelDescription, experts: RecordTable) -> Self:
        """The shape of a model with this expert table."""
        return cls(
            top_k=model.top_k,
            dense_layers=model.dense_layers,
            counts=tuple(each.count for each in experts.ranges),
            record_lengths=tuple(each.record_length for each in experts.ranges),
        )

    def bank_bytes(self, group_size: int) -> int:
        """Room of a bank: `group_size` of the largest record."""
        return group_size * max(self.record_lengths)

    def group_counts(self, group_size: int) -> list[int]:
        """Groups of each layer; the last of a layer may be ragged."""
        return [-(-count // group_size) for count in self.counts]

    def steps(self, layer: int) -> tuple[Opcode, ...]:
        """The instructions of a layer that have one order in every program."""
        routed = (Opcode.ROUTE,) if self.counts[layer] else ()
        dense = (Opcode.DENSE,) if layer in self.dense_layers else ()
        return Opcode.ATTEND, *routed, *dense, Opcode.COMBINE

    def group_bytes(self, layer: int, group: int, group_size: int) -> int:
        """Bytes of a group's records."""
        return min(group_size, self.counts[layer] - group * group_size) * self.record_lengths[layer]


def disassemble(program: Program) -> str:
    """A program as text: a comment that says what it is, then one instruction a line.

    Numbers that stand for nothing are shown as numbers, so that a program that breaks the rules can be looked at.
    """
    phases = {phase.value: phase.name.lower() for phase in Phase}
    phase = phases.get(program.phase, f"phase {program.phase}")
    policy = {int(each): name for each, name in POLICY_NAMES.items()}.get(program.policy, f"policy {program.policy}")
    banks = f"{program.bank_count} bank{'s' * (program.bank_count != 1)}"
    groups = "" if program.phase == Phase.DECODE else f"groups of {program.group_size}, "
    sizes = f"{groups}{banks}, arena {program.arena_bytes:,} bytes"
    width = len(str(max(len(program.instructions) - 1, 0)))
    longest = 14 if program.phase == Phase.DECODE else 8
    lines = [f"; {phase}, {policy}: {sizes}"]
    for index, instruction in enumerate(program.instructions):
        name, operands = _words(instruction)
        lines.append(f"{index:>{width}}  {name:<{longest}} {operands}".rstrip())
    return "\n".join(lines)


def assembly(instruction: Instruction) -> str:
    """One instruction as text: its name, then its operands, each with what it is."""
    return " ".join(_words(instruction)).rstrip()


def _names(opcode: int) -> tuple[str, str, str]:
    """What the operand fields of an instruction stand for."""
    return "layer", "count" if "count" in OPERANDS.get(opcode, ()) else "group", "bank"


def _words(instruction: Instruction) -> tuple[str, str]:
    opcode, *operands = instruction
    names = {each.value: each.name for each in Opcode}
    shown = OPERANDS.get(opcode, ())
    given = zip(_names(opcode), operands, strict=True)
    text = " ".join(f"{field} {value}" for field, value in given if field in shown or value)
    return names.get(opcode, f"opcode {opcode}"), text
