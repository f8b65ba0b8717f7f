"""How many tokens and groups a prompt is expected to ask of a layer's experts.

A token picks expert `e` with probability `s[e]`, its share. Of `n` tokens that is `n s[e]` in the mean, and at least
one with probability `1 - (1 - s[e])^n`; with even routing, `s = k / E`, that makes `E (1 - (1 - k/E)^n)` active
experts. Real routing is less even, so that a calibrated histogram gives fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_spec.model import ExpertBlock, ModelDescription

Floats = npt.NDArray[np.float64]

FEW_TOKENS: Final = 2
"""Tokens an expert gets in the mean. With fewer, many get none, and reading before that is known reads in vain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingLoad:
    """What is expected of one layer's experts, f64 `[experts]`.

    Attributes:
        active: probability that the expert has a token.
        tokens: how many it has in the mean when it has any.
    """

    active: Floats
    tokens: Floats


def few_tokens(model: ModelDescription, tokens: int) -> bool:
    """Whether so many tokens are too few to read experts for before they are routed, in any of the layers."""
    return tokens * min(block.router.top_k / block.experts for block in model.expert_blocks) < FEW_TOKENS


def even_shares(block: ExpertBlock) -> Floats:
    """The probability of each expert to be picked by a token when all are alike."""
    return np.full(block.experts, block.router.top_k / block.experts)


def even_layers(model: ModelDescription) -> list[Floats]:
    """The shares of the experts of each layer when all of it are alike; empty where there are none."""
    layers = range(len(model.layers))
    return [even_shares(model.expert_block(layer)) if layer in model.expert_layers else np.empty(0) for layer in layers]


def shares_of(counts: Sequence[int], block: ExpertBlock) -> Floats:
    """The probability of each expert to be picked by a token, from how often each was picked; even where none was."""
    picked: Floats = np.asarray(counts, np.float64)
    total = picked.sum()
    return np.minimum(picked * (block.router.top_k / total), 1.0) if total else even_shares(block)


def expected_load(shares: Floats, tokens: int) -> RoutingLoad:
    """What a prompt of `tokens` tokens is expected to ask of experts with these shares, f64 `[experts]`."""
    # expm1 and log1p keep the digits where shares are tiny, as those of hardly ever picked experts are.
    with np.errstate(divide="ignore"):
        active: Floats = -np.expm1(tokens * np.log1p(-shares))
    mean = tokens * shares
    return RoutingLoad(active=active, tokens=np.divide(mean, active, out=np.zeros_like(mean), where=active > 0))
