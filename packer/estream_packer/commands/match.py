"""`estream-pack match`: say what a package is to a device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE, REFUSED, print_json, size
from estream_packer.commands.plan import MEMORY_HELP
from estream_spec.manifest import SDK_PATTERN

if TYPE_CHECKING:
    from estream_packer.matching import Matched

RUNS = ("exact", "usable")
"""Verdicts that end with exit status 0."""


def sdk_build(text: str) -> str:
    """An SDK build such as `2.51.0.260929181845`, or nothing."""
    if text and not re.search(SDK_PATTERN, text):
        raise click.BadParameter(f"{text!r} is not an SDK build such as 2.51.0.260929181845")
    return text


@click.command(short_help="Say what a package is to a device.")
@click.argument("package", type=FILE)
@click.option(
    "--device",
    required=True,
    help="A chip (sm8650, 8-gen-3, v75, soc52-v73), a JSON file of facts (spec/MATCHING.md), or here: this machine.",
)
@click.option(
    "--sdk",
    type=sdk_build,
    metavar="BUILD",
    help="Build of Qualcomm's SDK on the device; '' for none.  [default: the file's, or that of onnxruntime-qnn here]",
)
@click.option("--memory", type=size, metavar="SIZE", help=f"{MEMORY_HELP}  [default: all that the device has]")
@click.option("--json", "as_json", is_flag=True, help="Print the match as JSON.")
@click.pass_context
def command(
    context: click.Context, package: Path, device: str, sdk: str | None, memory: int | None, as_json: bool
) -> None:
    """Say what PACKAGE is to a device; only its superblocks, directory and manifest are read.

    \b
    exact      it runs on the NPU, with a binary that the device's own SDK made
    usable     it runs as it is: on the NPU, or on the CPU if the device's NPU cannot be used
    recompile  it runs on the CPU, and on the NPU once `compile` has compiled it for the device
    refuse     it cannot run

    Also told are the arena to expect, which is that of the package as it was built, and what the device has to fetch.
    Of a chip alone neither memory nor SDK are known: those of its profile and of onnxruntime-qnn here are assumed.

    Exit status 0 for exact and usable, 1 for recompile and refuse.
    """  # noqa: D301 (the characters that keep the lines as they are)
    from estream_packer.matching import find_device, match_package

    found = match_package(package, find_device(device, sdk, memory))
    if as_json:
        print_json(found)
        context.exit(0 if found.verdict in RUNS else REFUSED)
    _show(found, package)


def _show(found: Matched, package: Path) -> None:
    """Print a match; raises what a refusal is told with.

    Raises:
        LinkError: the package does not use what the device has, or cannot run.
    """
    from estream_spec.errors import LinkError

    click.echo(f"{found.verdict}: {found.reason}")
    if found.verdict != "refuse":
        click.echo(f"arena {found.arena_bytes:,} bytes")
        fetched = f"{found.fetch_bytes:,} of {found.file_bytes:,} bytes"
        click.echo(f"to fetch {fetched}, {len(found.sections)} of {found.section_count} sections")
    if found.verdict not in RUNS:
        raise LinkError(found.explanation, path=str(package), hint=found.advice)
    click.echo(found.explanation)
    if found.advice is not None:
        click.echo(f"hint: {found.advice}")
