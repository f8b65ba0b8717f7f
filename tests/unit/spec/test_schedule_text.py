"""The tables and the example of SCHEDULE.md say what the code does."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from estream_spec import constants, schedule
from estream_spec.decode_compiler import compile_decode
from estream_spec.errors import MalformedError
from estream_spec.rulebook import RULES
from estream_spec.schedule import ExpertShape, Opcode, Phase, Policy, Program, ProgramHeader, disassemble
from estream_spec.schedule_compiler import compile_program
from fixtures.markdown import Row, read_tables

TEXT = (Path(__file__).parents[3] / "spec" / "SCHEDULE.md").read_text(encoding="utf-8")
TABLES = read_tables(TEXT)
STRUCTURES: dict[str, tuple[int, Callable[..., bytes]]] = {
    "2.1": (ProgramHeader.SIZE, lambda *values: ProgramHeader(*values).encode()),
    "2.2": (
        schedule.INSTRUCTION.size,
        lambda opcode, layer, group, bank: schedule.INSTRUCTION.pack(opcode, 0, layer, group, bank, 0),
    ),
}


def table(number: str) -> list[Row]:
    return TABLES[number][0]


@pytest.mark.parametrize("number", STRUCTURES)
def test_structures_put_each_field_where_the_table_says(number: str) -> None:
    size, encode = STRUCTURES[number]
    rows = [(row["name"], int(row["offset"]), int(row["size"])) for row in table(number)]
    assert [offset for _, offset, _ in rows] == [sum(each[2] for each in rows[:n]) for n in range(len(rows))]
    assert sum(each[2] for each in rows) == size
    named = [row for row in rows if row[0] != "reserved"]
    zeros: list[Any] = [bytes(length) if name == "magic" else 0 for name, _, length in named]
    for index, (name, offset, length) in enumerate(named):
        value = b"\xff" * length if name == "magic" else (1 << 8 * length) - 1
        data = encode(*zeros[:index], value, *zeros[index + 1 :])
        assert [at for at, byte in enumerate(data) if byte] == list(range(offset, offset + length)), name


def test_the_header_has_the_names_of_the_table() -> None:
    assert [row["name"] for row in table("2.1") if row["name"] != "reserved"] == [
        each.name for each in fields(ProgramHeader)
    ]
    assert f"`{constants.PROGRAM_MAGIC.hex(' ')}`" in table("2.1")[0]["meaning"]


def test_reserved_bytes_are_refused() -> None:
    program = example().encode()
    for number, start in (("2.1", 0), ("2.2", ProgramHeader.SIZE)):
        for row in table(number):
            if row["name"] == "reserved":
                for at in range(int(row["offset"]), int(row["offset"]) + int(row["size"])):
                    data = bytearray(program)
                    data[start + at] = 1
                    with pytest.raises(MalformedError):
                        Program.decode(bytes(data), path="program")


def test_numbers_are_those_of_the_code() -> None:
    assert {row["name"]: int(row["id"]) for row in table("2.3")} == {each.name: each.value for each in Phase}
    assert {row["name"]: int(row["id"]) for row in table("2.4")} == {each.name: each.value for each in Policy}
    assert {row["name"]: int(row["opcode"]) for row in table("3")} == {each.name: each.value for each in Opcode}


def test_operands_are_those_of_the_code() -> None:
    defined = {
        int(row["opcode"]): tuple(row["operands"].split(", ")) if row["operands"] else ()
        for row in table("3")
        if row["what it does"] != "reserved"
    }
    assert defined == schedule.OPERANDS


def test_rules_stand_in_the_order_of_their_checks() -> None:
    cited = re.findall(r"EMOE-SCH-\d{3}", TEXT)
    assert cited == sorted(cited) == [rule for rule in RULES if rule.startswith("EMOE-SCH")]


def example() -> Program:
    shape = ExpertShape(counts=(3, 2), record_lengths=(4096, 4096), top_k=(2, 1))
    return compile_program(shape, arena_bytes=16384, group_size=2, prefetch_depth=1, policy=Policy.PRE_ROUTING)


def test_the_example_is_what_the_code_makes() -> None:
    blocks = TEXT.partition("\n## 7. ")[2].partition("\n## 8. ")[0].split("```\n")
    rows = [re.fullmatch(r"([0-9a-f]{2})  ((?:[0-9a-f]{2} )+) +(.+)", line) for line in blocks[1].splitlines()]
    shown = [(int(row[1], 16), bytes.fromhex(row[2])) for row in rows if row is not None]
    data = example().encode()
    assert len(shown) == len(rows)
    assert shown == [(at, data[at : at + len(part)]) for at, part in shown]
    assert b"".join(part for _, part in shown) == data[: sum(len(part) for _, part in shown)]
    first, *lines = blocks[3].splitlines()
    assert [first, *(line.partition(";")[0].rstrip() for line in lines)] == disassemble(example()).splitlines()
    shape = ExpertShape(counts=(3, 2), record_lengths=(4096, 4096), top_k=(2, 1))
    decoding = compile_decode(shape, arena_bytes=16384, slots=4, policy=Policy.PRE_ROUTING)
    first, *lines = blocks[5].splitlines()
    assert [first, *(line.partition(";")[0].rstrip() for line in lines)] == disassemble(decoding).splitlines()
