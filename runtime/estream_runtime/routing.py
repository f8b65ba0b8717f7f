"""From router scores to each expert's tokens. FORMAT.md annex A.

The choice is made on f32 scores and equal scores go to the lower expert id, so every backend that computes the same
scores chooses the same experts. A row is routed alike alone and among others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from estream_spec.errors import TrapError
from estream_spec.model import Router
from estream_spec.weights import Floats

Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]


def route(scores: Floats, router: Router, selection_bias: Floats | None = None) -> tuple[Ids, Floats]:
    """Chooses each token's experts and their weights.

    Args:
        scores: f32 `[T, E]`, what the router says of each expert.
        router: the rule.
        selection_bias: f32 `[E]`, added to weights for choosing, where the rule has it.

    Returns:
        Expert ids int32 `[T, k]` in the order of choice, and their weights f32 `[T, k]`.

    Raises:
        TrapError: a score or a weight is not finite.
    """
    finite = np.isfinite(scores)
    if not finite.all():
        token, expert = np.argwhere(~finite)[0]
        raise TrapError(f"router score {scores[token, expert]} of token row {token}, expert {expert} is not finite")
    scores = np.ascontiguousarray(scores)
    if router.family == "sparsemixer":
        chosen, weights = _sparsemixer(scores, router)
        if router.scale != 1:
            weights = weights * np.float32(router.scale)
    else:
        shares = _shares(scores, router)
        chosen = _largest(_preferences(scores, shares, router, selection_bias), router.top_k)
        weights = _weights(shares, chosen, router)
    if not np.isfinite(weights).all():
        raise TrapError("a routing weight is not finite")
    return chosen.astype(np.int32), weights


class Substituted(NamedTuple):
    """What a row takes in place of what it was routed to.

    Attributes:
        expert_ids: int32 `[1, k]`.
        weights: f32 `[1, k]`.
        replaced: experts that it was routed to and does without.
        lost_share: the share of the weights that those had, 0 to 1.
    """

    expert_ids: Ids
    weights: Floats
    replaced: list[int]
    lost_share: float


def substituted(
    scores: Floats,
    router: Router,
    selection_bias: Floats | None,
    routed: tuple[Ids, Floats],
    ready: Collection[int],
    most_share: float,
) -> Substituted:
    """Replaces experts that are not ready by those that are and that the router would choose next.

    A substitute counts as much as the router says of it, by the rule for all that are chosen. An expert with more than
    `most_share` of the row's weights is not replaced, nor is one for which no other is ready; of several for which too
    few are ready, those of the least weight are replaced. Source: the stall-free mode of APEX (arXiv 2608.11688); the
    bound is ours.

    Args:
        scores: f32 `[1, E]`.
        router: the rule, not sparsemixer.
        selection_bias: see `route`.
        routed: what `route` gave.
        ready: experts that are there.
        most_share: 0 to 1.
    """
    expert_ids, weights = routed
    chosen = expert_ids[0].tolist()
    parts = weights[0] / weights[0].sum()
    late = [at for at, expert in enumerate(chosen) if expert not in ready and parts[at] <= most_share]
    shares = _shares(scores, router)
    wanted = _preferences(scores, shares, router, selection_bias)
    order = _largest(wanted, scores.shape[1])[0].tolist()
    others = [each for each in order if each in ready and each not in chosen and wanted[0, each] > -np.inf]
    changed = list(zip(sorted(late, key=lambda at: float(parts[at])), others, strict=False))
    if not changed:
        return Substituted(expert_ids, weights, [], 0.0)
    taken = expert_ids.astype(np.int64)
    for at, substitute in changed:
        taken[0, at] = substitute
    lost = float(sum(parts[at] for at, _ in changed))
    return Substituted(taken.astype(np.int32), _weights(shares, taken, router), [chosen[at] for at, _ in changed], lost)


def _shares(scores: Floats, router: Router) -> Floats:
    """What each expert counts before any is chosen, f32 `[T, E]`."""
    return _sigmoid(scores) if router.family.startswith("sigmoid") else _softmax(scores)


def _weights(shares: Floats, chosen: Rows, router: Router) -> Floats:
    """Weights f32 `[T, k]` of what was chosen."""
    weights: Floats = shares[np.arange(len(chosen))[:, None], chosen]
    if router.family.endswith("-renormalise"):
        with np.errstate(invalid="ignore"):  # sigmoids that are all 0 divided by their sum
            weights /= weights.sum(axis=1, keepdims=True) + np.float32(router.epsilon)
    return weights if router.scale == 1 else weights * np.float32(router.scale)


def preferences(scores: Floats, router: Router, selection_bias: Floats | None = None) -> Floats:
    """What experts are chosen by, f32 `[T, E]`, minus infinity for those of a group that is left out.

    `sparsemixer` goes by scores as well: what is near the best decides weights alone. See `route` for the arguments.
    """
    if router.family == "sparsemixer":
        return scores
    return _preferences(scores, _shares(scores, router), router, selection_bias)


def _preferences(scores: Floats, shares: Floats, router: Router, selection_bias: Floats | None) -> Floats:
    """What experts are chosen by, `[T, E]`: scores, unless weights are changed for choosing."""
    if selection_bias is None and router.groups == 1:
        return scores
    wanted = shares if selection_bias is None else shares + selection_bias
    if router.groups == 1:
        return wanted
    grouped = wanted.reshape(len(wanted), router.groups, -1)
    best = -np.sort(-grouped, axis=2)[:, :, : 2 if router.group_score == "two-largest" else 1].sum(axis=2)
    kept = np.zeros(best.shape, bool)
    np.put_along_axis(kept, _largest(best, router.top_groups), True, axis=1)
    return np.where(kept[:, :, None], grouped, np.float32(-np.inf)).reshape(wanted.shape)


def _largest(values: Floats, count: int) -> Rows:
    """Where the largest of each row are, from the largest down; equal ones from the left."""
    found: Rows = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return found


def _sparsemixer(scores: Floats, router: Router) -> tuple[Rows, Floats]:
    """One expert after the other, each weighed by the softmax over those whose score is near the best that is left.

    Near means at most `2 tolerance` of the larger of the best score and the score's own size. Source: Sparse
    Backpropagation for MoE Training (arXiv 2310.00811), as Phi-3.5-MoE computes it without training.
    """
    left = scores
    chosen, weights = [], []
    for _ in range(router.top_k):
        best = left.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = (best - scores) / np.maximum(np.abs(scores), best)
        near = np.where(distance > np.float32(2 * router.tolerance), np.float32(-np.inf), left)
        expert = np.argmax(left, axis=1)[:, None]
        chosen.append(expert)
        weights.append(np.take_along_axis(_softmax(near), expert, axis=1))
        left = left.copy()
        np.put_along_axis(left, expert, np.float32(-np.inf), axis=1)
    return np.concatenate(chosen, axis=1), np.concatenate(weights, axis=1)


def _sigmoid(scores: Floats) -> Floats:
    """`1 / (1 + exp(-x))`, in f32."""
    with np.errstate(over="ignore"):
        shares: Floats = np.float32(1) / (np.float32(1) + np.exp(-scores))
    return shares


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
