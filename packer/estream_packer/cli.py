"""The command `estream-pack`: finds the verb, runs it, and says plainly why it failed.

What a verb prints as its result goes to standard output, everything else to standard error. Exit status: 0 done,
1 refused, 2 wrong usage, 130 or 143 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

import click

from estream_packer import commands
from estream_spec import __version__
from estream_spec.errors import EmoeError

PROGRAM = "estream-pack"


class Verbs(click.Group):
    """A group with a verb for each module of `estream_packer.commands`, imported when it is called for.

    The module's name is the verb's, with hyphens, and its `command` is what runs.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every verb, by name."""
        return sorted(module.name.replace("_", "-") for module in iter_modules(commands.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name, if there is one."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"{commands.__name__}.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Pack mixture-of-experts language models into one .emoe file each."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None takes the process's own.

    Returns:
        The exit status.
    """
    try:
        group.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.UsageError as error:
        place = error.ctx.command_path if error.ctx else PROGRAM
        return _fail(error.format_message(), f"see {place} --help", status=2)
    except EmoeError as error:
        return _fail(str(error), error.hint)
    except OSError as error:
        place = f" (at {error.filename})" if error.filename else ""
        return _fail((error.strerror or str(error)).lower() + place)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", status=128 + signal.SIGINT)
    return 0


def main() -> None:
    """Entry point of the program."""
    # A polite kill ends the program as an error would, so that nothing half-written stays behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run())


def _fail(message: str, hint: str | None = None, status: int = 1) -> int:
    click.echo(f"{PROGRAM}: error: {message}", err=True)
    if hint:
        click.echo(f"{PROGRAM}: hint: {hint}", err=True)
    return status
