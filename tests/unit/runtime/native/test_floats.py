"""What the kernel computes in floats: norm, rotary encoding, attention and products, against numpy in f64."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.kernel_driver import Driver, Floats
from fixtures.stored import seeds, token_rows

Wide = npt.NDArray[np.float64]

EPSILON: Final = float(np.finfo(np.float32).eps)
token_counts = st.integers(1, 8) | st.integers(1, 130)
thread_counts = st.sampled_from((1, 3))


def normal(random: np.random.Generator, *shape: int) -> Floats:
    return random.standard_normal(shape).astype(np.float32)


def wide(*arrays: Floats) -> tuple[Wide, ...]:
    return tuple(each.astype(np.float64) for each in arrays)


def attention(
    queries: Floats, keys: Floats, values: Floats, mask: Floats, scale: float, sinks: Floats | None = None
) -> Wide:
    """`[T, heads * V]`."""
    q, k, v = wide(queries, keys, values)
    repeats = len(q) // len(k)
    scores = q @ k.repeat(repeats, 0).transpose(0, 2, 1) * scale + mask
    without_value = np.full(len(q), -np.inf) if sinks is None else sinks.astype(np.float64)
    largest = np.maximum(scores.max(-1), without_value[:, None])[..., None]
    shares = np.exp(scores - largest)
    total = shares.sum(-1, keepdims=True) + np.exp(without_value[:, None, None] - largest)
    y: Wide = shares / total @ v.repeat(repeats, 0)
    return y.transpose(1, 0, 2).reshape(q.shape[1], -1)


def causal_mask(tokens: int, length: int) -> Floats:
    """0 for keys up to a row's own, the last row seeing all, and minus infinity beyond."""
    seen = np.arange(length) <= np.arange(length - tokens, length)[:, None]
    return np.where(seen, np.float32(0), -np.float32(np.inf))


@settings(max_examples=12, deadline=None)
@given(tokens=token_counts, columns=st.integers(1, 200), threads=thread_counts, seed=seeds)
def test_norm(driver: Driver, tokens: int, columns: int, threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, weight = token_rows(["normal", "zeros", "signs"], tokens, columns, random), normal(random, columns)
    (x64, weight64), epsilon = wide(x, weight), float(np.float32(1e-5))
    expected = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + epsilon) * weight64
    y = driver.norm(x, weight, epsilon, threads)
    np.testing.assert_allclose(y, expected, rtol=1e-6 + columns * EPSILON / 16, atol=0)
    np.testing.assert_array_equal(driver.norm(x[-1:], weight, epsilon), y[-1:])


@settings(max_examples=12, deadline=None)
@given(tokens=token_counts, columns=st.integers(1, 200), threads=thread_counts, seed=seeds)
def test_layer_norm(driver: Driver, tokens: int, columns: int, threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = token_rows(["normal", "zeros"], tokens, columns, random) + np.float32(random.uniform(-2, 2))
    weight, bias = normal(random, columns), normal(random, columns)
    (x64, weight64, bias64), epsilon = wide(x, weight, bias), float(np.float32(1e-2))
    centred = x64 - x64.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + epsilon) * weight64 + bias64
    y = driver.norm(x, weight, epsilon, threads, bias)
    np.testing.assert_allclose(y, expected, rtol=0, atol=(1 + columns / 16) * 100 * EPSILON)
    np.testing.assert_array_equal(driver.norm(x[-1:], weight, epsilon, bias=bias), y[-1:])


