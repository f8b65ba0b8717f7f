"""Shows the results of a run: for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import click

from estream_conformance.runner import BAD, Outcome, Result
from estream_conformance.suite import area, rule_of
from estream_spec import __version__

_ERROR_LINES: Final = 8
"""Lines of standard error that are shown of a failed test, the last ones."""
_COUNTED: Final = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "failed",
    Outcome.UNEXPECTED_PASS: "passed unexpectedly",
    Outcome.EXPECTED_FAILURE: "failed as expected",
    Outcome.LEFT_OUT: "left out",
    Outcome.NOT_ASKED: "not asked",
}
_TOLD: Final = {*BAD, Outcome.NOT_ASKED}
"""Outcomes that are told test by test."""


def print_report(results: Sequence[Result], shown: int) -> None:
    """Print the first failures of each rule, and a summary.

    Args:
        results: those of the run.
        shown: how many failures of a rule are told.
    """
    from rich.console import Console

    told: dict[str, list[Result]] = {}
    for result in results:
        if result.outcome in _TOLD:
            told.setdefault(rule_of(result.vector), []).append(result)
    for rule, failures in told.items():
        for result in failures[:shown]:
            click.echo(f"{_failure(result)}\n")
        if 0 < shown < len(failures):
            click.echo(f"... and {len(failures) - shown} more of {rule}\n")
    Console().print(_summary(results))


def _failure(result: Result) -> str:
    """What there is to say of a failed test."""
    vector, judgement = result.vector, result.judgement
    if result.fault is not None:
        told = [f"{vector.name}: not asked", vector.about, str(result.fault), result.fault.hint]
        return "\n  ".join(line for line in told if line)
    assert judgement is not None
    if judgement.reason is None:
        return f"{vector.name}: passed, though it is expected to fail\n  {vector.about}\n  take it off the list"
    lines = [
        f"{vector.name}: {judgement.reason.text}",
        f"  {vector.about}",
        f"  expected  {judgement.expected}",
        f"  found     {judgement.found}",
        *(f"  stderr    {line}" for line in result.errors.splitlines()[-_ERROR_LINES:]),
        f"  file      estream-conformance export FOLDER --only {vector.name}",
    ]
    return "\n".join(lines)


def _summary(results: Sequence[Result]) -> Any:
    """A row for each rule area and for each of its rules that is told, in order; a column for each outcome there is."""
    from rich.table import Table

    total = Counter(result.outcome for result in results)
    columns = [outcome for outcome in Outcome if total[outcome] or outcome in (Outcome.PASSED, Outcome.FAILED)]
    table = Table("rules", box=None, show_footer=True)
    table.columns[0].footer = "all"
    for outcome in columns:
        table.add_column(_COUNTED[outcome], str(total[outcome]), justify="right")
    for name in dict.fromkeys(area(result.vector) for result in results):
        here = [result for result in results if area(result.vector) == name]
        told = dict.fromkeys(each.vector.rule for each in here if each.vector.rule and each.outcome in _TOLD)
        rows = {name: here, **{f"  {rule}": [each for each in here if each.vector.rule == rule] for rule in told}}
        for label, those in rows.items():
            counts = Counter(result.outcome for result in those)
            table.add_row(label, *(str(counts[outcome]) for outcome in columns))
    return table


def report_values(results: Sequence[Result], entry_point: str, features: Sequence[str]) -> dict[str, Any]:
    """The results as JSON has them."""
    counts = Counter(result.outcome for result in results)
    return {
        "version": __version__,
        "entry_point": entry_point,
        "features": list(features),
        "counts": {outcome.value: counts[outcome] for outcome in Outcome},
        "results": [_result_values(result) for result in results],
    }


def _result_values(result: Result) -> dict[str, Any]:
    judgement = result.judgement
    return {
        "name": result.vector.name,
        "about": result.vector.about,
        "rule": result.vector.rule,
        "outcome": result.outcome.value,
        "reason": judgement.reason.slug if judgement and judgement.reason else None,
        "expected": judgement.expected if judgement else None,
        "found": judgement.found if judgement else None,
        "fault": str(result.fault) if result.fault else None,
        "stderr": result.errors,
        "seconds": round(result.seconds, 3),
    }
