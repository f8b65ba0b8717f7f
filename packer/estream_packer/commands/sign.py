"""`estream-pack sign`: vouch for a package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE
from estream_loader.trust import MAX_COUNTER

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from estream_loader import Package
    from estream_spec.records import Signature


@click.command(short_help="Sign a package.")
@click.argument("package", type=FILE)
@click.option("--key", type=FILE, required=True, help="The private key, an Ed25519 one in PEM; see keygen.")
@click.option(
    "--counter",
    type=click.IntRange(0, MAX_COUNTER),
    default=0,
    show_default=True,
    help="Security counter. Raise it with a release that older ones must not replace.",
)
@click.option("-o", "--output", type=FILE, help="Write the signature to this file and leave PACKAGE alone.")
def command(package: Path, key: Path, counter: int, output: Path | None) -> None:
    """Prove every byte of PACKAGE, then sign it: in place, replacing an earlier signature by the same key.

    A signature covers all but what is added where a package is used, such as device configurations. With -o, a file of
    that name is replaced only if it is a signature. Each edit in place leaves old bytes behind, the list of sections
    above all: one or two thousand in most packages.
    """
    from estream_loader import open_package
    from estream_loader.small_files import write_over
    from estream_packer.editing import edit_package
    from estream_packer.keys import read_private_key
    from estream_packer.signing import read_replaceable, renews, signature_changes

    private = read_private_key(key)
    if output is None:
        edited, changes = edit_package(
            package, lambda opened: signature_changes(opened, _prove_and_sign(opened, private, counter))
        )
        file_id, changed = edited.file_id(), bool(changes)
    else:
        there = read_replaceable(output)
        with open_package(package) as opened:
            signature, file_id = _prove_and_sign(opened, private, counter), opened.file_id
        changed = renews(signature, there, file_id, str(output))
        if changed:
            write_over(output, signature.encode())
    click.echo(f"file id {file_id.hex()}")
    click.echo(f"key {private.public_key().public_bytes_raw().hex()}")
    click.echo(f"security counter {counter}")
    if not changed:
        click.echo(f"already signed, nothing changes in {output or package}")
    else:
        click.echo(f"signed {package}" if output is None else f"wrote {output}")


def _prove_and_sign(package: Package, key: Ed25519PrivateKey, counter: int) -> Signature:
    """A signature over a package that is proven first: nobody must vouch for what is damaged."""
    from estream_packer.proving import prove
    from estream_packer.signing import sign

    prove(package)
    return sign(package.file_id, key, counter)
