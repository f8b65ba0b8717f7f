"""Draws what packages lose against what they take, as SVG."""

from __future__ import annotations

from math import ceil, floor, log10
from pathlib import Path
from typing import Final

from estream_packer.chart import (
    COLOURS,
    LABEL_GAP,
    Axis,
    bytes_axis,
    bytes_ticks,
    circle,
    heading,
    label_places,
    picture,
    row_tick,
)
from estream_packer.markup import Markup, element
from estream_packer.quality import PackageQuality, Quality
from estream_spec.sizes import bytes_text

WIDTH: Final = 890
LEFT: Final = 72
RIGHT: Final = 560
TOP: Final = 80
PLOT_HEIGHT: Final = 320
"""Pixels, or as many as the labels need."""
BELOW: Final = 64
"""Pixels below the plot."""
LEAST: Final = 1e-9
"""Nats that a divergence is drawn at when it is less, or nothing at all."""


def quality_svg(quality: Quality) -> Markup:
    """The picture: a mark for each package, the lower the nearer to the reference, the more to the left the smaller."""
    packages = quality.packages
    divergences = [_drawn(each) for each in packages]
    bottom = TOP + max(PLOT_HEIGHT, LABEL_GAP * len(packages))
    x = bytes_axis([each.file_length for each in packages], LEFT, RIGHT)
    y = Axis(10.0 ** floor(log10(min(divergences) / 1.2)), 10.0 ** ceil(log10(max(divergences) * 1.2)), bottom, TOP)
    measured = (
        f"{quality.tokens:,} tokens of {quality.text}, each predicted from at most {quality.window}; "
        f"perplexity of the reference {quality.perplexity:.2f}"
    )
    parts = [
        heading(f"Packages beside {quality.reference}", LEFT),
        element("text", "mean KL divergence of their predictions from the reference's, nats, by size", x=LEFT, y=45),
        element("text", measured, x=LEFT, y=62),
        *bytes_ticks(x, TOP, bottom),
    ]
    for tick in y.decimal_ticks():
        parts += row_tick(f"{tick:g}", LEFT, RIGHT, y(tick))
    parts.append(element("text", "size", x=(LEFT + RIGHT) / 2, y=bottom + 44, text_anchor="middle"))
    labels = label_places([y(each) for each in divergences], bottom - 14)
    for number, (each, at, label_y) in enumerate(zip(packages, divergences, labels, strict=True)):
        parts += _mark(each, COLOURS[number % len(COLOURS)], x(each.file_length), y(at), label_y)
    return picture("Quality of packages by size", WIDTH, bottom + BELOW, *parts)


def _mark(each: PackageQuality, colour: str, x: float, y: float, label_y: float) -> list[Markup]:
    """One package, and what it is."""
    found = each.comparison
    size = f"{bytes_text(each.file_length)}, {each.bits_per_weight:.2f} bits per weight"
    quality = f"perplexity × {found.perplexity_ratio:.4f}, same token {found.top1_agreement:.1%}"
    leader = f"M{x:.1f},{y:.1f}L{RIGHT + 12},{label_y - 4:.1f}"
    return [
        element("path", d=leader, stroke=colour, stroke_width=0.6, stroke_dasharray="2 3"),
        circle(x, y, 5, colour, "#ffffff"),
        element("text", f"{Path(each.package).name}: {size}", x=RIGHT + 16, y=label_y, fill=colour, font_weight=600),
        element("text", quality, x=RIGHT + 16, y=label_y + 14, fill=colour),
    ]


def _drawn(each: PackageQuality) -> float:
    return max(each.comparison.mean_kl, LEAST)
