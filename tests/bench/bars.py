"""Draws numbers as horizontal bars, as SVG, in groups; dark where the reader's screen is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from estream_packer.markup import Markup, element

WIDTH: Final = 760
LEFT: Final = 180
RIGHT: Final = 690
TOP: Final = 64
BAR: Final = 20
STEP: Final = 27
"""Pixels from one bar to the next."""
GROUP: Final = 34
"""Pixels above the bars of a group, for its name."""
STYLE: Final = Markup("""
.ground { fill: #ffffff }
.text { fill: #0f172a }
.quiet { fill: #475569 }
.bar { fill: #94a3b8 }
.ours { fill: #1f5fa8 }
@media (prefers-color-scheme: dark) {
  .ground { fill: #0d1117 }
  .text { fill: #f1f5f9 }
  .quiet { fill: #a3b1c6 }
  .bar { fill: #64748b }
  .ours { fill: #58a6ff }
}
""")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        name: whose it is.
        value: its length.
        ours: whether it stands out.
    """

    name: str
    value: float
    ours: bool


def bars_svg(title: str, subtitle: str, groups: Mapping[str, Sequence[Bar]], unit: str = "s") -> Markup:
    """The picture: a group of bars for each name, all on one scale from zero, in one unit."""
    longest = max(bar.value for bars in groups.values() for bar in bars)
    parts = [
        element("text", title, x=20, y=30, class_="text", font_size=16, font_weight=600),
        element("text", subtitle, x=20, y=50, class_="quiet"),
    ]
    y = TOP
    for name, bars in groups.items():
        y += GROUP
        parts.append(element("text", name, x=20, y=y - 10, class_="text", font_weight=600))
        for bar in bars:
            parts += _bar(bar, y, (RIGHT - LEFT) * bar.value / longest, unit)
            y += STEP
    height = y + 14
    return element(
        "svg",
        element("title", title),
        element("style", STYLE),
        element("rect", width=WIDTH, height=height, class_="ground"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
        font_family="system-ui, sans-serif",
        font_size=13,
    )


def _bar(bar: Bar, y: float, length: float, unit: str) -> list[Markup]:
    """A name, a bar of so many pixels and its number."""
    weight, baseline = 600 if bar.ours else 400, y + 15
    return [
        element("text", bar.name, x=LEFT - 10, y=baseline, class_="text", font_weight=weight, text_anchor="end"),
        element("rect", x=LEFT, y=y, width=length, height=BAR, rx=3, class_="ours" if bar.ours else "bar"),
        element("text", f"{bar.value:.1f} {unit}", x=LEFT + length + 8, y=baseline, class_="text", font_weight=weight),
    ]
