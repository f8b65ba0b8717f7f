"""Runs a program that may do anything: hang, crash, print without end, leave children behind.

It gets no standard input and runs in a process group of its own, which is killed at the end whatever happened. What it
prints is kept up to a bound.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from estream_conformance.errors import UsageError

STDERR_KEPT: Final = 4096
"""Bytes of standard error that are kept, the last ones: there a traceback says what it was."""
_CHUNK: Final = 1 << 16
_TICK: Final = 0.05
"""Seconds between looks at a process that is silent."""
_LAST_CHUNKS: Final = 32
"""What is read at most of a pipe after the end; it holds no more, unless somebody who got away is still writing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program did.

    Attributes:
        status: its exit status, the negative number of the signal that ended it, or None where it was stopped.
        output: what it printed, up to the bound.
        errors: the end of what it printed to standard error.
        seconds: how long it ran.
        flooded: whether it was stopped for printing more than the bound; where not, for its time.
    """

    status: int | None
    output: bytes = b""
    errors: bytes = b""
    seconds: float = 0.0
    flooded: bool = False


def ask(command: Sequence[str], *, timeout: float, limit: int, stop: threading.Event | None = None) -> Answer:
    """Run a program to its end.

    Args:
        command: the program and its arguments.
        timeout: seconds it may take.
        limit: bytes it may print.
        stop: ends it early when set.

    Raises:
        UsageError: it cannot be started.
    """
    begin = time.monotonic()
    try:
        process = subprocess.Popen(  # noqa: S603 (the caller's own program)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"the entry point {command[0]!r} cannot be started: {reason}") from error
    output, errors = bytearray(), bytearray()
    with process, selectors.DefaultSelector() as selector:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            for pipe, kept in ((process.stdout, output), (process.stderr, errors)):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, kept)

            while process.poll() is None and len(output) <= limit:
                remaining = begin + timeout - time.monotonic()
                if remaining <= 0 or (stop is not None and stop.is_set()):
                    break
                if not selector.get_map():  # it closed both, most likely since it is about to end
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(min(_TICK, remaining))
                    continue
                for key, _ in selector.select(min(_TICK, remaining)):
                    if _read(key, errors) == b"":
                        selector.unregister(key.fileobj)
            status = process.poll()
        finally:
            # All of the group, also where the program itself has ended: a child may live on.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for key in list(selector.get_map().values()):
            for _ in range(_LAST_CHUNKS):
                if len(output) > limit or not _read(key, errors):
                    break
    flooded = len(output) > limit
    seconds = time.monotonic() - begin
    return Answer(None if flooded else status, bytes(output[:limit]), bytes(errors), seconds, flooded)


def _read(key: selectors.SelectorKey, errors: bytearray) -> bytes | None:
    """Read once into what is kept of a pipe; empty at its end, None where there is nothing now."""
    try:
        data = os.read(key.fd, _CHUNK)
    except BlockingIOError:
        return None
    kept: bytearray = key.data
    kept += data
    del errors[:-STDERR_KEPT]
    return data
