"""From router scores to each expert's tokens. FORMAT.md annex A.

The choice is made on f32 scores and equal scores go to the lower expert id, so every backend that computes the same
scores chooses the same experts. A row is routed alike alone and among others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from estream_spec.errors import TrapError
from estream_spec.model import Router

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]


def route(scores: Floats, router: Router) -> tuple[Ids, Floats]:
    """Chooses each token's experts and their weights.

    Args:
        scores: f32 `[T, E]`, what the router says of each expert.
        router: the rule.

    Returns:
        Expert ids int32 `[T, k]` from the largest score down, and their weights f32 `[T, k]`.

    Raises:
        TrapError: a score is not finite.
    """
    finite = np.isfinite(scores)
    if not finite.all():
        token, expert = np.argwhere(~finite)[0]
        raise TrapError(f"router score {scores[token, expert]} of token row {token}, expert {expert} is not finite")
    scores = np.ascontiguousarray(scores)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : router.top_k]
    weights = np.take_along_axis(_softmax(scores), chosen, axis=1)
    if router.family == "softmax-topk-renormalise":
        weights /= weights.sum(axis=1, keepdims=True)
    return chosen.astype(np.int32), weights


def _softmax(scores: Floats) -> Floats:
    """Softmax of each row, in f32."""
    with np.errstate(over="ignore"):  # Two scores further apart than f32 reaches: the share of the lower one is 0.
        shares: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


@dataclass(frozen=True, slots=True)
class Routed:
    """The token rows of each expert, all in one array.

    Attributes:
        rows: int64 `[T * k]`, token rows by expert and ascending for each.
        weights: f32 `[T * k]`, the weight of the expert for that row.
        starts: int64 `[E + 1]`, expert `e` has the entries from `starts[e]` up to `starts[e + 1]`.
    """

    rows: Rows
    weights: Floats
    starts: Rows

    def tokens_of(self, expert: int) -> tuple[Rows, Floats]:
        """Token rows of one expert, ascending, and its weight for each; both empty when no token chose it."""
        entries = slice(self.starts[expert], self.starts[expert + 1])
        return self.rows[entries], self.weights[entries]

    @property
    def counts(self) -> Rows:
        """Tokens per expert, int64 `[E]`."""
        return np.diff(self.starts)


def by_expert(expert_ids: Ids, weights: Floats, experts: int) -> Routed:
    """Turns each token's experts into each expert's tokens.

    Args:
        expert_ids: int32 `[T, k]`, no expert twice in a row.
        weights: f32 `[T, k]`.
        experts: how many experts the layer has, chosen or not.
    """
    ids = expert_ids.ravel()
    order = np.argsort(ids, kind="stable")
    starts = np.zeros(experts + 1, np.int64)
    np.cumsum(np.bincount(ids, minlength=experts), out=starts[1:])
    return Routed(rows=order // expert_ids.shape[1], weights=weights.ravel()[order], starts=starts)
