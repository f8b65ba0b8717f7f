"""`estream-run trace`: where the time of a prefill goes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import click
import msgspec
import numpy as np

from estream_loader.console import print_json
from estream_loader.small_files import require_writable, write_over
from estream_runtime.breakdown import breakdown, lane_busy_s
from estream_runtime.commands.options import random_ids, session_options
from estream_runtime.session import Session
from estream_runtime.text import encode_prompt
from estream_runtime.timeline import BLOCKS, LETTERS, timeline
from estream_spec.errors import LinkError
from estream_spec.limits import MAX_DIMENSION
from estream_spec.trace import Trace, encode_trace

WIDEST: Final = 300
"""Columns of the picture at most, whatever a terminal says it has."""


@click.command()
@session_options
@click.option("--prompt", help="The text to take in.")
@click.option("--tokens", type=click.IntRange(1, MAX_DIMENSION), help="Or so many random tokens.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a trace for Perfetto to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(session: Session, prompt: str | None, tokens: int | None, output: Path | None, as_json: bool) -> None:
    """Take one prompt in with PACKAGE and show where the time goes.

    A table says how long each activity takes, a picture when computing, reading and banks are busy. The file of -o
    opens in ui.perfetto.dev and in chrome://tracing.
    """
    if prompt is not None and tokens is None:
        if session.package.tokenizer_json is None:
            raise LinkError("the package has no tokenizer", path=session.package.source.name, hint="give --tokens N")
        token_ids = np.array(encode_prompt(session.package, prompt), np.int64)
    elif prompt is None and tokens is not None:
        token_ids = random_ids(tokens, session.package.manifest.model.vocabulary)
    else:
        raise click.UsageError("give --prompt or --tokens", click.get_current_context())
    if output is not None:
        require_writable(output)
    trace = session.trace(token_ids)
    if as_json:
        print_json(_figures(trace))
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        click.echo("\n".join([*breakdown(trace), "", *timeline(trace, width, _marks())]))
    if output is not None:
        write_over(output, encode_trace(trace))
        if not as_json:
            click.echo(f"wrote {output}")


def _marks() -> str:
    """What the terminal can show."""
    try:
        BLOCKS.encode(sys.stdout.encoding if sys.stdout is not None else "ascii")
    except UnicodeEncodeError:
        return LETTERS
    return BLOCKS


def _figures(trace: Trace) -> dict[str, object]:
    """What ran and what it cost, with what the table makes of it."""
    run, stats = trace.other_data, trace.other_data.stats
    made = {"other_s": stats.other_s, "floor_s": stats.floor_s, "lane_busy_s": lane_busy_s(trace)}
    return {**msgspec.to_builtins(run), "stats": {**msgspec.to_builtins(stats), **made}}
