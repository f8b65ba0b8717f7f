"""A trace as a picture in characters: a line for each track, from the run's begin on the left to its end on the right.

A cell's height is the share of its slice of time in which the track is busy. Computing has two lines, one for what it
does and one for its waiting: reading hides behind computing where the second is empty. A bank is busy while what it
holds is ready or in use: computing has much to go on with where many banks are full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_spec.trace import COMPUTING, IDLE, Event, Trace

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
"""Heights of a cell, from nothing to all of it."""
LETTERS: Final = " .:-=+*#@"
"""The same for terminals that show ASCII only."""
MOST_BANKS: Final = 8
"""Banks that have lines of their own; the figures of others stand in the trace."""
LEAST_WIDTH: Final = 40


def timeline(trace: Trace, width: int, marks: str) -> list[str]:
    """The picture, line by line.

    Args:
        trace: what happened.
        width: characters in a line, at most, and at least `LEAST_WIDTH`.
        marks: heights of a cell, from nothing to all of it.
    """
    tracks = trace.tracks()
    end = trace.other_data.stats.total_s * 1e6
    lines = []
    for name, events in tracks.items():
        if name == COMPUTING:
            lines.append((name, [each for each in events if each.name not in IDLE]))
            lines.append(("waiting", [each for each in events if each.name == "wait"]))
        elif name.startswith("lane "):
            lines.append((name, events))
    banks = [(name, events) for name, events in tracks.items() if name.startswith("bank ")]
    lines += [(name, [each for each in events if each.name not in IDLE]) for name, events in banks[:MOST_BANKS]]
    label = max(len(name) for name, _ in lines) + 1
    cells = max(width, LEAST_WIDTH) - label - len("|| 100%")
    drawn = [_line(name.ljust(label), shares(events, end, cells), marks) for name, events in lines]
    seconds = f"{trace.other_data.stats.total_s:.3f} s"
    axis = f"{'':{label}}0{seconds:>{cells + 1}}"
    more = f", and {len(banks) - MOST_BANKS} more of them" if len(banks) > MOST_BANKS else ""
    return [axis, *drawn, f"banks while full: ready or in use{more}"]


def shares(events: Iterable[Event], end: float, cells: int) -> npt.NDArray[np.float64]:
    """The share of each of `cells` equal slices of time that events take.

    Args:
        events: in the order of time, one after the other.
        end: of the last slice, in microseconds.
        cells: how many slices.

    Returns:
        f64 `[cells]`, 0 to 1.
    """
    spans = np.array([(each.ts, each.ts + each.dur) for each in events], np.float64).reshape(-1, 2)
    if not len(spans) or end <= 0:
        return np.zeros(cells)
    # Time spent in events up to each moment goes straight from one begin or end of an event to the next.
    moments = np.maximum.accumulate(spans.ravel())
    spent = np.zeros_like(moments)
    spent[1::2] = spans[:, 1] - spans[:, 0]
    edges = np.linspace(0, end, cells + 1)
    within: npt.NDArray[np.float64] = np.diff(np.interp(edges, moments, np.cumsum(spent)))
    return np.clip(within * cells / end, 0, 1)


def _line(label: str, shown: npt.NDArray[np.float64], marks: str) -> str:
    """One line; what is there at all is seen, and only what is full looks full."""
    most = len(marks) - 1
    heights = np.where(shown > 0.999, most, np.minimum(np.ceil(shown * most), most - 1)).astype(int)
    heights[shown < 0.001] = 0
    return f"{label}|{''.join(marks[each] for each in heights)}| {shown.mean():4.0%}"
