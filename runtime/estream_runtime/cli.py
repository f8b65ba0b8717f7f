"""The command `estream-run`: runs packages. How it ends is `estream_loader.console`."""

from __future__ import annotations

import sys

import click

from estream_loader.console import run_command
from estream_runtime.commands import generate, score
from estream_spec import __version__

PROGRAM = "estream-run"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Run .emoe packages while their experts pass through a small arena of memory."""


group.add_command(generate.command, "generate")
group.add_command(score.command, "score")


def main() -> None:
    """Entry point of the program."""
    sys.exit(run_command(group, PROGRAM))
