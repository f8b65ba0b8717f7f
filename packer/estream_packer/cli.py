"""The command `estream-pack`: finds the verb, runs it, and says plainly why it failed.

What a verb prints as its result goes to standard output, everything else to standard error. How it ends is
`estream_loader.console`.
"""

from __future__ import annotations

import signal
import sys
from typing import Final

import click

from estream_loader.console import run_command, verbs_of
from estream_packer import commands
from estream_spec import __version__

PROGRAM: Final = "estream-pack"


@click.group(cls=verbs_of(commands), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Pack mixture-of-experts language models into one .emoe file each."""


def main() -> None:
    """Entry point of the program."""
    # A polite kill, or a terminal that closes, ends the program as an error would, so that nothing half-written stays
    # behind. `nohup` ignores the latter, and so it stays.
    for polite in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(polite) is not signal.SIG_IGN:
            signal.signal(polite, lambda number, _: sys.exit(128 + number))
    sys.exit(run_command(group, PROGRAM))
