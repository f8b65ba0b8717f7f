from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_packer.quantise import Parts, quantise_embedding, quantise_matrix
from estream_spec.errors import PackError
from estream_spec.weights import (
    Encoding,
    Floats,
    dequantise,
    dequantise_embedding,
    embedding_parts,
    invalid_values,
    matrix_parts,
)

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
QUANTISED: tuple[Encoding, ...] = ("w8", "w4g32", "w4g64")
GROUPED: tuple[Encoding, ...] = ("w4g32", "w4g64")


def _gaussian(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def _heavy_tailed(rows: int, columns: int) -> Floats:
    return np.random.default_rng(0).standard_t(5, (rows, columns)).astype(np.float32)


def _row_outliers(rows: int, columns: int) -> Floats:
    weight = _gaussian(rows, columns)
    weight[:: rows // 8] *= 5
    return weight


def _stored(weight: Floats, encoding: Encoding, importance: Floats | None = None) -> Floats:
    """What the weight reads back as; the parts on the way are legal."""
    parts = quantise_matrix(weight, encoding, importance)
    assert invalid_values(encoding, parts, len(weight)) is None
    stored = dequantise(encoding, parts, len(weight))
    assert stored.shape == weight.shape
    assert np.isfinite(stored).all()
    return stored


def _error(weight: Floats, stored: Floats) -> float:
    """Relative error in percent."""
    return float(100 * np.linalg.norm(stored - weight) / np.linalg.norm(weight))


@pytest.mark.parametrize(("encoding", "most"), [("f32", 0), ("w8", 0.9), ("w4g32", 8.4), ("w4g64", 9.2)])
def test_error_on_gaussian_weights(encoding: Encoding, most: float) -> None:
    weight = _gaussian(1024, 96)
    assert _error(weight, _stored(weight, encoding)) <= most


@pytest.mark.parametrize("make", [_gaussian, _heavy_tailed, _row_outliers])
def test_more_bits_are_more_accurate(make: Callable[[int, int], Floats]) -> None:
    weight = make(512, 64)
    eight, four, less = (_error(weight, _stored(weight, encoding)) for encoding in QUANTISED)
    assert 0 < eight < four < less < 20


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("rows", "columns"), [(171, 7), (342, 1), (45, 33), (1, 1), (64, 5)])
def test_parts_have_the_shapes_the_format_says(encoding: Encoding, rows: int, columns: int) -> None:
    weight = _gaussian(rows, columns)
    parts = quantise_matrix(weight, encoding)
    _check_parts(parts, {part.name: (part.dtype, part.shape) for part in matrix_parts("", encoding, rows, columns)})
    assert _error(weight, _stored(weight, encoding)) < 15


@pytest.mark.parametrize("encoding", ["f32", "w8"])
def test_embedding_has_a_scale_per_row(encoding: Encoding) -> None:
    weight = _gaussian(37, 24) * np.logspace(-9, 9, 37, dtype=np.float32)[:, None]
    parts = quantise_embedding(weight, encoding)
    _check_parts(parts, {part.name: (part.dtype, part.shape) for part in embedding_parts("", encoding, 37, 24)})
    assert invalid_values(encoding, parts, 37) is None
    stored = dequantise_embedding(encoding, parts)
    for row in range(37):
        assert _error(weight[row], stored[row]) < 1.5


def _check_parts(parts: Parts, expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    kinds = {"float32": "f32", "int8": "i8", "uint8": "u8"}
    found = {f".{name}" if name else "": (kinds[part.dtype.name], part.shape) for name, part in parts.items()}
    assert found == expected


@pytest.mark.parametrize("encoding", GROUPED)
def test_embedding_in_groups_is_refused(encoding: Encoding) -> None:
    with pytest.raises(PackError, match=f"'{encoding}', expected 'f32' or 'w8'"):
        quantise_embedding(_gaussian(8, 8), encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(encoding: Encoding, value: float) -> None:
    weight = _gaussian(64, 9)
    weight[40, 5] = value
    with pytest.raises(PackError, match="not finite"):
        quantise_matrix(weight, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(encoding: Encoding, zero: float) -> None:
    weight = _gaussian(128, 4)
    weight[:64, 0] = zero
    weight[:, 1] = zero
    stored = _stored(weight, encoding)
    assert not stored[:64, 0].any()
    assert not stored[:, 1].any()
    assert _error(weight, stored) < 12


@pytest.mark.parametrize("encoding", QUANTISED)
@pytest.mark.parametrize("largest", [1e30, -1e30, np.finfo(np.float32).max, np.finfo(np.float32).min])
def test_an_enormous_weight_is_kept_and_harms_no_other_column(encoding: Encoding, largest: float) -> None:
    weight = _gaussian(128, 4)
    weight[70, 2] = largest
    stored = _stored(weight, encoding)
    assert stored[70, 2] == pytest.approx(largest, rel=0.05)
    others = [0, 1, 3]
    assert _error(weight[:, others], stored[:, others]) < 12


@pytest.mark.parametrize("encoding", GROUPED)
def test_a_large_group_leaves_the_small_ones_their_multipliers(encoding: Encoding) -> None:
    weight = _gaussian(512, 16)
    weight[:64] *= 10
    assert _error(weight[64:], _stored(weight, encoding)[64:]) < 14


@pytest.mark.parametrize("encoding", QUANTISED)
@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-41, 1e-45])
def test_tiny_weights_stay_finite_and_tiny(encoding: Encoding, size: float) -> None:
    weight = _gaussian(96, 8) * np.float32(size)
    stored = _stored(weight, encoding)
    assert np.abs(stored).max() <= 1.1 * np.abs(weight).max()
    if size >= 1e-36:
        assert _error(weight.astype(np.float64), stored.astype(np.float64)) < 12


def test_a_scale_too_coarse_for_its_largest_weight_lets_none_change_its_sign() -> None:
    # Of subnormal numbers: the scale is rounded to the smallest there is, which 190 is 190 times.
    smallest = np.finfo(np.float32).smallest_subnormal
    weight = np.array([[190], [-190], [64]], np.float32) * smallest
    parts = quantise_matrix(weight, "w8")
    assert (parts[""].tolist(), parts["scale"].tolist()) == ([[127], [-127], [64]], [smallest])


@pytest.mark.parametrize("encoding", GROUPED)
def test_weights_on_the_grid_are_kept_exactly(encoding: Encoding) -> None:
    # Every channel has a step that a multiplier of 15 and a power of two give exactly, with weights at both ends.
    random = np.random.default_rng(4)
    values = random.integers(-8, 8, (128, 6))
    values[::32], values[1::32] = -8, 7
    weight = (15 * values / 64).astype(np.float32)
    np.testing.assert_allclose(_stored(weight, encoding), weight, rtol=1e-6)


def test_columns_do_not_touch_each_other() -> None:
    weight = _gaussian(2048, 300)
    whole, alone = quantise_matrix(weight, "w4g32"), quantise_matrix(weight[:, 200:203].copy(), "w4g32")
    for name in ("nibbles", "multipliers", "scale"):
        np.testing.assert_array_equal(whole[name][..., 200:203], alone[name])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_same_weights_give_the_same_bytes_whatever_their_strides(encoding: Encoding) -> None:
    weight = _gaussian(171, 13)
    before = weight.copy()
    parts, again = quantise_matrix(weight, encoding), quantise_matrix(np.asfortranarray(weight), encoding)
    assert {name: part.tobytes() for name, part in parts.items()} == {n: p.tobytes() for n, p in again.items()}
    np.testing.assert_array_equal(weight, before)


def _uneven(rows: int, spread: float = 1.5) -> Floats:
    """Importance of input channels of which few matter much."""
    return np.exp(spread * np.random.default_rng(7).standard_normal(rows)).astype(np.float32)


@pytest.mark.parametrize("make", [_gaussian, _heavy_tailed, _row_outliers])
@pytest.mark.parametrize(("encoding", "most"), [("w8", 0.999), ("w4g32", 0.93), ("w4g64", 0.95)])
def test_importance_lowers_the_error_where_it_counts(
    encoding: Encoding, most: float, make: Callable[[int, int], Floats]
) -> None:
    weight, importance = make(500, 64), _uneven(500)  # the last group is padded
    root = np.sqrt(importance)[:, None]
    plain, weighted = (_error(root * weight, root * _stored(weight, encoding, each)) for each in (None, importance))
    assert weighted < most * plain


@pytest.mark.parametrize("encoding", GROUPED)
def test_even_importance_is_none(encoding: Encoding) -> None:
    weight = _gaussian(171, 13)
    even = quantise_matrix(weight, encoding, np.full(171, 0.125, np.float32))
    assert {name: part.tobytes() for name, part in even.items()} == {
        name: part.tobytes() for name, part in quantise_matrix(weight, encoding).items()
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [2.0**-120, 2.0**100])
def test_only_ratios_of_importance_count(encoding: Encoding, size: float) -> None:
    weight, importance = _gaussian(96, 5), _uneven(96)
    parts, others = (quantise_matrix(weight, encoding, importance * np.float32(each)) for each in (1, size))
    for name, part in parts.items():
        np.testing.assert_array_equal(part, others[name])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 0, -1])
