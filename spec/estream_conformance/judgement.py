"""Compares what a loader answered with the right answer, and says how they differ. LOADER-CLI.md sections 1 to 3."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Never

from estream_conformance.process import Answer
from estream_conformance.vector import Vector
from estream_spec.errors import printable

_SHOWN: Final = 100
"""Characters of a value that are shown."""
_AROUND: Final = 30
"""Bytes that are shown before and from the place where two lines differ."""
_MISSING: Final = object()


class _UnreadableError(ValueError):
    """An output that is no JSON value; the text says why, behind the word `that`."""


class Reason(Enum):
    """Why a test failed: as reports for programs name it, and as people read it."""

    TIMEOUT = "timeout", "no answer in time"
    CRASH = "crash", "crashed"
    FLOOD = "flood", "printed without end"
    ACCEPTED = "accepted", "accepted what must be refused"
    REFUSED = "refused", "refused what must be accepted"
    NO_VERDICT = "no-verdict", "refused without a verdict"
    CLASS = "class", "refused for the wrong class of fault"
    RULE = "rule", "refused by the wrong rule"
    NO_JSON = "no-json", "accepted, but what it printed is not JSON"
    CONTENT = "content", "accepted, but read something else"
    SPELLING = "spelling", "accepted and read rightly, but spelled otherwise"

    def __init__(self, slug: str, text: str):
        self.slug, self.text = slug, text


@dataclass(frozen=True, slots=True)
class Judgement:
    """How an answer compares with the right one.

    Attributes:
        reason: why the test failed; None if it passed.
        expected: the right answer.
        found: the answer.
    """

    reason: Reason | None
    expected: str
    found: str


def judge(vector: Vector, answer: Answer, *, with_json: bool = True) -> Judgement:
    """Compare an answer with the right one.

    Args:
        vector: what was asked.
        answer: what the loader did.
        with_json: compare what it printed of a file it accepts.
    """
    expected = right_answer(vector)
    if answer.flooded:
        return Judgement(Reason.FLOOD, expected, f"more than {len(answer.output)} bytes on standard output")
    if answer.status is None:
        return Judgement(Reason.TIMEOUT, expected, f"no answer in {answer.seconds:.1f} s")
    if answer.status not in (0, 1):
        return Judgement(Reason.CRASH, expected, _end(answer.status))
    if answer.status == 1:
        return _judge_refusal(vector, answer.output, expected)
    if vector.rule is not None:
        return Judgement(Reason.ACCEPTED, expected, "accepted")
    if with_json:
        return _judge_json(vector, answer.output, expected)
    return Judgement(None, expected, "accepted")


def right_answer(vector: Vector) -> str:
    """The answer to a vector, in words."""
    return "accepted" if vector.rule is None else f"refused as {vector.refused_as} by {vector.rule}"


def _judge_refusal(vector: Vector, output: bytes, expected: str) -> Judgement:
    try:
        verdict = _parse(output)
    except _UnreadableError as error:
        return Judgement(Reason.NO_VERDICT, expected, f"exit status 1, and standard output that {error}")
    if not isinstance(verdict, dict) or not isinstance(verdict.get("class"), str):
        return Judgement(Reason.NO_VERDICT, expected, f"exit status 1, and JSON without a class: {_clipped(verdict)}")
    slug, rule = printable(verdict["class"]), verdict.get("rule", _MISSING)
    found = f"refused as {slug}"
    if rule is not _MISSING:
        found = f"{found} by {printable(rule) if isinstance(rule, str) else _clipped(rule)}"
    if vector.rule is None:
        return Judgement(Reason.REFUSED, expected, found)
    if slug != vector.refused_as:
        return Judgement(Reason.CLASS, expected, found)
    return Judgement(Reason.RULE if rule not in (_MISSING, vector.rule) else None, expected, found)


def _judge_json(vector: Vector, output: bytes, expected: str) -> Judgement:
    assert vector.json is not None, vector.name
    wanted, line = vector.json.encode(), output.removesuffix(b"\n")
    if line == wanted:
        return Judgement(None, expected, "accepted")
    try:
        value = _parse(output)
    except _UnreadableError as error:
        return Judgement(Reason.NO_JSON, "one JSON object", f"standard output that {error}")
    difference = first_difference(json.loads(vector.json), value)
    if difference is not None:
        place, own, other = difference
        return Judgement(Reason.CONTENT, f"{place}: {own}", f"{place}: {other}")
    at = next((n for n, pair in enumerate(zip(wanted, line, strict=False)) if pair[0] != pair[1]), len(wanted))
    return Judgement(
        Reason.SPELLING, f"at byte {at}: {_around(wanted, at)}", f"equal as JSON, but at byte {at}: {_around(line, at)}"
    )


def first_difference(expected: Any, found: Any, place: str = "") -> tuple[str, str, str] | None:
    """The first place where two JSON values differ, in the order of the expected one.

    Args:
        expected: the right value.
        found: the other one.
        place: where both stand.

    Returns:
        The place, such as `sections[3].offset`, what is expected there and what is found; None if they are equal.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(found.keys() - expected.keys())]:
            inner = f"{place}.{printable(key)}" if place else printable(key)
            if key not in found or key not in expected:
                return inner, _clipped(expected.get(key, _MISSING)), _clipped(found.get(key, _MISSING))
            if difference := first_difference(expected[key], found[key], inner):
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            if difference := first_difference(one, other, f"{place}[{number}]"):
                return difference
        if len(expected) != len(found):
            return place, f"{len(expected)} items", f"{len(found)} items"
        return None
    # 1, 1.0 and true are equal to Python, and three values to JSON.
    if type(expected) is type(found) and expected == found:
        return None
    return place or "the whole", _clipped(expected), _clipped(found)


def _parse(output: bytes) -> Any:
    """The JSON value in an output.

    Raises:
        _UnreadableError: there is none.
    """

    def refuse(constant: str) -> Never:
        raise _UnreadableError(f"has {constant}, which JSON has not")

    if not output.strip():
        raise _UnreadableError("is empty")
    try:
        return json.loads(output.decode("utf-8"), parse_constant=refuse)
    except _UnreadableError:
        raise
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        fault = f"is not JSON at character {error.pos}"
    except ValueError:  # from Python's limit on digits
        fault = "has an integer of thousands of digits"
    except RecursionError:
        fault = "is nested too deep"
    raise _UnreadableError(f"{fault}: {_shown(output[: 4 * _SHOWN].decode('utf-8', 'backslashreplace'))}")


def _end(status: int) -> str:
    """How a crash ended, in words."""
    if status >= 0:
        return f"exit status {status}, which is no answer"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"


def _clipped(value: object) -> str:
    """A JSON value, or what a part of it begins with."""
    if value is _MISSING:
        return "nothing"
    try:
        return _shown(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "a value nested too deep"


def _shown(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _around(data: bytes, at: int) -> str:
    """What stands around a byte."""
    if at >= len(data):
        return "the end"
    return printable(data[max(0, at - _AROUND) : at + _AROUND].decode("utf-8", "backslashreplace"))
