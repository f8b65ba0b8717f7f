"""`estream-pack build`: pack a checkpoint folder, or what a recipe names, into one package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from estream_loader.console import FILE, print_json
from estream_packer.commands.options import show_package, weight_options
from estream_packer.recipe import DEFAULTS, MAX_JOBS, BuildOptions
from estream_packer.remote import Location, location


def _executor(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """An executor that there can be."""
    from estream_packer.executors import is_executor

    if not is_executor(value):
        raise click.BadParameter(f"{value!r}, expected threads, processes or dask://HOST:PORT", context, parameter)
    return value


@click.command(short_help="Pack a checkpoint into one package.")
@click.argument("source", type=location)
@click.option("-o", "--output", type=location, required=True, help="The package to write: a file, or a URL.")
@weight_options
@click.option("--name", help="The model's name, for people.  [default: its family]")
@click.option("--licence", help="SPDX expression of the weights' licence.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="Compile the graphs for an NPU as well, as the verb compile does: htp:sm8650. May be given several times.",
)
@click.option(
    "--calibrate", type=FILE, help="Text, UTF-8, that the model reads first to find out which weights matter."
)
@click.option("--prefetch", type=FILE, help="A prefetch router that was trained for SOURCE, to pack with it.")
@click.option("--jobs", type=click.IntRange(1, MAX_JOBS), help="Records made at a time.  [default: one per processor]")
@click.option(
    "--executor",
    default="threads",
    callback=_executor,
    show_default=True,
    metavar="threads|processes|dask://HOST:PORT",
    help="Who makes the records: this program, more of its kind, or a Dask cluster that sees SOURCE as well.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    source: Location,
    output: Location,
    jobs: int | None,
    executor: str,
    as_json: bool,
    **choices: str | Path | tuple[str, ...] | None,
) -> None:
    """Pack SOURCE, a Hugging Face checkpoint folder or a recipe (.toml), into one .emoe package.

    A recipe says everything that decides the package, so only -o, --jobs, --executor and --json go with one. SOURCE and
    the package may be URLs of any file system that fsspec knows, such as s3://bucket/model.

    A build that is stopped goes on where it ended when it is begun again.
    """
    import msgspec

    from estream_loader.progress import open_progress
    from estream_packer.build import build
    from estream_packer.executors import open_executor

    given = {option: value for option, value in choices.items() if value not in (None, ())}
    if isinstance(source, Path) and source.suffix.lower() == ".toml":
        checkpoint, options = _from_recipe(source, output, given)
    else:
        checkpoint, options = source, _from_flags(given)
    options = msgspec.structs.replace(options, jobs=jobs)
    try:
        with open_executor(executor, jobs) as workers, open_progress() as progress:
            result = build(checkpoint, output, options, progress, workers)
    except BaseException as error:
        for note in getattr(error, "__notes__", ()):  # where what was made is kept
            click.echo(f"notice: {note}", err=True)
        raise
    for notice in result.notices:
        click.echo(f"notice: {notice}", err=True)
    if as_json:
        print_json(result)
    else:
        show_package(result, result.source_bytes, "read")
        for lines in result.compiled:
            click.echo(lines)


def _from_flags(given: Mapping[str, object]) -> BuildOptions:
    """Options from flags."""
    import msgspec

    from estream_packer.recipe import CalibrationTable

    options = {option: value for option, value in given.items() if option != "calibrate"}
    if "calibrate" in given:
        options["calibration"] = CalibrationTable(text=str(given["calibrate"]))
    if "prefetch" in given:
        options["prefetch"] = str(given["prefetch"])
    return msgspec.structs.replace(DEFAULTS, **options)


def _from_recipe(recipe: Path, output: Location, given: Mapping[str, object]) -> tuple[Location, BuildOptions]:
    """Checkpoint and options from a recipe, which no flag may contradict and no package replace."""
    from estream_packer.recipe import read_recipe
    from estream_spec.errors import PackError

    if given:
        flags = ", ".join(f"--{option.removesuffix('s') if option == 'targets' else option}" for option in given)
        message = f"{flags} cannot be given with a recipe: say it in {recipe.name}"
        raise click.UsageError(message, click.get_current_context())
    found = read_recipe(recipe)
    if isinstance(output, Path) and output.exists() and output.samefile(recipe):
        raise PackError("output is the recipe", path=str(output), hint="give another name")
    return found
