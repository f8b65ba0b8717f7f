"""A layer's linear map: from what enters its attention block to the distribution that its router will choose by.

The loss is the mean of `KL(p || softmax(n W + b))`, p being the router's own distribution: the softmax of its scores.
Where experts are not chosen by scores but by shares that were changed for choosing (a selection bias, groups), it is
the softmax of those, over their spread within a row, since shares lie too close together to be told apart; experts of a
group that is left out have none.

Training begins with the true router, given what enters attention in place of what leaves it, or with the least squares
of its preferences, whichever loses less on text of its own, and goes on with Adam. What loses least on that text stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estream_packer.prefetch.recording import Recorded, RouterTensors
from estream_spec.errors import PackError
from estream_spec.model import Router
from estream_spec.weights import Floats

Start = Literal["router", "least-squares"]

RIDGE: Final = 1e-2
"""Added to the mean square of each input channel, which is 1 on average."""
BATCH: Final = 256
EPOCHS: Final = 20
MAX_STEPS: Final = 6000
LEARNING_RATE: Final = 0.028
"""Over the root of `hidden`, at the first step, falling to nothing: 5e-4 for a model as wide as those of APEX."""
CHECKS: Final = 20
"""How often during training the loss on other text is looked at."""
_MEMORY: Final = 0.9, 0.999
_TINY: Final = 1e-8
_CHUNK: Final = 4096
"""Rows that are in memory together."""


class Linear(NamedTuple):
    """A map from normalised rows to scores: f32 `[hidden, E]` and f32 `[E]`."""

    weights: Floats
    bias: Floats

    def scores(self, rows: Floats) -> Floats:
        """Scores f32 `[T, E]` of rows f32 `[T, hidden]`."""
        found: Floats = rows @ self.weights + self.bias
        return found


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained map.

    Attributes:
        linear: the map, its weights as halves hold them.
        start: what training began with.
        start_loss: loss before training on the text that tells when to stop, nats.
        loss: loss after it.
        untrained: the true router in place of the map.
    """

    linear: Linear
    start: Start
    start_loss: float
    loss: float
    untrained: Linear


def fit_linear(
    train: Recorded, stop: Recorded, tensors: RouterTensors, router: Router, random: np.random.Generator
) -> Fitted:
    """Train the map of one layer.

    Args:
        train: tokens to train on.
        stop: other tokens, that tell which map is best.
        tensors: of the layer's router.
        router: how it chooses.
        random: shuffles.

    Raises:
        PackError: the weights do not fit into halves.
    """
    sharpness = _sharpness(train, router)
    untrained = _router_map(tensors)
    starts: dict[Start, Linear] = {"router": untrained, "least-squares": _least_squares(train, sharpness)}
    losses = {name: _loss(linear, stop, sharpness) for name, linear in starts.items()}
    start = min(losses, key=losses.__getitem__)
    best, loss = starts[start], losses[start]
    for linear in _training(starts[start], train, sharpness, random):
        if (found := _loss(linear, stop, sharpness)) < loss:
            best, loss = linear, found
    halves = best.weights.astype(np.float16).astype(np.float32)
    if not (np.isfinite(halves).all() and np.isfinite(best.bias).all()):
        raise PackError("a trained weight is larger than 16 bits hold, or not a number")
    return Fitted(Linear(halves, best.bias), start, losses[start], loss, untrained)


def chosen_by_scores(router: Router) -> bool:
    """Whether experts are chosen by the router's scores as they are."""
    return router.family == "sparsemixer" or not (router.selection_bias or router.groups > 1)


def _sharpness(train: Recorded, router: Router) -> float:
    """What preferences are multiplied by before their softmax."""
    if chosen_by_scores(router):
        return 1.0
    spreads = [np.nanstd(np.where(np.isfinite(each), each, np.nan), axis=1) for each in _chunks(train.preferences)]
    return 1.0 / max(float(np.concatenate(spreads).mean(dtype=np.float64)), 1e-6)