@settings(max_examples=12, deadline=None)
@given(
    tokens=token_counts,
    heads=st.integers(1, 4),
    half=st.integers(1, 40),
    rest=st.integers(0, 40),
    threads=thread_counts,
    seed=seeds,
)
def test_rotary_encoding(
    driver: Driver, tokens: int, heads: int, half: int, rest: int, threads: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x, angles = normal(random, tokens, heads * (2 * half + rest)), random.uniform(0, 7, (tokens, half))
    cosine, sine = (np.tile(each, 2).astype(np.float32) for each in (np.cos(angles), np.sin(angles)))
    first_heads = x.reshape(tokens, heads, -1).transpose(1, 0, 2)
    np.testing.assert_array_equal(driver.heads_first(x, heads, None, threads), first_heads)
    x64, cosine64, sine64 = wide(first_heads[..., : 2 * half], cosine, sine)
    turned = np.concatenate((-x64[..., half:], x64[..., :half]), -1)
    y = driver.heads_first(x, heads, (cosine, sine), threads)
    expected = x64 * cosine64 + turned * sine64
    np.testing.assert_allclose(y[..., : 2 * half], expected, rtol=0, atol=4 * EPSILON * np.abs(x).max())
    np.testing.assert_array_equal(y[..., 2 * half :], first_heads[..., 2 * half :])
    last = driver.heads_first(x[-1:], heads, (cosine[-1:], sine[-1:]))
    np.testing.assert_array_equal(last, y[:, -1:])


@settings(max_examples=12, deadline=None)
@given(tokens=token_counts, rows=st.integers(1, 200), columns=st.integers(1, 150), threads=thread_counts, seed=seeds)
def test_products_in_floats(driver: Driver, tokens: int, rows: int, columns: int, threads: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, matrix = normal(random, tokens, rows), normal(random, rows, columns)
    x64, matrix64 = wide(x, matrix)
    y = driver.mix(x, matrix, threads)
    bound = rows * EPSILON * (np.abs(x64) @ np.abs(matrix64))
    assert (np.abs(y - x64 @ matrix64) <= bound).all()
    np.testing.assert_array_equal(driver.mix(x[-1:], matrix), y[-1:])


@settings(max_examples=12, deadline=None)
@given(
    tokens=token_counts,
    before=st.integers(0, 5) | st.integers(0, 300),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (4, 1)]),
    widths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    with_sinks=st.booleans(),
    seed=seeds,
)
def test_attention(
    driver: Driver,
    tokens: int,
    before: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    with_sinks: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    length, (width, value_width) = before + tokens, widths
    queries, keys = normal(random, heads[0], tokens, width), normal(random, heads[1], length, width)
    values, mask = normal(random, heads[1], length, value_width), causal_mask(tokens, length)
    sinks = normal(random, heads[0]) * np.float32(9) if with_sinks else None
    scale = random.uniform(0.1, 10) / width**0.5
    y = driver.attend(queries, keys, values, mask, scale, length + 2, sinks=sinks)
    np.testing.assert_allclose(y, attention(queries, keys, values, mask, scale, sinks), rtol=0, atol=1e-4)
    threaded = driver.attend(queries, keys, values, mask, scale, length, 3, sinks)
    np.testing.assert_array_equal(threaded, y)


@pytest.mark.parametrize("tokens", [1, 7])
def test_attention_of_scores_far_apart(driver: Driver, tokens: int) -> None:
    """A key that outweighs all others, in the last block and in the first, whatever the others are."""
    random = np.random.default_rng(0)
    queries = np.ones((1, tokens, 16), np.float32)
    values, mask = normal(random, 1, 300, 16), np.zeros((tokens, 300), np.float32)
    for chosen in (0, 299):
        keys = np.full((1, 300, 16), -1000, np.float32)
        keys[0, chosen] = 1000
        y = driver.attend(queries, keys, values, mask, 0.25, 300)
        np.testing.assert_array_equal(y, np.repeat(values[0, chosen : chosen + 1], tokens, 0))


@pytest.mark.parametrize("hidden", [-np.finfo(np.float32).max, -np.inf])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_keys_at_the_end_that_no_row_sees_change_no_bit(driver: Driver, tokens: int, hidden: float) -> None:
    random = np.random.default_rng(tokens)
    seen = -(-tokens // 16) * 16 + 32
    queries, keys, values = (normal(random, 2, length, 24) for length in (tokens, seen + 300, seen + 300))
    mask = causal_mask(tokens, seen)
    more = np.concatenate([mask, np.full((tokens, 300), hidden, np.float32)], 1)
    expected = driver.attend(queries, keys[:, :seen], values[:, :seen], mask, 0.2, seen)
    np.testing.assert_array_equal(driver.attend(queries, keys, values, more, 0.2, seen + 300), expected)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_sink_that_outweighs_all_keys_leaves_nothing(driver: Driver, tokens: int) -> None:
    random = np.random.default_rng(0)
    queries, keys = np.ones((2, tokens, 16), np.float32), np.ones((1, 300, 16), np.float32)
    values, mask = normal(random, 1, 300, 16), np.zeros((tokens, 300), np.float32)
    y = driver.attend(queries, keys, values, mask, 0.25, 300, sinks=np.array([1000, -1000], np.float32))
    np.testing.assert_array_equal(y[:, :16], 0)  # the first head's
    without = driver.attend(queries, keys, values, mask, 0.25, 300)
    np.testing.assert_array_equal(y[:, 16:], without[:, 16:])
