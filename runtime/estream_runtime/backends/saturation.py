"""Finds out whether a processor multiplies unsigned with signed bytes exactly.

Some processors add two such products in 16 bits, which saturates: the result is silently wrong. Which kind is at hand
is not asked but tried, on a case whose answer is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from estream_runtime.backends.protocol import Array
from estream_spec.model import SWIGLU_SLOPE, ExpertBlock

LARGEST: Final = 127


def is_exact(run: Callable[[Mapping[str, Array]], dict[str, Array]], hidden: int, block: ExpertBlock) -> bool:
    """Runs an expert graph of dynamic-int8 activations and int8 weights on its extreme case.

    Rows of ones and weights of 127 make every pair of products as large as it can be. Scales are such that gate and
    up are 1, so the result is the activation of ones throughout; where sums saturate, next to nothing is left of them.

    Args:
        run: runs the graph on its inputs by name.
        hidden: rows of gate and up.
        block: the expert's shape class.
    """
    feeds: dict[str, Array] = {"normed": np.ones((2, hidden), np.float32)}
    for name in ("gate", "up", "down"):
        rows, columns = (block.intermediate, hidden) if name == "down" else (hidden, block.intermediate)
        feeds[name] = np.full((rows, columns), LARGEST, np.int8)
        feeds[f"{name}.scale"] = np.full(columns, 1 / (LARGEST * rows), np.float32)
        if block.bias:
            feeds[f"{name}.bias"] = np.zeros(columns, np.float32)
    return bool(np.allclose(run(feeds)["y"], _of_ones(block.limit), rtol=1e-3))


def _of_ones(limit: float | None) -> float:
    """What an expert's activation makes of a gate and an up of 1."""
    if limit is None:
        return 1 / (1 + math.exp(-1))
    held = min(1.0, limit)
    return held / (1 + math.exp(-SWIGLU_SLOPE * held)) * (held + 1)
