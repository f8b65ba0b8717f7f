"""What programs of each policy look like, and which cannot be made."""

from __future__ import annotations

from typing import Any

import pytest

from estream_spec import schedule_compiler
from estream_spec.errors import LinkError
from estream_spec.limits import MAX_EXPERTS
from estream_spec.schedule import ExpertShape, Opcode, Phase, Policy, Program
from estream_spec.schedule_compiler import compile_program
from estream_spec.schedule_verifier import verify_program

SHAPE = ExpertShape(counts=(5, 2), record_lengths=(4096, 8192), top_k=(2, 1))
"""Groups of two: three of layer 0, the last ragged, and one of layer 1."""
GROUPS = [(0, 0), (0, 1), (0, 2), (1, 0)]
BANK = 2 * 8192


def compiled(policy: Policy, phase: Phase = Phase.PREFILL, **changes: Any) -> Program:
    given = {"arena_bytes": 1 << 20, "group_size": 2, "prefetch_depth": 1}
    return compile_program(SHAPE, policy=policy, phase=phase, **{**given, **changes})


def spelled(program: Program) -> str:
    """Initials of the opcodes: `E` for EMBED, `X` for EXPERTS, small letters for what is about banks."""
    letters = {
        Opcode.EMBED: "E",
        Opcode.ATTEND: "A",
        Opcode.ROUTE: "R",
        Opcode.FILL: "f",
        Opcode.AWAIT: "w",
        Opcode.EXPERTS: "x",
        Opcode.RELEASE: "r",
        Opcode.COMBINE: "C",
        Opcode.DENSE: "D",
        Opcode.HEAD: "H",
        Opcode.HALT: ".",
    }
    return "".join(letters[Opcode(each.opcode)] for each in program.instructions)


def test_on_demand() -> None:
    program = compiled(Policy.ON_DEMAND, prefetch_depth=3)
    assert spelled(program) == "EARfwxrfwxrfwxrCARfwxrCH."
    assert {each.bank for each in program.instructions} == {0}
    proof = verify_program(program, SHAPE)
    assert (proof.banks, proof.peak_bytes, proof.furthest_ahead) == (4, BANK, 0)


def test_post_routing() -> None:
    program = compiled(Policy.POST_ROUTING)
    assert spelled(program) == "EARffwxrfwxrwxrCARfwxrCH."
    assert [each[1:] for each in program.instructions if each.opcode == Opcode.FILL] == [
        (*group, number % 2) for number, group in enumerate(GROUPS)
    ]
    assert verify_program(program, SHAPE).furthest_ahead == 1


def test_pre_routing() -> None:
    program = compiled(Policy.PRE_ROUTING)
    assert spelled(program) == "ffEARwxrfwxrfwxrCARwxrCH."
    proof = verify_program(program, SHAPE)
    assert (proof.furthest_ahead, proof.peak_bytes) == (1, 2 * BANK)
    assert spelled(compiled(Policy.PRE_ROUTING, prefetch_depth=3)) == "ffffEARwxrwxrwxrCARwxrCH."
    assert spelled(compiled(Policy.PRE_ROUTING, prefetch_depth=0)) == "fEARwxrfwxrfwxrfCARwxrCH."


def test_resident() -> None:
    load = compiled(Policy.RESIDENT, Phase.LOAD, prefetch_depth=3)
    assert spelled(load) == "ffffwwww."
    assert [each[1:] for each in load.instructions[:4]] == [(*group, bank) for bank, group in enumerate(GROUPS)]
    program = compiled(Policy.RESIDENT, prefetch_depth=3)
    assert spelled(program) == "EARxrxrxrCARxrCH."
    assert [each[1:] for each in program.instructions if each.opcode == Opcode.EXPERTS] == [
        (*group, bank) for bank, group in enumerate(GROUPS)
    ]
    proofs = [verify_program(each, SHAPE) for each in (load, program)]
    assert [proof.bytes_read for proof in proofs] == [5 * 4096 + 2 * 8192, 0]
    assert [proof.peak_bytes for proof in proofs] == [4 * BANK] * 2


