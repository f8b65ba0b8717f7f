"""Each rule about programs, broken by itself, and what a proof says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from estream_spec.decode_compiler import compile_decode
from estream_spec.errors import InvalidError
from estream_spec.rulebook import RULES
from estream_spec.schedule import ExpertShape, Instruction, Opcode, Phase, Policy, Program
from estream_spec.schedule_compiler import compile_program
from estream_spec.schedule_verifier import verify_program

SHAPE = ExpertShape(counts=(3, 2), record_lengths=(4096, 4096), top_k=(2, 1))
"""Groups of one and two banks, so that a program is short and has every kind of step."""


def compiled(policy: Policy = Policy.POST_ROUTING, phase: Phase = Phase.PREFILL, depth: int = 1) -> Program:
    return compile_program(SHAPE, arena_bytes=1 << 16, group_size=1, prefetch_depth=depth, policy=policy, phase=phase)


POST = compiled()
"""
 0 EMBED, 1 ATTEND 0, 2 ROUTE 0, 3 FILL 0.0 b0, 4 FILL 0.1 b1, 5 AWAIT 0.0, 6 EXPERTS 0.0, 7 RELEASE 0.0, 8 FILL 0.2 b0,
 9 AWAIT 0.1, 10 EXPERTS 0.1, 11 RELEASE 0.1, 12 AWAIT 0.2, 13 EXPERTS 0.2, 14 RELEASE 0.2, 15 COMBINE 0, 16 ATTEND 1,
