"""The control groups that this process is in, and those around them, as systems tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from estream_spec.errors import LinkError

PROC: Final = Path("/proc")
"""Where the system tells about processes."""
CGROUPS: Final = Path("/sys/fs/cgroup")
"""Where control groups are, of version 1 or 2."""


class ControlGroup(NamedTuple):
    """A group's folder, and the version of what is written there, 1 or 2."""

    folder: Path
    version: int


def groups_of(controller: str, proc: Path, cgroups: Path) -> Iterator[ControlGroup]:
    """The groups that a controller has this process in and all groups around them, from the inside out.

    A line is `0::PATH` for version 2 and `N:CONTROLLERS:PATH` for version 1. Inside a container the path may not be
    there; its own group is then what is mounted.

    Args:
        controller: what version 1 calls it.
        proc: such as `PROC`.
        cgroups: such as `CGROUPS`.

    Raises:
        LinkError: a line is neither.
    """
    membership = proc / "self" / "cgroup"
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
            root, version = cgroups, 2
        elif controller in controllers.split(","):
            root, version = cgroups / controller, 1
        else:
            continue
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            yield ControlGroup(each, version)
            if each == root:
                break
