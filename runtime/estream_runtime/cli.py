"""The command `estream-run`: runs packages. How it ends is `estream_loader.console`."""

from __future__ import annotations

import os
import sys

import click

from estream_loader.console import run_command, verbs_of
from estream_runtime import commands
from estream_spec import __version__

PROGRAM = "estream-run"


@click.group(cls=verbs_of(commands), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Run .emoe packages while their experts pass through a small arena of memory."""


def main() -> None:
    """Entry point of the program."""
    # Starting threads of OpenBLAS would take a third of the time in which modules are imported, and nothing multiplies
    # with it but the reference backend, which need not be fast.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(run_command(group, PROGRAM))
