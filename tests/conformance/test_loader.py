"""This loader through the suite, as anybody's. That it gives every answer is in `test_second_reader`."""

from __future__ import annotations

import sys

from estream_conformance.runner import Outcome, run_suite
from estream_conformance.vector import Vector
from estream_spec.rulebook import RULES

COMMAND = [sys.executable, "-m", "estream_loader.verdict"]


def sample(suite: list[Vector]) -> list[Vector]:
    """A vector for each rule, and one to accept for each set of features; `make conformance` asks about all."""
    first = {(vector.rule, vector.rule is None and vector.features): vector for vector in suite}
    return list(first.values())


def test_its_program(suite: list[Vector]) -> None:
    asked = sample(suite)
    found = run_suite(COMMAND, asked, timeout=60)
    wrong = [(each.vector.name, each.judgement, each.errors) for each in found if each.outcome is not Outcome.PASSED]
    assert wrong == []
    assert {each.rule for each in asked} == {None, *RULES}
