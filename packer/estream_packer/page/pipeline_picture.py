"""Draws a run: a track for computing, for each lane and for each bank, over one axis of time.

A track is cut into `CELLS` equal spans of time. A cell shows one of the things that were done in it, be that nothing,
chosen so that any stretch shows the shares it has however many events there are, and a page has a bounded size. Runs of
equal cells become one step of a path as wide as the track is high, so that looking closer is a matter of the track's
`viewBox` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_packer.markup import Markup, element
from estream_spec.trace import ACTIVITIES, BANK_EVENTS, COMPUTING, IDLE, WORDS, Event, Trace

CELLS: Final = 20_000
"""Spans of time in a track: about twenty for each point of a wide screen."""
WHOLE: Final = 0.999
"""A thing that takes this share of a cell takes all of it."""
MAX_TRACKS: Final = 32
"""Tracks drawn, each of at most 0.15 MB; a run that keeps all experts has a bank for every group."""
MAX_LAYERS: Final = 1024
"""Stretches of layers drawn above the tracks."""
KINDS: Final = (*ACTIVITIES, "read", *BANK_EVENTS)
"""What has a colour of its own, in the order of the legend."""
TICKS: Final = 6
"""Marks on the axis, about."""
LABELLED_WIDTH: Final = 1.5
"""Percent of the run from which a layer has its number above it."""
STEPS: Final = (1, 2, 5, 10)


def pipeline_picture(trace: Trace) -> Markup:
    """The tracks, whole; the page's script lets a reader look closer."""
    tracks = trace.tracks()
    ends = (event.ts + event.dur for events in tracks.values() for event in events)
    total = max(1.0, trace.other_data.stats.total_s * 1e6, max(ends, default=0.0))
    names = sorted(tracks, key=_order)
    left = len(names) - MAX_TRACKS
    spans = list(_layer_spans(tracks[COMPUTING]))
    more = len(spans) - MAX_LAYERS
    rows = [_layers(spans[:MAX_LAYERS], total), *(_track(name, tracks[name], total) for name in names[:MAX_TRACKS])]
    axis = element("svg", *_ticks(total), class_="axis", width="100%", height=20, aria_hidden="true")
    return element(
        "div",
        *rows,
        element("span", "time"),
        axis,
        element("span", f"and {left:,} more tracks", class_="left-out") if left > 0 else "",
        element("span", f"and {more:,} more stretches of layers", class_="left-out") if more > 0 else "",
        id="timeline",
        class_="tracks",
        tabindex=0,
        role="group",
        aria_label="The run over time; the tables below tell the same in figures.",
        data_total=total,
        data_cells=CELLS,
    )


def kind_class(name: str) -> str:
    """What a kind of event is called in the page's style."""
    return name.replace(" ", "-")


def kind_words(name: str) -> str:
    """What a kind of event is called where people read it."""
    return next((words for activity, words in WORDS.items() if activity == name), name)


def duration_text(microseconds: float) -> str:
    """A time with three figures and a unit that suits it."""
    unit, size = next(((unit, size) for unit, size in (("s", 1e6), ("ms", 1e3)) if microseconds >= size), ("µs", 1.0))
    value = microseconds / size
    digits = max(0, 2 - math.floor(math.log10(value))) if value >= 1e-2 else 0
    return f"{value:.{digits}f} {unit}"


def _order(name: str) -> tuple[int, int]:
    """Computing, then lanes, then banks, by number."""
    kind, _, number = name.partition(" ")
    return (COMPUTING, "lane", "bank").index(kind), int(number or 0)


def _track(name: str, events: Sequence[Event], total: float) -> Markup:
    """A name with its share, and a path for each kind of event."""
    cells = cells_of(events, total)
    busy = sum(event.dur for event in events if event.name not in IDLE)
    paths = []
    for number, kind in enumerate(KINDS):
        if steps := _steps(cells, number):
            spent = sum(event.dur for event in events if event.name == kind)
            title = element(
                "title", f"{name}: {kind_words(kind)}, in all {duration_text(spent)}, {spent / total:.1%} of the run"
            )
            paths.append(element("path", title, class_=f"line-{kind_class(kind)}", d=steps))
    word = "full" if name.startswith("bank ") else "busy"
    label = element("span", name, element("small", f" {busy / total:.0%} {word}"))
    box = element(
        "svg", *paths, class_="track", viewBox=f"0 0 {CELLS} 1", preserveAspectRatio="none", width="100%", height=24,
        role="img", aria_label=f"{name}: {word} {busy / total:.1%} of the run",
    )  # fmt: skip
    return Markup(label + box)


