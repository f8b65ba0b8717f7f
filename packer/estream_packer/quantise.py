"""Choosing the stored integers of a matrix so that the weights they stand for are near the true ones.

What stored weights mean is `estream_spec.weights`; this only chooses them. For the two-level encodings:

1. Each group of a channel is fitted alone, at a few step sizes of either sign, which gives it a best real step.
2. The channel's scale is the one at which small integer multiples come nearest to those steps.
3. Each group takes the multiplier, near its step, of least true error; the scale is fitted again to all of them by
   least squares, and the weights are rounded once more.

Every group is first divided by its largest weight and every channel by its own, so nothing overflows or drowns.
Results do not depend on anything but the arguments.

Every error is a sum of squares, in which each input channel counts as its importance says: the mean square of what
meets its weights. That makes it the expected square of what the output is off by, if channels do not correlate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from estream_spec.errors import PackError
from estream_spec.weights import (
    GROUP_SIZES,
    MAX_MULTIPLIER,
    Encoding,
    Floats,
    Int8s,
    pack_nibbles,
    padded_rows,
)

Parts = dict[str, npt.NDArray[Any]]
"""Arrays by the part's name after the matrix's: `""`, `"scale"`, `"nibbles"`, `"multipliers"`."""

_STEPS: Final[Mapping[int, tuple[float, ...]]] = {-1: (7.5, 8.25, 9.0), 1: (6.5, 7.25, 8.0)}
"""Where a group's largest weight is tried, in steps from zero, by the sign of the nibble it takes.

Beyond -8 or 7 it is cut off, which can pay for a finer step everywhere else.
"""
_TOP_MULTIPLIERS: Final = tuple(13 + i / 4 for i in range(13))
"""What the largest step of a channel is tried as, in units of the channel's scale."""
_LARGEST_W8: Final = 127
_LEAST_NORMAL: Final = np.finfo(np.float32).tiny
_CACHE_LINE: Final = 64
_CLIPS_W8: Final = (1.0, 0.96, 0.92, 0.84, 0.72, 0.6)
"""Where `w8` may cut a channel off, as shares of its largest weight, when some weights matter less than others."""
_LARGEST_W4: Final = 8 * MAX_MULTIPLIER


def quantise_matrix(weight: Floats, encoding: Encoding, importance: Floats | None = None) -> Parts:
    """Stores a matrix, or some of its columns: temporaries are some times what is given, so a large one goes in parts.

    Args:
        weight: f32 `[K, N]`, finite.
        encoding: how to store it.
        importance: what a squared error counts in each input channel, f32 `[K]`, positive; None counts all alike.

    Returns:
        The parts that `matrix_parts` describes.

    Raises:
        PackError: a weight is not finite, or an importance is not a positive number.
    """
    if importance is not None:
        importance = _relative(importance)
    if encoding == "f32":
        return {"": _finite(weight)}
    if encoding != "w8":
        return _quantise_w4(weight, GROUP_SIZES[encoding], importance)
    if importance is not None:
        return _quantise_w8_weighted(weight, importance)
    values, scale = _quantise_w8(weight.T)
    return {"": values.T, "scale": scale}


def quantise_embedding(weight: Floats, encoding: Encoding) -> Parts:
    """Stores an embedding, f32 `[vocabulary, hidden]`, with one scale per row.

    Raises:
        PackError: a weight is not finite, or the encoding cannot be read by rows.
    """
    if encoding == "f32":
        return {"": _finite(weight)}
    if encoding == "w8":
        values, scale = _quantise_w8(weight)
        return {"": values, "scale": scale}
    raise PackError(
        f"an embedding cannot be stored as {encoding!r}, expected 'f32' or 'w8'",
        hint="its rows are read one by one, so choose 'w8' for it",
    )


def _finite(weight: Floats) -> Floats:
    """The weights, row-major, refused where one is not finite."""
    _largest(weight, axis=0)
    return np.ascontiguousarray(weight)


