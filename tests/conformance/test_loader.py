"""This project's two readers through the suite, as anybody's. `test_both_readers` asks them about all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from estream_conformance.runner import Outcome, run_suite
from estream_conformance.vector import Vector
from estream_spec.rulebook import RULES

TESTS = Path(__file__).parents[1]
PROGRAMS = {
    "loader": [sys.executable, "-m", "estream_loader.verdict"],
    "second reader": [
        sys.executable,
        "-c",
        f"import sys, runpy; sys.path.insert(0, {str(TESTS)!r}); "
        "runpy.run_module('second_reader', run_name='__main__', alter_sys=True)",
    ],
}


def sample(suite: list[Vector]) -> list[Vector]:
    """A vector for each rule, and one to accept for each set of features; `make conformance` asks about all."""
    by_kind = {(vector.rule, vector.rule is None and vector.features): vector for vector in suite}
    return list(by_kind.values())


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_answer_a_sample(program: str, suite: list[Vector]) -> None:
    asked = sample(suite)
    found = run_suite(PROGRAMS[program], asked, timeout=60)
    wrong = [(each.vector.name, each.judgement, each.errors) for each in found if each.outcome is not Outcome.PASSED]
    assert wrong == []
    assert {each.rule for each in asked} == {None, *RULES}