17 ROUTE 1, 18 FILL 1.0 b1, 19 FILL 1.1 b0, 20 AWAIT 1.0, 21 EXPERTS, 22 RELEASE, 23 AWAIT 1.1, 24 EXPERTS, 25 RELEASE,
26 COMBINE 1, 27 HEAD, 28 HALT
"""
RESIDENT = compiled(Policy.RESIDENT, depth=4)
"""0 EMBED, 1 ATTEND, 2 ROUTE, 3 EXPERTS 0.0 b0, 4 RELEASE, 5 EXPERTS 0.1 b1, 6 RELEASE, 7, 8, 9 COMBINE 0, ..."""
LOAD = compiled(Policy.RESIDENT, Phase.LOAD, depth=4)
"""0 to 4 FILL, 5 to 9 AWAIT, 10 HALT"""

MIXED_SHAPE = ExpertShape(
    counts=(2, 0, 1), record_lengths=(4096, 0, 4096), top_k=(1, 0, 1), dense_layers=frozenset({1, 2})
)
"""A layer of experts, one with a dense block alone, one with both."""
MIXED = compile_program(MIXED_SHAPE, arena_bytes=1 << 16, group_size=2, prefetch_depth=0, policy=Policy.PRE_ROUTING)
"""
0 FILL 0.0 b0, 1 EMBED, 2 ATTEND 0, 3 ROUTE 0, 4 AWAIT, 5 EXPERTS, 6 RELEASE, 7 FILL 2.0 b0, 8 COMBINE 0, 9 ATTEND 1,
10 DENSE 1, 11 COMBINE 1, 12 ATTEND 2, 13 ROUTE 2, 14 DENSE 2, 15 AWAIT, 16 EXPERTS, 17 RELEASE, 18 COMBINE 2, ...
"""

DECODE = compile_decode(MIXED_SHAPE, arena_bytes=1 << 16, slots=2, policy=Policy.POST_ROUTING)
"""
0 EMBED, 1 ATTEND 0, 2 ROUTE 0, 3 DEMAND_FILL 0, 4 DEMAND_AWAIT 0 count 1, 5 DEMAND_EXPERTS 0,
6 DEMAND_RELEASE 0 count 1, 7 COMBINE 0, 8 ATTEND 1, 9 DENSE 1, 10 COMBINE 1, 11 ATTEND 2, 12 ROUTE 2, 13 DEMAND_FILL 2,
14 DENSE 2, 15 DEMAND_AWAIT, 16 DEMAND_EXPERTS, 17 DEMAND_RELEASE 2 count 1, 18 COMBINE 2, 19 HEAD, 20 HALT
"""

Edit = Callable[[list[Instruction]], Any]


def edited(program: Program, edit: Edit) -> Program:
    instructions = list(program.instructions)
    edit(instructions)
    return replace(program, instructions=tuple(instructions))


def put(index: int, opcode: Opcode | int, layer: int = 0, group: int = 0, bank: int = 0) -> Edit:
    return lambda each: each.insert(index, Instruction(opcode, layer, group, bank))


def drop(*indices: int) -> Edit:
    return lambda each: [each.pop(index) for index in sorted(indices, reverse=True)]


def change(index: int, **operands: int) -> Edit:
    return lambda each: each.__setitem__(index, each[index]._replace(**operands))


def swap(first: int, second: int) -> Edit:
    def apply(each: list[Instruction]) -> None:
        each[first], each[second] = each[second], each[first]

    return apply


def move(*steps: tuple[int, int]) -> Edit:
    def apply(each: list[Instruction]) -> None:
        for source, target in steps:
            each.insert(target, each.pop(source))

    return apply


HEADERS: dict[str, tuple[Program, str, str]] = {
    "phase 0": (replace(POST, phase=0), "005", "phase"),
    "phase of no name": (replace(POST, phase=4), "005", "phase"),
    "policy 0": (replace(POST, policy=0), "006", "policy"),
    "unknown policy": (replace(POST, policy=5), "006", "policy"),
    "loading with another policy": (replace(LOAD, policy=Policy.PRE_ROUTING), "006", "policy"),
    "groups of none": (replace(POST, group_size=0), "007", "group_size"),
    "groups above the limit": (replace(POST, group_size=4097), "007", "group_size"),
    "depth above the limit": (replace(POST, prefetch_depth=4097), "007", "prefetch_depth"),
    "arena above the limit": (replace(POST, arena_bytes=(1 << 44) + 1), "007", "arena_bytes"),
    "no bank": (replace(POST, bank_count=0), "008", "bank_count"),
    "a bank more than the depth asks for": (replace(POST, bank_count=3), "008", "bank_count"),
    "more banks than groups": (replace(POST, prefetch_depth=9, bank_count=10), "008", "bank_count"),
    "resident with a bank too few": (replace(RESIDENT, prefetch_depth=3, bank_count=4), "009", "bank_count"),
    "loading with a bank too few": (replace(LOAD, prefetch_depth=3, bank_count=4), "009", "bank_count"),
    "arena below its banks": (replace(POST, arena_bytes=8191), "010", "arena_bytes"),
    "decoding on demand": (replace(DECODE, policy=Policy.ON_DEMAND), "006", "policy"),
    "decoding with what stays": (replace(DECODE, policy=Policy.RESIDENT), "006", "policy"),
    "decoding groups of two": (replace(DECODE, group_size=2), "007", "group_size"),
    "depth above the limit to decode": (replace(DECODE, prefetch_depth=(1 << 17) + 1), "007", "prefetch_depth"),
}


@pytest.mark.parametrize(("program", "rule", "field"), HEADERS.values(), ids=HEADERS)
def test_rule_of_the_header(program: Program, rule: str, field: str) -> None:
    with pytest.raises(InvalidError) as caught:
        verify_program(program, SHAPE, "schedule section 0")
    assert (caught.value.rule, caught.value.path) == (f"EMOE-SCH-{rule}", f"schedule section 0.{field}")


INSTRUCTIONS: dict[str, tuple[Program, Edit, str, int | None]] = {
    "HALT twice": (POST, put(29, Opcode.HALT), "011", 29),
    "a step behind HALT": (POST, put(29, Opcode.AWAIT), "011", 29),
    "a step of no meaning behind HALT": (POST, put(29, 99), "011", 29),
    "opcode 0": (POST, put(0, 0), "012", 0),
    "reserved opcode": (POST, put(5, Opcode.SHARED), "012", 5),
    "unknown opcode": (POST, put(5, 255), "012", 5),
    "computing while loading": (LOAD, put(0, Opcode.EMBED), "013", 0),
    "using experts while loading": (LOAD, put(10, Opcode.EXPERTS), "013", 10),
    "operand of HALT": (POST, change(28, layer=1), "014", 28),
    "group of ATTEND": (POST, change(1, group=1), "014", 1),
    "bank of COMBINE": (POST, change(15, bank=1), "014", 15),
    "layer beyond the last": (POST, change(1, layer=2), "015", 1),
    "layer of FILL beyond the last": (POST, change(3, layer=0xFFFF), "015", 3),
    "group beyond the last": (POST, change(18, group=2), "016", 18),
    "bank beyond the last": (POST, change(3, bank=2), "017", 3),
    "HEAD first": (POST, put(0, Opcode.HEAD), "018", 0),
    "HEAD before the last COMBINE": (POST, swap(26, 27), "018", 26),
    "EMBED missing": (POST, drop(0), "019", 0),
    "EMBED twice": (POST, put(1, Opcode.EMBED), "019", 1),
    "ROUTE before ATTEND": (POST, swap(1, 2), "019", 1),
    "ATTEND missing": (POST, drop(16), "019", 16),
    "COMBINE before ROUTE": (POST, put(2, Opcode.COMBINE), "019", 2),
    "a layer begun before the one before it ends": (POST, put(15, Opcode.ATTEND, 1), "019", 15),
    "HEAD twice": (POST, put(28, Opcode.HEAD), "019", 28),
    "HEAD missing": (POST, drop(27), "019", 27),
    "HALT before HEAD": (POST, swap(27, 28), "019", 27),
    "the second layer first": (POST, change(1, layer=1), "020", 1),
    "a layer twice": (POST, change(16, layer=0), "020", 16),
    "another layer's ROUTE": (POST, change(2, layer=1), "020", 2),
    "refill while filling": (POST, change(4, bank=0), "021", 4),
    "refill while ready": (POST, put(6, Opcode.FILL, 0, 2, 0), "021", 6),
    "refill in use": (POST, swap(7, 8), "021", 7),
    "reading in a resident program": (RESIDENT, put(0, Opcode.FILL), "021", 0),
    "a group filled twice": (POST, put(8, Opcode.FILL, 0, 0, 0), "022", 8),
    "a group filled into two banks": (POST, change(4, group=0), "022", 4),
    "a group of a layer that is done": (POST, put(16, Opcode.FILL, 0, 1, 0), "022", 16),
    "groups loaded crosswise": (LOAD, change(0, bank=1), "023", 0),
    "AWAIT without FILL": (POST, drop(3), "024", 4),
    "AWAIT twice": (POST, put(6, Opcode.AWAIT, 0, 0, 0), "024", 6),
    "AWAIT in a resident program": (RESIDENT, put(3, Opcode.AWAIT), "024", 3),
    "use before load": (POST, drop(5), "025", 5),
    "use of a bank that was never filled": (POST, put(3, Opcode.EXPERTS), "025", 3),
    "use again without RELEASE": (POST, put(7, Opcode.EXPERTS), "025", 7),
    "use after RELEASE": (POST, put(8, Opcode.EXPERTS), "025", 8),
    "RELEASE without EXPERTS": (POST, drop(6), "026", 6),
    "RELEASE without EXPERTS in a resident program": (RESIDENT, drop(3), "026", 3),
    "RELEASE twice": (POST, put(8, Opcode.RELEASE), "026", 8),
    "AWAIT of another group": (POST, change(5, group=1), "027", 5),
    "EXPERTS of another group": (POST, change(6, group=1), "027", 6),
    "EXPERTS of another layer": (POST, change(6, layer=1), "027", 6),
    "RELEASE of another group": (POST, change(7, group=2), "027", 7),
    "EXPERTS of another group in a resident program": (RESIDENT, change(3, group=1), "027", 3),
    "EXPERTS before ROUTE": (RESIDENT, swap(2, 3), "028", 2),
    "EXPERTS behind COMBINE": (RESIDENT, put(10, Opcode.EXPERTS), "028", 10),
    "EXPERTS of the next layer": (RESIDENT, put(5, Opcode.EXPERTS, 1, 0, 3), "028", 5),
    "groups in descending order": (
        RESIDENT,
        lambda each: each.__setitem__(slice(3, 7), [*each[5:7], *each[3:5]]),
        "029",
        5,
    ),
    "EXPERTS twice in a resident program": (RESIDENT, put(5, Opcode.EXPERTS), "029", 5),
    "a group missing": (RESIDENT, drop(3, 4), "030", 7),
    "the last group missing": (POST, drop(23, 24, 25), "030", 23),
    "no group": (RESIDENT, drop(3, 4, 5, 6, 7, 8), "030", 3),
    "a group not loaded": (LOAD, drop(4, 9), "031", 8),
    "a bank left filling": (LOAD, drop(9), "032", 9),
    "a bank left in use": (POST, drop(25), "032", 27),
    "a bank left in use in a resident program": (RESIDENT, drop(4), "032", 17),
    "no HALT": (POST, drop(28), "033", None),
    "nothing": (POST, lambda each: each.clear(), "033", None),
    "nothing to load": (LOAD, lambda each: each.clear(), "033", None),
}


@pytest.mark.parametrize(("program", "edit", "rule", "index"), INSTRUCTIONS.values(), ids=INSTRUCTIONS)
def test_rule_of_the_instructions(program: Program, edit: Edit, rule: str, index: int | None) -> None:
    verify_program(program, SHAPE)
    with pytest.raises(InvalidError) as caught:
        verify_program(edited(program, edit), SHAPE, "program")
    place = "program" if index is None else f"program[{index}]"
    assert (caught.value.rule, caught.value.path) == (f"EMOE-SCH-{rule}", place)


MIXED_INSTRUCTIONS: dict[str, tuple[Edit, str, int]] = {
    "group of DENSE": (change(10, group=1), "014", 10),
    "a group of a layer without experts": (change(7, layer=1), "016", 7),
    "DENSE missing": (drop(10), "019", 10),
    "DENSE before ROUTE": (swap(13, 14), "019", 13),
    "DENSE of a layer without a dense block": (put(4, Opcode.DENSE, 0), "019", 4),
    "ROUTE of a layer without experts": (put(10, Opcode.ROUTE, 1), "019", 10),
    "DENSE of another layer": (change(10, layer=2), "020", 10),
    "EXPERTS before DENSE": (move((14, 16)), "028", 15),
}


@pytest.mark.parametrize(("edit", "rule", "index"), MIXED_INSTRUCTIONS.values(), ids=MIXED_INSTRUCTIONS)
def test_rule_of_layers_that_are_not_alike(edit: Edit, rule: str, index: int) -> None:
    assert verify_program(MIXED, MIXED_SHAPE).groups_read == 2
    with pytest.raises(InvalidError) as caught:
        verify_program(edited(MIXED, edit), MIXED_SHAPE)
    assert (caught.value.rule, caught.value.path) == (f"EMOE-SCH-{rule}", f"program[{index}]")


DEMANDS: dict[str, tuple[Edit, str, int | None]] = {
    "FILL to decode": (put(3, Opcode.FILL), "013", 3),
    "count of DEMAND_FILL": (change(3, group=1), "014", 3),
    "bank of DEMAND_AWAIT": (change(4, bank=1), "014", 4),
    "more kept than there is": (change(6, group=3), "016", 6),
    "DEMAND_EXPERTS before DENSE": (move((14, 16)), "028", 15),
    "PREDICT behind ATTEND": (put(2, Opcode.PREDICT), "034", 2),
    "PREDICT of a layer without experts": (put(8, Opcode.PREDICT, 1), "034", 8),
    "PREFETCH without PREDICT": (put(1, Opcode.PREFETCH, 0, 1), "035", 1),
    "DEMAND_FILL before ROUTE": (swap(2, 3), "036", 2),
    "DEMAND_FILL twice": (put(4, Opcode.DEMAND_FILL), "036", 4),
    "DEMAND_FILL missing": (drop(3), "037", 3),
    "DEMAND_AWAIT behind DEMAND_RELEASE": (put(7, Opcode.DEMAND_AWAIT, 0, 1), "037", 7),
    "DEMAND_AWAIT of none": (change(4, group=0), "038", 4),
    "DEMAND_AWAIT of more than top_k": (change(4, group=2), "038", 4),
    "DEMAND_AWAIT of no more": (put(5, Opcode.DEMAND_AWAIT, 0, 1), "038", 5),
    "DEMAND_AWAIT missing": (drop(4), "039", 4),
    "DEMAND_EXPERTS missing": (drop(5), "040", 5),
    "DEMAND_RELEASE of another layer": (change(6, layer=2), "040", 6),
    "DEMAND_RELEASE missing": (drop(6), "041", 6),
    "a layer's experts left out": (drop(3, 4, 5, 6), "041", 3),
    "no bank for what is kept": (change(6, group=2), "042", 20),
    "no HALT": (drop(20), "033", None),
}


@pytest.mark.parametrize(("edit", "rule", "index"), DEMANDS.values(), ids=DEMANDS)
def test_rule_of_a_program_that_decodes(edit: Edit, rule: str, index: int | None) -> None:
    with pytest.raises(InvalidError) as caught:
        verify_program(edited(DECODE, edit), MIXED_SHAPE)
    path = "program" if index is None else f"program[{index}]"
    assert (caught.value.rule, caught.value.path) == (f"EMOE-SCH-{rule}", path)


def test_demands_in_a_program_that_prefills() -> None:
    with pytest.raises(InvalidError, match=r"DEMAND_FILL layer 0: not in a program of this phase.*\[EMOE-SCH-013\]"):
        verify_program(edited(POST, put(3, Opcode.DEMAND_FILL)), SHAPE)


def test_a_message_says_which_banks_are_missing() -> None:
    with pytest.raises(InvalidError) as caught:
        verify_program(edited(DECODE, change(6, group=2)), MIXED_SHAPE)
    expected = "HALT: layer 0 needs 2 banks beside 1 of other layers, there are 2 (at program[20]) [EMOE-SCH-042]"
    assert str(caught.value) == expected


def test_every_rule_is_broken_by_some_program() -> None:
    broken = {f"EMOE-SCH-{rule}" for _, rule, _ in HEADERS.values()}
    broken |= {f"EMOE-SCH-{rule}" for _, _, rule, _ in INSTRUCTIONS.values()}
    broken |= {f"EMOE-SCH-{rule}" for _, rule, _ in DEMANDS.values()}
    decoded = {f"EMOE-SCH-{number:03}" for number in range(1, 5)}
    assert broken | decoded == {rule for rule in RULES if rule.startswith("EMOE-SCH")}


LEGAL: dict[str, tuple[Program, Edit]] = {
    "FILLs in another order": (POST, swap(3, 4)),
    "FILLs loaded in another order": (LOAD, swap(0, 4)),
    "a wait before its FILLs are all begun": (POST, swap(4, 5)),
    "a FILL before its layer's routing": (POST, move((3, 0))),
    "RELEASE after COMBINE": (POST, swap(14, 15)),
    "a wait long before use": (POST, swap(9, 8)),
    "a wait before ROUTE of its layer": (POST, move((3, 0), (5, 1))),
}


@pytest.mark.parametrize(("program", "edit"), LEGAL.values(), ids=LEGAL)
def test_other_programs_that_are_right(program: Program, edit: Edit) -> None:
    proof = verify_program(edited(program, edit), SHAPE)
    assert proof.groups_read == 5


def test_a_message_says_what_and_where() -> None:
    with pytest.raises(InvalidError) as caught:
        verify_program(edited(POST, swap(7, 8)), SHAPE)
    expected = "FILL     layer 0 group 2 bank 0: bank is in use, expected available (at program[7]) [EMOE-SCH-021]"
    assert str(caught.value) == expected.replace("FILL     ", "FILL ")


def test_a_program_of_another_model() -> None:
    other = ExpertShape(counts=(3, 3), record_lengths=(4096, 4096), top_k=(2, 2))
    with pytest.raises(InvalidError, match="2 of 3 groups are computed"):
        verify_program(POST, other)
    longer = ExpertShape(counts=(3, 2), record_lengths=(4096, 1 << 16), top_k=(2, 1))
    with pytest.raises(InvalidError, match=r"its banks take 131072.*\[EMOE-SCH-010\]"):
        verify_program(POST, longer)


def test_the_proof_in_words() -> None:
    program = compiled(Policy.PRE_ROUTING)
    assert verify_program(program, SHAPE).lines() == [
        "proven: prefill, pre-routing, 29 instructions",
        "memory: 2 banks of 4,096 bytes, at most 8,192 in use of an arena of 65,536",
        "reads: 5 groups, 20,480 bytes less what routing leaves out, at most 1 ahead",
    ]
    assert verify_program(LOAD, SHAPE).lines()[2] == "reads: 5 groups, 20,480 bytes"
    assert verify_program(RESIDENT, SHAPE).lines()[2] == "reads: nothing"
    decoding = compile_decode(SHAPE, arena_bytes=1 << 16, slots=4, policy=Policy.PRE_ROUTING)
    assert verify_program(decoding, SHAPE).lines() == [
        "proven: decode, pre-routing, 23 instructions",
        "memory: 4 banks of 4,096 bytes, at most 16,384 in use of an arena of 65,536",
        "reads: at most 5 experts, 20,480 bytes, 1 ahead; keeps at most 3",
    ]


def test_ragged_groups_count_their_own_bytes() -> None:
    shape = ExpertShape(counts=(3, 5), record_lengths=(4096, 8192), top_k=(2, 2))
    program = compile_program(shape, arena_bytes=1 << 20, group_size=2, prefetch_depth=2)
    proof = verify_program(program, shape)
    assert (proof.groups_read, proof.bytes_read) == (5, 3 * 4096 + 5 * 8192)
    assert (proof.banks, proof.bank_bytes, proof.peak_bytes) == (3, 2 * 8192, 3 * 2 * 8192)
