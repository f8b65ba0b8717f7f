"""Puts the page together."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib import resources
from typing import Final

from estream_packer.inspection import Inspection, describe_identity
from estream_packer.markup import Markup, element, foreign
from estream_packer.page import tables
from estream_packer.page.layout_picture import layout_picture
from estream_packer.page.run import run_of
from estream_spec.trace import Trace

STYLE: Final = "style.css"
SCRIPT: Final = "script.js"


def document(found: Inspection, trace: Trace | None = None) -> str:
    """The page, whole.

    Args:
        found: what the package says of itself.
        trace: a run of it.
    """
    style, script = _file(STYLE), _file(SCRIPT)
    allowed = f"default-src 'none'; style-src '{_source(style)}'; script-src '{_source(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element(
            "meta", http_equiv="Content-Security-Policy", content=f"{allowed}; base-uri 'none'; form-action 'none'"
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{found.name}: what is in the package"),
        element("style", style),
    )
    heading = element("header", element("p", "Package", class_="quiet"), element("h1", foreign(found.name)))
    runs = [] if trace is None else [_chapter("Run", run_of(trace))]
    main = element("main", heading, *_package(found), *runs, *_tables(found))
    return f"<!DOCTYPE html>\n{element('html', head, element('body', main, element('script', script)), lang='en')}\n"


def _package(found: Inspection) -> list[Markup]:
    """What a reader asks first."""
    layers = {each.layer for each in found.ranges if each.section == "dense"} - {None}
    experts = sum(each.count for each in found.ranges if each.section == "experts")
    figures = {
        "bytes": f"{found.summary.file_length:,}",
        "weights": f"{found.summary.weights:,}",
        "bits per weight": f"{found.summary.bits_per_weight:.3f}",
        "layers": f"{len(layers):,}",
        "experts": f"{experts:,}",
    }
    identity = {name: text for name, text in describe_identity(found).items() if name != "model"}
    return [
        tables.figures(figures),
        _chapter("Identity", tables.pairs(identity)),
        _chapter("Model", tables.pairs(found.model)),
        _chapter("Layout", layout_picture(found)),
    ]


def _tables(found: Inspection) -> list[Markup]:
    local = tables.configurations_table("Local device configurations", found.local_device_configurations)
    given = tables.configurations_table("Device configurations", found.device_configurations)
    weights, space = tables.weights_table(found.summary), tables.space_table(found.summary)
    parts = (
        tables.records_table(found),
        tables.graphs_table(found),
        tables.binaries_table(found),
        tables.sections_table(found),
    )
    return [
        _chapter("Weights and bytes", element("div", weights, space, class_="columns")),
        _chapter("Running it", local, given, tables.schedules_table(found), tables.prefetch_table(found)),
        _chapter("Parts", *parts),
    ]


def _chapter(title: str, *content: Markup) -> Markup:
    return element("section", element("h2", title), *content)


def _file(name: str) -> Markup:
    """A part of the page that comes with the program."""
    text = (resources.files(__package__) / name).read_text("utf-8")
    assert "</" not in text, name
    return Markup(text)


def _source(text: str) -> str:
    """How a policy allows exactly this text."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
