"""How many processors a process may use, as systems of every kind tell it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from estream_loader import open_package
from estream_runtime import Session
from estream_runtime.host_processors import usable_processors
from fixtures.packed import PackageFactory


class System:
    """A made-up /proc and /sys/fs/cgroup of a machine on eight of whose processors this process may run."""

    def __init__(self, folder: Path):
        self._folder = folder

    def write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def processors(self) -> int:
        return usable_processors(self._folder / "proc", self._folder / "cgroup")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    def eight(_: int) -> set[int]:
        return set(range(8))

    monkeypatch.setattr(os, "sched_getaffinity", eight)
    return System(tmp_path)


def test_without_groups_it_is_all_that_the_process_may_run_on(system: System) -> None:
    assert system.processors() == 8


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("max 100000\n", 8),
        ("300000 100000\n", 3),
        ("150000 100000\n", 2),
        ("100001 100000\n", 2),
        ("1000 100000\n", 1),
        ("25000 50000\n", 1),
        ("1600000 100000\n", 8),
        ("0 100000\n", 8),
        ("nonsense\n", 8),
        ("", 8),
    ],
)
def test_quota_of_a_group_is_rounded_up(said: str, expected: int, system: System) -> None:
    system.write("proc/self/cgroup", "0::/a\n")
    system.write("cgroup/a/cpu.max", said)
    assert system.processors() == expected


@pytest.mark.parametrize(("quota_us", "expected"), [("-1", 8), ("250000", 3), ("20000", 1)])
def test_groups_of_the_first_version_count(quota_us: str, expected: int, system: System) -> None:
    system.write("proc/self/cgroup", "7:cpu,cpuacct:/docker/a\n4:cpuset:/b\n1:name=systemd:/c\n")
    system.write("cgroup/cpu/docker/a/cpu.cfs_quota_us", f"{quota_us}\n")
    system.write("cgroup/cpu/docker/a/cpu.cfs_period_us", "100000\n")
    system.write("cgroup/cpu/docker/a/cpu.max", "100000 100000\n")  # not a file of this version
    assert system.processors() == expected


def test_tightest_group_around_a_process_counts(system: System) -> None:
    system.write("proc/self/cgroup", "0::/outer/inner\n")
    system.write("cgroup/outer/inner/cpu.max", "600000 100000\n")
    system.write("cgroup/outer/cpu.max", "400000 100000\n")
    assert system.processors() == 4


def test_own_group_of_a_container_is_what_is_mounted(system: System) -> None:
    system.write("proc/self/cgroup", "0::/not/there\n")
    system.write("cgroup/cpu.max", "200000 100000\n")
    assert system.processors() == 2


def test_group_that_is_not_told_as_it_should_be_limits_nothing(system: System) -> None:
    system.write("proc/self/cgroup", "0::/a\nnonsense\n")
    system.write("cgroup/a/cpu.max", "500000 100000\n")
    assert system.processors() == 5


def test_session_computes_with_as_many_threads_unless_told_otherwise(
    packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estream_runtime.session.usable_processors", lambda: 3)
    with open_package(packed()) as package:
        for asked, expected in ((None, 3), (2, 2), (5, 5)):
            with Session(package, "reference", threads=asked) as session:
                assert session.threads == expected
