"""Integer products of the kernel are those of the reference, bit for bit, on every path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_spec.weights import integer_product, quantise_activations
from fixtures.kernel_driver import Driver, Floats, Matrix
from fixtures.stored import GROUPS, products, stored_matrix, token_rows


def reference(x: Floats, matrix: Matrix) -> tuple[Floats, Floats]:
    """Scales of the rows, and products."""
    activations, scale = quantise_activations(x)
    return scale, integer_product(activations, scale, matrix.weights, matrix.scale)


def check(driver: Driver, x: Floats, matrix: Matrix, threads: int) -> None:
    """The kernel gives what the reference does."""
    scale, y = driver.product(x, matrix, threads)
    expected_scale, expected = reference(x, matrix)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(y, expected)


@settings(max_examples=20, deadline=None)
@given(case=products(), threads=st.sampled_from((1, 2, 5)))
def test_products_are_those_of_the_reference(driver: Driver, case: tuple[Floats, Matrix], threads: int) -> None:
    check(driver, *case, threads)


@pytest.mark.parametrize("group", GROUPS)
def test_any_number_of_rows_is_multiplied(driver: Driver, group: int) -> None:
    random = np.random.default_rng(group)
    x, matrix = token_rows(["normal"], 514, 40, random), stored_matrix("any", 40, 40, group, random)
    for tokens in (*range(1, 18), 256, 257, 258, 259, 514):
        check(driver, x[:tokens], matrix, 2)


@pytest.mark.parametrize("group", GROUPS)
def test_matrices_of_many_blocks_and_strips_are_multiplied(driver: Driver, group: int) -> None:
    random = np.random.default_rng(group)
    x = token_rows(["normal", "signs", "subnormal"], 3, 520, random)
    matrix = stored_matrix("any", 520, 1061, group, random)
    for tokens, threads in ((1, 1), (2, 1), (1, 3), (3, 3)):
        check(driver, x[:tokens], matrix, threads)


@pytest.mark.parametrize("groups", [(0, 0, 0), (32, 64, 32), (0, 32, 64)])
def test_one_row_is_multiplied_with_several_matrices_at_once(driver: Driver, groups: tuple[int, int, int]) -> None:
    """Matrices of any widths, one so large that it is made in parts beside and below each other."""
    random = np.random.default_rng(sum(groups))
    x = token_rows(["normal"], 1, 520, random)
    matrices = [
        stored_matrix("any", 520, columns, group, random) for columns, group in zip((33, 2100, 64), groups, strict=True)
    ]
    for threads in (1, 3):
        for found, matrix in zip(driver.row(x[0], matrices, threads), matrices, strict=True):
            np.testing.assert_array_equal(found, reference(x, matrix)[1][0])


@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_row_is_normed_before_it_is_multiplied(driver: Driver, layer_norm: bool) -> None:
    random = np.random.default_rng(0)
    x, matrices = token_rows(["normal"], 1, 77, random), [stored_matrix("any", 77, 50, 32, random) for _ in range(2)]
    weight, bias = token_rows(["normal"], 2, 77, random)
    norm = weight, bias if layer_norm else None, 1e-5
    normed = driver.norm(x, weight, 1e-5, bias=norm[1])
    for found, matrix in zip(driver.row(x[0], matrices, 2, norm), matrices, strict=True):
        np.testing.assert_array_equal(found, driver.product(normed, matrix)[1][0])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("experts", [0, 3, 77])
def test_a_row_leaves_an_attention_block_as_many_do(driver: Driver, experts: int, with_bias: bool) -> None:
    random = np.random.default_rng(experts)
    attended, residual = (token_rows(["normal"], 1, size, random) for size in (90, 70))
    matrix = stored_matrix("any", 90, 70, 64, random)
    weight = token_rows(["normal"], 1, 70, random)[0]
    router = random.standard_normal((70, experts)).astype(np.float32) if experts else None
    bias = random.standard_normal(experts).astype(np.float32) if with_bias and experts else None
    x, normed, scores = driver.row_out(attended[0], matrix, residual[0], (weight, None, 1e-5), router, bias, 2)
    expected = driver.product(attended, matrix)[1] + residual
    np.testing.assert_array_equal(x, expected[0])
    expected = driver.norm(expected, weight, 1e-5)
    np.testing.assert_array_equal(normed, expected[0])
    if router is not None:
        np.testing.assert_array_equal(scores, driver.mix(expected, router)[0] + (0 if bias is None else bias))


@pytest.mark.parametrize("tokens", [1, 2, 5, 20])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_no_finite_product_and_leaves_the_others(
    driver: Driver, tokens: int, value: float
) -> None:
    random = np.random.default_rng(0)
    x, matrix = token_rows(["normal"], tokens, 77, random), stored_matrix("any", 77, 50, 32, random)
    _, expected = reference(x, matrix)
    x[-1, 70] = value
    _, y = driver.product(x, matrix)
    assert not np.isfinite(y[-1]).any()
    np.testing.assert_array_equal(y[:-1], expected[:-1])
