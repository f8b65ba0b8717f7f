"""How well packages predict a text beside the checkpoint they were made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from estream_loader import Package, open_package
from estream_loader.progress import open_progress
from estream_packer.build import build
from estream_packer.checkpoint import TENSORS, open_checkpoint
from estream_packer.families import family_of
from estream_packer.recipe import BuildOptions
from estream_packer.remote import Location
from estream_packer.running import WINDOW, Comparison, measure_quality
from estream_packer.summary import summarise
from estream_packer.writer import scratch_folder
from estream_spec.errors import PackError
from estream_spec.manifest import Source

if TYPE_CHECKING:
    from rich.table import Table

UNQUANTISED: Final = BuildOptions(experts="f32", dense="f32", activations="f32")
"""What computes as the checkpoint does."""
_WRONG_SOURCE: Final = "give the checkpoint the package was made from"


class PackageQuality(Struct, frozen=True, kw_only=True):
    """How well one package predicts.

    Attributes:
        package: its path.
        file_id: digest of this very file, hexadecimal.
        file_length: its bytes.
        bits_per_weight: over all weights, scales included.
        expert_bits_per_weight: over those of experts.
        comparison: with the reference.
    """

    package: str
    file_id: str
    file_length: int
    bits_per_weight: float
    expert_bits_per_weight: float
    comparison: Comparison


class Quality(Struct, frozen=True, kw_only=True):
    """How well packages of one model predict a text.

    Attributes:
        reference: the checkpoint, or the package that stands for it.
        text: what was predicted.
        tokens: predictions, each of one token of the text.
        window: tokens of the text that are seen at a time, at most: a prediction looks back to its window's start.
        perplexity: of the reference.
        packages: in the order in which they were given.
    """

    reference: str
    text: str
    tokens: int
    window: int
    perplexity: float
    packages: tuple[PackageQuality, ...]


def measure(reference: Location, paths: Sequence[Path], text: tuple[str, str], tokens: int) -> Quality:
    """Prove every byte of some packages, and run them and their reference over a text.

    Args:
        reference: the checkpoint's folder, here or elsewhere, or a package of it whose weights are all f32.
        paths: the packages.
        text: what it is called, and what it says.
        tokens: how much of it is used, at most.

    Raises:
        PackError: the reference is neither, or not what a package was made from.
        FormatError: a package is faulty.
        LinkError: the reference has no tokenizer.
        TrapError: a text of fewer than two tokens, or a value that is not finite.
    """
    name, content = text
    with ExitStack() as stack:
        packages = [stack.enter_context(open_package(path, integrity="full")) for path in paths]
        against = stack.enter_context(opened_reference(reference, packages))
        compared = measure_quality(against, packages, content, tokens)
    return Quality(
        reference=str(reference),
        text=name,
        tokens=compared[0].tokens,
        window=WINDOW,
        perplexity=compared[0].reference_perplexity,
        packages=tuple(map(_described, paths, packages, compared)),
    )


@contextmanager
def opened_reference(reference: Location, packages: Sequence[Package]) -> Iterator[Package]:
    """What packages are held against, open. Of a checkpoint's folder an f32 package is made, in a temporary folder.

    Raises:
        PackError: see `measure`.
    """
    if isinstance(reference, Path) and not reference.is_dir():
        with open_package(reference) as package:
            _check_unquantised(package, reference)
            for each in packages:
                if each.manifest.model != package.manifest.model:
                    raise PackError("its model is not the reference's", path=each.source.name, hint=_WRONG_SOURCE)
                _check_tensors(package.manifest.provenance.sources, each, str(reference))
            yield package
        return
    check_source(reference, packages)
    with scratch_folder(Path(gettempdir(), "estream-verify")) as folder:
        path = folder / "unquantised.emoe"
        with open_progress() as progress:
            build(reference, path, UNQUANTISED, progress)
        with open_package(path) as package:
            yield package


def check_source(folder: Location, packages: Iterable[Package]) -> None:
    """Refuse a checkpoint that a package was not made from: another model, or other weights.

    Raises:
        PackError: see above, or it cannot be read.
    """
    with open_checkpoint(folder) as checkpoint:
        model = family_of(checkpoint.config).read(checkpoint.config, checkpoint.generation_config).model
        for package in packages:
            if model != package.manifest.model:
                raise PackError("the checkpoint's model is not the package's", path=str(folder), hint=_WRONG_SOURCE)
        sources = checkpoint.sources()
    for package in packages:
        _check_tensors(sources, package, str(folder))


def _check_tensors(sources: Iterable[Source], package: Package, path: str) -> None:
    """Refuse other weights than those a package was made from, as far as both say which."""
    found, expected = (
        {source.name: source.sha256.hex() for source in each}.get(TENSORS)
        for each in (sources, package.manifest.provenance.sources)
    )
    if None not in (found, expected) and found != expected:
        message = f"the checkpoint's tensors have digest {found}, those of the package have {expected}"
        raise PackError(message, path=path, hint=_WRONG_SOURCE)


def _check_unquantised(package: Package, path: Path) -> None:
    """Refuse a reference that is quantised itself."""
    encodings = {matrix.encoding for layout in package.manifest.layouts for matrix in layout.matrices}
    if quantised := sorted(encodings - {"f32"}):
        message = f"reference has weights stored as {', '.join(quantised)}, expected f32 alone"
        hint = "give the checkpoint's folder, here or elsewhere, or a package built with --experts f32 --dense f32"
        raise PackError(message, path=str(path), hint=hint)


def _described(path: Path, package: Package, comparison: Comparison) -> PackageQuality:
    layouts = package.manifest.layouts
    summary = summarise(package.container, layouts, package.dense.table, package.experts.table)
    [experts] = [each.bits_per_weight for each in summary.roles if each.role == "experts"]
    return PackageQuality(
        package=str(path),
        file_id=package.file_id.hex(),
        file_length=summary.file_length,
        bits_per_weight=summary.bits_per_weight,
        expert_bits_per_weight=experts,
        comparison=comparison,
    )


def quality_table(quality: Quality) -> Table:
    """The packages, for a terminal."""
    from rich.table import Table

    table = Table("package", box=None)
    for title in (
        "bytes",
        "bits per weight",
        "experts",
        "perplexity",
        "ratio",
        "mean KL, nats",
        "same likeliest token",
    ):
        table.add_column(title, justify="right")
    for each in quality.packages:
        found = each.comparison
        table.add_row(
            each.package,
            f"{each.file_length:,}",
            f"{each.bits_per_weight:.3f}",
            f"{each.expert_bits_per_weight:.3f}",
            f"{found.perplexity:.4f}",
            f"{found.perplexity_ratio:.5f} ± {found.perplexity_ratio_error:.5f}",
            f"{found.mean_kl:.6f}",
            f"{found.top1_agreement:.2%}",
        )
    return table


def explained(quality: Quality) -> list[str]:
    """What was measured, in words, a line each."""
    return [
        f"{quality.tokens:,} tokens of {quality.text} predicted, each from at most {quality.window} before it",
        f"reference: {quality.reference} in f32, perplexity {quality.perplexity:.4f}",
        "ratio: perplexity over the reference's, ± its standard error; KL: of the package's probabilities from the "
        "reference's, mean over tokens",
    ]
