"""From measured times to the figures of a device profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

FEW: Final = 16
"""Tokens of an expert up to which its time is taken to grow by the same for each."""
RATED: Final = 4
"""Tokens of an expert from which on a rate is made of its time; what fewer take beyond its weights is mostly noise."""
LEAST: Final = 0.01
"""Share of an expert's time that its tokens are taken to need at least: less cannot be told from noise."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFit:
    """How long an expert takes, as `profile.ExpertTimes` has it.

    Attributes:
        weight_s: seconds for each weight, however many tokens there are.
        flops: operations per second where most are reached.
        at: tokens at which the rate is known, increasing.
        shares: share of `flops` reached there, up to 1.
    """

    weight_s: float
    flops: float
    at: tuple[float, ...]
    shares: tuple[float, ...]


def fit_experts(tokens: Sequence[float], seconds: Sequence[float], weights: int) -> ExpertFit:
    """Split the time of an expert into what its weights take and what its tokens take.

    A straight line through the times of a few tokens meets 0 tokens at what the weights alone take. What more tokens
    take beyond that gives the rate at which they are computed.

    Args:
        tokens: how many an expert had, at least one number; in any order, and the same more than once.
        seconds: how long it took.
        weights: weights of the expert.
    """
    by_tokens: dict[float, list[float]] = {}
    for count, time_s in sorted(zip(tokens, seconds, strict=True)):
        by_tokens.setdefault(count, []).append(time_s)
    at, took = np.array(list(by_tokens), np.float64), monotone([median(each) for each in by_tokens.values()])
    few = at <= max(FEW, at[:2].max())
    slope, start = np.polyfit(at[few], took[few], 1) if few.sum() > 1 else (0.0, 0.0)
    fixed = float(np.clip(start, 0.0, took[0])) if slope > 0 else float(took[0])
    rated = at >= min(RATED, at[-1])
    rates = 2 * weights * at[rated] / np.maximum(took - fixed, LEAST * took)[rated]
    best = float(rates.max())
    return ExpertFit(
        weight_s=fixed / weights, flops=best, at=tuple(at[rated].tolist()), shares=tuple((rates / best).tolist())
    )


def monotone(values: Sequence[float]) -> Floats:
    """Numbers that never fall, between the highest so far and the lowest to come: more work takes no less time."""
    given = np.asarray(values, np.float64)
    lowest = np.minimum.accumulate(given[::-1])[::-1]
    middle: Floats = (np.maximum.accumulate(given) + lowest) / 2
    return middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What computing lost to reading beside it.

    Attributes:
        seconds: how much longer it took than with nothing read.
        groups: reads meanwhile, of a group each.
        bytes_read: their bytes, above 0.
    """

    seconds: float
    groups: int
    bytes_read: int


def fit_toll(losses: Sequence[tuple[Loss, Loss]]) -> tuple[float, float]:
    """Split what computing loses to reading into what groups take and what bytes take; neither is less than nothing.

    Args:
        losses: for each measurement, the loss to large groups and the one to small groups just before or after it; at
            least one. Where both have as many groups, all is put down to bytes.

    Returns:
        Seconds for each group, and seconds for each byte.
    """
    apart = [(small.seconds - large.seconds) / more for large, small in losses if (more := small.groups - large.groups)]
    group_s = max(0.0, median(apart)) if apart else 0.0
    rest = [(large.seconds - group_s * large.groups) / large.bytes_read for large, _ in losses]
    return group_s, max(0.0, median(rest))