def cells_of(events: Sequence[Event], total: float) -> npt.NDArray[np.int64]:
    """What each cell of a track shows.

    Where it has several things, the one that is owed most: each thing gets its share of each cell on account, and
    pays for a cell that shows it. So what always takes the smaller part of a cell is seen, too, as often as it is due.

    Args:
        events: those of the track, none at the same time as another.
        total: microseconds that all cells are together.

    Returns:
        Index into `KINDS` of each cell, `len(KINDS)` for nothing. `[CELLS] int64`.
    """
    spent = np.zeros((len(KINDS) + 1, CELLS))
    for number, kind in enumerate(KINDS):
        times = np.array([(event.ts, event.ts + event.dur) for event in events if event.name == kind])
        if len(times):
            spent[number] = _spent(times * (CELLS / total))
    spent[-1] = 1 - spent[:-1].sum(axis=0)
    shown: npt.NDArray[np.int64] = spent.argmax(axis=0)
    owed = np.zeros(len(KINDS) + 1)
    for cell in np.flatnonzero(spent.max(axis=0) < WHOLE).tolist():
        share = spent[:, cell]
        owed += share
        chosen = np.where(share > 1 - WHOLE, owed, -np.inf).argmax()
        shown[cell] = chosen
        owed[chosen] -= 1
    return shown


def _spent(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The share of each cell that lies in one of several spans; `times` are begins and ends in cells, `[spans, 2]`."""
    edges = np.clip(times, 0, CELLS)
    cells = np.minimum(edges.astype(np.int64), CELLS - 1)
    # How much of the spans lies before a cell's end is a ramp from each begin less a ramp from each end: summed twice.
    slopes = np.zeros(CELLS + 1)
    shares = np.zeros(CELLS)
    for sign, column in ((1.0, 0), (-1.0, 1)):
        place, within = cells[:, column], edges[:, column] - cells[:, column]
        np.add.at(shares, place, sign * (1 - within))
        np.add.at(slopes, place + 1, sign)
    return shares + np.cumsum(slopes[:CELLS])


def _steps(cells: npt.NDArray[np.int64], kind: int) -> str:
    """A path through the cells of one kind, each run of them a step."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (cells == kind).astype(np.int8), [0]))))
    moves = np.diff(np.concatenate(([0], edges)))
    steps = [f"m{gap} 0h{length}" for gap, length in moves.reshape(-1, 2).tolist()]
    return f"M0 .5{''.join(steps)}" if steps else ""


def _layers(spans: Sequence[tuple[int, float, float]], total: float) -> Markup:
    """Which layer was at work when, above the tracks."""
    boxes = []
    for number, (layer, begin, end) in enumerate(spans):
        place, size = 100 * begin / total, 100 * (end - begin) / total
        words = f"layer {layer}: {duration_text(begin)} to {duration_text(end)}"
        content = [
            element("title", words),
            element("rect", class_="odd" if number % 2 else None, width="100%", height=20),
        ]
        if size >= LABELLED_WIDTH:
            content.append(element("text", str(layer), x="50%", y=14, text_anchor="middle"))
        boxes.append(
            element("svg", *content, x=f"{place:.4f}%", width=f"{size:.4f}%", height=20, data_begin=begin, data_end=end)
        )
    picture = element("svg", *boxes, class_="layers", width="100%", height=20, role="img", aria_label="layers")
    return Markup(element("span", "layer") + picture)


def _layer_spans(events: Sequence[Event]) -> Iterator[tuple[int, float, float]]:
    """Each layer with when it began and ended, in the order of time."""
    for layer, group in groupby(events, lambda event: event.args.layer):
        spans = list(group)
        if layer is not None:
            yield layer, spans[0].ts, max(each.ts + each.dur for each in spans)


def _ticks(total: float) -> Iterator[Markup]:
    """Round times along the axis, as the page's script makes them anew for a closer look."""
    rough = total / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in STEPS if power * each >= rough * 0.999)
    for number in range(math.floor(total / step) + 1):
        place = f"{100 * number * step / total:.4f}%"
        yield element("line", x1=place, x2=place, y1=0, y2=5)
        anchor = "start" if number == 0 else "end" if number * step > 0.97 * total else "middle"
        yield element("text", _tick_text(number * step), x=place, y=17, text_anchor=anchor)


def _tick_text(microseconds: float) -> str:
    unit, size = ("s", 1e6) if microseconds >= 1e6 else ("ms", 1e3) if microseconds >= 1e3 else ("µs", 1.0)
    return f"{microseconds / size:g} {unit}" if microseconds else "0"
