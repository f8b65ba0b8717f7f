"""Lays out what decoding after a prompt is expected to cost, and whether prefetching can pay on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from estream_packer.planning import Planned, plain_table, seconds_text
from estream_spec.decode_planner import DecodePlan
from estream_spec.energy import EnergySpent
from estream_spec.sizes import bytes_text

if TYPE_CHECKING:
    from rich.table import Table


def decode_tables(planned: Planned) -> Iterator[Table]:
    """One for each prompt length after which a token can be decoded. They fit a terminal of 80 columns."""
    for plan in planned.decoding:
        if not plan.ways:
            continue
        table = plain_table(("prefetch", "hits", "read", "time", "tokens/s", "energy", "energy x time"))
        table.title = f"decoding after a prompt of {plan.tokens:,}"
        for way in plan.ways:
            costs = way.energy and energy_texts(way.energy, way.time_s)
            sizes = f"{way.hit_rate:.1%}", bytes_text(round(way.read_bytes)), seconds_text(way.time_s)
            table.add_row(way.strategy, *sizes, f"{1 / way.time_s:.2f}", *(costs or ("", "")))
        yield table


def decode_lines(planned: Planned) -> Iterator[str]:
    """What prompts take, how large an arena decoding wants, and whether prefetching can pay."""
    for prompt, energy in zip(planned.plans, planned.energies, strict=True):
        if energy is not None:
            joules, product = energy_texts(energy, prompt.choice.time_s)
            yield f"a prompt of {prompt.tokens:,} takes {joules}; times its time, {product}"
    for plan in planned.decoding:
        yield from _lines(plan)
    if any(plan.ways for plan in planned.decoding):
        worth = "as measured when it was trained" if planned.predicted else "those published, until one is trained"
        yield f"exact: figures of the prefetch router are {worth}"


def energy_texts(energy: EnergySpent, time_s: float) -> tuple[str, str]:
    """Energy and energy times delay, as people read them."""
    joules, product = energy.total_j, energy.delay_product(time_s)
    return _text(joules, "J"), _text(product, "J s")


def _lines(plan: DecodePlan) -> Iterator[str]:
    after = f"decoding after a prompt of {plan.tokens:,}"
    if not plan.ways:
        yield f"{after}: no room for the experts of a token; more memory lets them stay"
        return
    yield f"{after} wants all memory that is left: an arena of {bytes_text(plan.arena_bytes)}, {plan.slots:,} experts"
    if not plan.reads_ahead:
        why = "all experts are in the arena" if plan.ways[0].hit_rate == 1 else "the arena has no room for it"
        yield f"prefetching does not pay here: {why}"
        return
    verdict = "pays" if plan.prefetching_pays else "does not pay"
    hides = f"attention of a layer hides {plan.hidden_records:.1f} reads of an expert"
    yield f"prefetching {verdict} here: {hides}"
    why = "; room for it is taken from what layers keep" if plan.saving < 0 else ""
    yield f"prefetching {_share(plan.saving)} of a token, and without a wrong guess {_share(plan.best_saving)}{why}"


def _share(value: float) -> str:
    """What is gained or lost, in percent."""
    return f"{'saves' if value >= 0 else 'costs'} {abs(value):.1%}"


def _text(value: float, unit: str) -> str:
    """A number as people read it, in thousandths and millionths of a unit where it is small."""
    if value >= 1:
        return f"{value:.2f} {unit}"
    return f"{value * 1e3:.1f} m{unit}" if value >= 1e-3 or not value else f"{value * 1e6:.1f} µ{unit}"
