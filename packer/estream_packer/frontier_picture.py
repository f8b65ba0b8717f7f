"""Draws arena against time as SVG, one line per prompt length, by hand: no library is worth a chart of some lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Final

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
LABEL_GAP: Final = 32
"""Pixels between the labels of two lines, which have two rows each."""
COLOURS: Final = ("#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0f766e", "#854d0e", "#475569")
UNITS: Final = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
STEPS: Final = (1, 2, 5)
"""Numbers per power of ten that have a tick on the time axis."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis: numbers from `low` to `high` go from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + log10(value / self.low) / log10(self.high / self.low) * (self.end - self.start)


def frontier_svg(planned: Planned) -> str:
    """The picture: a step of a line is the time that becomes possible with an arena of that size."""
    points = [each for plan in planned.plans for each in (*plan.frontier, plan.choice)]
    arenas, times = [each.arena_bytes for each in points], [each.time_s for each in points]
    bottom = TOP + max(PLOT_HEIGHT, LABEL_GAP * len(planned.plans))
    x = _Axis(2 ** floor(log2(min(arenas))), 2 ** ceil(log2(max(arenas) + 1)), LEFT, RIGHT)
    y = _Axis(min(times) / 1.3, max(times) * 1.3, bottom, TOP)
    title = f"{planned.model} on {planned.profile}, {bytes_text(planned.memory_bytes)} of memory"
    height = bottom + BELOW
    parts = [
        element("title", f"{title}: time to first token by arena size"),
        element("rect", width=WIDTH, height=height, fill="#ffffff"),
        element("text", title, x=LEFT, y=26, font_size=15, font_weight=600, fill="#0f172a"),
        element("text", "time to first token by arena size; ● chosen, ○ above the memory cap", x=LEFT, y=45),
        *_arena_ticks(x, bottom),
        *_time_ticks(y),
        element("text", "arena", x=(LEFT + RIGHT) / 2, y=bottom + 44, text_anchor="middle"),
    ]
    for number, (plan, label_y) in enumerate(zip(planned.plans, _labels(planned.plans, y), strict=True)):
        parts += _line(plan, COLOURS[number % len(COLOURS)], label_y, x, y)
    return element(
        "svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height,
        font_family="system-ui, sans-serif", font_size=12, fill="#334155",
    )  # fmt: skip


def _line(plan: PromptPlan, colour: str, label_y: float, x: _Axis, y: _Axis) -> list[Markup]:
    """One prompt length: steps to the right edge, a mark for each way to run it, and what was chosen."""
    corners = [f"M{x(plan.frontier[0].arena_bytes):.1f},{y(plan.frontier[0].time_s):.1f}"]
    corners += [f"H{x(each.arena_bytes):.1f}V{y(each.time_s):.1f}" for each in plan.frontier[1:]]
    parts = [element("path", d=f"{''.join(corners)}H{RIGHT}", fill="none", stroke=colour, stroke_width=1.6)]
    for each in plan.frontier:
        fill = "#ffffff" if each.arena_bytes > plan.arena_cap else colour
        parts.append(_circle(x(each.arena_bytes), y(each.time_s), 2.6, fill, colour))
    choice = plan.choice
    parts.append(_circle(x(choice.arena_bytes), y(choice.time_s), 6, colour, "#ffffff"))
    end = y(plan.frontier[-1].time_s)
    leader = f"M{RIGHT},{end:.1f}L{RIGHT + 12},{label_y - 4:.1f}"
    parts.append(element("path", d=leader, stroke=colour, stroke_width=0.8))
    what = f"{choice.policy}: {bytes_text(choice.arena_bytes)}, {seconds_text(choice.time_s)}"
    tokens = f"{plan.tokens:,} tokens"
    parts.append(element("text", tokens, x=RIGHT + 16, y=label_y, fill=colour, font_weight=600))
    return [*parts, element("text", what, x=RIGHT + 16, y=label_y + 14, fill=colour)]


def _labels(plans: Sequence[PromptPlan], y: _Axis) -> list[float]:
    """Where each line's label stands: at the line's end, moved until no two overlap."""
    order = sorted(range(len(plans)), key=lambda index: y(plans[index].frontier[-1].time_s))
    places = [y(plans[index].frontier[-1].time_s) for index in order]
    for place in range(1, len(places)):
        places[place] = max(places[place], places[place - 1] + LABEL_GAP)
    over = max(0.0, places[-1] - (y.start - 14))
    places[-1] -= over
    for place in range(len(places) - 2, -1, -1):
        places[place] = min(places[place], places[place + 1] - LABEL_GAP)
    return [places[order.index(index)] for index in range(len(plans))]


def _arena_ticks(x: _Axis, bottom: float) -> list[Markup]:
    """A line at powers of two, or at every other one or third where there are many."""
    low, high = round(log2(x.low)), round(log2(x.high))
    step = max(1, ceil((high - low) / 9))
    parts = []
    for power in range(low, high + 1, step):
        at = x(2**power)
        parts.append(element("path", d=f"M{at:.1f},{TOP}V{bottom}", stroke="#e2e8f0"))
        parts.append(element("text", _power_text(power), x=at, y=bottom + 18, text_anchor="middle"))
    return parts


def _time_ticks(y: _Axis) -> list[Markup]:
    """A line at 1, 2 and 5 of each power of ten."""
    powers = range(floor(log10(y.low)), ceil(log10(y.high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in STEPS]
    parts = []
    for tick in ticks:
        if y.low <= tick <= y.high:
            at = y(tick)
            parts.append(element("path", d=f"M{LEFT},{at:.1f}H{RIGHT}", stroke="#e2e8f0"))
            label = f"{tick:g} s" if tick >= 1 else f"{tick * 1e3:g} ms"
            parts.append(element("text", label, x=LEFT - 8, y=at + 4, text_anchor="end"))
    return parts


def _power_text(power: int) -> str:
    unit, shift = next((unit, shift) for unit, shift in UNITS if power >= shift)
    return f"{1 << (power - shift)} {unit}"


def _circle(x: float, y: float, radius: float, fill: str, stroke: str) -> Markup:
    return element("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke, stroke_width=1.2)
