"""How much memory a process may use, as systems of every kind tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from estream_runtime.host_memory import usable_memory
from estream_spec.errors import LinkError

GIB = 1 << 30
MEMORY = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:   1048576 kB\nHugePages_Total: 0\n"


class System:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path):
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write("proc/meminfo", MEMORY)
        self._folder = folder

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def memory(self) -> tuple[int, str]:
        return usable_memory(self.proc, self.cgroups)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_without_groups_it_is_all_there_is_however_much_is_free(system: System) -> None:
    assert system.memory() == (16 * GIB, "MemTotal of /proc/meminfo")


@pytest.mark.parametrize("inner", ["max", str(6 * GIB)])
def test_tightest_group_around_a_process_counts(inner: str, system: System) -> None:
    system.write("proc/self/cgroup", "0::/outer/inner\n")
    system.write("cgroup/outer/inner/memory.max", f"{inner}\n")
    system.write("cgroup/outer/memory.max", f"{2 * GIB}\n")
    found, source = system.memory()
    assert found == 2 * GIB
    assert source == f"the limit of this process's control group, on a machine of {16 * GIB} bytes"


def test_groups_of_the_first_version_count(system: System) -> None:
    system.write("proc/self/cgroup", "7:cpu,cpuacct:/a\n4:memory:/docker/b\n1:name=systemd:/c\n")
    system.write("cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    system.write("cgroup/cpu/memory.limit_in_bytes", "4096\n")
    assert system.memory()[0] == GIB


def test_limit_above_what_there_is_does_not_count(system: System) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.write("cgroup/memory.max", f"{1 << 62}\n")
    assert system.memory()[0] == 16 * GIB


def test_system_that_does_not_tell_is_refused(system: System) -> None:
    (system.proc / "meminfo").write_text("MemAvailable: 1 kB\n")
    with pytest.raises(LinkError, match="does not tell how much memory it has"):
        system.memory()


def test_group_that_is_not_told_as_it_should_be_is_refused(system: System) -> None:
    system.write("proc/self/cgroup", "0::/a\nnonsense\n")
    with pytest.raises(LinkError, match="control group: 'nonsense', expected NUMBER:CONTROLLERS:PATH"):
        system.memory()
