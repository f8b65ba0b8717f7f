"""The kernel on each path, compiled once for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from estream_runtime.native.paths import PATHS
from fixtures.kernel_driver import Build, Driver, DriverFactory, MissingToolError

BUILDS: Final = (
    *(Build(path.name) for path in PATHS),
    Build("avx2", "memory"),
    Build("plain", "memory"),
)


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> DriverFactory:
    """`drivers(build)`: a driver of it; the test is skipped where a tool is missing, and fails in CI."""

    @cache
    def command(build: Build) -> tuple[str, ...]:
        return build.compile(tmp_path_factory.mktemp(str(build)))

    def start(build: Build) -> Driver:
        try:
            return Driver(command(build))
        except MissingToolError as error:
            missing = f"the kernel's build {build} cannot be tried: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)

    return start


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def driver(request: pytest.FixtureRequest, drivers: DriverFactory) -> Iterator[Driver]:
    """The kernel on each path in turn, ended with the file: a driver that nobody talks to gives up."""
    build: Build = request.param
    with drivers(build) as driver:
        yield driver
