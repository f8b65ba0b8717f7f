"""Tables of the rotary position encoding. FORMAT.md annex A.5."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from estream_spec.model import Attention

Floats = npt.NDArray[np.float32]


def rotary_tables(attention: Attention, positions: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Cosine and sine of every angle, all in f32, the order of operations being part of the definition.

    Args:
        attention: base and width.
        positions: `[T]`, tokens before each token.

    Returns:
        Two f32 `[T, head_dim]`, equal in both halves.
    """
    width = attention.head_dim
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = np.float32(1) / np.float32(attention.rotary.theta) ** exponents
    angles = np.tile(positions.astype(np.float32)[:, None] * frequencies, 2)
    return np.cos(angles), np.sin(angles)
