"""Draws where everything is in a package: rows of bars, to scale, each row a closer look at a part of the one above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from estream_packer.inspection import Extent, Inspection, RecordRangeSummary
from estream_packer.markup import Markup, element, swatch

LEAST_WIDTH: Final = 0.3
"""Percent of a row that even the smallest part gets, so that it can be seen and pointed at."""
MOST_FOR_SMALL: Final = 12.0
"""Percent of a row that all such parts get together, at most."""
LABELLED_WIDTH: Final = 18.0
"""Percent of a row from which a part has its name in it."""
EDGED_WIDTH: Final = 1.0
"""Percent of a row from which a part has an edge."""
MAX_LABELLED: Final = 20
"""Parts in a row of which each has its name in it, if that is a number."""
TELLING: Final = (
    "To scale, but for what would be too narrow to see. Point at a bar, or move to it with the tab key, to read it."
)
PADDING: Final = "section-padding"
"""Id of the table row for all padding together."""
RECORDS: Final = ("experts", "dense")
PLAIN_KINDS: Final = ("superblocks", "directory", "padding", "free", "manifest", "experts", "dense", "tokenizer")
"""Kinds of sections that are called as they are coloured."""


@dataclass(frozen=True, slots=True)
class Part:
    """A bar.

    Attributes:
        kind: decides its colour.
        label: what is written in it where there is room.
        length: bytes.
        words: everything about it, in words.
        target: id of the table row that tells more.
    """

    kind: str
    label: str
    length: int
    words: str
    target: str


def layout_picture(found: Inspection) -> Markup:
    """The rows: the package; its expert records by layer; its dense records; and what is neither."""
    total = found.summary.file_length
    parts = [_section(index, extent) for index, extent in enumerate(found.extents)]
    rest = [part for part in parts if part.kind not in RECORDS]
    rows = [
        _row("The package", total, parts, _legend(parts)),
        _row("Expert records by layer", total, _ranges(found, "experts")),
        _row("All but expert records", total, [part for part in parts if part.kind != "experts"]),
        _row("Dense records", total, _ranges(found, "dense")),
        _row("What is no record", total, rest),
    ]
    readout = element("p", TELLING, class_="readout")
    return element("div", *rows, readout, class_="picture", id="layout-picture")


def kind_of(name: str) -> str:
    """What colours a section, from what it is called."""
    if name in PLAIN_KINDS:
        return name
    for kind in ("graph", "binary", "schedule", "table", "device configuration", "signature"):
        if kind in name:
            return kind.replace(" ", "-")
    return "other"


def share_text(share: float) -> str:
    """A share, 0 to 1, of which none is shown as nothing that is something."""
    return "under 0.01%" if 0 < share < 0.5e-4 else f"{share:.2%}"


def widths(lengths: Sequence[int]) -> list[float]:
    """Percent of a row by length, small ones wider than they are and the others narrower for it."""
    if not (total := sum(lengths)):
        return [100 / len(lengths)] * len(lengths)
    least = min(LEAST_WIDTH, MOST_FOR_SMALL / len(lengths))
    small = [100 * length / total < least for length in lengths]
    large = sum(length for length, is_small in zip(lengths, small, strict=True) if not is_small)
    room = 100 - least * sum(small)
    return [least if is_small else room * length / large for length, is_small in zip(lengths, small, strict=True)]


def _section(index: int, extent: Extent) -> Part:
    decoded = f", {extent.length:,} decoded from {extent.codec}" if extent.codec != "none" else ""
    words = (
        f"{extent.name}: offset {extent.offset:,}, {extent.stored_length:,} bytes{decoded}, {share_text(extent.share)}"
    )
    target = PADDING if extent.name == "padding" else f"section-{index}"
    return Part(kind_of(extent.name), extent.name, extent.stored_length, f"{words} of the package", target)


def _ranges(found: Inspection, section: str) -> list[Part]:
    return [_range(each) for each in found.ranges if each.section == section]


def _range(each: RecordRangeSummary) -> Part:
    length = each.count * each.record_length
    if each.section == "experts":
        what, label = f"layer {each.layer}: {each.count} experts of {each.record_length:,} bytes", f"{each.layer}"
    else:
        what, label = each.name, each.name
    matrices = f" ({', '.join(each.matrices)})" if each.matrices else ""
    words = f"{what}{matrices}: offset {each.offset:,}, {length:,} bytes"
    return Part(each.section, label, length, words, f"records-{each.section}")


def _row(title: str, total: int, parts: Sequence[Part], legend: Markup | None = None) -> Markup:
    """A caption and bars; nothing where there are no parts."""
    if not parts:
        return Markup("")
    length = sum(part.length for part in parts)
    share = f", {share_text(length / total)}" if length < total else ""
    caption = element("figcaption", element("b", title), f" {length:,} bytes{share}")
    sizes = widths([part.length for part in parts])
    places = [0.0, *accumulate(sizes)]
    bars = [
        _bar(part, place, size, part.label.isdigit() and len(parts) <= MAX_LABELLED)
        for part, place, size in zip(parts, places, sizes, strict=False)
    ]
    picture = element("svg", *bars, class_="bars", role="group", aria_label=title, width="100%", height=38)
    return element("figure", caption, picture, legend or "")


def _bar(part: Part, place: float, size: float, labelled: bool) -> Markup:
    box = element("rect", class_=f"fill-{part.kind}{' edged' if size >= EDGED_WIDTH else ''}", width="100%", height=38)
    content = [element("title", part.words), box]
    if size >= LABELLED_WIDTH:
        content.append(element("text", part.label, x=8, y=24))
    elif labelled:
        content.append(element("text", part.label, x="50%", y=24, text_anchor="middle"))
    inside = element("svg", *content, x=f"{place:.4f}%", width=f"{size:.4f}%", height=38)
    return element("a", inside, href=f"#{part.target}", aria_label=part.words)


def _legend(parts: Sequence[Part]) -> Markup:
    """Kinds in the order of the package, with their bytes."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.kind] = sizes.get(part.kind, 0) + part.length
    items = [
        element("li", swatch(kind), f"{kind.replace('-', ' ')} ", element("span", f"{length:,}", class_="quiet"))
        for kind, length in sizes.items()
    ]
    return element("ul", *items, class_="legend")
