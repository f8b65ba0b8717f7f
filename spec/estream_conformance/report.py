"""Shows the results of a run: for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import click

from estream_conformance.runner import BAD, Outcome, Result
from estream_conformance.suite import area
from estream_spec import __version__

_ERROR_LINES: Final = 8
"""Lines of standard error that are shown of a failed test, the last ones."""
_COUNTED: Final = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "failed",
    Outcome.UNEXPECTED_PASS: "passed unexpectedly",
    Outcome.EXPECTED_FAILURE: "failed as expected",
    Outcome.LEFT_OUT: "left out",
}


def print_report(results: Sequence[Result]) -> None:
    """Print what failed and a summary by rule area."""
    from rich.console import Console

    for result in results:
        if result.outcome in BAD:
            click.echo(_failure(result))
            click.echo()
    Console().print(_summary(results))


def _failure(result: Result) -> str:
    """What there is to say of a failed test."""
    vector, judgement = result.vector, result.judgement
    assert judgement is not None
    if judgement.reason is None:
        return f"{vector.name}: passed, though it is expected to fail\n  {vector.about}\n  take it off the list"
    lines = [
        f"{vector.name}: {judgement.reason.text}",
        f"  {vector.about}",
        f"  expected  {judgement.expected}",
        f"  found     {judgement.found}",
        *(f"  stderr    {line}" for line in result.errors.splitlines()[-_ERROR_LINES:]),
    ]
    return "\n".join(lines)


def _summary(results: Sequence[Result]) -> Any:
    """A row for each rule area, in the order of the rules; a column for each outcome that there is."""
    from rich.table import Table

    total = Counter(result.outcome for result in results)
    columns = [outcome for outcome in Outcome if total[outcome] or outcome in (Outcome.PASSED, Outcome.FAILED)]
    table = Table("rules", box=None, show_footer=True)
    table.columns[0].footer = "all"
    for outcome in columns:
        table.add_column(_COUNTED[outcome], str(total[outcome]), justify="right")
    for name in dict.fromkeys(area(result.vector) for result in results):
        counts = Counter(result.outcome for result in results if area(result.vector) == name)
        table.add_row(name, *(str(counts[outcome]) for outcome in columns))
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
        "stderr": result.errors,
        "seconds": round(result.seconds, 3),
    }
