"""What stored weights mean: parts of a matrix, nibbles, scales, and the integer product. FORMAT.md section 7, annex A.

A matrix is `[rows, columns]` = `[K, N]`, input-major: `y = x @ W`. `w8` keeps an int8 and one scale per output channel.
`w4g32` and `w4g64` have two levels: a nibble in [-8, 7] times a signed multiplier of 1 to 15 in size is exactly an int8
weight, so that integer hardware can take over from there, and one scale per output channel does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from estream_spec.errors import InvalidError

Encoding = Literal["f32", "w8", "w4g32", "w4g64"]

Floats = npt.NDArray[np.float32]
Int8s = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]

GROUP_SIZES: Final[Mapping[Encoding, int]] = {"w4g32": 32, "w4g64": 64}
"""Rows that share one multiplier, for the encodings that have multipliers."""
NIBBLE_ZERO: Final = 8
"""What the value 0 is stored as."""
MAX_MULTIPLIER: Final = 15
ACTIVATION_ZERO: Final = 128
"""Zero point of quantised activations."""

_DTYPE_BYTES: Final = {"f32": 4, "i8": 1, "u8": 1}
_EXPAND_BYTES: Final = 1 << 19
"""Expanded weights made at a time: enough to hide the cost of a call, few enough for the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One array of a stored matrix, row-major.

    Attributes:
        name: the matrix's name, or that and what the part is, such as `gate.scale`.
        dtype: `f32`, `i8` or `u8`.
        shape: rows and columns, or one dimension.
    """

    name: str
    dtype: Literal["f32", "i8", "u8"]
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes, without padding."""
        length = _DTYPE_BYTES[self.dtype]
        for dimension in self.shape:
            length *= dimension
        return length


