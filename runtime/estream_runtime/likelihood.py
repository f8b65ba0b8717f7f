"""Probabilities from logits, in f64: sums over long texts must not lose what single tokens contribute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estream_spec.weights import Floats

Doubles = npt.NDArray[np.float64]


def log_softmax(logits: Floats) -> Doubles:
    """Natural log-probabilities of each row, f64 `[T, vocabulary]`."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def log_probabilities(logits: Floats, targets: npt.NDArray[np.int64]) -> Doubles:
    """Natural log-probability of one token per row.

    Args:
        logits: f32 `[T, vocabulary]`.
        targets: `[T]` token ids.

    Returns:
        f64 `[T]`.
    """
    picked: Doubles = np.take_along_axis(log_softmax(logits), targets[:, None], axis=-1)[:, 0]
    return picked
