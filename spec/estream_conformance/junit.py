"""The results of a run as JUnit XML, which CI systems read."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from estream_conformance.runner import BAD, Outcome, Result
from estream_conformance.suite import area, needed


def junit(results: Sequence[Result]) -> Xml.Element:
    """A suite with a case for each test; its class name is the rule area.

    What a loader printed is escaped already, so that every character is one that XML may hold.
    """
    counts = Counter(result.outcome for result in results)
    suite = Xml.Element(
        "testsuite",
        name="estream-conformance",
        tests=str(len(results)),
        failures=str(sum(counts[outcome] for outcome in BAD)),
        errors=str(counts[Outcome.NOT_ASKED]),
        skipped=str(counts[Outcome.EXPECTED_FAILURE] + counts[Outcome.LEFT_OUT]),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    suite.extend(_case(result) for result in results)
    suites = Xml.Element("testsuites")
    suites.append(suite)
    return suites


def _case(result: Result) -> Xml.Element:
    vector, judgement = result.vector, result.judgement
    seconds = f"{result.seconds:.3f}"
    case = Xml.Element("testcase", classname=f"conformance.{area(vector)}", name=vector.name, time=seconds)
    match result.outcome:
        case Outcome.LEFT_OUT:
            needs = ", ".join(sorted(needed(vector)))
            Xml.SubElement(case, "skipped", message=f"needs {needs}")
        case Outcome.NOT_ASKED:
            Xml.SubElement(case, "error", type="not-asked", message=str(result.fault))
        case Outcome.EXPECTED_FAILURE:
            Xml.SubElement(case, "skipped", message="failed as expected")
        case Outcome.UNEXPECTED_PASS:
            Xml.SubElement(case, "failure", type="unexpected-pass", message="passed, though it is expected to fail")
        case Outcome.FAILED:
            assert judgement is not None
            assert judgement.reason is not None
            failure = Xml.SubElement(case, "failure", type=judgement.reason.slug, message=judgement.reason.text)
            failure.text = f"{vector.about}\nexpected {judgement.expected}\nfound {judgement.found}"
    if result.errors and result.outcome is not Outcome.PASSED:
        Xml.SubElement(case, "system-err").text = result.errors
    return case


def write_junit(path: Path, results: Sequence[Result]) -> None:
    """Write the results to a file, which is replaced in one step.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.parent / f".{secrets.token_hex(8)}.partial"
    try:
        Xml.ElementTree(junit(results)).write(partial, encoding="utf-8", xml_declaration=True)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
