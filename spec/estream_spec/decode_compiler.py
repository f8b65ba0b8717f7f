"""Makes programs that decode: one token row, reading the experts that it is routed to. SCHEDULE.md sections 4.1 and 6.

The arena has one bank for each record. Each layer keeps its share of them from one token to the next; what is left is
for the layer at work: for routed experts beyond its share, and for those that it reads ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from estream_spec.errors import LinkError
from estream_spec.limits import MAX_INSTRUCTIONS
from estream_spec.schedule import ExpertShape, Instruction, Opcode, Phase, Policy, Program

READ_AHEAD: Final = 8
"""Experts beyond `top_k` that are read ahead at most. Chosen, not measured."""


def decode_program(shape: ExpertShape, arena_bytes: int, *, predicts: bool) -> Program | None:
    """The program that decodes in all of an arena; None where that has no room for a token's experts of one layer.

    Args:
        shape: experts, record lengths and `top_k` of the model.
        arena_bytes: memory for experts.
        predicts: whether there is something to predict experts with, so that they are read ahead.

    Raises:
        LinkError: the program would have more than `MAX_INSTRUCTIONS`.
    """
    slots = arena_bytes // shape.bank_bytes(1)
    if slots < max(shape.top_k):
        return None
    policy = Policy.PRE_ROUTING if predicts else Policy.POST_ROUTING
    return compile_decode(shape, arena_bytes=arena_bytes, slots=slots, policy=policy)


def compile_decode(shape: ExpertShape, *, arena_bytes: int, slots: int, policy: Policy) -> Program:
    """Make a program that decodes; the same one for the same arguments.

    Args:
        shape: experts, record lengths and `top_k` of the model.
        arena_bytes: memory for experts.
        slots: records that the arena has room for; those beyond the model's experts are not used.
        policy: POST_ROUTING to read what is routed alone, PRE_ROUTING to predict and read ahead too.

    Raises:
        LinkError: a token's experts of one layer have no room, the arena has none for so many records, or the policy is
            another one.
    """
    banks = min(slots, sum(shape.counts))
    if policy not in (Policy.POST_ROUTING, Policy.PRE_ROUTING):
        raise LinkError(f"policy {policy.name} has no program for phase {Phase.DECODE.name}")
    if banks < (fewest := max(shape.top_k)):
        message = f"arena of {slots} expert records, a token needs {fewest} at one time"
        raise LinkError(message, hint=f"the smallest arena to decode in is {fewest * shape.bank_bytes(1)} bytes")
    if arena_bytes < (needed := banks * shape.bank_bytes(1)):
        raise LinkError(f"arena of {arena_bytes} bytes, {banks} expert records take {needed}")
    kept, ahead = _divide(shape, banks, predicts=policy == Policy.PRE_ROUTING)
    instructions = tuple(_decode(shape, kept, ahead))
    if len(instructions) > MAX_INSTRUCTIONS:
        raise LinkError(f"program of {len(instructions)} instructions, the limit is {MAX_INSTRUCTIONS}")
    return Program(
        phase=Phase.DECODE,
        policy=policy,
        group_size=1,
        prefetch_depth=max(banks - 1, 0),
        bank_count=banks,
        arena_bytes=arena_bytes,
        instructions=instructions,
    )


def _divide(shape: ExpertShape, banks: int, *, predicts: bool) -> tuple[list[int], list[int]]:
    """How many records each layer keeps, and how many it reads ahead at most.

    Reading ahead gets what is left when each layer keeps a token's experts, but no more than are missing then.
    """
    spare = banks - sum(shape.top_k)
    wished = min(max(shape.top_k) + READ_AHEAD, spare) if predicts and banks < sum(shape.counts) else 0
    for ahead in range(max(wished, 0), -1, -1):
        kept = _shares(shape, banks - ahead)
        missing = [count - own for count, own in zip(shape.counts, kept, strict=True)]
        if ahead <= max(missing):
            break
    return kept, [min(ahead, each) for each in missing]


def _shares(shape: ExpertShape, banks: int) -> list[int]:
    """As many records for the layers to keep as leave room for the experts of a token in each, evenly spread."""

    def taken(total: int) -> int:
        kept = _spread(shape.counts, total)
        return total + max(0, *(top_k - own for top_k, own in zip(shape.top_k, kept, strict=True)))

    return _spread(shape.counts, bisect_right(range(banks + 1), banks, key=taken) - 1)


def _spread(most: tuple[int, ...], total: int) -> list[int]:
    """`total` in even shares, none above its `most`; what is left over goes to the first that have room."""
    level = bisect_right(range(max(most) + 1), total, key=lambda each: sum(min(own, each) for own in most)) - 1
    shares = [min(own, level) for own in most]
    left = total - sum(shares)
    for at, own in enumerate(most):
        if left and own > level:
            shares[at] += 1
            left -= 1
    return shares


def _decode(shape: ExpertShape, kept: list[int], ahead: list[int]) -> Iterator[Instruction]:
    yield Instruction(Opcode.EMBED)
    for layer in range(len(shape.counts)):
        if ahead[layer]:
            yield Instruction(Opcode.PREDICT, layer)
            yield Instruction(Opcode.PREFETCH, layer, ahead[layer])
        for step in shape.steps(layer):
            if step == Opcode.COMBINE and shape.counts[layer]:
                yield from _experts(layer, shape.top_k[layer], kept[layer])
            yield Instruction(step, layer)
            if step == Opcode.ROUTE:  # before the dense block, which hides the reading
                yield Instruction(Opcode.DEMAND_FILL, layer)
    yield Instruction(Opcode.HEAD)
    yield Instruction(Opcode.HALT)


def _experts(layer: int, top_k: int, kept: int) -> Iterator[Instruction]:
    """A layer's experts, each as soon as it is there."""
    for count in range(1, top_k + 1):
        yield Instruction(Opcode.DEMAND_AWAIT, layer, count)
        yield Instruction(Opcode.DEMAND_EXPERTS, layer)
    yield Instruction(Opcode.DEMAND_RELEASE, layer, kept)
