"""`estream-pack verify`: prove every byte of a package and its graphs for NPUs, measure what quantisation cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE, console, print_json, refusals_told
from estream_loader.policy_options import policy_of, policy_options
from estream_packer.remote import Location, location

if TYPE_CHECKING:
    from estream_loader import Package, SignaturePolicy
    from estream_packer.htp.proof import Proof
    from estream_packer.running import Comparison
    from estream_packer.signing import SignatureSummary
    from estream_spec.manifest import Binary


@click.command(short_help="Prove every byte; compare with the checkpoint; prove graphs.")
@click.argument("packages", type=location, nargs=-1, required=True, metavar="PACKAGE [CHECKPOINT] | PACKAGE...")
@click.option(
    "--quality", "reference", type=location, help="Compare all packages with this checkpoint, or f32 package."
)
@click.option("--text", type=FILE, help="Text to compare on, UTF-8.  [default: the sample's]")
@click.option("--tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Most tokens to compare.")
@click.option("--svg", type=FILE, help="Draw the divergence of packages against their size to this file.")
@click.option("--graphs", "with_graphs", is_flag=True, help="Prove the graphs for NPUs, too, in the simulator.")
@policy_options
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the refusal, as JSON.")
def command(
    packages: tuple[Location, ...],
    reference: Location | None,
    text: Path | None,
    tokens: int,
    svg: Path | None,
    with_graphs: bool,
    keys: tuple[str, ...],
    minimum_counter: int | None,
    signatures: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Prove every byte of PACKAGE: all digests, all checksums, all padding; and say what is odd about it.

    With --key, first require that each of the keys has signed it. What a package says of itself proves nothing: without
    --key, signatures are only listed.

    With CHECKPOINT, the folder it was made from or the URL of it, also build that without quantisation in a temporary
    folder, run both over a text the model was not trained on, and show how far the package is from it.

    With --quality, prove and compare any number of packages of one checkpoint, for a choice between them: perplexity of
    the text, KL divergence from the checkpoint, and how often both have the same likeliest token, side by side.

    With --graphs, also run every graph of every binary in Qualcomm's simulator on inputs that are random, zero or
    large, as `compile` does, and compare it with the reference: no row may be off by more than 1 % of its size. This
    needs onnxruntime-qnn on x86-64, with an SDK no older than the one that made the binaries.

    What is refused is told as `validate` tells it, with the class `untrusted` where a signature is not as required.
    """
    context = click.get_current_context()
    if reference is not None:
        if with_graphs or keys or minimum_counter is not None or signatures:
            raise click.UsageError("--quality goes with neither --graphs nor signatures: verify them apart", context)
        with refusals_told(as_json):
            _measure([_local(each) for each in packages], reference, text, tokens, svg, as_json)
        return
    if svg is not None:
        raise click.UsageError("--svg needs --quality", context)
    if len(packages) > 2:
        raise click.UsageError("more than one package: compare them with --quality CHECKPOINT", context)
    package, checkpoint = packages[0], packages[1] if len(packages) > 1 else None
    from estream_loader import open_package
    from estream_loader.integrity import notices
    from estream_loader.keys import read_signature
    from estream_packer.proving import prove
    from estream_packer.signing import summarise_signatures

    if with_graphs:
        from estream_packer.htp.proof import check_simulator
    if checkpoint is None and text is not None:
        raise click.UsageError("--text needs CHECKPOINT or --quality", context)
    with refusals_told(as_json):
        package = _local(package)
        if checkpoint is not None:
            _check_folder(checkpoint)
        detached = tuple(read_signature(path) for path in signatures)
        policy = policy_of(keys, minimum_counter, detached)
        with open_package(package, integrity="paged", policy=policy) as opened:  # `prove` does what `full` would
            sample = "" if checkpoint is None else _text(opened, text)
            if with_graphs and opened.manifest.binaries:
                check_simulator()
            length = prove(opened)
            found = list(summarise_signatures(opened, detached))
            graphs = _prove_graphs(opened) if with_graphs else None
            quality = None if checkpoint is None else _compare(opened, checkpoint, sample, tokens)
            file_id, content_id, odd = opened.file_id.hex(), opened.manifest.content_id.hex(), notices(opened)
    signers = {} if policy is None else _signed_by(found, policy)
    if policy is None:
        odd += map(_untrusted, found)
    if as_json:
        signed_by = [{"key": key, "security_counter": counter} for key, counter in signers.items()]
        identity = {"file_id": file_id, "content_id": content_id}
        found_out = {**identity, "bytes": length, "signed_by": signed_by, "notices": odd}
        proven = None if graphs is None else [_described(*each) for each in graphs]
        print_json({**found_out, "graphs": proven, "quality": quality})
        return
    click.echo(f"verified {length:,} bytes: every digest and every checksum is right")
    click.echo(f"file id {file_id}")
    for key, counter in signers.items():
        click.echo(f"signed by {key}, security counter {counter}")
    for notice in odd:
        click.echo(f"notice: {notice}")
    if graphs is not None:
        _show_graphs(graphs)
    if quality is not None:
        _show(quality)


def _local(package: Location) -> Path:
    """Refuse a package that is elsewhere."""
    from estream_spec.errors import PackError

    if not isinstance(package, Path):
        raise PackError("package is on another machine", path=str(package), hint="download it first")
    return package


