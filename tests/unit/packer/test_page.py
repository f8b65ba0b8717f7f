from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib import resources

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader import open_package
from estream_packer.inspection import Inspection, inspect_package
from estream_packer.page.document import document
from estream_packer.page.layout_picture import LEAST_WIDTH, MOST_FOR_SMALL, widths
from estream_packer.page.pipeline_picture import (
    CELLS,
    KINDS,
    MAX_LAYERS,
    MAX_TRACKS,
    cells_of,
    duration_text,
    kind_class,
)
from estream_packer.page.run import sentences
from estream_packer.page.tables import configurations_table
from estream_spec.constants import SectionType
from estream_spec.manifest import DeviceConfiguration
from estream_spec.trace import COMPUTING, Details, Event, Name, Trace, assemble, decode_trace, encode_trace
from fixtures.packages import Draft, Section, binary, with_binaries
from fixtures.pages import Page
from fixtures.traces import Spans, trace_from

RUN: dict[str, Spans] = {
    "computing": [("embed", 0, 100_000), ("wait", 100_000, 400_000), ("products", 500_000, 500_000)],
    "lane 0": [("read", 0, 500_000)],
    "lane 1": [],
    "bank 0": [("filling", 0, 400_000), ("ready", 400_000, 100_000), ("in use", 500_000, 500_000)],
}
COLOURED = "fill-", "line-"
HOSTILE = (
    "</title></style></script><script>alert(1)</script>\"'&<img src=x onerror=y>\x1b\x00\u202egnp\u200f\u05d0\u05d1"
)


def inspected(draft: Draft) -> Inspection:
    with open_package(draft.seal()) as package:
        return inspect_package(package)


@pytest.fixture(scope="module")
def found() -> Inspection:
    return inspected(Draft())


def check_page(text: str) -> Page:
    """Parse a page that must stand alone: nothing from outside, one style and one script, and only these allowed."""
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "style", "action", "data", "background"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "xlink:href"):
            if name in attributes:
                assert attributes[name].removeprefix("#") in ids
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form"})
    [style] = [text for tag, text in page.texts if tag == "style"]
    [script] = [text for tag, text in page.texts if tag == "script"]
    assert not re.search(r"url\(|@import|fetch|XMLHttp|eval|innerHTML", style + script)
    colours = {name for _, each in page.elements for name in each.get("class", "").split() if name[:5] in COLOURED}
    assert {name for name in colours if f".{name} " not in style and f".{name}," not in style} == set()
    [policy] = [each["content"] for each in page.named("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    allowed = [f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in (style, script)]
    assert policy.split("; ")[:3] == [
        "default-src 'none'",
        f"style-src {allowed[0]}",
        f"script-src {allowed[1]}",
    ]
    return page


def test_a_page_says_what_is_in_the_package(found: Inspection) -> None:
    page = check_page(document(found))
    text = page.text()
    for words in (
        found.file_id,
        found.content_id,
        f"{found.summary.file_length:,}",
        "gate w4g32, up w4g32, down w4g32",
    ):
        assert words in text
    for extent in found.extents:
        assert f"{extent.offset:,}" in text
    padding = [each.stored_length for each in found.extents if each.name == "padding"]
    assert len(padding) > 1
    cells = [text.strip() for tag, text in page.texts if tag == "td"]
    assert cells[cells.index("padding between them") + 1 :][:1] == [f"{sum(padding):,}"]
    titles = [text for tag, text in page.texts if tag == "title"]
    [experts] = {title for title in titles if title.startswith("experts: ")}
    extent = next(each for each in found.extents if each.name == "experts")
    assert f"offset {extent.offset:,}, {extent.stored_length:,} bytes, {extent.share:.2%}" in experts
    assert sum("3 experts of" in title for title in titles) == len(found.ranges) // 2 - 1 == 2
    assert "timeline" not in [attributes.get("id") for _, attributes in page.elements]


def test_a_page_shows_binaries() -> None:
    other = binary(9, soc_model=69, architecture=79, compiler=HOSTILE)
    page = check_page(document(inspected(with_binaries(binary(3), other))))
    cells = [text.strip() for tag, text in page.texts if tag == "td"]
    start = cells.index("sm8650, Snapdragon 8 Gen 3")
    assert cells[start - 1 : start + 5] == ["3", cells[start], "htp v75", "2.51.0", "1", "153"]
    assert "tests" in [text.strip() for _, text in page.texts]
    assert "sm8750, Snapdragon 8 Elite" in cells
    assert "fill-binary" in {each.get("class") for _, each in page.elements}
    assert "Binaries" not in document(inspected(Draft()))


def test_every_bar_can_be_reached_and_says_what_it_is(found: Inspection) -> None:
    page = check_page(document(found))
    links = page.named("a")
    assert len(links) > 2 * len(found.extents)
    assert all(link["aria-label"] and link["href"] for link in links)
    assert all(each["aria-label"] for each in page.named("svg") if each.get("role") == "img")
    assert len(page.named("h1")) == 1
    assert page.named("html") == [{"lang": "en"}]
    assert all(each["scope"] == "col" for each in page.named("th"))


@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1 << 40, 1), (1, 1 << 40, 1, 7, 1 << 30), (5,), (0, 0), (*[1] * 4000, 1 << 30), (0, 3)],
)
def test_bars_are_to_scale_and_none_vanishes(lengths: tuple[int, ...]) -> None:
    found = widths(lengths)
    assert sum(found) == pytest.approx(100)
    least = min(LEAST_WIDTH, MOST_FOR_SMALL / len(lengths))
    assert min(found) >= least * 0.85
    total = sum(lengths) or 1
    for length, width in zip(lengths, found, strict=True):
        if total > 1 and 100 * length / total > least:
            assert 0.85 <= width / (100 * length / total) <= 1.0001


