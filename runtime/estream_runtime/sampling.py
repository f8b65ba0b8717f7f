"""From logits to the next token."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from estream_spec.errors import TrapError

Floats = npt.NDArray[np.float32]


class Sampler:
    """Chooses tokens; the same seed makes the same choices.

    Args:
        temperature: 0 takes the largest logit, of equal ones the lower id; above 0, logits are divided by it.
        top_p: only the fewest tokens whose probabilities reach this sum are drawn from.
        seed: 0 or more; None takes one that differs every time.
        allowed: bool `[vocabulary]`, tokens that may be chosen; None allows all.

    Raises:
        TrapError: a value is out of range.
    """

    def __init__(
        self, temperature: float, top_p: float, seed: int | None, allowed: npt.NDArray[np.bool_] | None = None
    ):
        if not (math.isfinite(temperature) and temperature >= 0):
            raise TrapError(f"temperature is {temperature}, expected 0 or more")
        if not 0 < top_p <= 1:
            raise TrapError(f"top_p is {top_p}, expected more than 0 and at most 1")
        if seed is not None and seed < 0:
            raise TrapError(f"seed is {seed}, expected 0 or more")
        self._temperature, self._top_p, self._allowed = temperature, top_p, allowed
        self._random = np.random.Generator(np.random.PCG64(seed))

    def choose(self, logits: Floats) -> int:
        """The next token.

        Args:
            logits: f32 `[vocabulary]`, finite.
        """
        if self._allowed is not None:
            logits = np.where(self._allowed, logits, np.float32(-np.inf))
        if self._temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        # The largest is taken off first, so that a small temperature makes the others vanish and nothing overflow.
        with np.errstate(over="ignore"):
            scaled = (logits[order].astype(np.float64) - logits[order[0]]) / self._temperature
        sums = np.cumsum(np.exp(scaled))
        kept = sums[: int(np.searchsorted(sums, self._top_p * sums[-1])) + 1]
        drawn = int(np.searchsorted(kept, self._random.random() * kept[-1], side="right"))
        return int(order[min(drawn, len(kept) - 1)])
