"""`estream-run bench`: how fast a package runs here: taking a prompt in, or decoding in each of several ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np

from estream_loader.console import FILE, REFUSED, print_json
from estream_loader.package import Package
from estream_loader.progress import open_progress
from estream_runtime.batch import Ids
from estream_runtime.commands.options import opener_options, random_ids, substitute_share_option
from estream_runtime.decode_bench import CACHE, JUDGED, DecodeBench, Figures, decode_bench
from estream_runtime.evaluation import read_text
from estream_runtime.session import Session
from estream_runtime.stats import Stats
from estream_runtime.text import encode_prompt
from estream_spec.errors import LinkError
from estream_spec.limits import MAX_DIMENSION

MIB: Final = 1 << 20
PROMPT_TOKENS: Final = 64
TOKENS: Final = 32


@click.command(short_help="Measure how fast a package runs.")
@opener_options
@click.option("--decode", is_flag=True, help="Measure decoding, in each way of bringing experts.")
@click.option("--prompt", help="The text to begin with.")
@click.option("--prompt-file", type=FILE, help="The same from a file, UTF-8.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(2, MAX_DIMENSION),
    help=f"Tokens of the prompt at most, or random ones.  [default: all of the text, or {PROMPT_TOKENS}]",
)
@click.option("--tokens", type=click.IntRange(1), help=f"Tokens to decode.  [default: {TOKENS}]")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each way.")
@substitute_share_option
@click.option("--cold", is_flag=True, help="Before each run, drop what the page cache holds of PACKAGE.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    package: Package,
    open_session: Callable[..., Session],
    decode: bool,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_tokens: int | None,
    tokens: int | None,
    rounds: int,
    substitute_share: float | None,
    cold: bool,
    as_json: bool,
) -> None:
    """Measure how fast PACKAGE runs on this device: taking a prompt in, or with --decode the tokens that follow it.

    Decoding is measured without a cache of experts, with one, and with one and reading ahead: the experts of the token
    before, those that the package's prefetch router predicts (APEX), always, and judged, which is only while the
    session finds that it pays, and those that will really be needed (oracle). All of these make the same tokens, which
    is checked: the exit code is 1 where they do not. The mode stall-free, whose tokens may be others, is measured
    beside them wherever the model allows it; there is no --mode.

    Each run begins with an empty arena. Without a text the prompt is of random tokens, whose routing is not a text's.
    """
    if not decode and (tokens is not None or substitute_share is not None):
        option = "--tokens" if tokens is not None else "--substitute-share"
        raise click.UsageError(f"{option} needs --decode", click.get_current_context())
    ids, what = _prompt(package, prompt, prompt_file, prompt_tokens)
    opener = _cold(package, open_session) if cold else open_session
    if not decode:
        _prefill(opener, ids, what, rounds, as_json)
        return
    with open_progress("runs") as progress:
        found = decode_bench(package, opener, ids, tokens or TOKENS, rounds, substitute_share, progress)
    if as_json:
        print_json({"prompt_tokens": len(ids), "rounds": rounds, **asdict(found)})
    else:
        click.echo("\n".join(_decoding(found, what, rounds)))
    if not found.same_tokens:
        click.echo("estream-run: error: exact ways made different tokens", err=True)
        click.get_current_context().exit(REFUSED)


def _prompt(
    package: Package, prompt: str | None, prompt_file: Path | None, prompt_tokens: int | None
) -> tuple[Ids, str]:
    """Token ids int64 `[T]` to begin with, and what they are, in words."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both", click.get_current_context())
    if prompt is None and prompt_file is None:
        ids = random_ids(prompt_tokens or PROMPT_TOKENS, package.manifest.model.vocabulary)
        return ids, f"{len(ids)} random tokens"
    if package.tokenizer_json is None:
        hint = "give --prompt-tokens N alone, for a random prompt"
        raise LinkError("the package has no tokenizer", path=package.source.name, hint=hint)
    text = read_text(prompt_file) if prompt_file is not None else prompt
    ids = np.array(encode_prompt(package, text or "")[:prompt_tokens], np.int64)
    return ids, f"{len(ids)} tokens of the text"