def _check_folder(checkpoint: Location) -> None:
    """Refuse a file where the checkpoint's folder belongs: a signature, before anyone misses it, or a package."""
    from estream_packer.signing import is_signature_file
    from estream_spec.errors import PackError

    if not isinstance(checkpoint, Path):
        return
    if is_signature_file(checkpoint):
        message = "checkpoint is a signature, expected a folder"
        raise PackError(message, path=str(checkpoint), hint="a signature goes behind --signature")
    if checkpoint.is_file():
        hint = "'estream-pack diff' compares packages"
        raise PackError("is a file, expected the folder of a checkpoint", path=str(checkpoint), hint=hint)


def _signed_by(signatures: Sequence[SignatureSummary], policy: SignaturePolicy) -> dict[str, int]:
    """The highest security counter of each required key, of which each has signed."""
    return {
        key.hex(): max(each.security_counter for each in signatures if each.verifies and each.key == key.hex())
        for key in policy.keys
    }


def _untrusted(signature: SignatureSummary) -> str:
    """What is told of a signature when the caller names no key."""
    verdict = "verifies, but you have named no key to trust" if signature.verifies else "does not verify"
    return f"signature by {signature.key}, counter {signature.security_counter}: {verdict}"


def _measure(
    paths: Sequence[Path], reference: Location, text: Path | None, tokens: int, svg: Path | None, as_json: bool
) -> None:
    """Compare packages with their checkpoint, and print or draw what was found."""
    from estream_loader import open_package
    from estream_loader.small_files import require_writable, write_over
    from estream_packer.quality import explained, measure, quality_table

    if svg is not None:
        require_writable(svg)
    with open_package(paths[0]) as package:
        content = _text(package, text)
    quality = measure(reference, paths, ("the sample's text" if text is None else str(text), content), tokens)
    if svg is not None:
        from estream_packer.quality_picture import quality_svg

        write_over(svg, quality_svg(quality).encode())
    if as_json:
        print_json(quality)
        return
    console().print(quality_table(quality))
    for line in explained(quality):
        click.echo(line)
    if svg is not None:
        click.echo(f"wrote {svg}")


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


def _compare(package: Package, checkpoint: Location, text: str, tokens: int) -> Comparison:
    """Build the checkpoint as it is and run both."""
    from estream_packer.quality import opened_reference
    from estream_packer.running import measure_quality

    with opened_reference(checkpoint, [package]) as reference:
        [found] = measure_quality(reference, [package], text, tokens)
    return found


def _prove_graphs(package: Package) -> list[tuple[Binary, list[Proof]]]:
    """Every binary, and a proof of each of its graphs."""
    from estream_loader.progress import open_progress
    from estream_packer.htp.proof import prove_binary

    manifest = package.manifest
    with open_progress("graphs") as progress:
        return [
            (binary, prove_binary(binary, package.binary(binary), manifest.model, progress))
            for binary in manifest.binaries
        ]


def _described(binary: Binary, proofs: Sequence[Proof]) -> dict[str, object]:
    """A binary and the proofs of its graphs, for JSON."""
    from estream_spec.binary_interface import label_of

    graphs = [{"graph": label_of(each.graph), "output": each.output, "error": each.error} for each in proofs]
    named = {"section": binary.section, "soc_model": binary.soc_model, "architecture": binary.architecture}
    return {**named, "sdk": binary.sdk, "error": max(each.error for each in proofs), "graphs": graphs}


def _show_graphs(proven: Sequence[tuple[Binary, Sequence[Proof]]]) -> None:
    """Print for people which graphs are proven, chip by chip."""
    from rich.table import Table

    from estream_spec.binary_interface import label_of
    from estream_spec.chips import chip_numbered

    if not proven:
        click.echo("no graphs to prove: nothing in the package is compiled for an NPU")
    for binary, proofs in proven:
        chip, worst = chip_numbered(binary.soc_model, binary.architecture), max(each.error for each in proofs)
        count = f"{len(proofs)} graph{'s' * (len(proofs) != 1)}"
        click.echo(f"proven for {chip}: {count}, in the simulator off by at most {worst:.1e}")
        table = Table("  graph", "output", box=None)
        table.add_column("off by", justify="right")
        for each in proofs:
            table.add_row(f"  {label_of(each.graph)}", each.output, f"{each.error:.1e}")
        console().print(table)


def _show(quality: Comparison) -> None:
    """Print the comparison for people."""
    from rich.table import Table

    table = Table(f"against the checkpoint, {quality.tokens:,} tokens", box=None)
    table.add_column("", justify="right")
    table.add_row("largest difference of a logit", f"{quality.max_logit_difference:.5f}")
    table.add_row("mean KL divergence, nats", f"{quality.mean_kl:.6f}")
    table.add_row("same likeliest token", f"{quality.top1_agreement:.2%}")
    table.add_row("perplexity of the checkpoint", f"{quality.reference_perplexity:.4f}")
    table.add_row("perplexity of the package", f"{quality.perplexity:.4f}")
    table.add_row("ratio", f"{quality.perplexity_ratio:.5f}")
    console().print(table)
