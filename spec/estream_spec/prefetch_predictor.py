"""Predicts the experts of a layer by what its prefetch router says. FORMAT.md annex A.7.

`estream_spec.prefetch_router` has what is stored; this is what is computed with it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from estream_spec.model import ModelDescription
from estream_spec.prefetch_router import BEYOND, PrefetchLayer, arrays_of, feature_count
from estream_spec.weights import Floats

Integers = NDArray[np.int32]

LEAST: Final = np.float32(2**-30)
"""Probability that a lesser one counts as where its logarithm is taken."""


class Ranked(NamedTuple):
    """Experts of rows in the order in which they are likely to be needed.

    Attributes:
        experts: int32 `[T, E]`, each row a permutation of the ids.
        probabilities: f32 `[T, E]`, of those, falling.
    """

    experts: Integers
    probabilities: Floats


def normalised(rows: Floats, epsilon: float) -> Floats:
    """Rows f32 `[T, hidden]` over their root mean square: annex A.7. `epsilon` is that of the model's norms."""
    squares = np.einsum("th,th->t", rows, rows)[:, None] / np.float32(rows.shape[1])
    found: Floats = rows / np.sqrt(squares + np.float32(epsilon))
    return found


def ranked_by(scores: Floats) -> Ranked:
    """Rank experts by scores f32 `[T, E]`."""
    experts = (-scores).argsort(axis=1, kind="stable")
    shares = scores[np.arange(len(scores))[:, None], experts]
    np.exp(np.subtract(shares, shares[:, :1], out=shares), out=shares)
    shares /= shares.sum(axis=1, keepdims=True)
    return Ranked(experts.astype(np.int32), shares)


def features(ranked: Ranked, top_k: int) -> Floats:
    """What the confidence model sees of rows. FORMAT.md annex A.7.

    Args:
        ranked: the experts of rows, ranked.
        top_k: experts that a row is routed to.

    Returns:
        f32 `[T, F]`: logarithms of the first `top_k + 8` probabilities, falling; then by expert id the logarithm of
        each probability, and the probability itself.
    """
    count, experts = ranked.probabilities.shape
    seen = min(experts, top_k + BEYOND)
    found: Floats = np.empty((count, feature_count(experts, top_k)), np.float32)
    logarithms = np.log(np.maximum(ranked.probabilities, LEAST))
    found[:, :seen] = logarithms[:, :seen]
    np.put_along_axis(found, ranked.experts + seen, logarithms, axis=1)
    np.put_along_axis(found, ranked.experts + (seen + experts), ranked.probabilities, axis=1)
    return found


class LayerPredictor:
    """Predicts the experts of one layer.

    Attributes:
        layer: its number.
        top_k: experts that a row is routed to.
        needed: f32 `[E]`, how often the expert predicted at each rank was routed to.
    """

    def __init__(
        self,
        layer: int,
        top_k: int,
        *,
        weights: Floats,
        bias: Floats,
        confidence: Floats,
        thresholds: Floats,
        needed: Floats,
        target: float,
        epsilon: float,
    ):
        """`weights` is f32 `[hidden, E]`, `epsilon` that of the model's norms; see `PrefetchLayer` for the others."""
        self.layer, self.top_k, self.needed = layer, top_k, needed
        self._by_expert = np.ascontiguousarray(weights.T)  # a row times this is several times as fast
        self._bias, self._confidence, self._thresholds = bias, confidence, thresholds
        self._epsilon = epsilon
        # sigmoid(threshold - score) >= target, without the exponential; a sigmoid is never 1.
        self._sure = math.log(target / (1 - target)) if target < 1 else math.inf

    @classmethod
    def of(cls, layer: PrefetchLayer, model: ModelDescription) -> Self:
        """Of a layer of a prefetch router that was checked; halves become f32 once, here."""
        block = model.expert_block(layer.layer)
        arrays = arrays_of(layer)
        return cls(
            layer.layer,
            block.router.top_k,
            weights=arrays.pop("weights").astype(np.float32).reshape(model.hidden, block.experts),
            **arrays,
            target=layer.target,
            epsilon=model.norm_epsilon,
        )

    def rank(self, rows: Floats) -> Ranked:
        """Rank the layer's experts for rows.

        Args:
            rows: f32 `[T, hidden]`, what enters the layer's attention block or convolution.
        """
        # Weights that are finite may still give scores that are not: such a ranking is no good, and does no harm.
        with np.errstate(all="ignore"):
            return ranked_by(normalised(rows, self._epsilon) @ self._by_expert.T + self._bias)

    def extras(self, ranked: Ranked) -> Integers:
        """How many experts beyond `top_k` to predict: as few as the confidence model is sure enough of.

        Args:
            ranked: the experts of rows, as `rank` gives them.

        Returns:
            int32 `[T]`, each at most `E - top_k`.
        """
        most = len(self._thresholds) - 1
        with np.errstate(all="ignore"):
            asked = features(ranked, self.top_k) @ self._confidence + self._sure
        return np.minimum(np.searchsorted(self._thresholds, asked), most).astype(np.int32)