def _cold(package: Package, open_session: Callable[..., Session]) -> Callable[..., Session]:
    """What opens sessions once nothing of the package is in the page cache, as far as nobody else holds it there."""

    def opener(**changes: Any) -> Session:
        with Path(package.source.name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return open_session(**changes)

    return opener


def _prefill(open_session: Callable[..., Session], prompt: Ids, what: str, rounds: int, as_json: bool) -> None:
    """Take a prompt in so many times, and print what that came to."""
    found: list[Stats] = []
    for _ in range(rounds):
        with open_session() as session:
            found.append(session.prefill(prompt).stats)
    seconds = median(each.ttft_s for each in found)
    if as_json:
        print_json({"prompt_tokens": len(prompt), "ttft_s": seconds, "runs": [asdict(each) for each in found]})
        return
    bytes_read = median(each.bytes_read for each in found)
    lowest, highest = min(each.ttft_s for each in found), max(each.ttft_s for each in found)
    click.echo(
        f"{what}, {rounds} round{'s' * (rounds > 1)}: first token after {seconds:.3f} s ({lowest:.3f} to"
        f" {highest:.3f}), {len(prompt) / seconds:.1f} tokens/s\n"
        f"{bytes_read / MIB:,.1f} MiB of experts read ({found[0].reading_mode}); waiting for them took"
        f" {median(each.bubble for each in found):.0%} of the time; arena {found[0].peak_arena_bytes / MIB:,.1f} MiB"
    )


def _decoding(found: DecodeBench, what: str, rounds: int) -> Iterator[str]:
    """The figures as people read them."""
    for notice in found.notices:
        yield f"notice: {notice}"
    yield (
        f"{what}, then {found.ways[0].tokens} tokens decoded, {rounds} round{'s' * (rounds > 1)};"
        f" arena {found.arena_bytes / MIB:,.1f} MiB, reads: {found.reading_mode}"
    )
    yield ""
    yield (
        f"{'way':24}{'tokens/s':>9}{'of cache':>10}{'MiB/token':>11}{'there':>7}{'stalls':>8}{'in time':>9}"
        f"{'useful':>8}{'waiting':>11}"
    )
    cache = next(each for each in found.ways if each.name == CACHE)
    for way in found.ways:
        yield (
            f"{way.name:24}{way.tokens_per_s:>9.2f}{way.tokens_per_s / cache.tokens_per_s:>9.2f}x"
            f"{way.bytes_per_token / MIB:>11.2f}{way.hit_rate:>7.0%}{way.stalls_per_token:>8.1f}"
            f"{_share(way.timeliness):>9}{_share(way.precision):>8}{way.waiting_s * 1e3:>8.1f} ms"
        )
    yield ""
    yield "there: of the experts needed, from earlier tokens; stalls, waiting: layers that waited, and how long a token"
    yield "in time: of the experts read ahead and needed, there before that; useful: of those read ahead, needed"
    yield "tokens: the same by all exact ways" if found.same_tokens else "tokens: NOT the same by all exact ways"
    if all(each.precision is None for each in found.ways):
        _, _, why = found.ways[-1].prefetching.partition("off: ")  # the oracle's: it always has something to read
        yield f"nothing was read ahead: {why or 'it was expected to pay at no time, or had no time to begin'}"
    yield from _remarks(found.ways)


def _remarks(ways: Sequence[Figures]) -> Iterator[str]:
    """What the table has no room for."""
    for way in ways:
        if not way.exact:
            yield (
                f"{way.name}: {way.substituted_per_token:.1f} experts a token replaced, which had {way.lost_share:.1%}"
                f" of the weights; the first {way.agreeing} of {way.tokens + 1} tokens are those of the exact ways"
            )
        elif way.name == JUDGED:
            yield f"{way.name}: reading ahead ended {way.prefetching}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
