"""An expert of the kernel: rows gathered, gate, up and down, shares, and the total that all of it is added to."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_spec.model import SWIGLU_SLOPE
from estream_spec.weights import integer_product, quantise_activations
from fixtures.kernel_driver import Build, Driver, DriverFactory, Floats, Matrix
from fixtures.stored import GROUPS, WeightKind, seeds, stored_matrix, token_rows

Expert = tuple[Matrix, Matrix, Matrix]

EPSILON: Final = float(np.finfo(np.float32).eps)
sizes = st.integers(1, 40) | st.integers(1, 200)


def product(x: Floats, matrix: Matrix) -> Floats:
    """The reference's, and a bias if there is one."""
    activations, scale = quantise_activations(x)
    y = integer_product(activations, scale, matrix.weights, matrix.scale)
    return y if matrix.bias is None else y + matrix.bias


def output(x: Floats, expert: Expert, limit: float = 0) -> Floats:
    """What an expert makes of rows, by numpy, the activation in f64."""
    gate, up, down = expert
    gated, other = product(x, gate).astype(np.float64), product(x, up)
    if limit:
        gated, other = np.minimum(gated, limit), other.clip(-limit, limit) + 1
    slope = SWIGLU_SLOPE if limit else 1
    return product((gated / (1 + np.exp(-slope * gated)) * other).astype(np.float32), down)


def biased(expert: Expert, random: np.random.Generator) -> Expert:
    """The expert with biases about as large as its products."""
    gate, up, down = (
        replace(each, bias=(random.standard_normal(len(each.scale)) * size).astype(np.float32))
        for each, size in zip(expert, (2, 1000, 100000), strict=True)
    )
    return gate, up, down


def scaled(matrix: Matrix, factor: float) -> Matrix:
    """The matrix with its scales multiplied."""
    return replace(matrix, scale=(matrix.scale * factor).astype(np.float32))


def make_expert(
    hidden: int, inner: int, group: int, down_group: int, random: np.random.Generator, gates: WeightKind = "any"
) -> Expert:
    """An expert whose gates are some units in size for rows of that size, and large if all of them are positive."""
    gate = stored_matrix(gates, hidden, inner, group, random)
    return (
        scaled(gate, 0.02 / np.sqrt(hidden) if gates == "any" else 100),
        stored_matrix("any", hidden, inner, group, random),
        stored_matrix("any", inner, hidden, down_group, random),
    )


def choose(tokens: int, of: int, random: np.random.Generator) -> tuple[list[int], Floats]:
    """Some rows in any order, and their shares."""
    chosen: list[int] = random.permutation(of)[:tokens].tolist()
    return chosen, random.uniform(0, 1, tokens).astype(np.float32)


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 5) | st.integers(1, 40),
    hidden=sizes,
    inner=sizes,
    groups=st.tuples(st.sampled_from(GROUPS), st.sampled_from(GROUPS)),
    threads=st.sampled_from((1, 3)),
    seed=seeds,
)
def test_an_expert_is_exact_where_silu_is(
    driver: Driver, tokens: int, hidden: int, inner: int, groups: tuple[int, int], threads: int, seed: int
) -> None:
    """From 20 on SiLU is its argument, so that nothing but integers and single roundings remains."""
    random = np.random.default_rng(seed)
    expert = make_expert(hidden, inner, *groups, random, gates="positive")
    x = random.uniform(0.5, 1, (tokens + 2, hidden)).astype(np.float32)
    chosen, shares = choose(tokens, len(x), random)
    nothing = np.zeros((len(x), hidden), np.float32)
    added = nothing.copy()
    added[chosen] = shares[:, None] * output(x[chosen], expert)
    np.testing.assert_array_equal(driver.expert(x, chosen, shares, expert, nothing, threads), added)

    total = (random.standard_normal(nothing.shape) * 1000).astype(np.float32)
    result = driver.expert(x, chosen, shares, expert, total, threads)
    np.testing.assert_array_equal(result, total + added)


