"""Threads of the kernel: many quick calls, pools opened and closed over and over, pools side by side, forks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest

from fixtures.kernel_driver import Build, Driver, DriverFactory, Floats, Matrix
from fixtures.stored import stored_matrix, token_rows

BUILDS: Final = (Build("plain"), Build("plain", "threads"), Build("dotprod"))


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def driver(request: pytest.FixtureRequest, drivers: DriverFactory) -> Iterator[Driver]:
    """Threads are the same on every path, not on every processor."""
    build: Build = request.param
    with drivers(build) as driver:
        yield driver


@pytest.fixture
def quick() -> tuple[Floats, Matrix]:
    """A product of a few tasks that takes microseconds."""
    random = np.random.default_rng(0)
    return token_rows(["normal"], 4, 20, random), stored_matrix("any", 20, 100, 0, random)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_quick_calls_are_right_and_pools_come_and_go(
    driver: Driver, quick: tuple[Floats, Matrix], threads: int
) -> None:
    assert driver.storm(*quick, callers=1, threads=threads, pools=1, calls=200) == 0
    assert driver.storm(*quick, callers=1, threads=threads, pools=30, calls=2) == 0
    assert driver.storm(*quick, callers=1, threads=threads, pools=30, calls=0) == 0


def test_pools_work_side_by_side(driver: Driver, quick: tuple[Floats, Matrix]) -> None:
    assert driver.storm(*quick, callers=2, threads=3, pools=5, calls=20) == 0
    assert driver.storm(*quick, callers=4, threads=2, pools=5, calls=10) == 0


def test_threads_go_on_with_each_expert_as_soon_as_they_may(driver: Driver) -> None:
    """Three experts of several parts each, whose second halves wait for their first."""
    random = np.random.default_rng(0)
    row, shares = token_rows(["normal"], 1, 300, random)[0], np.ones(3, np.float32)
    shapes = ((300, 600), (300, 600), (600, 300))
    experts = [
        (first, second, third)
        for first, second, third in ([stored_matrix("any", *shape, 32, random) for shape in shapes] for _ in range(3))
    ]
    alone = driver.experts(row, shares, experts)
    for _ in range(20):
        np.testing.assert_array_equal(driver.experts(row, shares, experts, 3), alone)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_closed_pools_leave_no_thread(driver: Driver, quick: tuple[Floats, Matrix]) -> None:
    driver.storm(*quick, callers=1, threads=1, pools=1, calls=1)
    before = driver.threads()
    driver.storm(*quick, callers=2, threads=5, pools=10, calls=1)
    # The system may list a thread for a while after it was joined.
    for _ in range(500):
        if driver.threads() <= before:
            break
        time.sleep(0.01)
    assert driver.threads() <= before


def test_a_forked_process_computes_without_the_threads_of_its_parent(
    driver: Driver, quick: tuple[Floats, Matrix]
) -> None:
    assert driver.fork(*quick, threads=3) == 0
