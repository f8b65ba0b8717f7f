"""`estream-pack verify`: prove every byte of a package, and measure what quantisation cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from estream_loader import Package
    from estream_packer.running import Comparison


@click.command(short_help="Prove every byte; compare with the checkpoint.")
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("checkpoint", type=click.Path(path_type=Path), required=False)
@click.option("--text", type=click.Path(path_type=Path), help="Text to compare on, UTF-8.  [default: the sample's]")
@click.option("--tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Most tokens to compare.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(package: Path, checkpoint: Path | None, text: Path | None, tokens: int, as_json: bool) -> None:
    """Prove every byte of PACKAGE: all digests, all checksums, all padding; and say what is odd about it.

    With CHECKPOINT, the folder it was made from, also build that without quantisation in a temporary folder, run both
    over a text the model was not trained on, and show how far the package is from it.
    """
    from estream_loader import open_package
    from estream_loader.console import print_json
    from estream_loader.integrity import notices

    if checkpoint is None and text is not None:
        raise click.UsageError("--text needs CHECKPOINT", click.get_current_context())
    with open_package(package) as opened:
        sample = "" if checkpoint is None else _text(opened, text)
        length = _prove(opened)
        quality = None if checkpoint is None else _compare(opened, checkpoint, sample, tokens)
        file_id, content_id, odd = opened.file_id.hex(), opened.manifest.content_id.hex(), notices(opened)
    if as_json:
        identity = {"file_id": file_id, "content_id": content_id}
        print_json({**identity, "bytes": length, "notices": odd, "quality": quality})
        return
    click.echo(f"verified {length:,} bytes: every digest and every checksum is right")
    click.echo(f"file id {file_id}")
    for notice in odd:
        click.echo(f"notice: {notice}")
    if quality is not None:
        _show(quality)


def _prove(package: Package) -> int:
    """Prove every byte, with a progress bar; returns how many there are. What is in free sections means nothing."""
    from estream_loader.integrity import check_padding, verify, verify_length
    from estream_loader.progress import open_progress
    from estream_spec.constants import SectionType

    with open_progress() as progress:
        progress.begin("verifying", verify_length(package))
        verify(package, progress.advance)
    check_padding(package)
    free = sum(entry.stored_length for entry in package.container.entries if entry.type == SectionType.FREE)
    return package.container.superblock.file_length - free


def _text(package: Package, path: Path | None) -> str:
    """The text to compare on: a file, or what comes with the sample model where the package has its tokenizer."""
    from estream_packer.running import read_text
    from estream_packer.sample import sample_files

    if path is not None:
        return read_text(path)
    tokenizer, held_out = (sample_files() / name for name in ("tokenizer.json", "held-out.txt"))
    if not held_out.is_file() or package.tokenizer_json != tokenizer.read_bytes():
        message = "the sample's text is for the sample model: give another with --text"
        raise click.UsageError(message, click.get_current_context())
    return held_out.read_text(encoding="utf-8")


def _check_source(package: Package, folder: Path) -> None:
    """Refuse a checkpoint the package was not made from: another model, or other weights."""
    from estream_packer.checkpoint import TENSORS, open_checkpoint
    from estream_packer.families import family_of
    from estream_spec.errors import PackError

    hint = "give the checkpoint the package was made from"
    with open_checkpoint(folder) as checkpoint:
        model = family_of(checkpoint.config).describe(checkpoint.config, checkpoint.generation_config)
        if model != package.manifest.model:
            raise PackError("the checkpoint's model is not the package's", path=str(folder), hint=hint)
        found, expected = (
            {source.name: source.sha256.hex() for source in sources}.get(TENSORS)
            for sources in (checkpoint.sources(), package.manifest.provenance.sources)
        )
    # A package need not say what it was made from.
    if expected is not None and found != expected:
        message = f"the checkpoint's tensors have digest {found}, those of the package have {expected}"
        raise PackError(message, path=str(folder), hint=hint)


def _compare(package: Package, checkpoint: Path, text: str, tokens: int) -> Comparison:
    """Build the checkpoint as it is and run both."""
    from tempfile import TemporaryDirectory

    from estream_loader import open_package
    from estream_loader.progress import open_progress
    from estream_packer.build import build
    from estream_packer.recipe import BuildOptions
    from estream_packer.running import measure_quality

    _check_source(package, checkpoint)
    with TemporaryDirectory(prefix="estream-verify-") as folder:
        unquantised = Path(folder) / "unquantised.emoe"
        with open_progress() as progress:
            build(checkpoint, unquantised, BuildOptions(experts="f32", dense="f32", activations="f32"), progress)
        with open_package(unquantised) as reference:
            return measure_quality(reference, package, text, tokens)


def _show(quality: Comparison) -> None:
    """Print the comparison for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(f"against the checkpoint, {quality.tokens:,} tokens", box=None)
    table.add_column("", justify="right")
    table.add_row("largest difference of a logit", f"{quality.max_logit_difference:.5f}")
    table.add_row("mean KL divergence, nats", f"{quality.mean_kl:.6f}")
    table.add_row("same likeliest token", f"{quality.top1_agreement:.2%}")
    table.add_row("perplexity of the checkpoint", f"{quality.reference_perplexity:.4f}")
    table.add_row("perplexity of the package", f"{quality.perplexity:.4f}")
    table.add_row("ratio", f"{quality.perplexity_ratio:.5f}")
    Console(highlight=False).print(table)
