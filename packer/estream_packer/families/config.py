"""Typed look-ups in a checkpoint's configuration. Every refusal names the key, what was found and what was expected.

Null means the same as an absent key: Hugging Face writes it for "not set".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from estream_spec.errors import PackError
from estream_spec.model_rules import as_f32

LARGEST: Final = 1e30
"""Of any number that something is multiplied by."""


class Config:
    """A configuration object, read key by key.

    Attributes:
        values: the object as it was decoded.
        place: what to call it in a message.
    """

    def __init__(self, values: Mapping[str, object], place: str = "config.json"):
        self.values, self.place = values, place

    def has(self, key: str) -> bool:
        """Whether the key is set."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`; `default`, which must be one too, where it is not set.

        Raises:
            PackError: it is not set and there is no default, or anything else.
        """
        value = self.values[key] if self.has(key) else default
        if type(value) is not int or not low <= value <= high:
            raise self.refusal(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, above: float, high: float, default: float | None = None) -> float:
        """A number above `above`, at most `high`, which it must still be in f32. Whole numbers are accepted.

        Where it is not set it is `default`.

        Raises:
            PackError: it is not set and there is no default, or anything else.
        """
        value = self.values[key] if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            value = math.nan
        if not (above < value <= high and above < as_f32(value)):
            raise self.refusal(key, f"a number above {above:g}, at most {high:g}")
        return float(value)

    def numbers(self, key: str, count: int, high: float) -> tuple[float, ...]:
        """A list of `count` numbers above 0, at most `high`.

        Raises:
            PackError: it is not set, or anything else.
        """
        values = self.values.get(key)
        if isinstance(values, list) and len(values) == count:
            each = [Config({key: value}, self.place) for value in values]
            return tuple(one.number(key, 0, high) for one in each)
        raise self.refusal(key, f"a list of {count} numbers")

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where it is not set.

        Raises:
            PackError: it is anything else.
        """
        if not self.has(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def section(self, key: str) -> Config:
        """The object below a key; an empty one where it is not set.

        Raises:
            PackError: it is not an object.
        """
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return Config(value, f"{self.place}: {key}")

    def only(self, key: str, *allowed: object) -> None:
        """Refuse a key that is set to anything but `allowed`.

        Raises:
            PackError: it is.
        """
        if self.has(key) and not any(
            type(self.values[key]) is type(one) and self.values[key] == one for one in allowed
        ):
            raise self.refusal(key, " or ".join(repr(one) for one in allowed) or "it not to be set")

    def refusal(self, key: str, expected: str, hint: str | None = None) -> PackError:
        """The error for a key that has a wrong value."""
        found = repr(self.values[key]) if key in self.values else "absent"
        if len(found) > 80:
            found = found[:77] + "..."
        return PackError(f"{key} is {found}, expected {expected}", path=self.place, hint=hint)
