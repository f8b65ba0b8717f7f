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

LOAD, PREFILL, DECODE = 1, 2, 3
POST_ROUTING, PRE_ROUTING, RESIDENT = 2, 3, 4
POLICIES: Final = {
    LOAD: (RESIDENT,),
    PREFILL: (1, POST_ROUTING, PRE_ROUTING, RESIDENT),
    DECODE: (POST_ROUTING, PRE_ROUTING),
}

EMBED, ATTEND, ROUTE, FILL, AWAIT, EXPERTS, RELEASE, COMBINE, HEAD, HALT, _, DENSE = range(1, 13)
PREDICT, PREFETCH, DEMAND_FILL, DEMAND_AWAIT, DEMAND_EXPERTS, DEMAND_RELEASE = range(13, 19)
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
    PREDICT: 1,
    PREFETCH: 2,
    DEMAND_FILL: 1,
    DEMAND_AWAIT: 2,
    DEMAND_EXPERTS: 1,
    DEMAND_RELEASE: 2,
}
"""How many of layer, group or count, and bank each opcode names, of all that are not reserved."""


def _is_of_phase(opcode: int, phase: int) -> bool:
    """EMOE-SCH-013."""
    if phase == LOAD:
        return opcode in (FILL, AWAIT, HALT)
    return opcode < PREDICT if phase == PREFILL else opcode not in (FILL, AWAIT, EXPERTS, RELEASE)


Group = tuple[int, int]
"""A layer, and the group's number in it."""
Step = tuple[int, int]
"""An opcode, and its layer or 0."""