def test_importance_that_is_no_positive_number_is_refused(encoding: Encoding, value: float) -> None:
    importance = _uneven(64)
    importance[3] = value
    with pytest.raises(PackError, match="importance is not a positive number"):
        quantise_matrix(_gaussian(64, 4), encoding, importance)


@pytest.mark.parametrize("encoding", QUANTISED)
def test_importance_harms_no_extreme(encoding: Encoding) -> None:
    importance = _uneven(128)
    weight = _gaussian(128, 5)
    weight[:, 0] = 0
    weight[:64, 1] = -0.0
    weight[70, 2] = 1e30
    weight[:, 3] *= np.float32(1e-41)
    stored = _stored(weight, encoding, importance)
    assert not stored[:, 0].any()
    assert not stored[:64, 1].any()
    assert stored[70, 2] == pytest.approx(1e30, rel=0.5)
    assert np.abs(stored[:, 3]).max() <= 1.1 * np.abs(weight[:, 3]).max()
    assert _error(weight[:, 4], stored[:, 4]) < 15


@pytest.mark.parametrize("encoding", QUANTISED)
def test_columns_do_not_touch_each_other_under_importance(encoding: Encoding) -> None:
    weight, importance = _gaussian(2048, 300), _uneven(2048)
    whole, alone = (quantise_matrix(each, encoding, importance) for each in (weight, weight[:, 200:203].copy()))
    for name, part in alone.items():
        np.testing.assert_array_equal(whole[name][..., 200:203], part)


