"""`estream-pack keygen`: make a key to sign packages with."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import FILE


@click.command(short_help="Make a key to sign packages with.")
@click.option("-o", "--output", type=FILE, required=True, help="The private key to write.")
def command(output: Path) -> None:
    """Make an Ed25519 key: OUTPUT, the private one, for you alone to read, and OUTPUT.pub, which others need to verify.

    Neither ever replaces a file. Both are PEM, as other tools read and write them.
    """
    from estream_packer.keys import public_file, write_key_pair

    key = write_key_pair(output)
    click.echo(f"public key {key.hex()}")
    click.echo(f"wrote {output} and {public_file(output)}")