class Layer(NamedTuple):
    """What a layer has besides attention."""

    experts: int
    has_dense_block: bool
    top_k: int


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
    """EMOE-SCH-001 to EMOE-SCH-042.

    Args:
        data: the program.
        layers: of the model.
        longest: bytes of the longest expert record.
    """
    header = _parse(data)
    instructions = list(INSTRUCTION.iter_unpack(data[HEADER.size :]))
    require(all(first == second == 0 for _, first, _, _, _, second in instructions), "SCH-004")
    require(header.phase in POLICIES, "SCH-005")
    require(header.policy in POLICIES[header.phase], "SCH-006")
    decodes = header.phase == DECODE
    require(1 <= header.group_size <= (1 if decodes else limits.MAX_EXPERTS), "SCH-007")
    require(header.prefetch_depth <= (limits.MAX_RECORDS if decodes else limits.MAX_EXPERTS), "SCH-007")
    require(header.arena_bytes <= limits.MAX_FILE_LENGTH, "SCH-007")
    groups = [-(-layer.experts // header.group_size) for layer in layers]
    require(header.bank_count == min(header.prefetch_depth + 1, sum(groups)), "SCH-008")
    require(header.policy != RESIDENT or header.bank_count == sum(groups), "SCH-009")
    require(header.arena_bytes >= header.bank_count * header.group_size * longest, "SCH-010")
    run = _Run(header, groups, layers)
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

    def __init__(self, header: Header, groups: Sequence[int], layers: Sequence[Layer]) -> None:
        self.groups, self.layers = groups, layers
        self.phase, self.loads = header.phase, header.phase == LOAD
        self.is_resident = header.policy == RESIDENT
        self.numbers = {
            place: number
            for number, place in enumerate(
                (layer, group) for layer, count in enumerate(groups) for group in range(count)
            )
        }
        self.order = [*([] if self.loads else _steps(layers)), (HALT, 0)]
        self.turn = 0
        self.filled: set[Group] = set()
        self.computed: list[list[int]] = [[] for _ in groups]
        finds_all = self.is_resident and not self.loads
        self.states = [State.READY if finds_all else State.AVAILABLE] * header.bank_count
        self.held: list[Group | None] = list(self.numbers) if finds_all else [None] * header.bank_count
        self.demands = [_Demands(layer) for layer in layers]

    @property
    def has_halted(self) -> bool:
        return self.turn == len(self.order)

    def step(self, opcode: int, layer: int, group: int, bank: int) -> None:
        """One instruction, by EMOE-SCH-011 to EMOE-SCH-032, and to EMOE-SCH-042."""
        require(not self.has_halted, "SCH-011")
        require(opcode in OPERAND_COUNT, "SCH-012")
        require(_is_of_phase(opcode, self.phase), "SCH-013")
        count = OPERAND_COUNT[opcode]
        require(not any((layer, group, bank)[count:]), "SCH-014")
        require(count < 1 or layer < len(self.groups), "SCH-015")
        require(count < 3 or group < self.groups[layer], "SCH-016")
        require(count != 2 or group <= self.layers[layer].experts, "SCH-016")
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
        elif opcode >= PREDICT:
            require(opcode != DEMAND_EXPERTS or self.order[self.turn] == (COMBINE, layer), "SCH-028")
            following, at_turn = self.order[self.turn]
            self.demands[layer].ask(opcode, group, following if at_turn == layer else None)
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
        if opcode == COMBINE and self.phase == PREFILL:
            require(len(self.computed[layer]) == self.groups[layer], "SCH-030")
        if opcode == COMBINE and self.phase == DECODE:
            require(self.layers[layer].experts == 0 or self.demands[layer].names(DEMAND_RELEASE), "SCH-041")
        if opcode == HALT and self.phase == DECODE:
            self._check_room()
        elif opcode == HALT:
            require(not self.loads or len(self.filled) == len(self.numbers), "SCH-031")
            last = State.READY if self.is_resident else State.AVAILABLE
            require(all(state == last for state in self.states), "SCH-032")
        self.turn += 1

    def _check_room(self) -> None:
        """There is a bank for all that is kept, asked for and read ahead, in the turn of each layer."""
        keeps = [demands.count_of(DEMAND_RELEASE) for demands in self.demands]
        for number, (layer, demands) in enumerate(zip(self.layers, self.demands, strict=True)):
            others = sum(keeps[:number]) + sum(keeps[number + 1 :])
            own = max(layer.top_k, keeps[number]) + demands.count_of(PREFETCH)
            require(others + own <= len(self.states), "SCH-042")


class _Demands:
    """What a program that decodes has asked for in one layer: section 4.1."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.asked: list[tuple[int, int]] = []

    def names(self, opcode: int) -> bool:
        """Whether an instruction of this opcode stands before, in this layer."""
        return any(earlier == opcode for earlier, _ in self.asked)

    def count_of(self, opcode: int) -> int:
        """The highest count of this opcode, or 0."""
        return max((count for earlier, count in self.asked if earlier == opcode), default=0)

    def ask(self, opcode: int, count: int, following: int | None) -> None:
        """One more instruction.

        Args:
            opcode: from PREDICT on.
            count: its count, or 0.
            following: the opcode whose turn is next, if it is the layer's turn.
        """
        # The one order's next step says where in its turn a layer is: ATTEND, ROUTE, [DENSE,] COMBINE.
        with_experts = following if self.layer.experts > 0 else None
        routed = with_experts in (DENSE, COMBINE)
        is_first = not self.names(opcode)
        released = self.names(DEMAND_RELEASE)
        if opcode == PREDICT:
            require(with_experts == ATTEND and is_first, "SCH-034")
        elif opcode == PREFETCH:
            require(with_experts in (ATTEND, ROUTE) and self.names(PREDICT) and is_first, "SCH-035")
        elif opcode == DEMAND_FILL:
            require(routed and is_first, "SCH-036")
        elif opcode == DEMAND_AWAIT:
            require(routed and self.names(DEMAND_FILL) and not released, "SCH-037")
            require(self.count_of(DEMAND_AWAIT) < count <= self.layer.top_k, "SCH-038")
        elif opcode == DEMAND_EXPERTS:
            require(self.names(DEMAND_AWAIT) and not released, "SCH-039")
        else:
            require(routed and self._has_computed_all() and is_first, "SCH-040")
        self.asked.append((opcode, count))

    def _has_computed_all(self) -> bool:
        last = (DEMAND_AWAIT, self.layer.top_k)
        return last in self.asked and (DEMAND_EXPERTS, 0) in self.asked[self.asked.index(last) :]


def _steps(layers: Sequence[Layer]) -> list[Step]:
    """What stands in one order before HALT, in a program that does not load."""
    steps = [(EMBED, 0)]
    for number, layer in enumerate(layers):
        routed, dense = [ROUTE] * (layer.experts > 0), [DENSE] * layer.has_dense_block
        steps += [(opcode, number) for opcode in (ATTEND, *routed, *dense, COMBINE)]
    return [*steps, (HEAD, 0)]
