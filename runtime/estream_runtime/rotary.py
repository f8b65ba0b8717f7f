"""Tables of the rotary position encoding. FORMAT.md annex A.5."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estream_spec.model import Attention
from estream_spec.weights import Floats


def rotary_tables(attention: Attention, positions: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Cosine and sine of every angle, all in f32, the order of operations being part of the definition.

    Args:
        attention: frequencies, scale and rotated width.
        positions: `[T]`, tokens before each token.

    Returns:
        Two f32 `[T, rotated]`, equal in both halves.
    """
    rotary, width = attention.rotary, attention.rotated
    if rotary.frequencies:
        frequencies = np.array(rotary.frequencies, np.float32)
    else:
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        frequencies = np.float32(1) / np.float32(rotary.theta) ** exponents
    angles = np.tile(positions.astype(np.float32)[:, None] * frequencies, 2)
    scale = np.float32(rotary.scale)
    return np.cos(angles) * scale, np.sin(angles) * scale
