"""Numbers of bytes as people read them."""

from __future__ import annotations

from typing import Final

UNITS: Final = (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1))
"""Unit, power of two, decimals."""


def bytes_text(count: int) -> str:
    """A number of bytes as people read it, in units of 1024 as the options take them."""
    for unit, power, decimals in UNITS:
        if abs(count) >= 1 << power:
            return f"{count / (1 << power):.{decimals}f} {unit}"
    return f"{count} bytes"
