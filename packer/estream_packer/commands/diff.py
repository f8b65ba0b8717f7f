"""`estream-pack diff`: how two packages differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE, print_json

if TYPE_CHECKING:
    from estream_packer.difference import Difference, Records

SHOWN = 40
"""Lines of one kind that are shown; JSON has them all."""


@click.command(short_help="Show how two packages differ.")
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.pass_context
def command(context: click.Context, first: Path, second: Path, as_json: bool) -> None:
    """Show how the packages FIRST and SECOND differ.

    They are the same file, byte for byte; or have the same signed content, with other signatures or added device
    configurations; or the same content, with other pages, order, codec, graphs, binaries or configuration; or differ:
    in values of the manifest, in weights by layer, expert and role, in sections.

    Exit code 0 for equal content, 1 for different content or a package that is refused.
    """
    from estream_loader import open_package
    from estream_loader.progress import open_progress
    from estream_packer.difference import compare_packages, record_bytes

    with open_package(first) as one, open_package(second) as other, open_progress() as progress:
        progress.begin("comparing", record_bytes(one, other))
        found = compare_packages(one, other, progress.advance)
    if as_json:
        print_json(found)
    else:
        _show(found)
    context.exit(1 if found.level == "different" else 0)


def _show(found: Difference) -> None:
    from estream_spec.errors import printable

    click.echo(found.level)
    lines = [
        [f"{printable(field.path)}: {_value(field.first)} → {_value(field.second)}" for field in found.fields],
        [_records(records) for records in found.records],
        [f"{name}: {what}" for name, what in found.sections.items()],
    ]
    for title, shown in zip(("manifest", "weights", "sections"), lines, strict=True):
        if shown:
            click.echo(f"\n{title}")
            for line in shown[:SHOWN]:
                click.echo(f"  {line}")
            if len(shown) > SHOWN:
                click.echo(f"  and {len(shown) - SHOWN} more")


def _value(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 70 else f"{text[:69]}…"


def _records(records: Records) -> str:
    sizes = f"{records.first}" if records.first == records.second else f"{records.first} and {records.second}"
    counted = f"{records.where}: {records.differing} of {sizes} differ"
    if not records.tensors:
        return f"{counted}, stored differently" if min(records.first, records.second) else counted
    roles = ", ".join(f"{name} in {count}" for name, count in records.tensors.items())
    return f"{counted} ({roles})"
