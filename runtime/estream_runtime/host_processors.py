"""How many processors this process may use: those it may run on, or what its control groups allow of their time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from estream_runtime.control_groups import CGROUPS, PROC, ControlGroup, groups_of
from estream_spec.errors import LinkError


def usable_processors(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """As many threads as this process may have running all the time, at least 1; half a processor counts as one.

    More would be stopped together as soon as the groups' time is used up, and wait for each other.

    Args:
        proc: where the system tells about processes.
        cgroups: where control groups are, of version 1 or 2.
    """
    counts = [len(os.sched_getaffinity(0))]
    with suppress(LinkError):  # groups that are not told limit nothing
        for group in groups_of("cpu", proc, cgroups):
            counts += _quota(group)
    return min(counts)


def _quota(group: ControlGroup) -> Iterator[int]:
    """Processors that a group allows, rounded up, unless it does not say.

    It has so many microseconds of their time in each period of so many. What it says instead of the former where it
    allows everything is `max` in version 2 and -1 in version 1.
    """
    names = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((group.folder / name).read_text() for name in names).split()
    except OSError:
        return
    if len(words) == 2 and all(each.isdigit() and int(each) for each in words):
        quota_us, period_us = map(int, words)
        yield -(-quota_us // period_us)
