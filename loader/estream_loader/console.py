"""What all command lines share: results as JSON, what is printed when one cannot go on, and its exit code.

Exit 0 is good, 1 is refused, 2 is a usage error, 130 an interrupt. An error is one line on stderr, a second one says
what can be done about it. A reader that closes the pipe ends the program without a word.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from estream_spec.errors import EmoeError
from estream_spec.limits import MAX_FILE_LENGTH

if TYPE_CHECKING:
    from rich.console import Console

FILE: Final = click.Path(path_type=Path, readable=False)
"""Type of a file or folder on a command line. Whoever opens it says why that fails, in one way and with one status."""
NO_VERBS = {"options"}
"""Modules beside the verbs that hold what several of them share."""
REFUSED = 1
USAGE = 2
INTERRUPTED = 130
SIZE_HELP: Final = "bytes, or a number with K, M or G (or KiB, MiB, GiB), such as 512K or 8M"
"""What `size` takes, for the help of an option."""
UNBROKEN: Final = 4096
"""Columns that no table needs."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class FiniteRange(click.FloatRange):
    """A range of numbers that leaves out nan and the infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number a text spells; anything else is a usage error."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def verbs_of(package: ModuleType) -> type[click.Group]:
    """A group with a verb for each module of a package that has a `command`; each is imported when it is called for.

    The module's name is the verb's, with hyphens.
    """

    class Verbs(click.Group):
        def list_commands(self, ctx: click.Context) -> list[str]:
            names = (module.name.replace("_", "-") for module in iter_modules(package.__path__))
            return sorted(name for name in names if name not in NO_VERBS)

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in self.list_commands(ctx):
                return None
            command = import_module(f"{package.__name__}.{cmd_name.replace('-', '_')}").command
            assert isinstance(command, click.Command)
            return command

    return Verbs


def run_command(command: click.Command, program: str, arguments: list[str] | None = None) -> int:
    """Run a command to its end.

    Args:
        command: what to run.
        program: its name, as messages begin.
        arguments: the command line after the program's name; None takes the process's own.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        result = command.main(arguments, program, standalone_mode=False)
        if sys.stdout is not None:  # None where it was closed from outside
            sys.stdout.flush()  # while a closed pipe can still be told from other ends
    except EmoeError as error:
        return tell_error(program, str(error), error.hint)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.UsageError as error:
        help_line = f"{error.ctx.command_path if error.ctx else program} --help"
        return tell_error(program, error.format_message(), f"see '{help_line}'", code=USAGE)
    except click.ClickException as error:
        return tell_error(program, error.format_message())
    except (KeyboardInterrupt, click.Abort):
        return tell_error(program, "interrupted", code=INTERRUPTED)
    except BrokenPipeError:
        # Whatever is still buffered must not fail a second time when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED  # as click does where a closed pipe shows earlier
    except OSError as error:
        place = "" if error.filename is None else f" (at {error.filename})"
        return tell_error(program, f"{(error.strerror or str(error)).lower()}{place}")
    except MemoryError:
        return tell_error(program, "out of memory", "give it more, or less to do at a time")
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        return tell_error(program, "no more threads can be started", "allow this process more, or ask for fewer")
    return result if isinstance(result, int) else 0  # an exit code where the command asked for one, as --help does


def size(text: str) -> int:
    """Bytes from text: `524288`, `512K`, `8M`, `1G`; a unit is 1024 times the one before."""
    match = re.fullmatch(r"(\d{1,15})(?:([KMG])(?:iB)?)?", text, re.ASCII)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size, expected {SIZE_HELP}")
    found = int(match[1]) * _UNITS[match[2] or ""]
    if found > MAX_FILE_LENGTH:
        raise click.BadParameter(f"{text!r} is more than the largest package has, {MAX_FILE_LENGTH} bytes")
    return found


def print_json(value: object) -> None:
    """Print a result as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)))


def console() -> Console:
    """Where tables are printed: as wide as a terminal is, and where there is none as wide as they need.

    What reads a pipe or a file should meet no word or number that is broken over lines.
    """
    from rich.console import Console

    there = sys.stdout is not None and sys.stdout.isatty()
    return Console(highlight=False, width=None if there else UNBROKEN)


@contextmanager
def refusals_told(as_json: bool) -> Iterator[None]:
    """Print the verdict on standard output where what is inside refuses, and end the command with exit code 1.

    Args:
        as_json: whether the verdict is an object of JSON, and all there is, or a line before the error.
    """
    try:
        yield
    except EmoeError as error:
        if not as_json:
            click.echo(f"refused: {error.slug}")
            raise
        verdict = {"valid": False, "class": error.slug, "rule": error.rule, "message": error.message}
        print_json({**verdict, "path": error.path, "offset": error.offset, "hint": error.hint, "notices": []})
        click.get_current_context().exit(REFUSED)


def tell_error(program: str, message: str, hint: str | None = None, code: int = REFUSED) -> int:
    """Print an error, and what can be done about it; gives the exit code back."""
    click.echo(f"{program}: error: {message}", err=True)
    if hint is not None:
        click.echo(f"{program}: hint: {hint}", err=True)
    return code