def test_silu_is_accurate(driver: Driver) -> None:
    """One feature through matrices of one weight: x becomes silu(x) * x."""
    one = Matrix.of_bytes(np.array([[127]], np.int8), np.array([1 / 127], np.float32))
    x = np.concatenate([np.linspace(-80, 80, 399), [-1e-3, 0, 1e-3, 1e4]]).astype(np.float32)[:, None]
    shares, nothing = np.ones(len(x), np.float32), np.zeros_like(x)
    y = driver.expert(x, range(len(x)), shares, (one, one, one), nothing)
    wide = x.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * wide
    # What x loses on its way through integers counts |x| times.
    assert (np.abs(y - expected) <= 4 * EPSILON * (1 + np.abs(wide)) * np.abs(expected)).all()


@pytest.mark.parametrize("groups", [(0, 32), (32, 0), (64, 64)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 60])
def test_an_expert_is_what_numpy_computes(driver: Driver, tokens: int, groups: tuple[int, int]) -> None:
    random = np.random.default_rng(tokens)
    expert, x = make_expert(200, 150, *groups, random), token_rows(["normal"], tokens, 200, random)
    chosen, shares = choose(tokens, tokens, random)
    y = driver.expert(x, chosen, np.ones_like(shares), expert, np.zeros_like(x), 2)
    expected = output(x, expert)
    # What stands at a tie is rounded by the last bits of SiLU.
    assert np.linalg.norm(y - expected) <= 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("limit", [0, 700.0])
@pytest.mark.parametrize("groups", [(0, 32), (64, 0)])
@pytest.mark.parametrize("tokens", [1, 3, 60])
def test_biases_and_another_activation(driver: Driver, tokens: int, groups: tuple[int, int], limit: float) -> None:
    """About half of what `up` makes is held to the limit."""
    random = np.random.default_rng(tokens)
    expert, x = biased(make_expert(200, 150, *groups, random), random), token_rows(["normal"], tokens, 200, random)
    chosen, shares = choose(tokens, tokens, random)
    y = driver.expert(x, chosen, np.ones_like(shares), expert, np.zeros_like(x), 2, limit)
    expected = output(x, expert, limit)
    assert np.linalg.norm(y - expected) <= 5e-3 * np.linalg.norm(expected)
    whole = driver.expert(x, range(tokens), shares, expert, x, 1, limit)
    alone = driver.expert(x, [tokens - 1], shares[-1:], expert, x, 1, limit)
    np.testing.assert_array_equal(alone[-1], whole[-1])


def test_the_clamped_activation_is_accurate(driver: Driver) -> None:
    """One feature through matrices of one weight, gate and up moved apart by their biases."""
    one = Matrix.of_bytes(np.array([[127]], np.int8), np.array([1 / 127], np.float32))
    gate, up = (replace(one, bias=np.array([bias], np.float32)) for bias in (0.5, -2))
    x = np.concatenate([np.linspace(-80, 80, 399), [-1e-3, 0, 1e-3, 1e4, -1e4]]).astype(np.float32)[:, None]
    shares, nothing = np.ones(len(x), np.float32), np.zeros_like(x)
    y = driver.expert(x, range(len(x)), shares, (gate, up, one), nothing, limit=7)
    wide = x.astype(np.float64)
    held = np.minimum(wide + 0.5, 7)
    with np.errstate(over="ignore"):
        expected = held / (1 + np.exp(-SWIGLU_SLOPE * held)) * ((wide - 2).clip(-7, 7) + 1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=64 * EPSILON * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("groups", [(0, 0), (32, 32), (64, 0)])
def test_a_row_comes_out_the_same_alone_and_among_others_and_with_any_threads(
    driver: Driver, groups: tuple[int, int]
) -> None:
    random = np.random.default_rng(sum(groups))
    tokens, hidden = 260, 37
    expert, x = make_expert(hidden, 45, *groups, random), token_rows(["normal"], tokens, hidden, random)
    total = token_rows(["normal"], tokens, hidden, random)
    shares = random.uniform(0, 1, tokens).astype(np.float32)
    whole = driver.expert(x, range(tokens), shares, expert, total)
    np.testing.assert_array_equal(driver.expert(x, range(tokens), shares, expert, total, threads=4), whole)
    for first, count in ((0, 1), (7, 2), (255, 3), (100, 9), (1, 258)):
        rows = slice(first, first + count)
        part = driver.expert(x, range(first, first + count), shares[rows], expert, total)
        np.testing.assert_array_equal(part[rows], whole[rows])


def test_a_row_that_is_not_finite_spoils_no_other(driver: Driver) -> None:
    random = np.random.default_rng(0)
    expert, x = make_expert(70, 50, 32, 32, random), token_rows(["normal"], 5, 70, random)
    shares, nothing = np.ones(5, np.float32), np.zeros_like(x)
    expected = driver.expert(x, range(5), shares, expert, nothing)
    x[3, 11] = np.inf
    y = driver.expert(x, range(5), shares, expert, nothing)
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(expected, 3, 0))


