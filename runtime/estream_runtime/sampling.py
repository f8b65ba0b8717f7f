"""From logits to the next token."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from estream_spec.errors import TrapError
from estream_spec.weights import Floats


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
        self._temperature, self._top_p, self._allowed = as_number(temperature), as_number(top_p), allowed
        if not (math.isfinite(self._temperature) and self._temperature >= 0):
            raise TrapError(f"temperature is {temperature!r}, expected a finite number, 0 or more")
        if not 0 < self._top_p <= 1:
            raise TrapError(f"top_p is {top_p!r}, expected a number more than 0 and at most 1")
        if seed is not None:
            check_count("seed", seed)
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


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number of 0 or more.

    Raises:
        TrapError: it is none.
    """
    if not is_whole(value, 0):
        raise TrapError(f"{name} is {value!r}, expected a whole number, 0 or more")


def is_whole(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value of any type is a whole number from `low` to `high`; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def as_number(value: object) -> float:
    """A number as it is, or not a number for whatever is none."""
    try:
        return float(value) if isinstance(value, (int, float, np.integer, np.floating)) else math.nan
    except OverflowError:  # a whole number beyond every float
        return math.inf