def test_ranges_tell_where_each_layer_is(found: Inspection) -> None:
    for section in ("dense", "experts"):
        extent = next(each for each in found.extents if each.name == section)
        ranges = [each for each in found.ranges if each.section == section]
        end = extent.offset
        for each in ranges:
            assert each.offset == end
            end += each.count * each.record_length
        assert end == extent.offset + extent.length
    assert [each.name for each in found.ranges] == ["embedding", "layer 0", "layer 1", "head", "layer 0", "layer 1"]


def test_the_run_is_told_in_figures_words_and_a_picture(found: Inspection) -> None:
    page = check_page(document(found, trace_from(RUN, 1.0)))
    paths = {each["class"]: each["d"] for each in page.named("path")}
    assert paths["line-wait"] == f"M0 .5m{CELLS // 10} 0h{CELLS * 4 // 10}"
    assert paths["line-products"] == paths["line-in-use"] == f"M0 .5m{CELLS // 2} 0h{CELLS // 2}"
    assert paths["line-read"] == f"M0 .5m0 0h{CELLS // 2}"
    tracks = [each["aria-label"] for each in page.classed("track")]
    assert tracks == [
        "computing: busy 60.0% of the run",
        "lane 0: busy 50.0% of the run",
        "lane 1: busy 0.0% of the run",
        "bank 0: full 60.0% of the run",
    ]
    assert page.text().count(" 60% full") == 1
    assert "layer 0: 0 µs to 1.00 s" in page.text()
    titles = [text for tag, text in page.texts if tag == "title"]
    assert "computing: matrix products, in all 500 ms, 50.0% of the run" in titles
    legend = [text.strip() for tag, text in page.texts if tag == "li"][-8:]
    assert legend == [
        *("embedding", "waiting for reads", "matrix products", "read", "filling", "ready", "in use", "other"),
    ]
    assert "Computing waited for experts during 40.0% of the run" in page.text()
    assert "209,715,200 bytes resident at most" in page.text()
    [timeline] = [each for _, each in page.elements if each.get("id") == "timeline"]
    assert timeline["tabindex"] == "0"


def test_floors_in_words() -> None:
    told = "".join(sentences(trace_from(RUN, 1.0).other_data))
    assert "Reading alone took 500 ms and computing alone 600 ms" in told
    assert "would have taken 600 ms, the time of computing; it took 400 ms more" in told


def test_what_a_run_does_has_colours_of_its_own() -> None:
    style = (resources.files("estream_packer.page") / "style.css").read_text("utf-8")
    rules = re.findall(r"((?:\.line-[a-z-]+(?:, )?)+) \{ stroke: var\(--(\w+)\)", style)
    colours = {name.strip(): colour for names, colour in rules for name in names.split(",")}
    assert set(colours) == {f".line-{kind_class(kind)}" for kind in KINDS}
    assert colours.pop(".line-in-use") == colours[".line-products"]  # what a bank is used for
    assert len(set(colours.values())) == len(colours)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0, "0 µs"), (0.004, "0 µs"), (1.5, "1.50 µs"), (999, "999 µs"), (12_345, "12.3 ms"), (6e11, "600000 s")],
)
def test_durations(microseconds: float, text: str) -> None:
    assert duration_text(microseconds) == text


def events_of(spans: Spans) -> list[Event]:
    return [
        Event(name=name, cat="computing", ts=begin, dur=length, tid=1) for name, begin, length in spans
    ]  # fmt: skip


