"""How much memory this process may use: all that the machine has, or what its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from estream_runtime.control_groups import CGROUPS, PROC, groups_of
from estream_spec.errors import LinkError


def usable_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int, str]:
    """Bytes of memory that this process may use, and how that is known.

    Args:
        proc: where the system tells about processes.
        cgroups: where control groups are, of version 1 or 2.

    Raises:
        LinkError: the system does not tell.
    """
    try:
        total = _total(proc / "meminfo")
    except (OSError, KeyError, ValueError, IndexError):
        raise LinkError("the system does not tell how much memory it has", path=str(proc / "meminfo")) from None
    limit = min(_limits(proc, cgroups), default=None)
    if limit is not None and limit < total:
        return limit, f"the limit of this process's control group, on a machine of {total} bytes"
    return total, "MemTotal of /proc/meminfo"


def _total(path: Path) -> int:
    """Bytes in all. What is free at the moment says little of what a device can give."""
    values = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(values["MemTotal"].split()[0]) * 1024


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Limits of the groups a process is in and of all groups around them. Raises as `groups_of` does."""
    for folder, version in groups_of("memory", proc, cgroups):
        yield from _limit(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))


def _limit(path: Path) -> Iterator[int]:
    """What a file says, unless it says `max` or is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return
    if text.isdigit() and int(text) > 0:
        yield int(text)
