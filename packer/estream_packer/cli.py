"""The command `estream-pack`: finds the verb, runs it, and says plainly why it failed.

What a verb prints as its result goes to standard output, everything else to standard error. How it ends is
`estream_loader.console`.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

import click

from estream_loader.console import run_command
from estream_packer import commands
from estream_spec import __version__

PROGRAM: Final = "estream-pack"


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


def main() -> None:
    """Entry point of the program."""
    # A polite kill ends the program as an error would, so that nothing half-written stays behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(run_command(group, PROGRAM))
