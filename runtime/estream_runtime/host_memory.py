"""How much memory this process may use: what the machine has left, or what its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from estream_spec.errors import LinkError

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def usable_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str]:
    """Bytes of memory that this process may use, and how that is known.

    Args:
        proc: where the system tells about processes.
        cgroups: where control groups are, of version 1 or 2.

    Raises:
        LinkError: the system does not tell.
    """
    try:
        total, available = _meminfo(proc / "meminfo")
    except (OSError, KeyError, ValueError, IndexError):
        raise LinkError("the system does not tell how much memory it has", path=str(proc / "meminfo")) from None
    source = f"MemAvailable of /proc/meminfo, of {total} bytes in all"
    limit = min(_limits(proc / "self" / "cgroup", cgroups), default=None)
    if limit is not None and limit < available:
        return limit, f"the limit of this process's control group, on a machine of {total} bytes"
    return available, source


def _meminfo(path: Path) -> tuple[int, int]:
    """Bytes in all, and those that can be had without swapping."""
    values = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    total, available = (int(values[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def _limits(membership: Path, cgroups: Path) -> Iterator[int]:
    """Limits of the groups a process is in and of all groups around them.

    A line is `0::PATH` for version 2 and `N:CONTROLLERS:PATH` for version 1. Inside a container the path may not be
    there; its own group is then what is mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            yield from _limit(each / name)
            if each == root:
                break


def _limit(path: Path) -> Iterator[int]:
    """What a file says, unless it says `max` or is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return
    if text.isdigit() and int(text) > 0:
        yield int(text)
