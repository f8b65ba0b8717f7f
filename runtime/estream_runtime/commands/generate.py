"""`estream-run generate`: continue a text, shown as it comes."""

from __future__ import annotations

from dataclasses import asdict

import click

from estream_loader.console import print_json
from estream_runtime.commands.options import decoding_options, sampling_options, session_options
from estream_runtime.decoding import DecodeStats
from estream_runtime.session import Session
from estream_runtime.stats import Stats
from estream_runtime.text import TextStream, encode_prompt


@click.command()
@session_options
@click.option("--prompt", required=True, help="The text to continue.")
@sampling_options(128)
@decoding_options
@click.option("--json", "as_json", is_flag=True, help="Print text and figures as JSON when all is done.")
def command(
    session: Session,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Continue a text with PACKAGE.

    The text goes to standard output, what it cost to standard error.
    """
    tokenizer = session.package.tokenizer
    prompt_ids = encode_prompt(session.package, prompt)
    generation = session.generate(prompt_ids, max_new_tokens, temperature, top_p, seed)
    stream, pieces, token_ids = TextStream(tokenizer, prompt_ids), list[str](), list[int]()
    try:
        for token in generation:
            token_ids.append(token)
            if token not in session.package.manifest.model.end_tokens:
                _show(stream.push(token), pieces, as_json)
        _show(stream.finish(), pieces, as_json)
    except BaseException:
        if any(pieces) and not as_json:
            click.echo()  # an error is not to stand on the text's last line
        raise
    package_bytes = session.package.container.superblock.file_length
    if as_json:
        print_json({"text": "".join(pieces), "token_ids": token_ids, "stats": figures(generation.stats, package_bytes)})
    else:
        click.echo()
        click.echo(_summary(generation.stats, package_bytes), err=True)


def figures(stats: Stats, package_bytes: int) -> dict[str, object]:
    """What a run cost, for JSON."""
    rate = stats.decode_tokens_per_s
    return {**asdict(stats), "decode_tokens_per_s": rate, "package_bytes": package_bytes}


def _show(piece: str, pieces: list[str], as_json: bool) -> None:
    pieces.append(piece)
    if piece and not as_json:
        click.echo(piece.encode(), nl=False)  # UTF-8 whatever the terminal claims to be


def _summary(stats: Stats, package_bytes: int) -> str:
    rate = stats.decode_tokens_per_s
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    share = stats.peak_arena_bytes / package_bytes
    backend = f"{stats.backend} ({stats.backend_detail})" if stats.backend_detail else stats.backend
    kind = "" if stats.arena_kind == "ordinary" else f" of {stats.arena_kind}"
    arena = f"arena {stats.peak_arena_bytes:,} bytes{kind}, {share:.1%} of the package's {package_bytes:,}"
    padded = f"; {stats.padded_rows / stats.tile_rows:.0%} of rows computed for none" if stats.tile_rows else ""
    lines = [
        f"{stats.prompt_tokens} tokens in, {stats.new_tokens} out; first token after {stats.ttft_s:.2f} s{speed}",
        f"{backend}, {arena}; {stats.bytes_read:,} bytes of experts read in {stats.reads:,} reads{padded}",
    ]
    if stats.decoding is not None:
        lines.append(_decoding_summary(stats.decoding, stats.prefetching))
    return "\n".join(lines)


def _decoding_summary(decoded: DecodeStats, prefetching: str) -> str:
    substituted = ""
    if decoded.substituted:
        lost = decoded.lost_share / max(decoded.layers, 1)
        substituted = f"; {decoded.substituted:,} experts replaced, which had {lost:.1%} of the weights"
    return (
        f"decoding: {decoded.hit_rate:.0%} of experts there from earlier tokens,"
        f" {decoded.bytes_read // decoded.tokens:,} bytes and {decoded.stalls / decoded.tokens:.1f} stalls a token;"
        f" reading ahead {prefetching}{substituted}"
    )
