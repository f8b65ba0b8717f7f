"""The command `estream-conformance`: asks a loader about every file of the suite, lists them, writes them out.

What a verb prints as its result goes to standard output, everything else to standard error. Exit status: 0 if every
test passed or failed as expected, 1 otherwise, 2 for a usage error, 3 where a file could not be written, 130 for an
interrupt.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from estream_conformance.errors import UnwritableError, UsageError
from estream_conformance.expectations import parse_expected_failures
from estream_conformance.export import export as export_vectors
from estream_conformance.judgement import right_answer
from estream_conformance.junit import write_junit
from estream_conformance.report import print_report, report_values
from estream_conformance.runner import BAD, TIMEOUT, Outcome, check_entry_point, parse_entry_point, run_suite
from estream_conformance.suite import FEATURES, chosen, load_vectors, needed, parse_features, rule_of
from estream_conformance.vector import Vector
from estream_spec import __version__
from estream_spec.errors import printable

PROGRAM: Final = "estream-conformance"
FAILED: Final = 1
USAGE: Final = 2
UNWRITABLE: Final = 3
INTERRUPTED: Final = 130
SHOWN: Final = 2
"""Failures of a rule that are told where nothing else is said."""
FIRST: Final = "smallest"
"""The vector that a loader is asked about before all others."""

_features = click.option(
    "--features", metavar="LIST", default="all", show_default=True, help="What the loader can, joined by commas."
)
_only = click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only tests whose name, rule or rule area is like this, in any case. * stands for anything; may be repeated.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Ask loaders of .emoe packages about two thousand files, good and bad, and say where they are wrong.

    What a loader's program must do is described in spec/LOADER-CLI.md.
    """


