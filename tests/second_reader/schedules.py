"""Programs: what SCHEDULE.md asks of the content of a SCHEDULE section."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from struct import Struct
from typing import Final, NamedTuple

from second_reader import limits
from second_reader.rules import require
from second_reader.source import is_zero

PROGRAM_MAGIC: Final = b"EMOEPRG\0"
HEADER: Final = Struct("<8sBB2sIIII4sQ")
INSTRUCTION: Final = Struct("<BBHIII")

LOAD: Final = 1
PREFILL: Final = 2
RESIDENT: Final = 4
POLICIES: Final = (1, 2, 3, RESIDENT)

EMBED, ATTEND, ROUTE, FILL, AWAIT, EXPERTS, RELEASE, COMBINE, HEAD, HALT, _, DENSE = range(1, 13)
OPERAND_COUNT: Final = {
    EMBED: 0,
    ATTEND: 1,
    ROUTE: 1,
    FILL: 3,
    AWAIT: 3,
    EXPERTS: 3,
    RELEASE: 3,
    COMBINE: 1,
    HEAD: 0,
    HALT: 0,
    DENSE: 1,
}
"""How many of layer, group and bank each opcode names, of all that are not reserved."""
LOADING: Final = (FILL, AWAIT, HALT)

Group = tuple[int, int]
"""A layer, and the group's number in it."""
Step = tuple[int, int]
"""An opcode, and its layer or 0."""


class Layer(NamedTuple):
    """What a layer has besides attention."""

    experts: int
    has_dense_block: bool


class State(Enum):
    """Section 3.2."""

    AVAILABLE = 0
    FILLING = 1
    READY = 2
    IN_USE = 3


class Header(NamedTuple):
    """Section 2.1, the fields in their order."""

    magic: bytes
    phase: int
    policy: int
    reserved: bytes
    group_size: int
    prefetch_depth: int
    bank_count: int
    instruction_count: int
    more_reserved: bytes
    arena_bytes: int