def _router_map(tensors: RouterTensors) -> Linear:
    """The true router composed with the gain of the norm before it, given rows that were only divided by their size."""
    router = tensors["router"]
    bias = np.zeros(router.shape[1], np.float32)
    if "expert_norm.bias" in tensors:
        bias += tensors["expert_norm.bias"] @ router
    if "router.bias" in tensors:
        bias += tensors["router.bias"]
    return Linear(tensors["expert_norm"][:, None] * router, bias)


def _least_squares(train: Recorded, sharpness: float) -> Linear:
    """The map whose scores are nearest to preferences, apart from what all experts of a row have in common.

    An expert that could not be chosen counts as the least preferred one that could.
    """
    width, experts = train.rows.shape[1], train.preferences.shape[1]
    squares, products = np.zeros((width, width)), np.zeros((width, experts))
    row_sum, wanted_sum = np.zeros(width), np.zeros(experts)
    for halves, preferences in zip(_chunks(train.rows), _chunks(train.preferences), strict=True):
        rows, possible = halves.astype(np.float32), np.isfinite(preferences)
        least = np.where(possible, preferences, np.inf).min(axis=1, keepdims=True)
        wanted = np.where(possible, preferences, least) * np.float32(sharpness)
        wanted -= wanted.mean(axis=1, keepdims=True)
        squares += rows.T @ rows
        products += rows.T @ wanted
        row_sum += rows.sum(axis=0, dtype=np.float64)
        wanted_sum += wanted.sum(axis=0, dtype=np.float64)
    count = len(train.rows)
    row_mean, wanted_mean = row_sum / count, wanted_sum / count
    squares += count * (RIDGE * np.eye(width) - np.outer(row_mean, row_mean))
    weights = np.linalg.solve(squares, products - count * np.outer(row_mean, wanted_mean))
    bias = wanted_mean - row_mean @ weights
    return Linear(weights.astype(np.float32), bias.astype(np.float32))


def _training(start: Linear, train: Recorded, sharpness: float, random: np.random.Generator) -> Iterator[Linear]:
    """Minimise the loss with Adam (arXiv 1412.6980), and show the map now and then."""
    count = len(train.rows)
    batch = min(BATCH, count)
    steps = min(EPOCHS * (count // batch), MAX_STEPS)
    check = max(1, steps // CHECKS)
    rate = LEARNING_RATE / train.rows.shape[1] ** 0.5
    values = [start.weights.copy(), start.bias.copy()]
    means, squares = ([np.zeros_like(each) for each in values] for _ in range(2))
    order, at = random.permutation(count), 0
    for step in range(1, steps + 1):
        if at + batch > count:
            order, at = random.permutation(count), 0
        chosen = np.sort(order[at : at + batch])
        at += batch
        rows = train.rows[chosen].astype(np.float32)
        shares = _softmax(train.preferences[chosen] * np.float32(sharpness))
        error = (_softmax(rows @ values[0] + values[1]) - shares) / np.float32(batch)
        left = rate * (1 - (step - 1) / steps)
        for value, mean, square, slope in zip(values, means, squares, (rows.T @ error, error.sum(axis=0)), strict=True):
            mean += (1 - _MEMORY[0]) * (slope - mean)
            square += (1 - _MEMORY[1]) * (slope * slope - square)
            size = np.sqrt(square / (1 - _MEMORY[1] ** step)) + _TINY
            value -= left / (1 - _MEMORY[0] ** step) * mean / size
        if step % check == 0 or step == steps:
            yield Linear(values[0].copy(), values[1].copy())


def _loss(linear: Linear, found: Recorded, sharpness: float) -> float:
    """Mean `KL(p || q)` over tokens, in nats."""
    total = 0.0
    for rows, preferences in zip(_chunks(found.rows), _chunks(found.preferences), strict=True):
        wanted = _log_softmax(preferences * np.float32(sharpness))
        had = _log_softmax(linear.scores(rows.astype(np.float32)))
        difference = np.where(np.isfinite(wanted), wanted - had, 0)
        total += float((np.exp(wanted) * difference).sum(dtype=np.float64))
    return total / len(found.rows)


def _chunks(values: NDArray[np.floating]) -> Iterator[NDArray[np.floating]]:
    for begin in range(0, len(values), _CHUNK):
        yield values[begin : begin + _CHUNK]


def _log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max(axis=1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _softmax(scores: Floats) -> Floats:
    shares: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