def test_gate_and_up_may_be_stored_differently(driver: Driver) -> None:
    random = np.random.default_rng(3)
    for gate_group, up_group in ((0, 32), (32, 0), (64, 32)):
        gate, _, down = make_expert(70, 50, gate_group, 32, random)
        expert, x = (gate, stored_matrix("any", 70, 50, up_group, random), down), token_rows(["normal"], 9, 70, random)
        y = driver.expert(x, range(9), np.ones(9, np.float32), expert, np.zeros_like(x), 2)
        assert np.linalg.norm(y - output(x, expert)) <= 5e-3 * np.linalg.norm(output(x, expert))


def test_an_expert_without_tokens_adds_nothing(drivers: DriverFactory) -> None:
    """On threads that have not computed anything yet."""
    random = np.random.default_rng(0)
    total = token_rows(["normal"], 4, 70, random)
    no_shares = np.empty(0, np.float32)
    with drivers(Build("plain")) as driver:
        y = driver.expert(total, [], no_shares, make_expert(70, 50, 32, 32, random), total, 2)
    np.testing.assert_array_equal(y, total)


@pytest.mark.parametrize("limit", [0, 700.0])
@pytest.mark.parametrize("groups", [(0, 0, 32), (32, 32, 64), (64, 0, 32), (32, 64, 0)])
def test_experts_of_one_row_give_what_each_adds_to_zeros(
    driver: Driver, groups: tuple[int, int, int], limit: float
) -> None:
    """Of any sizes, and so large that a matrix is made in several parts."""
    random = np.random.default_rng(sum(groups))
    for hidden, inner in ((1, 1), (37, 45), (96, 64), (530, 1040)):
        x = token_rows(["normal"], 1, hidden, random)
        experts = [expert_of(hidden, inner, groups, random) for _ in range(3)]
        experts[1] = biased(experts[1], random)
        shares, nothing = random.uniform(0, 1, 3).astype(np.float32), np.zeros_like(x)
        expected = [
            driver.expert(x, [0], shares[each : each + 1], expert, nothing, limit=limit)[0]
            for each, expert in enumerate(experts)
        ]
        for threads in (1, 3):
            np.testing.assert_array_equal(driver.experts(x[0], shares, experts, threads, limit), expected)
        np.testing.assert_array_equal(driver.experts(x[0], shares[2:], experts[2:], 2, limit), expected[2:])


def expert_of(hidden: int, inner: int, groups: tuple[int, int, int], random: np.random.Generator) -> Expert:
    """An expert whose matrices are stored in any ways."""
    gate, _, down = make_expert(hidden, inner, groups[0], groups[2], random)
    return gate, stored_matrix("any", hidden, inner, groups[1], random), down


def test_a_row_that_is_not_finite_spoils_all_experts(driver: Driver) -> None:
    random = np.random.default_rng(0)
    row = token_rows(["normal"], 1, 70, random)[0]
    row[11] = np.nan
    experts = [make_expert(70, 50, 32, 32, random) for _ in range(2)]
    assert not np.isfinite(driver.experts(row, np.ones(2, np.float32), experts, 2)).any()
