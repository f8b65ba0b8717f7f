"""Finds out whether a processor multiplies unsigned with signed bytes exactly.

Some processors add two such products in 16 bits, which saturates: the result is silently wrong. Which kind is at hand
is not asked but tried, on a case whose answer is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from estream_runtime.backends.protocol import Array

LARGEST: Final = 127
SILU_OF_ONE: Final = 0.7310586


def is_exact(run: Callable[[Mapping[str, Array]], dict[str, Array]], hidden: int, intermediate: int) -> bool:
    """Runs an expert graph of dynamic-int8 activations and int8 weights on its extreme case.

    Rows of ones and weights of 127 make every pair of products as large as it can be. Scales are such that gate and
    up are 1, so the result is silu(1) throughout; where sums saturate, next to nothing is left of them.

    Args:
        run: runs the graph on its inputs by name.
        hidden: rows of gate and up, columns of down.
        intermediate: the other way round.
    """
    feeds: dict[str, Array] = {"normed": np.ones((2, hidden), np.float32)}
    for name in ("gate", "up", "down"):
        rows, columns = (intermediate, hidden) if name == "down" else (hidden, intermediate)
        feeds[name] = np.full((rows, columns), LARGEST, np.int8)
        feeds[f"{name}.scale"] = np.full(columns, 1 / (LARGEST * rows), np.float32)
    return bool(np.allclose(run(feeds)["y"], SILU_OF_ONE, rtol=1e-3))
