"""Telling people how far a build has come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """What a build reports to."""

    def begin(self, stage: str, total: int) -> None:
        """A stage begins that will read `total` bytes of the source."""

    def advance(self, amount: int) -> None:
        """`amount` more bytes of the source are done."""


class Quiet:
    """Progress nobody looks at."""

    def begin(self, stage: str, total: int) -> None:
        """Says nothing."""

    def advance(self, amount: int) -> None:
        """Says nothing."""


@contextlib.contextmanager
def open_progress() -> Iterator[Progress]:
    """A bar on standard error where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield Quiet()
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    class Terminal:
        """One bar per stage."""

        def __init__(self, bars: Bars):
            self._bars, self._stage = bars, TaskID(-1)

        def begin(self, stage: str, total: int) -> None:
            self._stage = self._bars.add_task(stage, total=total)

        def advance(self, amount: int) -> None:
            self._bars.advance(self._stage, amount)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Terminal(bars)
