"""`estream-pack inspect`: show what a package says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from estream_packer.inspection import Inspection
    from estream_packer.prefetch.summary import PrefetchSummary
    from estream_packer.schedules import ScheduleListing, ScheduleSummary
    from estream_spec.manifest import DeviceConfiguration


@click.command(short_help="Show what a package holds.")
@click.argument("package", type=FILE)
@click.option("--schedule", "schedules", is_flag=True, help="Show its programs instead: their proof, their assembly.")
@click.option("--html", type=click.Path(path_type=Path), metavar="PAGE", help="Draw it on this page for a browser.")
@click.option(
    "--trace", type=FILE, metavar="RUN", help="Draw this run of it, too, as `estream-run trace -o` writes it."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(package: Path, schedules: bool, html: Path | None, trace: Path | None, as_json: bool) -> None:
    """Show what PACKAGE says of itself: model, weights, sections, records, graphs, binaries, signatures, provenance.

    Only its tables are read, however large it is; `validate` and `verify` say whether the rest is sound. Nor is a
    signature that verifies a reason to trust it, since anyone can make one: `verify --key` asks for the vendor's.

    With --html all of it goes onto one page for a browser, with a picture of the layout and, with --trace, of a run.
    """
    from estream_loader import open_package
    from estream_loader.small_files import require_writable
    from estream_packer.inspection import inspect_package
    from estream_packer.schedules import list_schedules

    context = click.get_current_context()
    if html is not None and (schedules or as_json):
        raise click.UsageError(f"--html and {'--schedule' if schedules else '--json'} exclude each other", context)
    if trace is not None and html is None:
        raise click.UsageError("--trace needs --html", context)
    if html is not None:
        if trace is not None and _same_file(html, trace):
            raise click.UsageError("--html and --trace are the same file", context)
        require_writable(html)
    with open_package(package) as opened:
        if schedules:
            listings = list(list_schedules(opened))
            print_json(listings) if as_json else _show_schedules(listings)
            return
        found = inspect_package(opened)
    if html is not None:
        _write_page(found, html, trace)
    elif as_json:
        print_json(found)
    else:
        _show(found)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # who opens them says why
        return False


def _write_page(found: Inspection, html: Path, trace: Path | None) -> None:
    from estream_loader.small_files import write_over
    from estream_packer.checkpoint.files import InputFile
    from estream_packer.page.document import document
    from estream_spec.errors import PackError
    from estream_spec.trace import MAX_TRACE_LENGTH, decode_trace

    run = None
    if trace is not None:
        with InputFile(trace) as file:
            run = decode_trace(file.read_all(MAX_TRACE_LENGTH), str(trace))
        if run.other_data.file_id != found.file_id:
            message = f"the trace is of a package with file id {run.other_data.file_id}, this one has {found.file_id}"
            hint = "trace this package, or inspect the one that was traced"
            raise PackError(message, path=str(trace), hint=hint)
    write_over(html, document(found, run).encode())
    click.echo(f"wrote {html}")


def _show(found: Inspection) -> None:
    from estream_packer.inspection import describe_identity
    from estream_packer.summary import summary_tables

    _show_pairs(describe_identity(found))
    _show_pairs(found.model)
    shown = console()
    tables = (
        *summary_tables(found.summary),
        _sections(found),
        _records(found),
        _graphs(found),
        _binaries(found),
        _configurations("local device", found.local_device_configurations),
        _configurations("device", found.device_configurations),
        _schedules(found.schedules),
        _prefetch_router(found.prefetch_router),
    )
    for table in tables:
        if table.row_count:
            shown.print(table)
            shown.print()


def _table(headings: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `numbers` are set to the right."""
    from rich.table import Table

    table = Table(box=None)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table


def _show_pairs(pairs: dict[str, str]) -> None:
    """Print names and values, never broken over lines, so that ids can be copied."""
    from estream_spec.errors import printable

    width = max(map(len, pairs))
    for name, value in pairs.items():
        click.echo(printable(f" {name:<{width}}  {value}".rstrip()))
    click.echo()


