"""HTML and SVG made of elements, in which text cannot be anything but text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from estream_spec.errors import printable

VOID: Final = frozenset({"meta"})
"""Elements that have no end."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *content: str | Iterable[str], **attributes: str | float | None) -> Markup:
    """An element of HTML or SVG.

    Args:
        name: what it is.
        content: what is in it; text that is no `Markup` is escaped, and what does not print is spelled out.
        attributes: by name, with `_` for `-` and one at the end of those that Python reserves; None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: str | Iterable[str]) -> Markup:
    """Several texts and elements behind each other."""
    parts: list[str] = []
    for each in content:
        parts += [each] if isinstance(each, str) else each
    return Markup("".join(each if isinstance(each, Markup) else _escaped(each) for each in parts))


def foreign(text: str) -> Markup:
    """A name out of a file, which may run from right to left but turns nothing around it."""
    return element("bdi", text)


def swatch(kind: str) -> Markup:
    """A small square in the colour of a kind of section, activity or state, and a space."""
    box = element("rect", class_=f"fill-{kind}", width=12, height=12)
    return join(element("svg", box, class_="swatch", width=12, height=12, aria_hidden="true"), " ")


def _escaped(text: str) -> str:
    return escape(printable(text))


def _text(value: str | float) -> str:
    """Numbers as pictures need them: short."""
    return f"{value:.7g}" if isinstance(value, float) else str(value)
