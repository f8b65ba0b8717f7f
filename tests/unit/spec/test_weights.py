from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_spec import weights
from estream_spec.errors import InvalidError
from estream_spec.weights import Encoding, Part


def test_parts_of_a_matrix() -> None:
    assert weights.matrix_parts("up", "f32", 3, 5) == (Part(name="up", dtype="f32", shape=(3, 5)),)
    assert weights.matrix_parts("up", "w8", 3, 5) == (
        Part(name="up", dtype="i8", shape=(3, 5)),
        Part(name="up.scale", dtype="f32", shape=(5,)),
    )
    assert weights.matrix_parts("up", "w4g32", 65, 5) == (
        Part(name="up.nibbles", dtype="u8", shape=(48, 5)),
        Part(name="up.multipliers", dtype="i8", shape=(3, 5)),
        Part(name="up.scale", dtype="f32", shape=(5,)),
    )


def test_parts_of_an_embedding_have_a_scale_per_row() -> None:
    assert weights.embedding_parts("embedding", "f32", 7, 4) == (Part(name="embedding", dtype="f32", shape=(7, 4)),)
    assert weights.embedding_parts("embedding", "w8", 7, 4)[1] == Part(name="embedding.scale", dtype="f32", shape=(7,))


@pytest.mark.parametrize("encoding", ["w4g32", "w4g64"])
def test_an_embedding_cannot_have_groups(encoding: Encoding) -> None:
    with pytest.raises(InvalidError, match=f"'{encoding}', expected 'f32' or 'w8'"):
        weights.embedding_parts("embedding", encoding, 7, 4)


@pytest.mark.parametrize(("encoding", "bits"), [("f32", 32), ("w8", 8), ("w4g32", 4.25), ("w4g64", 4.125)])
def test_bits_per_weight(encoding: Encoding, bits: float) -> None:
    rows, columns = 2048, 1024
    length = sum(part.length for part in weights.matrix_parts("up", encoding, rows, columns))
    scales = 0 if encoding == "f32" else 4 * columns
    assert length - scales == rows * columns * bits / 8


def test_nibble_order() -> None:
    values = np.random.default_rng(0).integers(-8, 8, (64, 1), dtype=np.int8)
    packed = weights.pack_nibbles(values, 32)
    assert packed.shape == (32, 1)
    for group in range(2):
        for row in range(16):
            low, high = (int(values[group * 32 + r, 0]) + 8 for r in (row, row + 16))
            assert packed[group * 16 + row, 0] == low | high << 4


def test_rows_that_fill_no_group_are_padded_with_zeros() -> None:
    packed = weights.pack_nibbles(np.full((1, 2), -8, np.int8), 32)
    assert packed[0].tolist() == [0x80, 0x80]
    assert (packed[1:] == 0x88).all()


