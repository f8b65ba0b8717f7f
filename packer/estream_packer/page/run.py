"""What the page says of a run: in figures, in words, as tables, beside the picture of it."""

from __future__ import annotations

from typing import Final

from estream_packer.markup import Markup, element, join, swatch
from estream_packer.page.pipeline_picture import KINDS, duration_text, kind_class, kind_words, pipeline_picture
from estream_packer.page.tables import bar, figures, pairs, table
from estream_spec.trace import WORDS, Run, Trace

MOVES: Final = (("in", "Closer"), ("out", "Further"), ("left", "Earlier"), ("right", "Later"), ("all", "Whole run"))
"""What the buttons do, and what they are called."""
OTHER: Final = "gap", "other"
"""Colour and name of what is no activity: a gap in the track of computing."""
KEYS: Final = "or drag, or the arrow keys, + and − and 0, or the wheel with Ctrl"


def run_of(trace: Trace) -> Markup:
    """Figures, words, the picture and tables of a run."""
    run = trace.other_data
    buttons = [element("button", name, type="button", data_move=move) for move, name in MOVES]
    controls = element("div", *buttons, element("span", KEYS, class_="quiet"), id="moves", hidden="")
    readout = element("p", "Point at a track to read what it shows.", class_="readout", id="moment")
    return join(
        figures(_figures(run)),
        element("p", *sentences(run)),
        controls,
        element("div", pipeline_picture(trace), readout, class_="picture"),
        _legend(trace),
        element("div", _activities(run), element("div", _start_up(run), pairs(_settings(run))), class_="columns"),
    )


def sentences(run: Run) -> list[str]:
    """The bubble and the floors in words."""
    stats = run.stats
    what = "reading" if stats.io_busy_s >= stats.compute_busy_s else "computing"
    above = max(0.0, stats.total_s - stats.floor_s)
    return [
        f"Computing waited for experts during {stats.bubble:.1%} of the run: that is the bubble. ",
        f"Reading alone took {_seconds(stats.io_busy_s)} and computing alone {_seconds(stats.compute_busy_s)}. ",
        "Even if the shorter of them hid wholly behind the longer, the run would have taken "
        f"{_seconds(stats.floor_s)}, the time of {what}; ",
        f"it took {_seconds(above)} more than that.",
    ]


def _figures(run: Run) -> dict[str, str]:
    stats = run.stats
    return {
        "prefill": _seconds(stats.total_s),
        "tokens": f"{run.tokens:,}",
        "bubble": f"{stats.bubble:.1%}",
        "reading": _seconds(stats.io_busy_s),
        "computing": _seconds(stats.compute_busy_s),
        "read at": f"{stats.read_rate / 1e6:,.0f} MB/s",
    }


def _settings(run: Run) -> dict[str, str]:
    stats = run.stats
    return {
        "package": run.package,
        "file id": run.file_id,
        "device": run.device,
        "computing": f"{run.threads:,} threads, {run.backend}",
        "arena": f"{run.arena_bytes:,} bytes in {run.banks:,} banks, groups of {run.group_size:,}",
        "policy": run.policy,
        "lanes": f"{run.lanes:,}",
        "read": f"{stats.bytes_read:,} bytes in {stats.reads:,} reads, {stats.pieces:,} pieces",
        "memory": f"{stats.peak_resident_bytes:,} bytes resident at most, everything included",
        "reading mode": stats.reading_mode,
    }


def _activities(run: Run) -> Markup:
    """Where the time of computing went; what is no activity is there too, so that it adds up."""
    spent = run.stats.activity_s
    times = {(kind_class(name), words): spent[name] for name, words in WORDS.items() if name in spent}
    times[OTHER] = run.stats.other_s
    total = sum(times.values()) or 1.0
    rows = [
        (
            join(swatch(colour), words),
            _seconds(seconds),
            join(bar(seconds / total), f" {seconds / total:.1%}"),
        )
        for (colour, words), seconds in times.items()
    ]
    return table("What computing did", ("activity", "time", "share"), [*rows, ("run", _seconds(total), "")], ("time",))


def _start_up(run: Run) -> Markup:
    """What came before the run."""
    rows = [(name, _seconds(seconds)) for name, seconds in run.stats.start_up_s.items()]
    return table("Before it, starting up", ("part", "time"), rows, ("time",))


def _legend(trace: Trace) -> Markup:
    there = {event.name for events in trace.tracks().values() for event in events}
    kinds = [*((kind_class(kind), kind_words(kind)) for kind in KINDS if kind in there), OTHER]
    return element("ul", *(element("li", swatch(colour), words) for colour, words in kinds), class_="legend")


def _seconds(seconds: float) -> str:
    return duration_text(seconds * 1e6)