def _relative(importance: Floats) -> Floats:
    """Importance in units of the mean, so that no sum of it overflows."""
    if not (np.isfinite(importance) & (importance > 0)).all():
        raise PackError("an input channel's importance is not a positive number")
    relative: Floats = (importance / importance.mean(dtype=np.float64)).astype(np.float32)
    return relative


def _largest(weight: Floats, axis: int) -> Floats:
    """The largest absolute value along an axis, which is kept with length 1. Refused where it is not finite."""
    largest: Floats = np.maximum(weight.max(axis=axis, keepdims=True), -weight.min(axis=axis, keepdims=True))
    if not np.isfinite(largest).all():
        raise PackError("a weight is not finite", hint="the checkpoint is damaged, or its training diverged")
    return largest


def _bounded(scale: Floats, largest: int) -> Floats:
    """The scale, lowered where its product with the largest stored integer would not be finite."""
    bound = np.nextafter(np.finfo(np.float32).max / np.float32(largest), np.float32(0))
    return np.minimum(scale, bound)


def _quantise_w8(weight: Floats) -> tuple[Int8s, Floats]:
    """Symmetric int8 with one scale per row: its largest weight is 127.

    The rows that result are set apart by an odd number of cache lines: rows whole pages apart would all fall into the
    same few lines when a matrix is turned.
    """
    scale = _bounded(_largest(weight, axis=1) / np.float32(_LARGEST_W8), _LARGEST_W8)
    quotients = _quotients(weight, scale)
    if scale.min() < _LEAST_NORMAL:  # so coarse that a quotient may leave the range
        np.clip(quotients, -_LARGEST_W8, _LARGEST_W8, out=quotients)
    rows, width = weight.shape
    values: Int8s = np.empty((rows, width + _CACHE_LINE * (1 - width // _CACHE_LINE % 2)), np.int8)[:, :width]
    np.rint(quotients, out=values, casting="unsafe")
    return values, scale.reshape(-1)


def _quotients(weight: Floats, scale: Floats) -> Floats:
    """The weights in units of the scale; where that is 0 they are near enough to it themselves."""
    quotients: Floats = np.divide(weight, np.where(scale > 0, scale, np.float32(1)), dtype=np.float32)
    return quotients


def _quantise_w8_weighted(weight: Floats, importance: Floats) -> Parts:
    """Int8 with one scale per column, the one of least error where the largest weight may be cut off."""
    largest = _largest(weight, axis=0)
    shares = _least_clip(weight, np.where(largest > 0, largest, np.float32(1)), importance)
    scale = _bounded(largest * shares / np.float32(_LARGEST_W8), _LARGEST_W8)
    return {"": _cut_off(weight, scale).astype(np.int8), "scale": scale.reshape(-1)}


def _cut_off(weight: Floats, scale: Floats) -> Floats:
    """Whole numbers in [-127, 127] that times the scale come nearest to the weights."""
    quotients = _quotients(weight, scale)
    np.rint(quotients, out=quotients)
    return np.clip(quotients, -_LARGEST_W8, _LARGEST_W8, out=quotients)


def _least_clip(weight: Floats, largest: Floats, importance: Floats) -> Floats:
    """At which share of its largest weight each column is best cut off: f32 `[columns]`."""
    relative = weight / largest
    best = np.ones(relative.shape[1], np.float32)
    least: Floats = np.full(relative.shape[1], np.inf, np.float32)
    for clip in _CLIPS_W8:
        scale = np.full((1, 1), clip / _LARGEST_W8, np.float32)
        squares = np.square(_cut_off(relative, scale) * scale - relative)
        error = np.einsum("k,kn->n", importance, squares)  # a product of BLAS rounds as its kernel does
        best = np.where(error < least, np.float32(clip), best)
        least = np.minimum(error, least)
    return best


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Groups side by side, each divided by its largest weight with the sign turned so that this one is -1.

    A lane is one group of one column; all work on weights is on whole rows of lanes, so numpy's loops are long.

    Attributes:
        units: f32 `[group, lanes]` in [-1, 1].
        peaks: f32 `[lanes]`; `units * peaks` are the weights.
        values: f32 `[group, lanes]`, overwritten by each call of `round` and `sums`.
        importance: f32 `[group, lanes]`, what a squared error counts; None where all count 1.
        weighted: `units` times `importance`.
    """

    units: Floats
    peaks: Floats
    values: Floats
    importance: Floats | None
    weighted: Floats

    def round(self, inverse: Floats | np.float32) -> Floats:
        """Nibble values of `units * inverse`."""
        np.multiply(self.units, inverse, out=self.values)
        np.rint(self.values, out=self.values)
        return np.clip(self.values, -8, 7, out=self.values)

    def sums(self, inverse: Floats | np.float32) -> tuple[Floats, Floats]:
        """Rounds, and sums `unit * value` and `value * value` over each lane, each as it counts."""
        values = self.round(inverse)
        products = np.einsum("gl,gl->l", self.weighted, values)
        if self.importance is None:
            return products, np.einsum("gl,gl->l", values, values)
        np.square(values, out=values)
        return products, np.einsum("gl,gl->l", self.importance, values)


def _lanes(weight: Floats, group: int, importance: Floats | None) -> _Lanes:
    """Arranges weights f32 `[K, N]`, K in whole groups, as lanes `k * N + n` of the k-th group and column n."""
    columns = weight.shape[1]
    rows = np.ascontiguousarray(weight.reshape(-1, group, columns).transpose(1, 0, 2)).reshape(group, -1)
    high, low = rows.max(axis=0), rows.min(axis=0)
    peaks = np.where(high >= -low, -high, -low)
    rows /= np.where(peaks == 0, np.float32(1), peaks)
    if importance is None:
        return _Lanes(rows, peaks, np.empty_like(rows), None, rows)
    # What pads the last group is zero and errs by nothing, whatever it counts.
    padded = np.pad(importance, (0, len(weight) - len(importance)), constant_values=1)
    spread = np.repeat(padded.reshape(-1, group).T, columns, axis=1)
    return _Lanes(rows, peaks, np.empty_like(rows), spread, rows * spread)


def _quantise_w4(weight: Floats, group: int, importance: Floats | None) -> Parts:
    """The two-level encodings."""
    rows, columns = weight.shape
    largest = _largest(weight, axis=0)
    relative: Floats = np.zeros((padded_rows(rows, group), columns), np.float32)
    np.divide(weight, np.where(largest > 0, largest, np.float32(1)), out=relative[:rows])
    lanes = _lanes(relative, group, importance)

    steps, scale = _fit_steps(lanes, columns)
    multipliers, scale = _fit_multipliers(lanes, steps, scale)
    values = lanes.round(lanes.peaks / _spread(scale, lanes) / multipliers)

    by_row = values.reshape(group, -1, columns).transpose(1, 0, 2).reshape(-1, columns)
    return {
        "nibbles": pack_nibbles(by_row.astype(np.int8), group),
        "multipliers": multipliers.reshape(-1, columns).astype(np.int8),
        "scale": _bounded(scale * largest[0], _LARGEST_W4),
    }


def _spread(scale: Floats, lanes: _Lanes) -> Floats:
    """Repeats a value per column for each lane."""
    return np.tile(scale, len(lanes.peaks) // len(scale))


def _fit_steps(lanes: _Lanes, columns: int) -> tuple[tuple[Floats, Floats], Floats]:
    """Fits every group alone.

    Returns:
        The best step of each lane among those of the peak's sign, and among those of the other sign: f32 `[lanes]`.
        The scale of each column that suits the better of the two: f32 `[columns]`, positive.
    """
    fits = [_fit_step(lanes, side) for side in (-1, 1)]
    (gain, step, curvature), (other_gain, other_step, other_curvature) = fits
    better = gain >= other_gain
    sizes = np.abs(np.where(better, step, other_step)).reshape(-1, columns)
    curvatures = np.where(better, curvature, other_curvature).reshape(-1, columns)
    return (step, other_step), _fit_scale(sizes, curvatures)


def _fit_step(lanes: _Lanes, side: int) -> tuple[Floats, Floats, Floats]:
    """The best real step of each lane when its peak goes to this side of zero.

    Returns:
        How much of the lane's square the step explains, the step, and what an error of the step costs per
        square: f32 `[lanes]` each.
    """
    gain, step, curvature = (np.zeros_like(lanes.peaks) for _ in range(3))
    for place in _STEPS[side]:
        products, squares = lanes.sums(np.float32(-side * place))
        fitted = products / np.where(squares > 0, squares, np.float32(1))
        better = fitted * products > gain
        gain = np.where(better, fitted * products, gain)
        step = np.where(better, fitted * lanes.peaks, step)
        curvature = np.where(better, squares, curvature)
    return gain, step, curvature


def _fit_scale(sizes: Floats, curvatures: Floats) -> Floats:
    """The scale of each column whose multiples of 1 to 15 come nearest to the steps of its groups.

    Args:
        sizes: f32 `[groups, columns]`, absolute steps.
        curvatures: f32 `[groups, columns]`, what a squared deviation from each costs.

    Returns:
        f32 `[columns]`, positive.
    """
    top: Floats = sizes.max(axis=0)
    top = np.where(top > 0, top, np.float32(1))
    best = top / np.float32(MAX_MULTIPLIER)
    least: Floats = np.full(len(top), np.inf, np.float32)
    for multiplier in _TOP_MULTIPLIERS:
        scale = top / np.float32(multiplier)
        nearest = np.clip(np.rint(sizes / scale), 1, MAX_MULTIPLIER)
        cost: Floats = np.sum(curvatures * np.square(sizes - scale * nearest), axis=0)
        best = np.where(cost < least, scale, best)
        least = np.minimum(cost, least)
    return best


def _fit_multipliers(lanes: _Lanes, steps: tuple[Floats, Floats], scale: Floats) -> tuple[Floats, Floats]:
    """Chooses the multiplier of each lane by its true error, then fits the scales to what was chosen.

    Args:
        lanes: the weights.
        steps: the best real steps of either sign, f32 `[lanes]`.
        scale: of each column, f32 `[columns]`.

    Returns:
        Multipliers f32 `[lanes]`, whole numbers; scales f32 `[columns]`.
    """
    scales = _spread(scale, lanes)
    chosen = np.ones_like(scales)
    products, squares = np.zeros_like(scales), np.zeros_like(scales)
    least: Floats = np.full(len(scales), np.inf, np.float32)
    signs = np.where(lanes.peaks < 0, np.float32(-1), np.float32(1))
    for step, sign in zip(steps, (signs, -signs), strict=True):
        below = np.floor(np.abs(step) / scales)
        for size in (below, below + 1):
            multiplier = sign * np.clip(size, 1, MAX_MULTIPLIER)
            fitted = scales * multiplier
            product, square = lanes.sums(lanes.peaks / fitted)
            product *= lanes.peaks
            # The squared error, less the square of the weights themselves.
            error = fitted * (fitted * square - 2 * product)
            better = error < least
            least = np.minimum(error, least)
            chosen = np.where(better, multiplier, chosen)
            products = np.where(better, multiplier * product, products)
            squares = np.where(better, multiplier * multiplier * square, squares)
    columns = len(scale)
    numerator = products.reshape(-1, columns).sum(axis=0)
    denominator = squares.reshape(-1, columns).sum(axis=0)
    fits = (numerator > 0) & (denominator > 0)
    return chosen, np.where(fits, numerator / np.where(fits, denominator, np.float32(1)), scale)
