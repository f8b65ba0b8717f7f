"""The vectors by themselves: that they are what the cases make, and that none is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

from estream_conformance import generate
from estream_conformance.suite import FEATURES
from estream_conformance.vector import FOLDER, SUFFIX, Vector, decode_header
from estream_spec.rulebook import RULES

DOCUMENT = (Path(__file__).parents[2] / "spec" / "LOADER-CLI.md").read_text(encoding="utf-8")


def section(number: int) -> str:
    """A section of LOADER-CLI.md."""
    return DOCUMENT.partition(f"\n## {number}. ")[2].partition("\n## ")[0]


def first_column(text: str) -> list[str]:
    """Words marked as code in the first column of a section's tables."""
    return [name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall("`([^`]+)`", row)]


def test_making_them_anew_changes_nothing() -> None:
    kept = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob(f"*{SUFFIX}")}
    made = generate.texts()
    assert sorted(kept) == sorted(made)
    assert [name for name, text in made.items() if kept[name] != text] == []


def test_their_bytes_are_those_of_their_digest(suite: list[Vector]) -> None:
    headers = {
        each.name: decode_header((FOLDER / f"{each.name}{SUFFIX}").read_text(encoding="utf-8")) for each in suite
    }
    named = [each for each in suite if "sha256" in headers[each.name]]
    assert [each.name for each in named if each.image.digest() != headers[each.name]["sha256"]] == []
    assert len(named) > len(suite) * 9 // 10


def test_every_rule_has_a_file_that_breaks_it(suite: list[Vector]) -> None:
    assert {each.rule for each in suite} == {None, *RULES}
    assert [each.name for each in suite if each.rule and each.refused_as != RULES[each.rule].slug] == []
    assert len(suite) >= 2000


def test_every_bad_file_stands_beside_a_good_one(suite: list[Vector]) -> None:
    good = {each.name for each in suite if each.rule is None}
    assert [each.name for each in suite if each.rule is not None and each.base not in good] == []


def test_every_file_has_a_name_and_a_sentence(suite: list[Vector]) -> None:
    assert [each.name for each in suite if not re.fullmatch("[a-z0-9]+(_[a-z0-9]+)*", each.name)] == []
    assert [each.about for each in suite if not re.fullmatch(r"[A-Z`0-9].*\.", each.about)] == []


def test_features_are_those_of_the_text(suite: list[Vector]) -> None:
    assert first_column(section(4)) == list(FEATURES)
    assert {feature for each in suite for feature in each.features} <= set(FEATURES)
    assert [each.name for each in suite if ("accept" in each.features) != (each.rule is None)] == []


def test_options_need_their_feature(suite: list[Vector]) -> None:
    needs = {
        "--offset": "embedded",
        "--key": "signature",
        "--minimum-counter": "signature",
        "--detached": "signature",
    }
    for vector in suite:
        options = [each for each in vector.arguments if each.startswith("--")]
        assert {needs[each] for each in options} <= vector.features, vector.name
        assert vector.arguments[::2] == tuple(options), vector.name
        assert ("{detached}" in vector.arguments) == (vector.detached is not None), vector.name
        assert ("large" in vector.features) == (vector.image.length > 1 << 31), vector.name


def test_keys_of_an_answer_are_those_of_the_text(suite: list[Vector]) -> None:
    tables = section(3).partition("A record is an object:")
    whole, record = set(first_column(tables[0])), set(first_column(tables[2]))
    for vector in suite:
        if vector.json is not None:
            value = json.loads(vector.json)
            assert set(value) == whole, vector.name
            records = [each for ranges in (value["dense"], value["experts"]) for one in ranges for each in one]
            assert {key for each in records for key in each} == record, vector.name
            assert json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) == vector.json


def test_the_suite_shares_little_with_what_it_tests() -> None:
    """Only constants, limits and the names of rules and errors: all else is understood twice."""
    folder = Path(generate.__file__).parent
    texts = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    shared = set(re.findall(r"^\s*(?:from|import) (estream_(?!conformance)\S+)", texts, re.MULTILINE))
    assert shared == {
        "estream_spec",
        *(f"estream_spec.{name}" for name in ("constants", "errors", "limits", "rulebook")),
    }
