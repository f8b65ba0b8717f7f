"""How much memory this process may use: all that the machine has, or what its control groups allow."""

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
        total = _total(proc / "meminfo")
    except (OSError, KeyError, ValueError, IndexError):
        raise LinkError("the system does not tell how much memory it has", path=str(proc / "meminfo")) from None
    limit = min(_limits(proc / "self" / "cgroup", cgroups), default=None)
    if limit is not None and limit < total:
        return limit, f"the limit of this process's control group, on a machine of {total} bytes"
    return total, "MemTotal of /proc/meminfo"


def _total(path: Path) -> int:
    """Bytes in all. What is free at the moment says little of what a device can give."""
    values = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(values["MemTotal"].split()[0]) * 1024


def _limits(membership: Path, cgroups: Path) -> Iterator[int]:
    """Limits of the groups a process is in and of all groups around them.

    A line is `0::PATH` for version 2 and `N:CONTROLLERS:PATH` for version 1. Inside a container the path may not be
    there; its own group is then what is mounted.

    Raises:
        LinkError: a line is neither.
    """
    try:
        lines = membership.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            number, controllers, path = line.split(":", 2)
        except ValueError:
            message = f"the system does not tell a control group: {line!r}, expected NUMBER:CONTROLLERS:PATH"
            raise LinkError(message, path=str(membership)) from None
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
