"""Draws arena against time as SVG, one line per prompt length, by hand: no library is worth a chart of some lines."""

from __future__ import annotations

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
from estream_packer.planning import Planned, seconds_text
from estream_spec.planner import PromptPlan
from estream_spec.sizes import bytes_text

WIDTH: Final = 890
LEFT: Final = 72
RIGHT: Final = 650
TOP: Final = 64
PLOT_HEIGHT: Final = 352
"""Pixels, or as many as the labels need."""
BELOW: Final = 64
"""Pixels below the plot."""


def frontier_svg(planned: Planned) -> str:
    """The picture: a step of a line is the time that becomes possible with an arena of that size."""
    points = [each for plan in planned.plans for each in (*plan.frontier, plan.choice)]
    arenas, times = [each.arena_bytes for each in points], [each.time_s for each in points]
    bottom = TOP + max(PLOT_HEIGHT, LABEL_GAP * len(planned.plans))
    x = bytes_axis(arenas, LEFT, RIGHT)
    y = Axis(min(times) / 1.3, max(times) * 1.3, bottom, TOP)
    title = f"{planned.model} on {planned.profile}, {bytes_text(planned.memory_bytes)} of memory"
    parts = [
        heading(title, LEFT),
        element("text", "time to first token by arena size; ● chosen, ○ above the memory cap", x=LEFT, y=45),
        *bytes_ticks(x, TOP, bottom),
        *_time_ticks(y),
        element("text", "arena", x=(LEFT + RIGHT) / 2, y=bottom + 44, text_anchor="middle"),
    ]
    labels = label_places([y(plan.frontier[-1].time_s) for plan in planned.plans], bottom - 14)
    for number, (plan, label_y) in enumerate(zip(planned.plans, labels, strict=True)):
        parts += _line(plan, COLOURS[number % len(COLOURS)], label_y, x, y)
    return picture(f"{title}: time to first token by arena size", WIDTH, bottom + BELOW, *parts)


def _line(plan: PromptPlan, colour: str, label_y: float, x: Axis, y: Axis) -> list[Markup]:
    """One prompt length: steps to the right edge, a mark for each way to run it, and what was chosen."""
    corners = [f"M{x(plan.frontier[0].arena_bytes):.1f},{y(plan.frontier[0].time_s):.1f}"]
    corners += [f"H{x(each.arena_bytes):.1f}V{y(each.time_s):.1f}" for each in plan.frontier[1:]]
    parts = [element("path", d=f"{''.join(corners)}H{RIGHT}", fill="none", stroke=colour, stroke_width=1.6)]
    for each in plan.frontier:
        fill = "#ffffff" if each.arena_bytes > plan.arena_cap else colour
        parts.append(circle(x(each.arena_bytes), y(each.time_s), 2.6, fill, colour))
    choice = plan.choice
    parts.append(circle(x(choice.arena_bytes), y(choice.time_s), 6, colour, "#ffffff"))
    end = y(plan.frontier[-1].time_s)
    leader = f"M{RIGHT},{end:.1f}L{RIGHT + 12},{label_y - 4:.1f}"
    parts.append(element("path", d=leader, stroke=colour, stroke_width=0.8))
    what = f"{choice.policy}: {bytes_text(choice.arena_bytes)}, {seconds_text(choice.time_s)}"
    tokens = f"{plan.tokens:,} tokens"
    parts.append(element("text", tokens, x=RIGHT + 16, y=label_y, fill=colour, font_weight=600))
    return [*parts, element("text", what, x=RIGHT + 16, y=label_y + 14, fill=colour)]


def _time_ticks(y: Axis) -> list[Markup]:
    """A line at 1, 2 and 5 of each power of ten."""
    parts = []
    for tick in y.decimal_ticks():
        parts += row_tick(f"{tick:g} s" if tick >= 1 else f"{tick * 1e3:g} ms", LEFT, RIGHT, y(tick))
    return parts
