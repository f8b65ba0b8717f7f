from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from estream_runtime.sampling import Sampler
from estream_spec.errors import TrapError

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def shares(sampler: Sampler, count: int = 5000) -> list[float]:
    drawn = [sampler.choose(LOGITS) for _ in range(count)]
    return [drawn.count(token) / count for token in range(len(LOGITS))]


def test_zero_temperature_takes_the_largest_and_of_equals_the_lower_id() -> None:
    greedy = Sampler(temperature=0, top_p=1, seed=None)
    assert greedy.choose(LOGITS) == 1
    assert greedy.choose(np.array([1, 3, 3, 2], np.float32)) == 1
    assert greedy.choose(np.zeros(5, np.float32)) == 0


def test_tokens_come_as_often_as_they_are_likely() -> None:
    assert shares(Sampler(temperature=1, top_p=1, seed=1)) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)


def test_temperature_flattens_and_sharpens() -> None:
    squares = [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]
    assert shares(Sampler(temperature=0.5, top_p=1, seed=2)) == pytest.approx(squares, abs=0.03)
    assert shares(Sampler(temperature=1000, top_p=1, seed=3)) == pytest.approx([0.25] * 4, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_nearly_none(temperature: float) -> None:
    assert shares(Sampler(temperature=temperature, top_p=1, seed=4), 50) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.3, [0, 1, 0, 0]),
        (0.5, [0, 4 / 7, 0, 3 / 7]),
        (0.8, [0, 4 / 9, 2 / 9, 3 / 9]),
        (0.95, [0.1, 0.4, 0.2, 0.3]),
        (1e-9, [0, 1, 0, 0]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, expected: list[float]) -> None:
    assert shares(Sampler(temperature=1, top_p=top_p, seed=5)) == pytest.approx(expected, abs=0.03)


def test_the_same_seed_makes_the_same_choices() -> None:
    first, second, other = (Sampler(temperature=1, top_p=0.95, seed=seed) for seed in (7, 7, 8))
    drawn = [[sampler.choose(LOGITS) for _ in range(50)] for sampler in (first, second, other)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("temperature", [0, 1, 100])
def test_a_token_that_is_not_allowed_is_never_chosen(temperature: float) -> None:
    allowed = np.array([True, False, True, False])
    sampler = Sampler(temperature=temperature, top_p=1, seed=9, allowed=allowed)
    assert {sampler.choose(LOGITS) for _ in range(500)} == ({2} if temperature == 0 else {0, 2})


@pytest.mark.parametrize(
    ("temperature", "top_p", "seed", "message"),
    [
        (-0.1, 1, None, "temperature is -0.1, expected a finite number, 0 or more"),
        (math.nan, 1, None, "temperature is nan"),
        (math.inf, 1, None, "temperature is inf"),
        (1, 0, None, "top_p is 0, expected a number more than 0 and at most 1"),
        (1, 1.01, None, "top_p is 1.01"),
        (1, math.nan, None, "top_p is nan"),
        (1, 1, -1, "seed is -1, expected a whole number, 0 or more"),
        ("1", 1, None, "temperature is '1', expected a finite number"),
        (10**400, 1, None, "temperature is 10*, expected a finite number"),
        (1, [1], None, r"top_p is \[1\], expected a number"),
        (1, 1, 1.5, "seed is 1.5, expected a whole number"),
        (1, 1, "1", "seed is '1', expected a whole number"),
    ],
)
def test_values_out_of_range_are_refused(temperature: Any, top_p: Any, seed: Any, message: str) -> None:
    with pytest.raises(TrapError, match=message):
        Sampler(temperature=temperature, top_p=top_p, seed=seed)
