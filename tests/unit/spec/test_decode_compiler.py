"""How an arena is divided to decode in, what the programs look like, and which cannot be made."""

from __future__ import annotations

from typing import Any

import pytest

from estream_spec import decode_compiler
from estream_spec.decode_compiler import compile_decode, decode_program
from estream_spec.errors import LinkError
from estream_spec.schedule import ExpertShape, Opcode, Phase, Policy, Program, assembly
from estream_spec.schedule_verifier import verify_program

SHAPE = ExpertShape(counts=(64,) * 4, record_lengths=(4096,) * 4, top_k=(8,) * 4)
ALL = 4 * 64


def compiled(slots: int, policy: Policy = Policy.PRE_ROUTING, shape: ExpertShape = SHAPE, **changes: Any) -> Program:
    return compile_decode(shape, policy=policy, **{"slots": slots, "arena_bytes": 1 << 30, **changes})


def counts(program: Program, opcode: Opcode) -> list[int]:
    return [each.group for each in program.instructions if each.opcode == opcode]


@pytest.mark.parametrize(
    ("slots", "kept", "ahead"),
    [
        (8, [0] * 4, []),
        (9, [1, 0, 0, 0], []),
        (16, [3, 3, 2, 2], []),
        (31, [8, 8, 7, 7], []),
        (32, [8] * 4, []),
        (33, [8] * 4, [1] * 4),
        (40, [8] * 4, [8] * 4),
        (48, [8] * 4, [16] * 4),
        (98, [21, 21, 20, 20], [16] * 4),
        (ALL - 8, [62, 61, 61, 61], [2, 3, 3, 3]),
        (ALL - 1, [64, 64, 63, 63], [0, 0, 1, 1]),
        (ALL, [64] * 4, []),
        (ALL + 9, [64] * 4, []),
    ],
)
def test_shares_of_the_layers(slots: int, kept: list[int], ahead: list[int]) -> None:
    program = compiled(slots)
    assert counts(program, Opcode.DEMAND_RELEASE) == kept
    assert counts(program, Opcode.PREFETCH) == [each for each in ahead if each]
    assert (program.bank_count, program.prefetch_depth) == (min(slots, ALL), min(slots, ALL) - 1)
    proof = verify_program(program, SHAPE)
    assert (proof.groups_kept, proof.furthest_ahead) == (sum(kept), max(ahead, default=0))


@pytest.mark.parametrize("slots", [8, 20, 31, 32, 33, 40, 48, 57, 98, 200, ALL - 1, ALL])
@pytest.mark.parametrize("policy", [Policy.POST_ROUTING, Policy.PRE_ROUTING])
def test_no_bank_is_wasted(slots: int, policy: Policy) -> None:
    """More to keep by one record, or one more to read ahead, would need another bank."""
    assert verify_program(compiled(slots, policy), SHAPE).peak_bytes == slots * 4096


def test_nothing_is_read_ahead_after_routing() -> None:
    program = compiled(98, Policy.POST_ROUTING)
    assert (program.phase, program.policy) == (Phase.DECODE, Policy.POST_ROUTING)
    assert counts(program, Opcode.DEMAND_RELEASE) == [25, 25, 24, 24]
    assert not {Opcode.PREDICT, Opcode.PREFETCH} & {each.opcode for each in program.instructions}


def test_layers_that_are_not_alike() -> None:
    """One layer with three experts, one with none, one with two beside a dense block, whose routers choose 2 and 1."""
    shape = ExpertShape(
        counts=(3, 0, 2), record_lengths=(4096, 0, 8192), top_k=(2, 0, 1), dense_layers=frozenset({1, 2})
    )
    program = compiled(4, shape=shape)
    assert [assembly(each) for each in program.instructions] == [
        "EMBED",
        "PREDICT layer 0",
        "PREFETCH layer 0 count 1",
        "ATTEND layer 0",
        "ROUTE layer 0",
        "DEMAND_FILL layer 0",
        "DEMAND_AWAIT layer 0 count 1",
        "DEMAND_EXPERTS layer 0",
        "DEMAND_AWAIT layer 0 count 2",
        "DEMAND_EXPERTS layer 0",
        "DEMAND_RELEASE layer 0 count 2",
        "COMBINE layer 0",
        "ATTEND layer 1",
        "DENSE layer 1",
        "COMBINE layer 1",
        "PREDICT layer 2",
        "PREFETCH layer 2 count 1",
        "ATTEND layer 2",
        "ROUTE layer 2",
        "DEMAND_FILL layer 2",
        "DENSE layer 2",
        "DEMAND_AWAIT layer 2 count 1",
        "DEMAND_EXPERTS layer 2",
        "DEMAND_RELEASE layer 2 count 1",
        "COMBINE layer 2",
        "HEAD",
        "HALT",
    ]
    proof = verify_program(program, shape)
    assert (proof.groups_read, proof.bytes_read, proof.peak_bytes) == (5, 3 * 4096 + 2 * 8192, 4 * 8192)


def test_a_small_layer_leaves_its_share_to_others() -> None:
    shape = ExpertShape(counts=(2, 64, 64), record_lengths=(4096,) * 3, top_k=(2, 2, 2))
    assert counts(compiled(33, Policy.POST_ROUTING, shape), Opcode.DEMAND_RELEASE) == [2, 16, 15]


def test_a_model_of_many_experts() -> None:
    """DeepSeek-V3's layers, experts and routers, all of whose experts fit · far below the limit of instructions."""
    shape = ExpertShape(counts=(256,) * 58, record_lengths=(1 << 14,) * 58, top_k=(8,) * 58)
    program = compiled(58 * 256, shape=shape)
    assert len(program.instructions) == 58 * (3 + 1 + 2 * 8 + 1) + 3
    assert verify_program(program, shape).banks == 58 * 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 7}, "arena of 7 expert records, a token needs 8 at one time"),
        ({"slots": 0}, "arena of 0 expert records"),
        ({"arena_bytes": 9 * 4096 - 1}, "arena of 36863 bytes, 9 expert records take 36864"),
        ({"policy": Policy.ON_DEMAND}, "policy ON_DEMAND has no program for phase DECODE"),
        ({"policy": Policy.RESIDENT}, "policy RESIDENT has no program for phase DECODE"),
    ],
)
def test_programs_that_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LinkError, match=message):
        compiled(**{"slots": 9, **changes})


def test_program_for_an_arena_uses_all_of_it() -> None:
    reads, predicts = (decode_program(SHAPE, 98 * 4096 + 1, predicts=each) for each in (False, True))
    assert reads == compiled(98, Policy.POST_ROUTING, arena_bytes=98 * 4096 + 1)
    assert predicts == compiled(98, Policy.PRE_ROUTING, arena_bytes=98 * 4096 + 1)
    assert decode_program(SHAPE, 8 * 4096, predicts=False) is not None
    assert decode_program(SHAPE, 8 * 4096 - 1, predicts=False) is None


def test_the_smallest_arena_is_named() -> None:
    with pytest.raises(LinkError) as caught:
        compiled(7)
    assert caught.value.hint == "the smallest arena to decode in is 32768 bytes"


def test_more_instructions_than_a_program_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(compiled(9).instructions)
    monkeypatch.setattr(decode_compiler, "MAX_INSTRUCTIONS", length - 1)
    with pytest.raises(LinkError, match=f"program of {length} instructions, the limit is {length - 1}"):
        compiled(9)
