"""Telling people how far something long has come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Literal, Protocol


class Progress(Protocol):
    """What something long reports to, in bytes, tokens, measurements, graphs or runs."""

    def begin(self, stage: str, total: int) -> None:
        """A stage begins that will take `total`."""

    def advance(self, amount: int) -> None:
        """`amount` more of it is done."""


class Quiet:
    """Progress nobody looks at."""

    def begin(self, stage: str, total: int) -> None:
        """Says nothing."""

    def advance(self, amount: int) -> None:
        """Says nothing."""


@contextlib.contextmanager
def open_progress(unit: Literal["bytes", "tokens", "measurements", "graphs", "runs"] = "bytes") -> Iterator[Progress]:
    """A bar on standard error where that is a terminal, else nothing.

    Args:
        unit: what is counted.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # None where the stream was closed from outside
        yield Quiet()
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
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

    counted: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn(unit))
    if unit == "bytes":
        counted = DownloadColumn(binary_units=True), TransferSpeedColumn()
    columns = TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Terminal(bars)
