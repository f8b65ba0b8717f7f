"""This loader through the suite: as anybody's, and without a process for each file."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from estream_conformance.judgement import judge
from estream_conformance.process import Answer
from estream_conformance.runner import Outcome, run_suite
from estream_conformance.vector import Vector
from estream_loader import verdict
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


def test_every_vector(suite: list[Vector], tmp_path: Path) -> None:
    wrong = []
    for vector in suite:
        judgement = judge(vector, answer_of(vector, tmp_path))
        if judgement.reason is not None:
            wrong.append((vector.name, judgement))
    assert wrong == []


def answer_of(vector: Vector, folder: Path) -> Answer:
    """What the program answers, run in this process."""
    path, detached = folder / "package", folder / "signature"
    vector.image.write(path)
    if vector.detached is not None:
        detached.write_bytes(vector.detached)
    arguments = [each.replace("{detached}", str(detached)) for each in vector.arguments]
    output = io.BytesIO()
    with io.TextIOWrapper(output, encoding="ascii") as stream:
        with contextlib.redirect_stdout(stream):
            status = verdict.main([str(path), *arguments])
        stream.flush()
        path.unlink()
        return Answer(status, output.getvalue())
