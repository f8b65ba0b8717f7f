from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_spec.trace import encode_trace
from fixtures.pages import Page
from fixtures.traces import Spans, trace_from

TRACKS: dict[str, Spans] = {
    "computing": [("attention", 0, 10), ("products", 10, 20)],
    "lane 0": [("read", 0, 9), ("read", 9, 9)],
    "bank 0": [("filling", 0, 10), ("in use", 10, 20)],
}
Document = dict[str, Any]


@pytest.fixture
def trace(built: Built, tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    with open_package(built()) as package:
        file_id = package.file_id.hex()
    path.write_bytes(encode_trace(trace_from(TRACKS, 30e-6, file_id=file_id)))
    return path


def test_a_page_is_written_and_replaced(built: Built, pack: Pack, tmp_path: Path, trace: Path) -> None:
    path, page = built(), tmp_path / "page.html"
    assert pack("inspect", path, "--html", page) == (0, f"wrote {page}\n", "")
    alone = Page(page.read_text("utf-8"))
    assert not alone.classed("track")
    assert pack("inspect", path, "--html", page, "--trace", trace) == (0, f"wrote {page}\n", "")
    assert len(Page(page.read_text("utf-8")).classed("track")) == 3
    assert {each.name for each in tmp_path.iterdir()} == {"page.html", "trace.json"}


def test_a_run_of_another_package_is_not_drawn(built: Built, pack: Pack, tmp_path: Path, trace: Path) -> None:
    page, other = tmp_path / "page.html", built(experts="w8")
    status, out, err = pack("inspect", other, "--html", page, "--trace", trace)
    assert (status, out) == (1, "")
    for path in (built(), other):
        with open_package(path) as package:
            assert package.file_id.hex() in err
    assert not page.exists()


def test_equal_packages_give_equal_pages(built: Built, pack: Pack, tmp_path: Path, trace: Path) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        pack("inspect", built(), "--html", page, "--trace", trace)
    assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "page.html", "--json"), "--html and --json exclude each other"),
        (("--html", "page.html", "--schedule"), "--html and --schedule exclude each other"),
        (("--trace", "trace.json"), "--trace needs --html"),
        (("--trace", "trace.json", "--json"), "--trace needs --html"),
    ],
)
def test_usage(built: Built, pack: Pack, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = pack("inspect", built(), *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert not Path("page.html").exists()


def event(document: Document, name: str) -> Document:
    return next(each for each in document["traceEvents"] if each["name"] == name)


FAULTS: dict[str, Callable[[Document], object]] = {
    "begins before": lambda each: event(each, "products").update(ts=5),
    "the run ended at": lambda each: event(each, "products").update(dur=1e9),
    ">= 0.0": lambda each: event(each, "attention").update(ts=-1),
    "<= 604800000000.0": lambda each: event(each, "attention").update(dur=1e30),
    "no track 'computing'": lambda each: each["traceEvents"].pop(1),
    "track 'screen'": lambda each: event(each, "thread_name")["args"].update(name="screen"),
    "has no name": lambda each: event(each, "read").update(tid=77),
    "missing required field `otherData`": lambda each: each.pop("otherData"),
    "unknown field": lambda each: each.update(more=1),
    "invalid enum value": lambda each: event(each, "read").update(name="<b>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trace_that_is_none_is_refused(built: Built, pack: Pack, tmp_path: Path, trace: Path, fault: str) -> None:
    document = json.loads(trace.read_bytes())
    FAULTS[fault](document)
    trace.write_text(json.dumps(document))
    refused(built, pack, tmp_path, trace, fault)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"GGUF", "JSON is malformed"),
        (b"[]", "expected `object`, got `array`"),
        (b'{"traceEvents":[]}', "missing required field"),
        (b'{"traceEvents":[{"args":' + b"[" * 100_000, "recursion"),
        (b"\xff\xfe", "JSON is malformed"),
    ],
)
def test_what_is_no_trace_is_refused(
    built: Built, pack: Pack, tmp_path: Path, trace: Path, data: bytes, message: str
) -> None:
    trace.write_bytes(data)
    refused(built, pack, tmp_path, trace, message)


@pytest.mark.parametrize("number", ["NaN", "1e999", "Infinity", '"1"'])
def test_times_that_are_no_times_are_refused(
    built: Built, pack: Pack, tmp_path: Path, trace: Path, number: str
) -> None:
    trace.write_bytes(trace.read_bytes().replace(b'"dur":20', b'"dur":%b' % number.encode()))
    refused(built, pack, tmp_path, trace, "not a trace of a run")


def refused(built: Built, pack: Pack, tmp_path: Path, trace: Path, message: str) -> None:
    """Inspecting ends with one line that says why, and no page."""
    page = tmp_path / "page.html"
    status, out, err = pack("inspect", built(), "--html", page, "--trace", trace)
    assert (status, out) == (1, "")
    assert err.startswith("estream-pack: error: not a trace of a run: ")
    assert message in err
    assert err.endswith(f"(at {trace})\n")
    assert err.count("\n") == 1
    assert not page.exists()


def test_files_that_cannot_be_read_or_written(built: Built, pack: Pack, tmp_path: Path, trace: Path) -> None:
    page = tmp_path / "page.html"
    status, _, err = pack("inspect", built(), "--html", page, "--trace", tmp_path / "none.json")
    assert status == 1
    assert "file cannot be opened: no such file or directory" in err
    assert not page.exists()
    status, _, err = pack("inspect", built(), "--html", tmp_path / "none" / "page.html")
    assert status == 1
    assert "file cannot be written: no such file or directory" in err
    (tmp_path / "bad.emoe").write_bytes(b"GGUF" * 99)
    page.write_text("as it was")
    assert pack("inspect", tmp_path / "bad.emoe", "--html", page)[0] == 1
    assert page.read_text() == "as it was"
