"""Measure what goes by before a package is being read, and before its first token is there.

    python tests/bench/startup.py
    python tests/bench/startup.py build/sample.emoe --tokens 16 --rounds 9

Each start is a process of its own, with compiled modules at hand as an installed program has them, and with nothing of
the package in the page cache. It opens package and session from Python and takes in a prompt. Times are counted from
the moment at which the process is asked for. The package, of 3.9 GB, is made in `build/bench` unless it is there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
from rich.console import Console
from rich.table import Table

from bench.synthetic import made
from estream_loader.console import run_command
from estream_runtime.backends import BACKENDS

MOMENTS: Final = {
    "python": "Python runs",
    "imports": "all is imported",
    "package": "package open",
    "first read": "first read of weights",
    "session": "session open",
    "first expert read": "first read of experts",
    "last read": "last read",
    "first token": "first token",
}
"""Seconds to these, by the names that `first_token.py` gives them."""


def started(package: Path, tokens: int, backend: str, compiled: str) -> dict[str, float]:
    """Start once, with a cold cache: seconds to each moment, and with reading.

    Args:
        package: what to run.
        tokens: of the prompt.
        backend: what computes.
        compiled: folder for compiled modules.
    """
    with package.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    script = Path(__file__).with_name("first_token.py")
    command = [sys.executable, str(script), str(time.monotonic()), str(package), str(tokens), backend]
    done = subprocess.run(
        command, env={**environment, "PYTHONPYCACHEPREFIX": compiled}, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@click.command(help=f"\b\n{__doc__.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}")
@click.argument("package", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--tokens", type=click.IntRange(1), multiple=True, default=(1, 512), show_default=True)
@click.option("--backend", type=click.Choice(BACKENDS), default=BACKENDS[0], show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Of which medians are taken.")
def command(package: Path | None, tokens: tuple[int, ...], backend: str, rounds: int) -> None:
    path = package or made("olmoe-1b-7b", "w4g32")
    table = Table("seconds to", *(f"{each} tokens" for each in tokens), title=f"{path.stem}, medians of {rounds}")
    columns = []
    with tempfile.TemporaryDirectory() as compiled:
        started(path, 1, backend, compiled)  # compiles modules
        for each in tokens:
            columns.append([started(path, each, backend, compiled) for _ in range(rounds)])
    for name, what in MOMENTS.items():
        table.add_row(what, *(f"{statistics.median(run[name] for run in runs):.3f}" for runs in columns))
    idle = [[run["last read"] - run["first read"] - run["reading"] for run in runs] for runs in columns]
    table.add_row("nothing was read between first and last", *(f"{statistics.median(each):.3f}" for each in idle))
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(run_command(command, "startup.py"))