@group.command()
@click.argument("entry_point", metavar="ENTRYPOINT")
@_features
@click.option("--xfail", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Names of known failures.")
@click.option(
    "--timeout", type=click.IntRange(min=1), default=TIMEOUT, show_default=True, help="Seconds for each file."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Files at a time. [default: number of processors]")
@_only
@click.option(
    "--show", type=click.IntRange(min=0), default=SHOWN, show_default=True, help="Failures of each rule to tell about."
)
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write all results as JUnit XML.")
@click.pass_context
def run(
    context: click.Context,
    entry_point: str,
    features: str,
    xfail: Path | None,
    timeout: int,
    jobs: int | None,
    only: tuple[str, ...],
    show: int,
    as_json: bool,
    junit: Path | None,
) -> None:
    """Ask a loader about every file.

    ENTRYPOINT is the loader's program with its first arguments, in quotes: "python3 my_loader.py".

    Exit code 0 if every test passed or failed as expected, 1 otherwise, 2 for a usage error, 3 if a file could not be
    written.
    """
    command = parse_entry_point(entry_point)
    able = parse_features(features)
    if junit is not None:
        _check_results(junit, [*command, *([str(xfail)] if xfail else [])])
    vectors = load_vectors()
    first = next(each for each in vectors if each.name == FIRST)
    expected = frozenset[str]()
    if xfail is not None:
        expected = parse_expected_failures(_text(xfail), [each.name for each in vectors], str(xfail))
    vectors = chosen(vectors, only)
    _within(able, vectors)
    check_entry_point(command, first, timeout)
    with _progress("asking", len(vectors)) as advance:
        results = run_suite(
            command, vectors, features=able, expected_failures=expected, timeout=timeout, jobs=jobs, advance=advance
        )
    try:
        if junit is not None:
            write_junit(junit, results)
    finally:  # what took minutes is told whatever becomes of the file
        if as_json:
            _print_json(report_values(results, entry_point, [each for each in FEATURES if each in able]))
        else:
            print_report(results, show)
    outcomes = {result.outcome for result in results}
    context.exit(UNWRITABLE if Outcome.NOT_ASKED in outcomes else FAILED if outcomes & BAD else 0)


def _check_results(path: Path, others: Sequence[str]) -> None:
    """Refuse a file for the results that cannot be one, or is what the run itself needs.

    Raises:
        UsageError: there is no folder for it, or it is one of the others.
    """
    if path.exists() and not path.is_file():
        raise UsageError("the results cannot replace what is no plain file", path=str(path), hint="name another file")
    if not path.absolute().parent.is_dir():
        raise UsageError("there is no folder for the results", path=str(path), hint="make the folder first")
    used = [Path(shutil.which(other) or other) for other in others]
    if path.exists() and any(other.exists() and other.samefile(path) for other in used):
        raise UsageError("the results would replace a file of this run", path=str(path), hint="name another file")


def _within(able: frozenset[str], vectors: Sequence[Vector]) -> list[Vector]:
    """The vectors that need no other features.

    Raises:
        UsageError: there are none.
    """
    within = [each for each in vectors if needed(each) <= able]
    if not within:
        raise UsageError("every test that was asked for needs a feature that --features leaves out")
    return within


@group.command("list")
@_only
@click.option("--json", "as_json", is_flag=True, help="Print the tests as JSON.")
def list_tests(only: tuple[str, ...], as_json: bool) -> None:
    """List tests: name, what is special about the file, answer and features; then how many there are of each rule."""
    vectors = chosen(load_vectors(), only)
    if as_json:
        _print_json([_vector_values(each) for each in vectors])
        return
    for vector in vectors:
        features = f" (features: {', '.join(sorted(vector.features))})" if vector.features else ""
        click.echo(f"{vector.name}\n  {vector.about}\n  {right_answer(vector)}{features}\n")
    for rule, count in Counter(rule_of(each) for each in vectors).items():
        click.echo(f"{count:5} {rule}")
    click.echo(f"{len(vectors):5} all")


def _vector_values(vector: Vector) -> dict[str, object]:
    return {
        "name": vector.name,
        "about": vector.about,
        "answer": "accepted" if vector.rule is None else "refused",
        "class": vector.refused_as,
        "rule": vector.rule,
        "features": sorted(vector.features),
    }


@group.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_features
@_only
def export(folder: Path, features: str, only: tuple[str, ...]) -> None:
    """Write files into FOLDER, each with its answer beside it.

    For loaders that test themselves, and to look at one file. FOLDER is made, or must be empty. Files of the feature
    `large` are sparse, and seem to have up to 1 TiB.
    """
    vectors = _within(parse_features(features), chosen(load_vectors(), only))
    with _progress("writing", len(vectors)) as advance:
        export_vectors(folder, vectors, advance)
    click.echo(
        f"{len(vectors)} {'file and its answer' if len(vectors) == 1 else 'files and their answers'} in {folder}"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(f"the file is not UTF-8 at byte {error.start}", path=str(path)) from None


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def _progress(stage: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error where that is a terminal; yields what is called after each step."""
    if sys.stderr is None or not sys.stderr.isatty():  # None where the stream was closed from outside
        yield lambda: None
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(stage, total=total)
        yield lambda: bars.advance(task)


def run_command(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit code; None takes the process's own arguments."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal cannot show is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        result = group.main(arguments, PROGRAM, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # while a closed pipe can still be told from other ends
    except UsageError as error:
        return _fail(str(error), error.hint, USAGE)
    except UnwritableError as error:
        return _fail(str(error), error.hint, UNWRITABLE)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.UsageError as error:
        return _fail(error.format_message(), _usage_hint(error), USAGE)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", None, INTERRUPTED)
    except BrokenPipeError:
        # Whatever is still buffered must not fail a second time when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        place = "" if error.filename is None else f" (at {error.filename})"
        return _fail(printable(f"{(error.strerror or str(error)).lower()}{place}"), None, UNWRITABLE)
    return result if isinstance(result, int) else 0


def _usage_hint(error: click.UsageError) -> str:
    """What helps against what click found wrong."""
    hint = f"see '{error.ctx.command_path if error.ctx else PROGRAM} --help'"
    if error.ctx is None or error.ctx.command is not run or isinstance(error, click.BadParameter):
        return hint
    # Words or options that `run` does not know are most likely the loader's own.
    return f'quote the whole command of the loader, such as "python3 my_loader.py"; {hint}'


def _fail(message: str, hint: str | None, code: int) -> int:
    click.echo(f"{PROGRAM}: error: {message}", err=True)
    if hint is not None:
        click.echo(f"{PROGRAM}: hint: {hint}", err=True)
    return code


def main() -> None:
    """Entry point of the program."""
    # A polite kill, or a terminal that closes, ends the program as an error would, so that no loader is left running.
    for polite in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(polite) is not signal.SIG_IGN:
            signal.signal(polite, lambda number, _: sys.exit(128 + number))
    sys.exit(run_command())
