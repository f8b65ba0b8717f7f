"""`estream-pack train-prefetch`: train what predicts a package's experts."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import FILE, FiniteRange, console, print_json


@click.command(short_help="Train what predicts experts before they are needed.")
@click.argument("package", type=FILE)
@click.option(
    "--text",
    "texts",
    type=FILE,
    multiple=True,
    required=True,
    help="Text, UTF-8, that the model reads; may be several.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The prefetch router to write.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=200_000,
    show_default=True,
    help="Most tokens of the texts that are read.",
)
@click.option(
    "--target",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    default=0.99,
    show_default=True,
    help="Share of needed experts that is to be predicted.",
)
@click.option(
    "--test", type=FILE, help="Text to report on, 256 tokens or more.  [default: a tenth of the others, kept for that]"
)
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Draw how reliable its confidence is to this SVG file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    package: Path,
    texts: tuple[Path, ...],
    output: Path,
    tokens: int,
    target: float,
    test: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Train a prefetch router for PACKAGE and any other of the same checkpoint; `build --prefetch` takes it in.

    The model reads the texts. For each layer a linear map learns from what enters it which experts its router will
    choose, and a second one how many more to fetch so that few are missed. What it predicts changes speed and never a
    result. Training, calibration and the report each have paragraphs of their own.

    While it runs, a folder beside the output holds what was recorded, some kilobytes a token and layer.
    """
    from estream_loader.progress import open_progress
    from estream_loader.small_files import require_writable, write_over
    from estream_packer.prefetch.training import Task, train_prefetch

    if picture is not None:
        if picture.resolve() == output.resolve():
            raise click.UsageError("--output and --picture are the same file", click.get_current_context())
        read = (*texts, *(() if test is None else (test,)))
        if picture.exists() and any(each.exists() and picture.samefile(each) for each in read):
            raise click.UsageError("--picture is a text that is read", click.get_current_context())
        require_writable(picture)
    task = Task(package=package, texts=texts, output=output, tokens=tokens, target=target, test=test)
    with open_progress("tokens") as progress:
        report = train_prefetch(task, progress)
    if picture is not None:
        from estream_packer.prefetch.picture import reliability_svg

        write_over(picture, reliability_svg(report).encode())
    if as_json:
        print_json(report)
        return
    from estream_packer.prefetch.report_tables import explained, report_tables

    shown = console()
    for table in report_tables(report):
        shown.print(table)
        shown.print()
    for line in explained(report):
        click.echo(line)
    click.echo(f"wrote {output}")
