"""Makes programs out of a model's shape and a device configuration. SCHEDULE.md section 6.

Groups are numbered through the model. A paged program reads at most `window` groups ahead of the one it releases, group
`n` into bank `n mod window`; how far a fill may run ahead of its layer's routing is all that tells the policies apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from estream_spec.errors import LinkError
from estream_spec.limits import MAX_EXPERTS, MAX_INSTRUCTIONS
from estream_spec.schedule import ExpertShape, Instruction, Opcode, Phase, Policy, Program


def compile_program(
    shape: ExpertShape,
    *,
    arena_bytes: int,
    group_size: int,
    prefetch_depth: int,
    policy: Policy = Policy.PRE_ROUTING,
    phase: Phase = Phase.PREFILL,
) -> Program:
    """Make a program; the same one for the same arguments.

    Args:
        shape: experts and record lengths of the model.
        arena_bytes: memory for experts.
        group_size: experts read together.
        prefetch_depth: groups read ahead; there is one bank more, but no more than there are groups.
        policy: when groups are read.
        phase: `LOAD` makes what must run before the resident program, once.

    Raises:
        LinkError: the arena is too small, there are more groups than banks to keep all in, a size out of its range, too
            many groups for one program, or no such phase of the policy.
    """
    check_sizes(shape, arena_bytes, group_size, prefetch_depth)
    groups = sum(shape.group_counts(group_size))
    banks = min(prefetch_depth + 1, groups)
    if phase == Phase.DECODE or (phase == Phase.LOAD and policy != Policy.RESIDENT):
        raise LinkError(f"policy {policy.name} has no program for phase {phase.name}")
    if policy == Policy.RESIDENT and banks < groups:
        message = f"{banks} banks cannot keep {groups} groups"
        raise LinkError(message, hint=f"the smallest prefetch depth that keeps all is {groups - 1}")
    match policy, phase:
        case Policy.RESIDENT, Phase.LOAD:
            instructions = tuple(_load(shape, group_size))
        case Policy.RESIDENT, _:
            instructions = tuple(_prefill(shape, group_size, banks, fills=None))
        case _:
            fills = _Fills(shape, group_size, 1 if policy == Policy.ON_DEMAND else banks)
            fills.across_layers = policy == Policy.PRE_ROUTING
            instructions = tuple(_prefill(shape, group_size, fills.window, fills=fills))
    if len(instructions) > MAX_INSTRUCTIONS:
        message = f"program of {len(instructions)} instructions, the limit is {MAX_INSTRUCTIONS}"
        raise LinkError(message, hint="read more experts together")
    return Program(
        phase=phase,
        policy=policy,
        group_size=group_size,
        prefetch_depth=prefetch_depth,
        bank_count=banks,
        arena_bytes=arena_bytes,
        instructions=instructions,
    )


def check_sizes(shape: ExpertShape, arena_bytes: int, group_size: int, prefetch_depth: int) -> None:
    """Refuse sizes that no program can have.

    Raises:
        LinkError: a size out of its range, or an arena too small for its banks.
    """
    if not (1 <= group_size <= MAX_EXPERTS and 0 <= prefetch_depth <= MAX_EXPERTS):
        message = f"group size {group_size} and prefetch depth {prefetch_depth}"
        raise LinkError(f"{message}, expected 1 to {MAX_EXPERTS} and 0 to {MAX_EXPERTS}")
    banks = min(prefetch_depth + 1, sum(shape.group_counts(group_size)))
    if arena_bytes < (needed := banks * shape.bank_bytes(group_size)):
        message = f"arena of {arena_bytes} bytes, {banks} banks of {group_size} records take {needed}"
        smallest = f"the smallest arena for this is {needed} bytes"
        raise LinkError(message, hint=f"{smallest}; with single experts and none read ahead {shape.bank_bytes(1)}")


@dataclass(slots=True)
class _Fills:
    """Reads in the order in which groups are computed, and how far they have gone.

    Attributes:
        window: groups that may be in banks at one time.
        across_layers: whether they run ahead of a layer's routing.
        done: how many groups have been filled.
    """

    shape: ExpertShape
    group_size: int
    window: int
    across_layers: bool = False
    done: int = 0
    groups: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = _groups(self.shape, self.group_size)

    def up_to(self, number: int) -> Iterator[Instruction]:
        """Fill all groups numbered below `number`, as far as there are any."""
        for each in range(self.done, min(number, len(self.groups))):
            yield Instruction(Opcode.FILL, *self.groups[each], each % self.window)
            self.done = each + 1


def _groups(shape: ExpertShape, group_size: int) -> list[tuple[int, int]]:
    """Layer, and number in it, of every group."""
    return [(layer, group) for layer, count in enumerate(shape.group_counts(group_size)) for group in range(count)]


def _load(shape: ExpertShape, group_size: int) -> Iterator[Instruction]:
    """Every group into the bank of its own number."""
    for opcode in (Opcode.FILL, Opcode.AWAIT):
        for bank, group in enumerate(_groups(shape, group_size)):
            yield Instruction(opcode, *group, bank)
    yield Instruction(Opcode.HALT)


def _prefill(shape: ExpertShape, group_size: int, window: int, fills: _Fills | None) -> Iterator[Instruction]:
    """All layers; without fills, over banks that hold every group already."""
    number = 0
    if fills is not None and fills.across_layers:
        yield from fills.up_to(window)
    yield Instruction(Opcode.EMBED)
    for layer, count in enumerate(shape.group_counts(group_size)):
        before, *steps = shape.steps(layer)
        yield Instruction(before, layer)
        end = number + count
        for step in steps[:-1]:
            yield Instruction(step, layer)
            if step == Opcode.ROUTE and fills is not None:  # before the dense block, which hides the reading
                yield from fills.up_to(min(number + window, end))
        for group in range(count):
            place = layer, group, number % window
            if fills is not None:
                yield Instruction(Opcode.AWAIT, *place)
            yield Instruction(Opcode.EXPERTS, *place)
            yield Instruction(Opcode.RELEASE, *place)
            number += 1
            if fills is not None:
                yield from fills.up_to(number + window if fills.across_layers else min(number + window, end))
        yield Instruction(Opcode.COMBINE, layer)
    yield Instruction(Opcode.HEAD)
    yield Instruction(Opcode.HALT)
