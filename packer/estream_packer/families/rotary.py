"""Rotary settings: found wherever a configuration keeps them, turned into the frequencies that transformers computes.

Formulas as in transformers' `modeling_rope_utils`, every array in f32: YaRN (arXiv 2309.00071), LongRoPE
(arXiv 2402.13753), Llama 3.1. Scaling that depends on how long a prompt is, such as `dynamic`, is not known.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from estream_packer.families.config import LARGEST, Config
from estream_spec import limits
from estream_spec.model import Rotary
from estream_spec.weights import Floats

_SECTIONS: Final = ("rope_parameters", "rope_scaling")
"""Where newer and older transformers keep rotary settings; the oldest kept the base at top level."""
_ORIGINAL: Final = "original_max_position_embeddings"
_KEYS: Final[dict[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _ORIGINAL}
    ),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale", _ORIGINAL}
    ),
}
"""The settings of each kind of scaling."""
_COMMON: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ALIASES: Final = {"su": "longrope"}


class RotarySettings:
    """The rotary settings of a configuration, one object wherever they stand in it.

    Attributes:
        kind: of scaling, `default` where there is none.
        theta: base of the frequencies.
        original_context: tokens the model was trained on before its context was extended; None of kinds without.
    """

    def __init__(
        self,
        keys: Config,
        *,
        theta: float,
        kinds: tuple[str, ...],
        default: dict[str, object] | None = None,
    ):
        """Find the settings.

        Args:
            keys: the configuration.
            theta: the family's base where the configuration has none.
            kinds: which kinds of scaling the family has.
            default: the family's settings where the configuration has no object of them.

        Raises:
            PackError: settings that contradict each other, are out of range, or are not known.
        """
        self._keys = keys
        sections = [keys.section(name) for name in _SECTIONS if keys.has(name)]
        if default is not None and not any(section.values for section in sections):
            sections = [Config(default, f"{keys.place}: {_SECTIONS[0]}")]
        self._sections = sections
        self.kind = self._find_kind(kinds)
        for section in sections:
            for key in sorted(section.values.keys() - _KEYS[self.kind] - _COMMON):
                section.only(key)
        for place in (keys, *sections):
            place.only("partial_rotary_factor", 1, 1.0)
        found = self._number("rope_theta", top_level=True)
        self.theta = theta if found is None else found
        self.original_context = self._original_context() if _ORIGINAL in _KEYS[self.kind] else None

    def rotary(self, head_dim: int, width: int | None = None) -> Rotary:
        """The rotary position encoding.

        Args:
            head_dim: width of a head of queries and keys.
            width: how much of it is rotated; None for all of it.

        Raises:
            PackError: a setting is missing or out of range.
        """
        rotated = head_dim if width is None else width
        with np.errstate(all="ignore"):
            frequencies, scale = self._frequencies(rotated)
        values = () if frequencies is None else tuple(float(value) for value in frequencies)
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise self._place("factor").refusal("factor", "one that gives frequencies in the range of f32")
        return Rotary(theta=self.theta, width=width, frequencies=values, scale=scale)

    @property
    def score_multiplier(self) -> float:
        """What DeepSeek models multiply the scale of scores by: the square of YaRN's factor for `mscale_all_dim`."""
        every = self._number("mscale_all_dim", above=-1.0) if self.kind == "yarn" else None
        return yarn_scale(self._factor(), every) ** 2 if every else 1.0

    def _frequencies(self, width: int) -> tuple[Floats | None, float]:
        """`[width / 2]`, None where they follow from theta; and what cosine and sine are multiplied by."""
        match self.kind:
            case "default":
                return None, 1.0
            case "linear":
                return plain_frequencies(self.theta, width) / np.float32(self._factor()), 1.0
            case "llama3":
                return self._llama3(width), 1.0
            case "yarn":
                return self._yarn(width), self._yarn_attention()
            case _:
                return self._longrope(width)

    def _llama3(self, width: int) -> Floats:
        factor, context = self._factor(), self._context()
        low, high = self.required("low_freq_factor"), self.required("high_freq_factor")
        if high <= low:
            raise self._place("high_freq_factor").refusal("high_freq_factor", f"more than low_freq_factor {low:g}")
        plain = plain_frequencies(self.theta, width)
        lengths = 2 * math.pi / plain
        scaled = np.where(lengths > context / low, plain / factor, plain)
        smooth = (context / lengths - low) / (high - low)
        between = ~(lengths < context / high) & ~(lengths > context / low)
        mixed = (1 - smooth) * scaled / factor + smooth * scaled
        return np.where(between, mixed, scaled).astype(np.float32)

    def _yarn(self, width: int) -> Floats:
        if self.theta <= 1:
            raise self._keys.refusal("rope_theta", "a number above 1 for yarn")
        factor = self._factor()
        low, high = yarn_range(
            self._number("beta_fast") or 32,
            self._number("beta_slow") or 1,
            width,
            self.theta,
            self._context(),
            truncate=self._place("truncate").flag("truncate", default=True),
        )
        one, powers = np.float32(1), plain_powers(self.theta, width)
        kept = one - _ramp(low, high, width // 2)
        return one / (np.float32(factor) * powers) * (one - kept) + one / powers * kept

    def _yarn_attention(self) -> float:
        given = self._number("attention_factor")
        if given is not None:
            return given
        factor = self._factor()
        some, every = self._number("mscale", above=-1.0), self._number("mscale_all_dim", above=-1.0)
        return yarn_scale(factor, some) / yarn_scale(factor, every) if some and every else yarn_scale(factor)

    def _longrope(self, width: int) -> tuple[Floats, float]:
        """Those for contexts up to the original one; beyond it the model would use others."""
        short = np.array(self._place("short_factor").numbers("short_factor", width // 2, LARGEST), np.float32)
        self._place("long_factor").numbers("long_factor", width // 2, LARGEST)
        scale = self._number("short_mscale")
        if scale is None:
            scale = self._number("attention_factor")
        if scale is None:
            factor = self._factor()
            scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self._context()))
        return np.float32(1) / (short * plain_powers(self.theta, width)), scale

    def _find_kind(self, kinds: tuple[str, ...]) -> str:
        kind: str | None = None
        for section in self._sections:
            for key in ("rope_type", "type"):
                if not section.has(key):
                    continue
                found = section.values[key]
                name = _ALIASES.get(found, found) if isinstance(found, str) else None
                if name not in kinds:
                    raise section.refusal(key, " or ".join(map(repr, kinds)))
                if kind not in (None, name):
                    raise section.refusal(key, f"{kind!r} as elsewhere in the file")
                kind = name
        return kind or "default"

    def _original_context(self) -> int:
        """At top level it wins, as it does in transformers."""
        for place in (self._keys, *self._sections):
            if place.has(_ORIGINAL):
                return place.integer(_ORIGINAL, 2, limits.MAX_DIMENSION)
        return self._keys.integer("max_position_embeddings", 2, limits.MAX_DIMENSION)

    def _context(self) -> int:
        assert self.original_context is not None
        return self.original_context

    def _factor(self) -> float:
        """By how much the context is extended; where it is not said, what the two context lengths say."""
        found = self._number("factor")
        if found is None and self.original_context is not None and self.kind != "llama3":
            longest = self._keys.integer("max_position_embeddings", 1, limits.MAX_DIMENSION)
            return longest / self.original_context
        return self.required("factor") if found is None else found

    def required(self, key: str) -> float:
        """A number that must be set.

        Raises:
            PackError: it is not, or is out of range.
        """
        return self._place(key).number(key, 0, LARGEST)

    def _number(self, key: str, *, above: float = 0.0, top_level: bool = False) -> float | None:
        """A number wherever it stands, None where it does not.

        Raises:
            PackError: it is out of range, or stands in two places with different values.
        """
        value: float | None = None
        for place in (*((self._keys,) if top_level else ()), *self._sections):
            if place.has(key):
                found = place.number(key, above, LARGEST)
                if value is not None and found != value:
                    raise place.refusal(key, f"{value:g} as elsewhere in the file")
                value = found
        return value

    def _place(self, key: str) -> Config:
        """The section that has a key, or else the first."""
        given = [section for section in self._sections if section.has(key)]
        return (given or self._sections or [self._keys])[0]


def plain_powers(theta: float, width: int) -> Floats:
    """`theta ** (2 i / width)`: `[width / 2]` f32.

    Rounded once from f64: an f32 power differs from processor to processor, and packages must not.
    """
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    base = float(np.float32(theta))
    return np.array([base**exponent for exponent in exponents.tolist()], np.float32)


def plain_frequencies(theta: float, width: int) -> Floats:
    """`theta ** (-2 i / width)`: `[width / 2]` f32."""
    return np.float32(1) / plain_powers(theta, width)


def yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    """By how much YaRN enlarges scores when a context is extended `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def yarn_range(
    fast: float, slow: float, width: int, theta: float, context: int, *, truncate: bool
) -> tuple[float, float]:
    """Between which frequencies YaRN passes from keeping to stretching: those of `fast` and `slow` turns in `context`.

    Args:
        fast: turns above which a frequency is kept.
        slow: turns below which it is stretched.
        width: rotated width; frequencies are counted from 0 to `width / 2`.
        theta: base of the frequencies.
        context: tokens of the original context.
        truncate: whether the bounds are moved outwards to whole numbers.
    """

    def dimension(turns: float) -> float:
        return (width * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, width - 1)


def _ramp(low: float, high: float, count: int) -> Floats:
    """0 up to `low`, 1 from `high` on, straight in between: `[count]` f32."""
    if low == high:
        high += 0.001  # as the reference does, so that nothing is divided by zero
    line = (np.arange(count, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    held: Floats = np.clip(line, np.float32(0), np.float32(1))
    return held
