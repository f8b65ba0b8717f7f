"""What drawn charts have in common: logarithmic axes, their ticks, marks, and labels that do not overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Final

from estream_packer.markup import Markup, element

COLOURS: Final = ("#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0f766e", "#854d0e", "#475569")
GRID: Final = "#e2e8f0"
LABEL_GAP: Final = 32
"""Pixels between the labels of two lines or marks, which have two rows each."""
_UNITS: Final = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
_STEPS: Final = (1, 2, 5)
"""Numbers per power of ten that have a tick."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis: numbers from `low` to `high` go from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a number."""
        return self.start + log10(value / self.low) / log10(self.high / self.low) * (self.end - self.start)

    def decimal_ticks(self) -> Iterator[float]:
        """Numbers on it that are 1, 2 or 5 times a power of ten."""
        for power in range(floor(log10(self.low)), ceil(log10(self.high)) + 1):
            yield from (tick for step in _STEPS if self.low <= (tick := step * 10.0**power) <= self.high)


def bytes_axis(lengths: Sequence[int], start: float, end: float) -> Axis:
    """An axis from a power of two to a power of two, with room for all lengths."""
    return Axis(2 ** floor(log2(min(lengths))), 2 ** ceil(log2(max(lengths) + 1)), start, end)


def bytes_ticks(x: Axis, top: float, bottom: float) -> list[Markup]:
    """A line at powers of two, or at every other one or third where there are many."""
    low, high = round(log2(x.low)), round(log2(x.high))
    parts = []
    for power in range(low, high + 1, max(1, ceil((high - low) / 9))):
        at = x(2**power)
        parts.append(element("path", d=f"M{at:.1f},{top}V{bottom}", stroke=GRID))
        parts.append(element("text", _power_text(power), x=at, y=bottom + 18, text_anchor="middle"))
    return parts


def row_tick(label: str, left: float, right: float, at: float) -> list[Markup]:
    """A line across the chart, and what it stands for."""
    line = element("path", d=f"M{left},{at:.1f}H{right}", stroke=GRID)
    return [line, element("text", label, x=left - 8, y=at + 4, text_anchor="end")]


def circle(x: float, y: float, radius: float, fill: str, stroke: str) -> Markup:
    """A mark."""
    return element("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke, stroke_width=1.2)


def label_places(wanted: Sequence[float], bottom: float) -> list[float]:
    """Where labels stand: near where each is wanted, `LABEL_GAP` between any two, none below `bottom`."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    places = [wanted[index] for index in order]
    for place in range(1, len(places)):
        places[place] = max(places[place], places[place - 1] + LABEL_GAP)
    places[-1] -= max(0.0, places[-1] - bottom)
    for place in range(len(places) - 2, -1, -1):
        places[place] = min(places[place], places[place + 1] - LABEL_GAP)
    return [places[order.index(index)] for index in range(len(wanted))]


def picture(title: str, width: float, height: float, *parts: Markup) -> Markup:
    """A whole picture on white."""
    return element(
        "svg", element("title", title), element("rect", width=width, height=height, fill="#ffffff"), *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=width, height=height,
        font_family="system-ui, sans-serif", font_size=12, fill="#334155",
    )  # fmt: skip


def heading(text: str, left: float) -> Markup:
    """What a picture is of, at its top."""
    return element("text", text, x=left, y=26, font_size=15, font_weight=600, fill="#0f172a")


def _power_text(power: int) -> str:
    unit, shift = next((unit, shift) for unit, shift in _UNITS if power >= shift)
    return f"{1 << (power - shift)} {unit}"