@pytest.mark.parametrize("encoding", QUANTISED)
def test_no_product_of_blas_decides_what_is_stored(encoding: Encoding) -> None:
    class Counted(np.ndarray[tuple[int, ...], np.dtype[np.float32]]):
        """Refuses the products that BLAS computes, which rounds by processor."""

        def __matmul__(self, other: object) -> Any:
            raise AssertionError("a product of BLAS")

        __rmatmul__ = __matmul__

    weight, importance = _gaussian(200, 8), _uneven(200)
    found = quantise_matrix(weight.view(Counted), encoding, importance.view(Counted))
    for name, part in quantise_matrix(weight, encoding, importance).items():
        np.testing.assert_array_equal(found[name], part)


@settings(max_examples=30, deadline=None)
@given(
    encoding=st.sampled_from(ENCODINGS),
    rows=st.integers(1, 150),
    columns=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    spread=st.integers(0, 38),
    weighted=st.booleans(),
)
def test_any_finite_weights_are_stored_legally(
    encoding: Encoding, rows: int, columns: int, seed: int, spread: int, weighted: bool
) -> None:
    random = np.random.default_rng(seed)
    exponents = random.uniform(-spread, spread * 0.97, (rows, columns))
    weight = (random.choice([-1, 0, 1], (rows, columns)) * 10**exponents).astype(np.float32)
    importance = (10 ** random.uniform(-spread, spread * 0.97, rows)).astype(np.float32) if weighted else None
    stored = _stored(weight, encoding, importance).astype(np.float64)
    largest = np.abs(weight).max(axis=0)
    assert (np.abs(stored - weight).max(axis=0) <= (1.1 if weighted else 0.2) * largest).all()
