"""What the verbs that make packages share: how weights are stored, and what is shown of a package that was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import click

from estream_packer.recipe import DEFAULTS, DenseEncoding
from estream_spec.manifest import Activations
from estream_spec.weights import Encoding

if TYPE_CHECKING:
    from estream_packer.packing import PackResult


def weight_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options `experts`, `dense` and `activations`; one left out is None."""
    options = (
        click.option(
            "--experts",
            type=click.Choice(get_args(Encoding)),
            help=f"How expert weights are stored.  [default: {DEFAULTS.experts}]",
        ),
        click.option(
            "--dense",
            type=click.Choice(get_args(DenseEncoding)),
            help=f"How all other matrices are stored.  [default: {DEFAULTS.dense}]",
        ),
        click.option(
            "--activations",
            type=click.Choice(get_args(Activations)),
            help=f"What enters the products of quantised weights.  [default: {DEFAULTS.activations}]",
        ),
    )
    for option in reversed(options):
        verb = option(verb)
    return verb


def show_package(result: PackResult, length: int, done: str) -> None:
    """Print what was made, for people.

    Args:
        result: the package.
        length: bytes that were `done`.
        done: what was done with them, such as `read`.
    """
    from estream_loader.console import console
    from estream_packer.summary import summary_tables

    shown = console()
    for table in summary_tables(result.summary):
        shown.print(table)
    megabytes = length / 1e6
    rate = megabytes / result.seconds
    shown.print(f"{megabytes:,.1f} MB {done} in {result.seconds:.1f} s, {rate:,.1f} MB/s", markup=False)
    shown.print(f"file id {result.file_id}", markup=False, soft_wrap=True)
    shown.print(f"wrote {result.output}", markup=False, soft_wrap=True)
