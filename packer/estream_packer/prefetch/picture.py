"""Draws whether a prefetch router's confidence is deserved, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from estream_packer.chart import COLOURS, GRID, circle, heading, label_places, picture, row_tick
from estream_packer.markup import Markup, element
from estream_packer.prefetch.report import Bin, PrefetchReport, calibration_error

WIDTH: Final = 760
LEFT: Final = 72
SIDE: Final = 400
"""Pixels of each side of the plot."""
TOP: Final = 80
BELOW: Final = 64
"""Pixels below the plot."""
MOST_LAYERS: Final = 8
"""Layers that have a line of their own; of more, all together have the only one."""


def reliability_svg(report: PrefetchReport) -> Markup:
    """The picture: how often predicted experts were enough, over the chance that was told; on the diagonal it is."""
    right, bottom = LEFT + SIDE, TOP + SIDE
    lines: list[tuple[str, Sequence[Bin]]] = [("all layers", report.reliability)]
    if len(report.layers) <= MOST_LAYERS:
        lines += [(f"layer {each.layer}", each.reliability) for each in report.layers]
    lines = [(name, bins) for name, bins in lines if bins]
    parts = [
        heading("Are predicted experts as often enough as was told?", LEFT),
        element("text", "how often they were, by the chance that the confidence model told", x=LEFT, y=45),
        element("text", _measured(report), x=LEFT, y=62),
    ]
    for tenth in range(0, 11, 2):
        parts += row_tick(f"{tenth * 10} %", LEFT, right, _y(tenth / 10))
        at = _x(tenth / 10)
        parts.append(element("path", d=f"M{at:.1f},{TOP}V{bottom}", stroke=GRID))
        parts.append(element("text", f"{tenth * 10} %", x=at, y=bottom + 18, text_anchor="middle"))
    parts.append(element("path", d=f"M{LEFT},{bottom}L{right},{TOP}", stroke="#94a3b8", stroke_dasharray="4 4"))
    parts.append(element("text", "chance that was told", x=(LEFT + right) / 2, y=bottom + 44, text_anchor="middle"))
    if lines:
        places = label_places([_y(bins[-1].found) for _, bins in lines], bottom - 14)
        for number, ((name, bins), label) in enumerate(zip(lines, places, strict=True)):
            parts += _line(name, bins, COLOURS[number % len(COLOURS)], label, right)
    return picture("Reliability of a prefetch router", WIDTH, bottom + BELOW, *parts)


def _line(name: str, bins: Sequence[Bin], colour: str, label: float, right: float) -> Iterator[Markup]:
    """One line, its marks, and what it is of."""
    points = " ".join(f"{_x(each.told):.1f},{_y(each.found):.1f}" for each in bins)
    yield element("polyline", points=points, fill="none", stroke=colour, stroke_width=1.5)
    for each in bins:
        yield circle(_x(each.told), _y(each.found), 3, colour, "#ffffff")
    yield element("text", name, x=right + 16, y=label, fill=colour, font_weight=600)
    yield element("text", f"calibration error {calibration_error(bins):.4f}", x=right + 16, y=label + 14, fill=colour)


def _measured(report: PrefetchReport) -> str:
    found = report.found
    return (
        f"{report.tokens['test']:,} tokens; at the calibrated targets {found.overlap:.2%} of needed experts predicted, "
        f"with {found.extra:.2f} beyond top_k"
    )


def _x(share: float) -> float:
    return LEFT + SIDE * share


def _y(share: float) -> float:
    return TOP + SIDE * (1 - share)
