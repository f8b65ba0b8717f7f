"""`estream-pack compile`: put graphs for the NPU of a phone into a package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE

if TYPE_CHECKING:
    from estream_loader import Package
    from estream_packer.editing import Changes
    from estream_packer.htp.compiler import Compiler
    from estream_packer.signing import SignatureSummary
    from estream_spec.chips import Chip


@click.command(short_help="Compile a package's graphs for a phone's NPU.")
@click.argument("package", type=FILE)
@click.option(
    "--target",
    "targets",
    required=True,
    multiple=True,
    help="htp: and a chip: its part number (htp:sm8650), what it is sold as (htp:8-gen-3), its Hexagon version"
    " (htp:v75), its number in Qualcomm's SDK (htp:soc57), or number and version of any other one (htp:soc52-v73)."
    " May be given several times.",
)
@click.option(
    "--compiler",
    type=click.Choice(["local", "aihub"]),
    default="local",
    show_default=True,
    help="What compiles: onnxruntime-qnn on this machine, or Qualcomm's AI Hub.",
)
@click.option("--remove", is_flag=True, help="Take the binaries for these targets out.")
def command(package: Path, targets: tuple[str, ...], compiler: str, remove: bool) -> None:
    """Compile the graphs of PACKAGE for the NPUs of phones and put them in, in place.

    Each target is one binary with graphs for fixed numbers of tokens, which take weights as inputs: their number does
    not depend on the model's layers and experts. One for the same chip is replaced. Before PACKAGE is touched, each
    graph runs in Qualcomm's simulator and is compared with the reference.

    This makes another file: signatures in PACKAGE are taken out, since they are not for it, and so are sections of
    types that this version does not know and that are not flagged as safe to copy.

    With --compiler aihub, jobs are noted in PACKAGE.aihub until all is done, so that another run takes them up.
    """
    from estream_packer.htp.targets import chip_of_target

    chips = list(dict.fromkeys(map(chip_of_target, targets)))
    if remove:
        if compiler != "local":
            raise click.UsageError("--remove needs no --compiler", click.get_current_context())
        _remove(package, chips)
    else:
        _compile(package, chips, compiler)


def _remove(package: Path, chips: Sequence[Chip]) -> None:
    from estream_packer.compiling import decompile_changes
    from estream_packer.editing import edit_package

    before = _signatures(package)
    _, changes = edit_package(package, lambda opened: decompile_changes(opened, chips))
    for chip in chips:
        click.echo(f"removed the binary for {chip}")
    _tell_of_losses(changes, before)


def _compile(package: Path, chips: Sequence[Chip], compiler: str) -> None:
    from estream_loader import open_package
    from estream_loader.progress import open_progress
    from estream_packer.compiling import compile_changes
    from estream_packer.editing import Changes, edit_package
    from estream_packer.htp.targets import compile_targets
    from estream_packer.htp.tiles import Weights
    from estream_spec.errors import PackError

    compiles = _compiler(compiler, package)
    edit_package(package, lambda _: Changes())  # whether it can be edited is known before anyone compiles for long
    before = _signatures(package)
    with open_package(package) as opened:
        weights = Weights.of(opened)
    with open_progress("graphs") as progress:
        made = compile_targets(weights, chips, compiles, progress)

    def decide(opened: Package) -> Changes:
        if Weights.of(opened) != weights:
            raise PackError("package was replaced by another while this compiled for it", path=str(package))
        return compile_changes(opened, made)

    _, changes = edit_package(package, decide)
    compiles.forget()
    for target in made:
        click.echo(target.described())
    if not changes:
        click.echo(f"already in it, nothing changes in {package}")
    _tell_of_losses(changes, before)


def _compiler(name: str, package: Path) -> Compiler:
    """The compiler of that name; notes of jobs in AI Hub are kept beside the package."""
    if name == "aihub":
        from estream_packer.htp.aihub import AiHubCompiler

        return AiHubCompiler(package.with_name(f"{package.name}.aihub"))
    from estream_packer.htp.local import LocalCompiler

    return LocalCompiler()


def _signatures(package: Path) -> list[SignatureSummary]:
    """The signatures in a package."""
    from estream_loader import open_package
    from estream_packer.signing import summarise_signatures

    with open_package(package) as opened:
        return list(summarise_signatures(opened))


def _tell_of_losses(changes: Changes, signatures: Sequence[SignatureSummary]) -> None:
    """Say what else the edit took out, because it was for the package as it was.

    Signing again has to go on from the counters that were there: nothing in the package tells them any more.
    """
    from estream_spec.constants import KNOWN_SECTIONS, SectionType

    gone = {entry.id for entry in changes.remove if entry.type == SectionType.SIGNATURE}
    for each in signatures:
        if each.section in gone:
            what = f"signature by {each.key} with security counter {each.security_counter} taken out"
            click.echo(f"notice: {what}, sign again with --counter {each.security_counter} or more", err=True)
    for entry in changes.remove:
        if entry.type not in KNOWN_SECTIONS:
            what = f"section of unknown type {entry.type} and id {entry.id}"
            click.echo(f"notice: {what} taken out, it is not flagged as safe to copy", err=True)