@pytest.mark.parametrize(
    ("policy", "depth", "expected"),
    [
        (Policy.ON_DEMAND, 0, "EADCARfDwxrfwxrCH."),
        (Policy.POST_ROUTING, 1, "EADCARffDwxrwxrCH."),
        (Policy.PRE_ROUTING, 1, "ffEADCARDwxrwxrCH."),
        (Policy.RESIDENT, 1, "EADCARDxrxrCH."),
    ],
)
def test_dense_blocks_are_computed_while_experts_are_read(policy: Policy, depth: int, expected: str) -> None:
    """A layer with a dense block alone, and one with experts beside it."""
    shape = ExpertShape(counts=(0, 3), record_lengths=(0, 4096), top_k=(0, 2), dense_layers=frozenset({0, 1}))
    program = compile_program(shape, arena_bytes=1 << 16, group_size=2, prefetch_depth=depth, policy=policy)
    assert spelled(program) == expected
    assert verify_program(program, shape).banks == min(depth + 1, 2)


def test_no_more_banks_than_groups() -> None:
    program = compiled(Policy.PRE_ROUTING, prefetch_depth=MAX_EXPERTS, arena_bytes=4 * BANK)
    assert (program.bank_count, program.prefetch_depth) == (4, MAX_EXPERTS)
    whole = compiled(Policy.PRE_ROUTING, group_size=MAX_EXPERTS, prefetch_depth=1, arena_bytes=1 << 30)
    assert spelled(whole) == "ffEARwxrCARwxrCH."


@pytest.mark.parametrize(("policy", "depth"), [(Policy.ON_DEMAND, 0), (Policy.PRE_ROUTING, 2), (Policy.RESIDENT, 3)])
def test_the_smallest_arena(policy: Policy, depth: int) -> None:
    needed = (depth + 1) * BANK
    assert compiled(policy, prefetch_depth=depth, arena_bytes=needed).arena_bytes == needed
    with pytest.raises(LinkError, match=rf"arena of {needed - 1} bytes, {depth + 1} banks .* take {needed}") as caught:
        compiled(policy, prefetch_depth=depth, arena_bytes=needed - 1)
    assert caught.value.hint is not None
    assert f"smallest arena for this is {needed} bytes" in caught.value.hint
    assert "none read ahead 8192" in caught.value.hint


@pytest.mark.parametrize("changes", [{"group_size": 0}, {"group_size": 4097}, {"prefetch_depth": -1}])
def test_sizes_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(LinkError, match="expected 1 to 4096 and 0 to 4096"):
        compiled(Policy.PRE_ROUTING, **changes)


def test_resident_without_a_bank_for_each_group() -> None:
    with pytest.raises(LinkError, match="3 banks cannot keep 4 groups") as caught:
        compiled(Policy.RESIDENT, prefetch_depth=2)
    assert caught.value.hint == "the smallest prefetch depth that keeps all is 3"


@pytest.mark.parametrize(("policy", "phase"), [(Policy.PRE_ROUTING, Phase.LOAD), (Policy.RESIDENT, Phase.DECODE)])
def test_phases_that_a_policy_does_not_have(policy: Policy, phase: Phase) -> None:
    with pytest.raises(LinkError, match=f"policy {policy.name} has no program for phase {phase.name}"):
        compiled(policy, phase, prefetch_depth=3)


def test_more_instructions_than_a_program_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(compiled(Policy.PRE_ROUTING).instructions)
    monkeypatch.setattr(schedule_compiler, "MAX_INSTRUCTIONS", length)
    compiled(Policy.PRE_ROUTING)
    monkeypatch.setattr(schedule_compiler, "MAX_INSTRUCTIONS", length - 1)
    with pytest.raises(LinkError, match=f"program of {length} instructions, the limit is {length - 1}"):
        compiled(Policy.PRE_ROUTING)


def test_a_model_of_many_small_experts() -> None:
    """DeepSeek-V3's number of experts, read one by one · a program far below the limit."""
    shape = ExpertShape(counts=(256,) * 58, record_lengths=(1 << 14,) * 58, top_k=(8,) * 58)
    program = compile_program(shape, arena_bytes=1 << 18, group_size=1, prefetch_depth=3)
    assert len(program.instructions) == 4 * 58 * 256 + 3 * 58 + 3
    proof = verify_program(program, shape)
    assert (proof.groups_read, proof.furthest_ahead) == (58 * 256, 3)
