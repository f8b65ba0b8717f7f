"""What the kernel says of the processor it runs on."""

from __future__ import annotations

import pytest

from fixtures.kernel_driver import Build, DriverFactory


@pytest.mark.parametrize(
    ("build", "runs", "others"),
    [
        ("dotprod", ["dotprod", "plain"], ["i8mm", "avx2", "avxvnni", "avx512vnni", "dot", ""]),
        ("i8mm", ["i8mm", "dotprod", "plain"], ["avx2", "avxvnni", "avx512vnni"]),
        ("avx2", ["avx2", "plain"], ["i8mm", "dotprod", "avx", "PLAIN"]),
    ],
)
def test_a_processor_takes_the_paths_it_has_instructions_for(
    drivers: DriverFactory, build: str, runs: list[str], others: list[str]
) -> None:
    with drivers(Build(build)) as driver:
        assert [path for path in runs if not driver.runs_on(path)] == []
        assert [path for path in others if driver.runs_on(path)] == []
