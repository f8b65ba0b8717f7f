"""What both kinds of checkpoint share when transformers runs them: kept outputs, clear decisions, greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

Array = npt.NDArray[Any]

MIN_SCORE_GAP = 1e-4
"""Least distance between neighbours among the chosen scores of a token and the first one not chosen."""
MIN_LOGIT_GAP = 1e-3
"""Least distance between the best and the second logit where a greedy token is taken."""


class UnclearError(Exception):
    """A checkpoint does not do what its vectors promise, or a decision is a near tie: another seed is needed."""


def require(condition: bool, message: str) -> None:
    """Raises `UnclearError` unless the condition holds."""
    if not condition:
        raise UnclearError(message)


def versions() -> str:
    """The libraries that compute the vectors."""
    return f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}"


def greedy(logits: Callable[[Array], Array], tokens: Array, count: int) -> Array:
    """The best tokens that follow, each from a run of everything before it.

    Args:
        logits: gives logits of every position, `[T, V]`, for `[T]` token ids.
        tokens: the prompt.
        count: how many tokens to take.
    """
    for _ in range(count):
        last = logits(tokens)[-1]
        second, best = np.sort(last)[-2:]
        require(best - second >= MIN_LOGIT_GAP, f"a greedy choice by only {best - second:.1e}")
        tokens = np.append(tokens, last.argmax())
    return tokens[-count:]