def check_program(data: bytes, layers: Sequence[Layer], longest: int) -> Header:
    """EMOE-SCH-001 to EMOE-SCH-033.

    Args:
        data: the program.
        layers: of the model.
        longest: bytes of the longest expert record.
    """
    header = _parse(data)
    instructions = list(INSTRUCTION.iter_unpack(data[HEADER.size :]))
    require(all(first == second == 0 for _, first, _, _, _, second in instructions), "SCH-004")
    require(header.phase in (LOAD, PREFILL), "SCH-005")
    require(header.policy in POLICIES, "SCH-006")
    require(header.phase != LOAD or header.policy == RESIDENT, "SCH-006")
    require(1 <= header.group_size <= limits.MAX_EXPERTS, "SCH-007")
    require(header.prefetch_depth <= limits.MAX_EXPERTS, "SCH-007")
    require(header.arena_bytes <= limits.MAX_FILE_LENGTH, "SCH-007")
    groups = [-(-layer.experts // header.group_size) for layer in layers]
    require(header.bank_count == min(header.prefetch_depth + 1, sum(groups)), "SCH-008")
    require(header.policy != RESIDENT or header.bank_count == sum(groups), "SCH-009")
    require(header.arena_bytes >= header.bank_count * header.group_size * longest, "SCH-010")
    run = _Run(header, groups, [] if header.phase == LOAD else _steps(layers))
    for opcode, _, layer, group, bank, _ in instructions:
        run.step(opcode, layer, group, bank)
    require(run.has_halted, "SCH-033")
    return header


def _parse(data: bytes) -> Header:
    require(len(data) >= HEADER.size, "SCH-001")
    header = Header._make(HEADER.unpack_from(data))
    require(header.magic == PROGRAM_MAGIC, "SCH-001")
    require(is_zero(header.reserved) and is_zero(header.more_reserved), "SCH-001")
    require(header.instruction_count <= limits.MAX_INSTRUCTIONS, "SCH-002")
    require(len(data) == HEADER.size + INSTRUCTION.size * header.instruction_count, "SCH-003")
    return header


class _Run:
    """A program while its instructions are gone through: section 4."""

    def __init__(self, header: Header, groups: Sequence[int], steps: Sequence[Step]) -> None:
        self.groups = groups
        self.loads = header.phase == LOAD
        self.is_resident = header.policy == RESIDENT
        self.numbers = {
            place: number
            for number, place in enumerate(
                (layer, group) for layer, count in enumerate(groups) for group in range(count)
            )
        }
        self.order = [*steps, (HALT, 0)]
        self.turn = 0
        self.filled: set[Group] = set()
        self.computed: list[list[int]] = [[] for _ in groups]
        finds_all = self.is_resident and not self.loads
        self.states = [State.READY if finds_all else State.AVAILABLE] * header.bank_count
        self.held: list[Group | None] = list(self.numbers) if finds_all else [None] * header.bank_count

    @property
    def has_halted(self) -> bool:
        return self.turn == len(self.order)

    def step(self, opcode: int, layer: int, group: int, bank: int) -> None:
        """One instruction, by EMOE-SCH-011 to EMOE-SCH-032."""
        require(not self.has_halted, "SCH-011")
        require(opcode in OPERAND_COUNT, "SCH-012")
        require(not self.loads or opcode in LOADING, "SCH-013")
        count = OPERAND_COUNT[opcode]
        require(not any((layer, group, bank)[count:]), "SCH-014")
        require(count < 1 or layer < len(self.groups), "SCH-015")
        require(count < 3 or group < self.groups[layer], "SCH-016")
        require(count < 3 or bank < len(self.states), "SCH-017")
        if opcode == FILL:
            self._fill((layer, group), bank)
        elif opcode == AWAIT:
            self._advance((layer, group), bank, State.FILLING, "SCH-024")
            self.states[bank] = State.READY
        elif opcode == EXPERTS:
            self._advance((layer, group), bank, State.READY, "SCH-025")
            self._compute(layer, group)
            self.states[bank] = State.IN_USE
        elif opcode == RELEASE:
            self._advance((layer, group), bank, State.IN_USE, "SCH-026")
            self.states[bank] = State.READY if self.is_resident else State.AVAILABLE
        else:
            self._take_turn(opcode, layer)

    def _fill(self, place: Group, bank: int) -> None:
        require(self.states[bank] == State.AVAILABLE, "SCH-021")
        require(place not in self.filled, "SCH-022")
        require(not self.loads or bank == self.numbers[place], "SCH-023")
        self.filled.add(place)
        self.states[bank], self.held[bank] = State.FILLING, place

    def _advance(self, place: Group, bank: int, state: State, rule: str) -> None:
        require(self.states[bank] == state, rule)
        require(self.held[bank] == place, "SCH-027")

    def _compute(self, layer: int, group: int) -> None:
        require(self.order[self.turn] == (COMBINE, layer), "SCH-028")
        require(all(group > earlier for earlier in self.computed[layer][-1:]), "SCH-029")
        self.computed[layer].append(group)

    def _take_turn(self, opcode: int, layer: int) -> None:
        # HEAD and HALT are the last two.
        require(opcode != HEAD or self.turn >= len(self.order) - 2, "SCH-018")
        require(opcode == self.order[self.turn][0], "SCH-019")
        require(layer == self.order[self.turn][1], "SCH-020")
        if opcode == COMBINE:
            require(len(self.computed[layer]) == self.groups[layer], "SCH-030")
        if opcode == HALT:
            require(not self.loads or len(self.filled) == len(self.numbers), "SCH-031")
            last = State.READY if self.is_resident else State.AVAILABLE
            require(all(state == last for state in self.states), "SCH-032")
        self.turn += 1


def _steps(layers: Sequence[Layer]) -> list[Step]:
    """What stands in one order before HALT, in a program that does not load."""
    steps = [(EMBED, 0)]
    for number, layer in enumerate(layers):
        routed, dense = [ROUTE] * (layer.experts > 0), [DENSE] * layer.has_dense_block
        steps += [(opcode, number) for opcode in (ATTEND, *routed, *dense, COMBINE)]
    return [*steps, (HEAD, 0)]
