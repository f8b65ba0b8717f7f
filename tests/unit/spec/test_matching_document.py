"""The tables of MATCHING.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec

from estream_conformance import matching as suite
from estream_spec.chips import OLDEST_ARCHITECTURE
from estream_spec.constants import FORMAT_MAJOR, FORMAT_MINOR
from estream_spec.matching import ON_NPU, VERDICTS, DeviceFacts, Reason, Verdict
from fixtures.markdown import Row, read_tables

SPEC = Path(__file__).parents[3] / "spec"
TEXT = (SPEC / "MATCHING.md").read_text(encoding="utf-8")
TABLES = read_tables(TEXT)


def table(number: str, index: int = 0) -> list[Row]:
    return TABLES[number][index]


def test_it_is_of_this_version() -> None:
    assert TEXT.splitlines()[0].endswith(f"version {FORMAT_MAJOR}.{FORMAT_MINOR}")


def test_facts_are_those_of_the_code() -> None:
    defaults = {"0": 0, "empty": "", "null": None, "": msgspec.NODEFAULT}
    fields = {field.name: field.default for field in msgspec.structs.fields(DeviceFacts)}
    assert {row["key"]: defaults[row["default"]] for row in table("2")} == fields


def test_ranges_are_those_of_the_code() -> None:
    """The bounds that the table names are taken, and what lies beyond them is not."""
    for row in table("2"):
        bounds = re.fullmatch(r".*?(\d+) to 2\^(\d+)( - 1)?", row["range"])
        if bounds is None:
            continue
        lowest, highest = int(bounds[1]), (1 << int(bounds[2])) - bool(bounds[3])
        assert [takes(row["key"], value) for value in (lowest, highest)] == [True, True], row
        beyond = 2 * highest if "power of two" in row["range"] else highest + 1
        assert [takes(row["key"], value) for value in (lowest - 1, beyond)] == [False, False], row


def takes(key: str, value: Any) -> bool:
    facts = {"page_bytes": 4096, "memory_bytes": 0} | {key: value}
    try:
        msgspec.json.decode(msgspec.json.encode(facts), type=DeviceFacts)
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


def test_reasons_are_those_of_the_code_in_their_order() -> None:
    assert [(row["reason"], row["verdict"]) for row in table("4")] == list(VERDICTS.items())
    assert list(get_args(Reason)) == list(VERDICTS)
    assert [row["verdict"] for row in table("4", 1)] == list(get_args(Verdict))
    [fp16] = [row["holds if"] for row in table("4") if row["reason"] == "no-fp16"]
    assert fp16.endswith(f"below {OLDEST_ARCHITECTURE}")
    [binary] = re.findall(r"^- \*\*Binary:\*\* with ([^.]*?) the one", TEXT, re.MULTILINE)
    assert set(re.findall(r"`(.*?)`", binary)) == ON_NPU


def test_the_cases_have_the_keys_of_the_tables() -> None:
    assert f"`{suite.FILE.relative_to(SPEC.parent).as_posix()}`" in TEXT
    text = msgspec.json.decode(suite.FILE.read_bytes())
    assert {f"`{key}`" for key in text} == {row["key"] for row in table("5")}
    keys = {row["key"].strip("`") if "key" in row else row["key of a case"].strip("`") for row in table("5", 1)}
    assert all(set(case) == keys for case in text["cases"])
