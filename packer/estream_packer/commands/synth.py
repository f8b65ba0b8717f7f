"""`estream-pack synth`: write a package of a published model's shape with random weights."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import FiniteRange, print_json
from estream_packer.commands.options import show_package, weight_options
from estream_packer.favourites import MAX_SKEW
from estream_packer.random_weights import MAX_SEED
from estream_packer.recipe import BuildOptions
from estream_spec.shapes import SHAPES


@click.command(short_help="Write a package of a model's shape, with random weights.")
@click.option("--shape", type=click.Choice(tuple(SHAPES)), required=True, help="The model whose shape it has.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The package to write.")
@weight_options
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    show_default=True,
    help="Picks the weights; the same seed gives the same package.",
)
@click.option(
    "--skew",
    type=FiniteRange(0, MAX_SKEW),
    default=0,
    show_default=True,
    help="How unevenly experts are chosen: the n-th most popular one n to the power of this as seldom as the first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(shape: str, output: Path, seed: int, skew: float, as_json: bool, **choices: str | None) -> None:
    """Write a package of a model's shape with random weights, for benchmarks and for planning.

    It needs no checkpoint, reads and computes as the model would, and sends tokens to all experts evenly unless
    --skew says otherwise.
    """
    import msgspec

    from estream_loader.progress import open_progress
    from estream_packer.synth import synthesise

    given = {option: value for option, value in choices.items() if value is not None}
    options = msgspec.structs.replace(BuildOptions(name=f"synthetic {shape}"), **given)
    with open_progress() as progress:
        result = synthesise(SHAPES[shape], output, options, seed, progress, skew)
    for notice in result.notices:
        click.echo(f"notice: {notice}", err=True)
    if as_json:
        print_json(result)
    else:
        show_package(result, result.summary.file_length, "written")
