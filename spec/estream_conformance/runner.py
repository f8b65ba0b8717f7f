"""Asks a loader's program about every vector, several at a time, and gives the results in the vectors' order."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from estream_conformance.errors import UnwritableError, UsageError
from estream_conformance.judgement import Judgement, judge
from estream_conformance.process import Answer, ask
from estream_conformance.suite import FEATURES, needed
from estream_conformance.vector import Vector
from estream_spec.errors import printable

TIMEOUT: Final = 10
"""Seconds for each file where nothing else is said."""
_ROOM: Final = 1 << 20
"""Bytes that a loader may print at least; of files to accept, four times the expected line more."""
_QUOTED: Final = 3
"""Lines of standard error that are quoted of a command that is no loader, the last ones."""


class Outcome(StrEnum):
    """What came of a test, with what was expected of it."""

    PASSED = "passed"
    FAILED = "failed"
    EXPECTED_FAILURE = "expected-failure"
    UNEXPECTED_PASS = "unexpected-pass"  # noqa: S105 (no password)
    LEFT_OUT = "left-out"
    NOT_ASKED = "not-asked"


BAD: Final = {Outcome.FAILED, Outcome.UNEXPECTED_PASS}
"""Outcomes that fail the run."""


@dataclass(frozen=True, slots=True)
class Result:
    """A test and what came of it.

    Attributes:
        vector: what was asked.
        outcome: what came of it.
        judgement: how the answer compares; None where the loader was not asked.
        errors: the end of what it printed to standard error, fit for a terminal.
        seconds: how long the loader took.
        fault: why the file could not be written, where the loader was not asked for that.
    """

    vector: Vector
    outcome: Outcome
    judgement: Judgement | None = None
    errors: str = ""
    seconds: float = 0.0
    fault: UnwritableError | None = None


def parse_entry_point(text: str) -> list[str]:
    """The program and its first arguments out of a command line.

    Raises:
        UsageError: there is no such program, or it is none.
    """
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the entry point cannot be split into words: {str(error).lower()}") from None
    if not command:
        raise UsageError("the entry point is empty", hint="give a command line such as 'python3 my_loader.py'")
    program = command[0]
    if shutil.which(program) is None:
        raise _no_program(program)
    return command


def _no_program(program: str) -> UsageError:
    path = Path(program)
    if not path.exists():
        return UsageError(f"there is no program {program!r}")
    if path.is_dir():
        return UsageError(f"the entry point {program!r} is a folder")
    if not os.access(path, os.X_OK):
        return UsageError(
            f"the entry point {program!r} is not executable", hint=f"run 'chmod +x {shlex.quote(program)}'"
        )
    return UsageError(f"there is no program {program!r}", hint=f"did you mean './{program}'?")


def check_entry_point(command: Sequence[str], vector: Vector, timeout: float) -> None:
    """Ask about a sound file before all others, so that a command that is no loader is told once.

    Raises:
        UsageError: the command cannot be started, or gives no verdict at all.
        UnwritableError: the file cannot be written.
        OSError: there is no folder for temporary files.
    """
    answer = ask_about(vector, command, timeout)
    if answer.status == 0 or (answer.status == 1 and answer.output.strip()):
        return
    lines = [line for line in _lines(answer.errors) if line.strip()]
    errors = f"its standard error ends: {' | '.join(lines[-_QUOTED:])}" if lines else "its standard error is empty"
    raise UsageError(
        f"{shlex.join(command)!r} gives no verdict about the file {vector.name!r}: "
        f"{judge(vector, answer).found}; {errors}",
        hint="spec/LOADER-CLI.md says how a loader is asked and what it must answer",
    )


def run_suite(
    command: Sequence[str],
    vectors: Sequence[Vector],
    *,
    features: Collection[str] = FEATURES.keys(),
    expected_failures: Collection[str] = (),
    timeout: float = TIMEOUT,
    jobs: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Ask a loader about vectors.

    Args:
        command: its program and first arguments.
        vectors: what to ask.
        features: what the loader can; vectors that need more are left out.
        expected_failures: names of vectors that it is known to get wrong.
        timeout: seconds for each.
        jobs: how many are asked at a time; None for one for each processor.
        advance: called after each.

    Returns:
        A result for each vector, in their order.

    Raises:
        UsageError: the loader cannot be started.
        OSError: there is no folder for temporary files.
    """
    stop = threading.Event()

    def test(vector: Vector) -> Result:
        if not needed(vector) <= set(features):
            return Result(vector, Outcome.LEFT_OUT)
        try:
            answer = ask_about(vector, command, timeout, stop)
        except UnwritableError as error:  # says nothing of the loader, and nothing of the other files
            return Result(vector, Outcome.NOT_ASKED, fault=error)
        judgement = judge(vector, answer, with_json="accept" in features)
        passed, foreseen = judgement.reason is None, vector.name in expected_failures
        if foreseen:
            outcome = Outcome.UNEXPECTED_PASS if passed else Outcome.EXPECTED_FAILURE
        else:
            outcome = Outcome.PASSED if passed else Outcome.FAILED
        return Result(vector, outcome, judgement, "\n".join(_lines(answer.errors)), answer.seconds)

    results = []
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        try:
            for result in pool.map(test, vectors):
                results.append(result)
                advance()
        finally:  # whatever ended it, an interrupt too: no program is left running
            stop.set()
            pool.shutdown(cancel_futures=True)
    return results


def ask_about(vector: Vector, command: Sequence[str], timeout: float, stop: threading.Event | None = None) -> Answer:
    """Ask a loader about one vector.

    Args:
        vector: what to ask. Its file gets a name that tells nothing, and goes when the loader has ended.
        command: the loader's program and first arguments.
        timeout: seconds it may take.
        stop: ends it early when set.

    Raises:
        UsageError: the loader cannot be started.
        UnwritableError: the vector's file cannot be written.
        OSError: there is no folder for temporary files.
    """
    # What a loader has done to the folder that cannot be undone fails no other test.
    with tempfile.TemporaryDirectory(prefix="estream-conformance-", ignore_cleanup_errors=True) as folder:
        path, detached = Path(folder, "package.emoe"), Path(folder, "signature")
        vector.write(path, detached)
        arguments = [each.replace("{detached}", str(detached)) for each in vector.arguments]
        limit = _ROOM + 4 * len(vector.json or "")
        return ask([*command, str(path), *arguments], timeout=timeout, limit=limit, stop=stop)


def _lines(errors: bytes) -> list[str]:
    """What was printed to standard error, fit for a terminal."""
    return [printable(line) for line in errors.decode("utf-8", "backslashreplace").splitlines()]
