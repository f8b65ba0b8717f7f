"""How sure a layer's confidence model must be, so that as many needed experts are predicted as was asked for.

Conformal risk control (arXiv 2208.02814): the share of a token's experts that are missed never grows with the target.
So the least target for which `(sum of shares missed + 1) / (tokens + 1)` is at most the risk keeps the share that is to
be expected of a further token like these below the risk, whatever their distribution.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from estream_packer.prefetch.recording import Ids
from estream_spec.weights import Floats

_LOGITS: Final = (-40.0, 36.0)
"""Between them lie all targets that differ: sigmoids beyond are 1, or less than any chance."""
_HALVINGS: Final = 40


def ranks_of(ranking: Ids, needed: Ids) -> Ids:
    """At which rank, from 0, each needed expert was predicted: int32 `[T, k]`.

    Args:
        ranking: int32 `[T, E]`, experts as predicted.
        needed: int32 `[T, k]`, those that were routed to.
    """
    places = np.empty_like(ranking)
    np.put_along_axis(places, ranking, np.arange(ranking.shape[1], dtype=ranking.dtype)[None], axis=1)
    return np.take_along_axis(places, needed, axis=1)


def missed(ranks: Ids, counts: Ids | int) -> float:
    """Share of needed experts that are not among the first `counts` of each token's ranking, mean over tokens."""
    limits = np.broadcast_to(counts, len(ranks))
    return float((ranks >= limits[:, None]).mean(dtype=np.float64))


def calibrated_target(doubts: Floats, thresholds: Floats, ranks: Ids, overlap: float) -> float:
    """The least target at which enough needed experts are predicted; 1, which asks for all, where none below does.

    Args:
        doubts: f32 `[T]`, what the confidence model makes of each token's features: the chance that the first
            `top_k + d` are enough is `sigmoid(thresholds[d] - doubt)`.
        thresholds: f32 `[D]`.
        ranks: int32 `[T, k]`, see `ranks_of`.
        overlap: share of needed experts that is to be predicted, mean over tokens.
    """
    count, top_k = ranks.shape

    def suffices(logit: float) -> bool:
        extras = np.minimum(np.searchsorted(thresholds, doubts + logit), len(thresholds) - 1)
        risk = (missed(ranks, (top_k + extras).astype(np.int32)) * count + 1) / (count + 1)
        return bool(risk <= 1 - overlap)

    low, high = _LOGITS
    if not suffices(high):
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return 1 / (1 + math.exp(-high))


def needed_by_rank(ranks: Ids, experts: int) -> Floats:
    """How often the expert predicted at each rank was needed, f32 `[E]`, 0 to 1."""
    return (np.bincount(ranks.ravel(), minlength=experts) / len(ranks)).astype(np.float32)
