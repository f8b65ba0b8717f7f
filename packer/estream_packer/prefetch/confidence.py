"""How many experts beyond `top_k` are worth fetching: an ordinal-logistic model of the rank of the last one needed.

With `p_d = sigmoid(theta_d - w . f)` the chance that the first `top_k + d` predicted experts cover all that are needed,
the loss is the sum over d of the binary cross-entropy of `p_d` and whether they did. It is convex, so Newton's method
finds its one minimum. For any w the best thetas rise with d, since coverage does: nothing has to hold them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from estream_packer.prefetch.recording import Ids
from estream_spec.weights import Floats

Doubles = NDArray[np.float64]

MAX_STEPS: Final = 50
RIDGE: Final = 1e-3
"""Penalty on the square of each weight of a feature of unit variance, per row."""
PRIOR: Final = 0.5
"""Rows added to each d that were covered, and as many that were not: keeps thetas finite where all were, or none."""
_SMALL: Final = 1e-9
"""A step whose every number is less than that ends the search."""
_FLAT: Final = 1e-7
"""Features that vary less than that, beside their mean, tell nothing."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """The fitted model.

    Attributes:
        weights: f32 `[F]`, what each feature counts.
        thresholds: f32 `[D]`, theta for d = 0 and so on, never falling.
    """

    weights: Floats
    thresholds: Floats


def extras_needed(ranks: Ids, top_k: int) -> Ids:
    """How many experts beyond `top_k` it takes to cover all that are needed, int32 `[T]`.

    Args:
        ranks: int32 `[T, k]`, at which rank each needed expert was predicted, from 0.
        top_k: experts that a row is routed to.
    """
    needed: Ids = np.maximum(ranks.max(axis=1) - (top_k - 1), 0)
    return needed


def fit_confidence(features: Floats, needed: Ids, most: int) -> Confidence:
    """Fit the model.

    Args:
        features: f32 `[T, F]`.
        needed: int32 `[T]`, extras that it took; see `extras_needed`.
        most: largest d.
    """
    rows = features.astype(np.float64)
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    spread[spread <= _FLAT * np.maximum(np.abs(mean), 1e-30)] = np.inf
    rows = (rows - mean) / spread
    covered = np.arange(most + 1) >= needed[:, None]
    thetas, weights = _minimum(rows, covered)
    weights = weights / spread
    thetas = thetas + weights @ mean
    return Confidence(weights.astype(np.float32), np.maximum.accumulate(thetas.astype(np.float32)))


def chances(features: Floats, model: Confidence) -> Doubles:
    """`p_d` of each row, f64 `[T, D]`."""
    return _sigmoid(model.thresholds.astype(np.float64) - (features @ model.weights).astype(np.float64)[:, None])


def _minimum(rows: Doubles, covered: NDArray[np.bool_]) -> tuple[Doubles, Doubles]:
    """The thetas and weights of least loss, by Newton's method with halved steps where a whole one leads up."""
    count, width = covered.shape[1], rows.shape[1]
    share = (covered.sum(axis=0) + PRIOR) / (len(rows) + 2 * PRIOR)
    point = np.concatenate([np.log(share / (1 - share)), np.zeros(width)])
    loss = _loss(point, rows, covered)
    for _ in range(MAX_STEPS):
        step = np.linalg.solve(*_curvature_and_slope(point, rows, covered))
        while (found := _loss(point - step, rows, covered)) > loss and np.abs(step).max() > _SMALL:
            step /= 2
        if np.abs(step).max() <= _SMALL:
            break
        point, loss = point - step, found
    return point[:count], point[count:]


def _loss(point: Doubles, rows: Doubles, covered: NDArray[np.bool_]) -> float:
    count = covered.shape[1]
    thetas, weights = point[:count], point[count:]
    logits = thetas - (rows @ weights)[:, None]
    entropy = np.logaddexp(0, np.where(covered, -logits, logits)).sum()
    prior = PRIOR * (np.logaddexp(0, thetas) + np.logaddexp(0, -thetas)).sum()
    return float(entropy + prior + RIDGE / 2 * len(rows) * (weights @ weights))


def _curvature_and_slope(point: Doubles, rows: Doubles, covered: NDArray[np.bool_]) -> tuple[Doubles, Doubles]:
    """Second and first derivatives of the loss, f64 `[D + F, D + F]` and `[D + F]`."""
    count, width = covered.shape[1], rows.shape[1]
    thetas, weights = point[:count], point[count:]
    found = _sigmoid(thetas - (rows @ weights)[:, None])
    missed, spread = found - covered, found * (1 - found)
    even = _sigmoid(thetas)
    slope = np.concatenate(
        [
            missed.sum(axis=0) + PRIOR * (2 * even - 1),
            -(missed.sum(axis=1) @ rows) + RIDGE * len(rows) * weights,
        ]
    )
    curvature = np.empty((count + width, count + width))
    curvature[:count, :count] = np.diag(spread.sum(axis=0) + 2 * PRIOR * even * (1 - even))
    curvature[:count, count:] = -(spread.T @ rows)
    curvature[count:, :count] = curvature[:count, count:].T
    curvature[count:, count:] = (rows * spread.sum(axis=1)[:, None]).T @ rows
    curvature[count:, count:] += RIDGE * len(rows) * np.eye(width)
    return curvature, slope


def _sigmoid(values: Doubles) -> Doubles:
    found: Doubles = np.exp(-np.logaddexp(0, -values))
    return found