@st.composite
def _nibbles(draw: st.DrawFn) -> tuple[int, npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    group = draw(st.sampled_from([32, 64]))
    rows, columns = draw(st.integers(1, 200)), draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = random.integers(1, 16, (weights.padded_rows(rows, group) // group, columns))
    multipliers = (sizes * random.choice([-1, 1], sizes.shape)).astype(np.int8)
    return group, random.integers(-8, 8, (rows, columns), dtype=np.int8), multipliers


@settings(max_examples=40, deadline=None)
@given(case=_nibbles(), unsigned=st.booleans())
def test_expansion_is_multiplier_times_value(
    case: tuple[int, npt.NDArray[np.int8], npt.NDArray[np.int8]], unsigned: bool
) -> None:
    group, values, multipliers = case
    rows = len(values)
    expected = values.astype(int) * np.repeat(multipliers.astype(int), group, axis=0)[:rows] + 128 * unsigned
    expanded = weights.expand_nibbles(weights.pack_nibbles(values, group), multipliers, group, rows, unsigned=unsigned)
    assert expanded.dtype == (np.uint8 if unsigned else np.int8)
    np.testing.assert_array_equal(expanded, expected)


def test_expansion_writes_to_the_array_it_is_given() -> None:
    # Large enough to be done in several steps, with a ragged last group.
    rows, columns, group = 1034, 1025, 32
    random = np.random.default_rng(5)
    values = random.integers(-8, 8, (rows, columns), dtype=np.int8)
    multipliers = random.integers(1, 16, (33, columns), dtype=np.int8)
    out = np.empty((rows, columns), np.int8)
    assert weights.expand_nibbles(weights.pack_nibbles(values, group), multipliers, group, rows, out) is out
    np.testing.assert_array_equal(out, values * np.repeat(multipliers, group, axis=0)[:rows])


def test_expansion_reads_arrays_it_may_not_write() -> None:
    packed, multipliers = np.full((16, 3), 0x0F, np.uint8), np.full((1, 3), -15, np.int8)
    packed.flags.writeable = multipliers.flags.writeable = False
    expanded = weights.expand_nibbles(packed, multipliers, 32, 32)
    assert expanded[:, 0].tolist() == [-105] * 16 + [120] * 16


def _parts(encoding: Encoding, rows: int = 40, columns: int = 3) -> dict[str, npt.NDArray[Any]]:
    """Legal parts with some values in them."""
    random = np.random.default_rng(1)
    if encoding == "f32":
        return {"": random.standard_normal((rows, columns)).astype(np.float32)}
    scale = np.linspace(0, 1, columns, dtype=np.float32)
    if encoding == "w8":
        return {"": random.integers(-127, 128, (rows, columns), dtype=np.int8), "scale": scale}
    group = weights.GROUP_SIZES[encoding]
    multipliers = np.full((weights.padded_rows(rows, group) // group, columns), -15, np.int8)
    nibbles = weights.pack_nibbles(random.integers(-8, 8, (rows, columns), dtype=np.int8), group)
    return {"nibbles": nibbles, "multipliers": multipliers, "scale": scale}


def test_meaning_of_stored_weights() -> None:
    plain = _parts("f32")
    np.testing.assert_array_equal(weights.dequantise("f32", plain, 40), plain[""])
    eight: dict[str, npt.NDArray[Any]] = {
        "": np.array([[1, -127], [3, 0]], np.int8),
        "scale": np.array([0.5, 2], np.float32),
    }
    assert weights.dequantise("w8", eight, 2).tolist() == [[0.5, -254], [1.5, 0]]
    assert weights.dequantise_embedding("w8", eight).tolist() == [[0.5, -63.5], [6, 0]]
    np.testing.assert_array_equal(weights.dequantise_embedding("f32", plain), plain[""])
    four: dict[str, npt.NDArray[Any]] = {
        "nibbles": weights.pack_nibbles(np.full((33, 1), -8, np.int8), 32),
        "multipliers": np.array([[15], [-2]], np.int8),
        "scale": np.array([0.25], np.float32),
    }
    assert weights.dequantise("w4g32", four, 33)[:, 0].tolist() == [-30] * 32 + [4]


@pytest.mark.parametrize("encoding", ["f32", "w8", "w4g32", "w4g64"])
def test_legal_values_pass(encoding: Encoding) -> None:
    assert weights.invalid_values(encoding, _parts(encoding), 40) is None


@pytest.mark.parametrize("encoding", ["w8", "w4g32", "w4g64"])
@pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf])
def test_scales_are_judged(encoding: Encoding, scale: float) -> None:
    parts = _parts(encoding)
    parts["scale"][1] = scale
    message = f"a scale is {scale}, expected a finite number of at least 0"
    assert weights.invalid_values(encoding, parts, 40) == ("EMOE-REC-006", message)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_plain_weights_are_judged(value: float) -> None:
    parts = _parts("f32")
    parts[""][3, 1] = value
    assert weights.invalid_values("f32", parts, 40) == (
        "EMOE-REC-005",
        f"a weight is {value}, expected a finite number",
    )


def test_the_integer_without_a_negative_is_refused() -> None:
    parts = _parts("w8")
    parts[""][3, 1] = -128
    assert weights.invalid_values("w8", parts, 40) == ("EMOE-REC-007", "a weight is -128, expected -127 to 127")


@pytest.mark.parametrize("multiplier", [0, 16, -16, -128])
def test_multipliers_are_judged(multiplier: int) -> None:
    parts = _parts("w4g32")
    parts["multipliers"][1, 2] = multiplier
    message = f"a multiplier is {multiplier}, expected -15 to -1 or 1 to 15"
    assert weights.invalid_values("w4g32", parts, 40) == ("EMOE-REC-008", message)


@pytest.mark.parametrize(("row", "bits"), [(24, 0x01), (24, 0x10), (31, 0x01), (16, 0x10)])
def test_padding_is_judged(row: int, bits: int) -> None:
    # 40 rows: of the second group, rows 0..7 hold weights (low nibbles of bytes 16..23) and rows 8..31 are padding.
    parts = _parts("w4g32")
    parts["nibbles"][row, 1] ^= bits
    message = f"a padding row holds {8 ^ (bits if bits < 16 else bits >> 4)}, expected 8"
    assert weights.invalid_values("w4g32", parts, 40) == ("EMOE-REC-009", message)


def test_activations_round_half_to_even_around_128() -> None:
    x = np.array([[127, 0.5, 1.5, -0.5, -127], [0, 0, -0.0, 0, 0], [0.25, -0.25, 0, 0.125, 0]], np.float32)
    integers, scale = weights.quantise_activations(x)
    assert integers.dtype == np.uint8
    assert integers.tolist() == [[255, 128, 130, 128, 1], [128] * 5, [255, 1, 128, 192, 128]]
    assert scale.dtype == np.float32
    assert scale.tolist() == [[1], [1], [np.float32(0.25) / np.float32(127)]]


def test_subnormal_activations_stay_in_range() -> None:
    tiny = np.float32(1e-45)
    integers, scale = weights.quantise_activations(np.array([[150 * tiny, -150 * tiny, 0]], np.float32))
    assert integers.tolist() == [[255, 0, 128]]
    assert scale.item() == tiny


def test_integer_product_sums_exactly_and_scales_in_order() -> None:
    random = np.random.default_rng(2)
    activations = random.integers(1, 256, (3, 4096), dtype=np.uint8)
    matrix = random.integers(-127, 128, (4096, 5), dtype=np.int8)
    token_scale = random.random((3, 1), dtype=np.float32)
    scale = random.random(5, dtype=np.float32)
    exact = (activations.astype(np.int64) - 128) @ matrix.astype(np.int64)
    product = weights.integer_product(activations, token_scale, matrix, scale)
    assert product.dtype == np.float32
    np.testing.assert_array_equal(product, exact.astype(np.float32) * token_scale * scale)
