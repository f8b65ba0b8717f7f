"""Run a command in a memory cgroup of its own: the kernel counts what it takes, page cache included, and can bound it.

Needs the right to make one, as root has on most machines; both versions of cgroups will do. Without that right a
command that is to be bounded is not run, and of others the memory is not known.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
BLOCK: Final = 512
"""Bytes of what the kernel counts as a block read."""
_V1: Final = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2: Final = ("memory.max", "memory.peak")


@dataclass(frozen=True, slots=True)
class Finished:
    """What came of a command.

    Attributes:
        output: what it wrote to standard output.
        seconds: from its start to its end.
        processor_s: seconds that processors spent on it, all together.
        bytes_read: what storage had to bring for it.
        peak_bytes: most memory that it took at any time, page cache included; None where nobody counted.
    """

    output: str
    seconds: float
    processor_s: float
    bytes_read: int
    peak_bytes: int | None = None


def run_bounded(command: list[str], limit: int | None = None) -> Finished:
    """Run a command to its end.

    Args:
        command: program and arguments.
        limit: bytes of memory it may take, page cache included; None bounds nothing.

    Raises:
        SystemExit: no cgroup can be made, or the command failed.
    """
    old = (_ROOT / "memory").is_dir()
    group = (_ROOT / "memory" if old else _ROOT) / f"estream-bench-{os.getpid()}"
    limit_file, peak_file = (group / name for name in (_V1 if old else _V2))
    try:
        try:
            group.mkdir()
            peak_file.read_text()  # only newer kernels have version 2's
            if limit is not None:
                limit_file.write_text(str(limit))
        except OSError as error:
            if limit is not None:
                raise SystemExit(f"no memory cgroup can be made: {error}; run this as root") from None
            return _finished(command)
        finished = _finished(["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command])
        return replace(finished, peak_bytes=int(peak_file.read_text()))
    finally:
        if group.exists():
            group.rmdir()


def _finished(command: list[str]) -> Finished:
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(done.stdout, seconds, processor_s, (after.ru_inblock - before.ru_inblock) * BLOCK)
