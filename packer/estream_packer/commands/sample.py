"""`estream-pack sample`: write the sample checkpoint that comes with this program."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import FILE


@click.command(short_help="Write the sample checkpoint.")
@click.argument("folder", type=FILE)
def command(folder: Path) -> None:
    """Write the sample checkpoint to FOLDER, which must be empty or not there yet.

    It is a small OLMoE trained on novels, for trying things out; see its README.md.
    """
    from estream_packer.sample import write_sample

    write_sample(folder)
    click.echo(f"wrote {folder}")
    click.echo(f"next: estream-pack build {folder} -o sample.emoe")
