"""The bytes of programs, and programs as text."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from estream_spec.constants import PROGRAM_MAGIC
from estream_spec.errors import FormatError, LimitError, MalformedError
from estream_spec.limits import MAX_INSTRUCTIONS
from estream_spec.manifest import DeviceConfiguration
from estream_spec.model import Layer
from estream_spec.records import RecordRange, RecordTable
from estream_spec.schedule import (
    ExpertShape,
    Instruction,
    Opcode,
    Phase,
    Policy,
    Program,
    ProgramHeader,
    disassemble,
)
from estream_spec.shapes import OLMOE_1B_7B

PROGRAM = Program(
    phase=Phase.PREFILL,
    policy=Policy.PRE_ROUTING,
    group_size=2,
    prefetch_depth=1,
    bank_count=2,
    arena_bytes=1 << 20,
    instructions=(Instruction(Opcode.FILL, 0x0102, 0x03040506, 0x0708090A), Instruction(Opcode.HALT)),
)
DATA = PROGRAM.encode()


def test_bytes_of_a_program() -> None:
    assert DATA[:8] == PROGRAM_MAGIC == b"EMOEPRG\0"
    assert DATA[8:12] == bytes([2, 3, 0, 0])
    assert struct.unpack("<IIIIIQ", DATA[12:40]) == (2, 1, 2, 2, 0, 1 << 20)
    assert DATA[40:56].hex() == "04000201060504030a09080700000000"
    assert DATA[56:] == bytes([10]) + bytes(15)
    assert Program.decode(DATA, path="program") == PROGRAM


@settings(max_examples=100, deadline=None)
@given(
    header=st.tuples(*[st.integers(0, 255)] * 2, *[st.integers(0, 2**32 - 1)] * 3, st.integers(0, 2**64 - 1)),
    instructions=st.lists(
        st.builds(
            Instruction,
            st.integers(0, 255),
            st.integers(0, 2**16 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
        ),
        max_size=5,
    ),
)
def test_any_program_is_read_back(header: tuple[int, ...], instructions: list[Instruction]) -> None:
    """Decoding judges no number: the verifier does."""
    names = ("phase", "policy", "group_size", "prefetch_depth", "bank_count", "arena_bytes")
    program = replace(PROGRAM, **dict(zip(names, header, strict=True)), instructions=tuple(instructions))
    assert Program.decode(program.encode(), path="program") == program
    assert len(disassemble(program).splitlines()) == 1 + len(instructions)


def with_count(count: int) -> bytes:
    return DATA[:24] + struct.pack("<I", count) + DATA[28:]


@pytest.mark.parametrize(
    ("data", "kind", "rule"),
    [
        (b"", MalformedError, "EMOE-SCH-001"),
        (DATA[:39], MalformedError, "EMOE-SCH-001"),
        (b"EMOETAB\0" + DATA[8:], MalformedError, "EMOE-SCH-001"),
        (DATA[:10] + b"\1" + DATA[11:], MalformedError, "EMOE-SCH-001"),
        (with_count(MAX_INSTRUCTIONS + 1), LimitError, "EMOE-SCH-002"),
        (with_count(MAX_INSTRUCTIONS), MalformedError, "EMOE-SCH-003"),
        (with_count(1), MalformedError, "EMOE-SCH-003"),
        (with_count(3), MalformedError, "EMOE-SCH-003"),
        (DATA + b"\0", MalformedError, "EMOE-SCH-003"),
        (DATA[:-1] + b"\1", MalformedError, "EMOE-SCH-004"),
        (DATA[:41] + b"\1" + DATA[42:], MalformedError, "EMOE-SCH-004"),
    ],
)
def test_bytes_that_are_no_program(data: bytes, kind: type[FormatError], rule: str) -> None:
    with pytest.raises(kind) as caught:
        Program.decode(data, path="program")
    assert caught.value.rule == rule


def test_reserved_bytes_are_named_with_their_instruction() -> None:
    with pytest.raises(MalformedError) as caught:
        Program.decode(DATA[:-1] + b"\1", path="schedule section 3")
    assert caught.value.path == "schedule section 3[1]"


def test_a_program_of_no_instructions_can_be_read() -> None:
    empty = replace(PROGRAM, instructions=())
    assert len(empty.encode()) == ProgramHeader.SIZE
    assert Program.decode(empty.encode(), path="program") == empty


def test_which_configuration_a_program_is_for() -> None:
    choice = DeviceConfiguration(name="phone", arena_bytes=1 << 20, group_size=2, prefetch_depth=1)
    assert PROGRAM.matches(choice)
    assert not replace(PROGRAM, arena_bytes=(1 << 20) + 1).matches(choice)
    assert not replace(PROGRAM, group_size=1).matches(choice)
    assert not replace(PROGRAM, prefetch_depth=2).matches(choice)
    assert not replace(PROGRAM, policy=Policy.POST_ROUTING).matches(choice)
    other = DeviceConfiguration(
        name="other",
        arena_bytes=1 << 20,
        group_size=2,
        prefetch_depth=1,
        lanes=9,
        policy="post-routing",
        prompt_tokens=8,
    )
    assert replace(PROGRAM, policy=Policy.POST_ROUTING).matches(other)
    decoding = replace(PROGRAM, phase=Phase.DECODE, group_size=1, prefetch_depth=9, policy=Policy.POST_ROUTING)
    assert decoding.matches(choice)
    assert decoding.matches(other)
    assert not replace(decoding, arena_bytes=(1 << 20) + 1).matches(choice)


def test_assembly() -> None:
    odd = (Instruction(200, 1), Instruction(Opcode.ATTEND, 3), Instruction(Opcode.HALT, 0, 0, 4))
    program = replace(PROGRAM, phase=9, policy=8, bank_count=1, instructions=(*PROGRAM.instructions[:1], *odd))
    assert disassemble(program).splitlines() == [
        "; phase 9, policy 8: groups of 2, 1 bank, arena 1,048,576 bytes",
        "0  FILL     layer 258 group 50595078 bank 117967114",
        "1  opcode 200 layer 1",
        "2  ATTEND   layer 3",
        "3  HALT     bank 4",
    ]


def test_shape_of_a_table() -> None:
    ranges = (RecordRange(0, 4096, 5, 0), RecordRange(5 * 4096, 8192, 2, 1))
    table = RecordTable(ranges=ranges, checksums=(0,) * 7, digests=(bytes(32),) * 7)
    model = structs.replace(OLMOE_1B_7B, layers=(Layer(attention=0, experts=0), Layer(attention=0, experts=0, dense=0)))
    shape = ExpertShape.of(model, table)
    assert shape == ExpertShape(counts=(5, 2), record_lengths=(4096, 8192), top_k=(8, 8), dense_layers=frozenset({1}))
    assert shape.bank_bytes(2) == 2 * 8192
    assert shape.group_counts(2) == [3, 1]
    assert [shape.group_bytes(0, group, 2) for group in range(3)] == [8192, 8192, 4096]
    assert shape.group_bytes(1, 0, 4096) == 2 * 8192
