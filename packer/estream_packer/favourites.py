"""Makes the routers of random weights prefer some experts, by a power law that each layer has its own favourites of.

The first channels of all embeddings have one value: a direction that every token has. A router's rows of those channels
say what each expert is preferred by, so that a token's score for an expert is normal with one deviation, as it is
without them, plus what is the same for all tokens, the expert's *lean*. If a token were routed to all experts whose
scores are over a threshold, the lean of an expert that a share of all tokens is routed to would be the normal quantile
of that share; taking the largest scores instead gives nearly the same. The n-th most popular expert has a share
proportional to `n ** -skew`, but none a larger one than `MOST`.

A token chooses by what it is itself: two that follow each other share the experts that all tokens like, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from estream_spec.weights import Floats

MAX_SKEW: Final = 4.0
"""More would only drive the least popular experts out of reach of the numbers."""
MOST: Final = 0.99
"""The largest share of tokens that an expert is meant for."""
COMMON: Final = 64
"""One channel in so many has the same value for all tokens. Were there more, attention and experts would add too much
that is the same for all tokens and no part of the law."""
LEVEL: Final = 1.25
"""That value, in units of the root mean square of the others: as much as bytes can hold."""


def common_channels(hidden: int) -> int:
    """Channels, from the first on, that are the same for all tokens."""
    return -(-hidden // COMMON)


def shares(experts: int, top_k: int, skew: float) -> list[float]:
    """The share of tokens that the n-th most popular expert is meant for, `[experts]`; `top_k` in total.

    Args:
        experts: of the layer, more than `top_k`.
        top_k: of a token.
        skew: exponent of the law.
    """
    weights = [rank**-skew for rank in range(1, experts + 1)]
    most = max(MOST, top_k / experts)
    # As many of the first as must be cut off have the most; the others divide what is left.
    for cut in range(top_k + 1):
        unit = (top_k - cut * most) / sum(weights[cut:])
        if unit * weights[cut] <= most:
            break
    return [most] * cut + [unit * weight for weight in weights[cut:]]


def leans(experts: int, top_k: int, skew: float) -> list[float]:
    """What the n-th most popular expert is preferred by, `[experts]`, in deviations of a token's score.

    Args:
        experts: of the layer.
        top_k: of a token.
        skew: exponent of the law; 0 leans to none.
    """
    if top_k == experts:
        return [0.0] * experts
    quantile = NormalDist().inv_cdf
    return [quantile(share) - quantile(top_k / experts) for share in shares(experts, top_k, skew)]


def lean_router(router: Floats, favourites: Sequence[int], top_k: int, skew: float) -> None:
    """Make a router prefer some experts.

    Args:
        router: f32 `[hidden, experts]`, random with deviation `hidden ** -0.5`; its first rows are replaced.
        favourites: all experts, the most popular first.
        top_k: of a token.
        skew: exponent of the law.
    """
    hidden, experts = router.shape
    channels = common_channels(hidden)
    # The score's deviation comes from the other channels.
    deviation = math.sqrt(1 - channels / hidden)
    rows = np.asarray(leans(experts, top_k, skew)) * (deviation / (channels * LEVEL))
    router[:channels, favourites] = rows.astype(np.float32)