def padded_rows(rows: int, group: int) -> int:
    """`rows` rounded up to a whole number of groups."""
    return -(-rows // group) * group


def matrix_parts(name: str, encoding: Encoding, rows: int, columns: int) -> tuple[Part, ...]:
    """The parts of a matrix `[rows, columns]`, in the order in which they are stored."""
    scale = Part(name=f"{name}.scale", dtype="f32", shape=(columns,))
    if encoding == "f32":
        return (Part(name=name, dtype="f32", shape=(rows, columns)),)
    if encoding == "w8":
        return (Part(name=name, dtype="i8", shape=(rows, columns)), scale)
    group = GROUP_SIZES[encoding]
    padded = padded_rows(rows, group)
    return (
        Part(name=f"{name}.nibbles", dtype="u8", shape=(padded // 2, columns)),
        Part(name=f"{name}.multipliers", dtype="i8", shape=(padded // group, columns)),
        scale,
    )


def embedding_parts(name: str, encoding: Encoding, rows: int, columns: int) -> tuple[Part, ...]:
    """The parts of an embedding `[rows, columns]` = `[vocabulary, hidden]`, which is read row by row.

    Raises:
        InvalidError: the encoding has no form that can be read by rows.
    """
    if encoding == "f32":
        return (Part(name=name, dtype="f32", shape=(rows, columns)),)
    if encoding == "w8":
        return (
            Part(name=name, dtype="i8", shape=(rows, columns)),
            Part(name=f"{name}.scale", dtype="f32", shape=(rows,)),
        )
    raise InvalidError(f"an embedding is stored as {encoding!r}, expected 'f32' or 'w8'", path=name)


def pack_nibbles(values: Int8s, group: int) -> Bytes:
    """Two values to a byte: row `r` of a group's first half in the low nibble, row `r + group / 2` in the high one.

    Args:
        values: int8 `[K, N]` in [-8, 7].
        group: rows in a group, even.

    Returns:
        uint8 `[K' / 2, N]`, K' being K rounded up to whole groups; the rows added are zeros.
    """
    rows, columns = values.shape
    stored: Bytes = np.full((padded_rows(rows, group), columns), NIBBLE_ZERO, np.uint8)
    stored[:rows] += values.view(np.uint8)
    halves = stored.reshape(-1, 2, group // 2, columns)
    packed: Bytes = halves[:, 0] | halves[:, 1] << np.uint8(4)
    return packed.reshape(-1, columns)


def expand_nibbles(
    packed: Bytes,
    multipliers: Int8s,
    group: int,
    rows: int,
    out: npt.NDArray[Any] | None = None,
    unsigned: bool = False,
) -> npt.NDArray[Any]:
    """Multiplies nibbles out to the int8 weights they stand for, exactly.

    Args:
        packed: uint8 `[K' / 2, N]`, as `pack_nibbles` makes it.
        multipliers: int8 `[K' / group, N]`.
        group: rows in a group.
        rows: logical K; padding beyond it is not written.
        out: C-contiguous int8 (uint8 if `unsigned`) `[rows, N]` to write to; None allocates it.
        unsigned: give weight + 128 as uint8, for kernels that want two unsigned operands.

    Returns:
        `out`.
    """
    columns = packed.shape[1]
    if out is None:
        out = np.empty((rows, columns), np.uint8 if unsigned else np.int8)
    weights = out.view(np.uint8)
    # multiplier * (stored - 8), plus 128 if unsigned, is stored * factor + offset modulo 256: two passes.
    factors = multipliers.view(np.uint8)
    offsets = np.subtract(128 if unsigned else 0, factors * np.uint8(NIBBLE_ZERO), dtype=np.uint8)
    whole = rows // group
    step = max(1, _EXPAND_BYTES // (group * columns))
    for first in range(0, whole, step):
        last = min(first + step, whole)
        _expand_groups(packed, factors, offsets, slice(first, last), weights[first * group : last * group])
    if rows % group:
        ragged: Bytes = np.empty((group, columns), np.uint8)
        _expand_groups(packed, factors, offsets, slice(whole, whole + 1), ragged)
        weights[whole * group :] = ragged[: rows % group]
    return out


def _expand_groups(packed: Bytes, factors: Bytes, offsets: Bytes, groups: slice, weights: Bytes) -> None:
    """Expands some whole groups into `weights`, uint8 `[groups * group, N]`."""
    factor, offset = factors[groups, None], offsets[groups, None]
    count, columns = factor.shape[0], factor.shape[2]
    group = weights.shape[0] // count
    pairs = packed.reshape(-1, group // 2, columns)[groups]
    halves = weights.reshape(count, 2, group // 2, columns)
    np.bitwise_and(pairs, 15, out=halves[:, 0])
    np.right_shift(pairs, 4, out=halves[:, 1])
    rows = weights.reshape(count, group, columns)
    np.multiply(rows, factor, out=rows)
    np.add(rows, offset, out=rows)


def dequantise(encoding: Encoding, parts: Mapping[str, npt.NDArray[Any]], rows: int) -> Floats:
    """The matrix that stored parts stand for: the reference.

    Args:
        encoding: how it is stored.
        parts: arrays by the part's name after the matrix's: `""`, `"scale"`, `"nibbles"`, `"multipliers"`.
        rows: logical K.

    Returns:
        f32 `[rows, N]`.
    """
    if encoding == "f32":
        plain: Floats = parts[""].astype(np.float32)
        return plain
    if encoding == "w8":
        weights = parts[""]
    else:
        weights = expand_nibbles(parts["nibbles"], parts["multipliers"], GROUP_SIZES[encoding], rows)
    scaled: Floats = weights.astype(np.float32) * parts["scale"]
    return scaled


def dequantise_embedding(encoding: Encoding, parts: Mapping[str, npt.NDArray[Any]]) -> Floats:
    """The embedding that stored parts stand for, f32 `[vocabulary, hidden]`: the scale is one per row."""
    weights: Floats = parts[""].astype(np.float32)
    return weights * parts["scale"][:, None] if encoding == "w8" else weights


def invalid_values(encoding: Encoding, parts: Mapping[str, npt.NDArray[Any]], rows: int) -> tuple[str, str] | None:
    """What is wrong with the values of a stored matrix or embedding whose shapes are right.

    Args:
        encoding: how it is stored.
        parts: as for `dequantise`.
        rows: logical K.

    Returns:
        The rule that is broken and a lower-case sentence for an error message; None where every value is legal.
    """
    if encoding == "f32":
        odd = parts[""][~np.isfinite(parts[""])]
        return ("EMOE-REC-005", f"a weight is {odd[0]}, expected a finite number") if odd.size else None
    scale = parts["scale"]
    odd = scale[~((scale >= 0) & (scale < np.inf))]  # NaN is neither
    if odd.size:
        return "EMOE-REC-006", f"a scale is {odd[0]}, expected a finite number of at least 0"
    if encoding == "w8":
        lowest = parts[""].min(initial=0) == -128
        return ("EMOE-REC-007", "a weight is -128, expected -127 to 127") if lowest else None
    multipliers = parts["multipliers"]
    odd = multipliers[(multipliers == 0) | (multipliers > MAX_MULTIPLIER) | (multipliers < -MAX_MULTIPLIER)]
    if odd.size:
        return "EMOE-REC-008", f"a multiplier is {odd[0]}, expected -15 to -1 or 1 to 15"
    group = GROUP_SIZES[encoding]
    last = parts["nibbles"][-(group // 2) :]
    padding = np.concatenate((last & 15, last >> 4))[rows % group or group :]
    odd = padding[padding != NIBBLE_ZERO]
    return ("EMOE-REC-009", f"a padding row holds {odd[0]}, expected {NIBBLE_ZERO}") if odd.size else None


def quantise_activations(x: Floats) -> tuple[Bytes, Floats]:
    """Rounds each token's activations to integers, symmetrically. FORMAT.md annex A.

    The scale is `max|x| / 127`, and 1 where that is 0; `x / scale` is a true division, rounded half to even.

    Args:
        x: f32 `[T, K]`, finite.

    Returns:
        uint8 `[T, K]`, 128 standing for 0, and scales f32 `[T, 1]`.
    """
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    # Only a subnormal scale is coarse enough for a quotient to leave the range, and then it saturates.
    rounded = np.clip(np.rint(x / scale) + ACTIVATION_ZERO, 0, 255)
    return rounded.astype(np.uint8), scale


def integer_product(activations: Bytes, activation_scale: Floats, weights: Int8s, scale: Floats) -> Floats:
    """`(f32(acc) * activation_scale) * scale`, in this order, acc being the exact sum of products. FORMAT.md annex A.

    Args:
        activations: uint8 `[T, K]`, 128 standing for 0.
        activation_scale: f32 `[T, 1]`.
        weights: int8 `[K, N]`.
        scale: f32 `[N]`, of the output channels.

    Returns:
        f32 `[T, N]`.
    """
    # Sums of such products are exact in f64 for any legal K, and numpy is much faster at them than at integers.
    accumulators = (activations.astype(np.float64) - ACTIVATION_ZERO) @ weights.astype(np.float64)
    return (accumulators.astype(np.float32) * activation_scale) * scale