def test_what_always_takes_the_smaller_part_of_a_cell_is_seen_as_often_as_it_is_due() -> None:
    number, kinds = 90_000, ("products", "expand", "scatter")
    lengths = np.tile([0.6, 0.3, 0.1], number // 3)
    begins = np.concatenate(([0], np.cumsum(lengths[:-1])))
    spans = [(kinds[n % 3], begin, length) for n, (begin, length) in enumerate(zip(begins, lengths, strict=True))]
    names: list[tuple[Name, float, float]] = [("products", 0, 0), *spans]  # type: ignore[list-item]
    total = float(lengths.sum()) * 2
    shown = cells_of(events_of(names), total)
    for kind, share in (("products", 0.6), ("expand", 0.3), ("scatter", 0.1)):
        for part in (shown[: CELLS // 4], shown[CELLS // 4 : CELLS // 2]):
            assert (part == KINDS.index(kind)).mean() == pytest.approx(share, abs=0.001)
    assert (shown[CELLS // 2 :] == len(KINDS)).all()


def large_trace() -> Trace:
    """200,000 events that no two neighbours of which can be shown as one."""
    names: tuple[Name, ...] = ("expand", "products")
    step = 1e6 / CELLS
    tracks: dict[str, Spans] = {COMPUTING: [(names[n % 2], n * step, step) for n in range(CELLS)]}
    for bank in range(9):
        states: tuple[Name, ...] = ("filling", "in use")
        tracks[f"bank {bank}"] = [(states[n % 2], n * step, step) for n in range(CELLS)]
    return trace_from(tracks, 1.0)


def test_the_page_of_200_000_events_stays_small(found: Inspection) -> None:
    trace = large_trace()
    assert len(trace.trace_events) > 200_000
    page = document(found, decode_trace(encode_trace(trace), "trace.json"))
    assert len(page) < 2_000_000
    check_page(page)


def test_of_many_tracks_the_first_are_drawn(found: Inspection) -> None:
    banks: dict[str, Spans] = {f"bank {number}": [("in use", 0, 9e5)] for number in range(500)}
    text = document(found, trace_from({**banks, **RUN}, 1.0))
    page = check_page(text)
    labels = [each["aria-label"].split(":")[0] for each in page.classed("track")]
    assert labels == ["computing", "lane 0", "lane 1", *(f"bank {number}" for number in range(MAX_TRACKS - 3))]
    assert f"and {503 - MAX_TRACKS} more tracks" in page.text()


def test_of_many_stretches_of_layers_the_first_are_drawn(found: Inspection) -> None:
    spans: Spans = [("attention", number, 1) for number in range(MAX_LAYERS + 3)]
    trace = trace_from({COMPUTING: spans}, 1.0)
    events = [replace(each, args=Details(layer=number)) for number, each in enumerate(trace.tracks()[COMPUTING])]
    page = check_page(document(found, assemble({COMPUTING: events}, trace.other_data)))
    [layers] = page.classed("layers")
    assert layers["aria-label"] == "layers"
    assert sum("data-begin" in attributes for _, attributes in page.elements) == MAX_LAYERS
    assert "and 3 more stretches of layers" in page.text()


def test_a_configuration_for_prompts_of_any_length_says_so(found: Inspection) -> None:
    lengths = 0, 4096
    choices = [
        DeviceConfiguration(name="phone", arena_bytes=1 << 20, group_size=1, prefetch_depth=0, prompt_tokens=length)
        for length in lengths
    ]
    cells = Page(configurations_table("Devices", choices)).text().split()
    assert cells.count("any") == cells.count("4,096") == 1
    assert cells.count("0") == len(lengths)  # the depths


def test_a_run_in_which_nothing_happened(found: Inspection) -> None:
    trace = trace_from({COMPUTING: []}, 1e-9)
    check_page(document(found, trace))


def test_foreign_text_stays_text() -> None:
    draft = Draft()
    choice = DeviceConfiguration(name=HOSTILE, arena_bytes=1 << 20, group_size=1, prefetch_depth=1)
    draft.change_manifest(name=HOSTILE, extensions={HOSTILE: b""}, device_configurations=(choice,))
    draft.sections.append(Section(SectionType.DEVICE_CONFIGURATION + 90, b"x"))
    run = dict(RUN)
    page = check_page(document(inspected(draft), trace_from(run, 1.0, package=HOSTILE, text=HOSTILE)))
    assert (
        page.text().count(
            "</title></style></script><script>alert(1)</script>\"'&<img src=x onerror=y>\\x1b\\x00\\u202egnp"
        )
        >= 6
    )
    assert not [each for _, text in page.texts for each in text if not each.isprintable() and each != "\n"]
    assert "unknown type 103, id 0" in page.text()
