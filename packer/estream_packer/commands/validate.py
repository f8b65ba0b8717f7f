"""`estream-pack validate`: say whether a package obeys the format, and if not, which way."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import FILE, print_json, refusals_told


@click.command(short_help="Check a package's structure.")
@click.argument("package", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def command(package: Path, as_json: bool) -> None:
    """Check the structure of PACKAGE: superblocks, directory, manifest, tables, every section but the weights, padding.

    Prints `valid structure` and what is odd, or fails with the class of the refusal: malformed, invalid, integrity,
    unsupported, limit, or link where there is no such file. Weights are not read; `verify` reads them.
    """
    with refusals_told(as_json):
        notices = _notices(package)
    if as_json:
        verdict = {"valid": True, "class": None, "rule": None, "message": None}
        print_json({**verdict, "path": None, "offset": None, "hint": None, "notices": notices})
        return
    click.echo("valid structure; weights are not read")
    for notice in notices:
        click.echo(f"notice: {notice}")


def _notices(path: Path) -> list[str]:
    """What is odd about a package; raises where it is not valid."""
    from estream_loader import open_package
    from estream_loader.integrity import check_padding, check_text, notices, verify_content_id, verify_section
    from estream_spec.constants import SectionFlag, SectionType

    with open_package(path) as package:
        for entry in package.container.entries:
            if not entry.flags & SectionFlag.RECORDS and entry.type != SectionType.FREE:
                verify_section(package, entry)
        check_text(package)
        # With the tables, judged as they are read.
        _ = package.device_configurations, package.schedules, package.prefetch_router
        verify_content_id(package)
        check_padding(package)
        return notices(package)
