"""The command `estream-conformance`: asks a loader about every file of the suite, lists them, writes them out.

What a verb prints as its result goes to standard output, everything else to standard error. Exit status: 0 if every
test passed or failed as expected, 1 otherwise, 2 for a usage error, 130 for an interrupt.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

from estream_conformance.errors import UsageError
from estream_conformance.expectations import parse_expected_failures
from estream_conformance.export import export as export_vectors
from estream_conformance.judgement import right_answer
from estream_conformance.junit import write_junit
from estream_conformance.report import print_report, report_values
from estream_conformance.runner import BAD, TIMEOUT, parse_entry_point, run_suite
from estream_conformance.suite import FEATURES, chosen, load_vectors, needed, parse_features
from estream_conformance.vector import Vector
from estream_spec import __version__
from estream_spec.errors import printable

PROGRAM: Final = "estream-conformance"
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Ask loaders of .emoe packages about two thousand files, good and bad, and say where they are wrong.

    What a loader's program must do is described in spec/LOADER-CLI.md.
    """


@group.command()
@click.argument("entry_point", metavar="ENTRYPOINT")
@click.option("--features", metavar="LIST", help="What the loader can, joined by commas. [default: all]")
@click.option("--xfail", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Names of known failures.")
@click.option(
    "--timeout", type=click.IntRange(min=1), default=TIMEOUT, show_default=True, help="Seconds for each file."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Files at a time. [default: number of processors]")
@click.option("--only", metavar="PATTERN", multiple=True, help="Only tests whose name or rule is like this.")
@click.option("--json", "as_json", is_flag=True, help="Print all results as JSON.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write all results as JUnit XML.")
@click.pass_context
def run(
    context: click.Context,
    entry_point: str,
    features: str | None,
    xfail: Path | None,
    timeout: int,
    jobs: int | None,
    only: tuple[str, ...],
    as_json: bool,
    junit: Path | None,
) -> None:
    """Ask a loader about every file.

    ENTRYPOINT is the loader's program with its first arguments, such as "python3 my_loader.py".

    Exit code 0 if every test passed or failed as expected, 1 otherwise, 2 for a usage error.
    """
    command = parse_entry_point(entry_point)
    able = frozenset(FEATURES) if features is None else parse_features(features)
    if junit is not None and not junit.absolute().parent.is_dir():
        raise UsageError("there is no folder for the results", path=str(junit), hint="make the folder first")
    vectors = load_vectors()
    expected = frozenset[str]()
    if xfail is not None:
        expected = parse_expected_failures(_text(xfail), [each.name for each in vectors], str(xfail))
    vectors = chosen(vectors, only)
    if not any(needed(each) <= able for each in vectors):
        raise UsageError("every test that was asked for needs a feature that --features leaves out")
    with _progress("asking", len(vectors)) as advance:
        results = run_suite(
            command, vectors, features=able, expected_failures=expected, timeout=timeout, jobs=jobs, advance=advance
        )
    if junit is not None:
        write_junit(junit, results)
    if as_json:
        _print_json(report_values(results, entry_point, [each for each in FEATURES if each in able]))
    else:
        print_report(results)
    context.exit(FAILED if any(result.outcome in BAD for result in results) else 0)


@group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the tests as JSON.")
def list_tests(as_json: bool) -> None:
    """List all tests: name, answer, features that a loader needs, and what is special about the file."""
    vectors = load_vectors()
    if as_json:
        _print_json([_vector_values(each) for each in vectors])
        return
    for vector in vectors:
        needs = f" (needs {', '.join(sorted(needed(vector)))})" if needed(vector) else ""
        click.echo(f"{vector.name}\n  {vector.about}\n  {right_answer(vector)}{needs}")


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
def export(folder: Path) -> None:
    """Write every file into FOLDER, with its answer beside it.

    For loaders that test themselves. FOLDER is made, or must be empty. Some files are sparse and seem large.
    """
    vectors = load_vectors()
    with _progress("writing", len(vectors)) as advance:
        export_vectors(folder, vectors, advance)
    click.echo(f"{len(vectors)} files and their answers in {folder}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
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
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else PROGRAM
        return _fail(error.format_message(), f"see '{path} --help'", USAGE)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", None, INTERRUPTED)
    except BrokenPipeError:
        # Whatever is still buffered must not fail a second time when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        place = "" if error.filename is None else f" (at {error.filename})"
        return _fail(printable(f"{(error.strerror or str(error)).lower()}{place}"), None, FAILED)
    return result if isinstance(result, int) else 0


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