def _sections(found: Inspection) -> Table:
    table = _table(("section", "offset", "stored", "length", "codec", "share"), ("offset", "stored", "length", "share"))
    padding = sum(extent.stored_length for extent in found.extents if extent.name == "padding")
    for extent in found.extents:
        if extent.name == "padding":
            continue
        sizes = f"{extent.offset:,}", f"{extent.stored_length:,}", f"{extent.length:,}"
        table.add_row(extent.name, *sizes, extent.codec, f"{extent.share:.1%}")
    table.add_row("padding between them", "", f"{padding:,}", "", "", f"{padding / found.summary.file_length:.1%}")
    total = sum(extent.stored_length for extent in found.extents)
    table.add_row("package", "", f"{total:,}", "", "", f"{total / found.summary.file_length:.1%}")
    return table


def _records(found: Inspection) -> Table:
    table = _table(("records", "count", "bytes each", "padding", "matrices"), ("count", "bytes each", "padding"))
    for group in found.records:
        row = f"{group.count:,}", f"{group.record_length:,}", f"{group.padding_share:.1%}"
        table.add_row(group.section, *row, ", ".join(group.matrices))
    return table


def _graphs(found: Inspection) -> Table:
    sizes = {extent.name: extent.length for extent in found.extents}
    table = _table(
        ("graph", "role", "shape class", "weights", "activations", "target", "bytes"), ("shape class", "bytes")
    )
    for graph in found.graphs:
        length = sizes[f"graph {graph.section}"]
        kinds = graph.weights, graph.activations, graph.target
        table.add_row(str(graph.section), graph.role, str(graph.shape_class), *kinds, f"{length:,}")
    return table


def _binaries(found: Inspection) -> Table:
    from rich.text import Text

    from estream_spec.errors import printable

    table = _table(("binary", "chip", "architecture", "sdk", "compiler", "graphs", "bytes"), ("graphs", "bytes"))
    for each in found.binaries:
        made = each.sdk, Text(printable(each.compiler)), f"{len(each.graphs):,}", f"{each.length:,}"
        table.add_row(str(each.section), f"{each.chip}, {each.title}", f"{each.target} v{each.architecture}", *made)
    return table


def _show_schedules(listings: Sequence[ScheduleListing]) -> None:
    """Print programs, each under its proof, every line a comment but the instructions."""
    from estream_spec.errors import printable

    if not listings:
        click.echo("no schedules: readers make their own")
    for number, listing in enumerate(listings):
        names = ", ".join(map(repr, listing.configurations)) or "no device configuration that is there"
        heading = [f"schedule {listing.section}, for {names}", *listing.proof]
        lines = (*(printable(f"; {line}") for line in heading), *listing.assembly)
        click.echo("\n".join(["", *lines] if number else lines))


def _schedules(found: Sequence[ScheduleSummary]) -> Table:
    from rich.text import Text

    from estream_spec.errors import printable

    numbers = "instructions", "banks", "peak bytes", "reads"
    table = _table(("schedule", "phase", "policy", "for", *numbers), numbers)
    for each in found:
        sizes = f"{each.instructions:,}", f"{each.banks:,}", f"{each.peak_bytes:,}", f"{each.bytes_read:,}"
        names = Text(printable(", ".join(each.configurations)))
        table.add_row(str(each.section), each.phase, each.policy, names, *sizes)
    return table


def _prefetch_router(found: PrefetchSummary | None) -> Table:
    from rich.text import Text

    from estream_spec.errors import printable

    numbers = "layers", "tokens", "overlap", "extra experts", "bytes"
    table = _table(("prefetch router", *numbers), numbers)
    if found is not None:
        figures = f"{found.overlap:.2%}", f"{found.extra:.2f}", f"{found.length:,}"
        table.add_row(Text(printable(f"by {found.writer}")), str(found.layers), f"{found.tokens:,}", *figures)
    return table


def _configurations(heading: str, choices: Sequence[DeviceConfiguration]) -> Table:
    from rich.text import Text

    from estream_spec.errors import printable

    numbers = "prompt", "arena bytes", "group", "depth", "lanes"
    table = _table((heading, *numbers, "policy"), numbers)
    for choice in choices:
        length = f"{choice.prompt_tokens:,}" if choice.prompt_tokens else "any"
        sizes = f"{choice.arena_bytes:,}", str(choice.group_size), str(choice.prefetch_depth), str(choice.lanes)
        table.add_row(Text(printable(choice.name)), length, *sizes, choice.policy)
    return table
