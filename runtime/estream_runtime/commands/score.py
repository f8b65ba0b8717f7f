"""`estream-run score`: how likely a model finds a text, or each of several ways to go on."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import FILE, print_json
from estream_loader.progress import open_progress
from estream_runtime.commands.options import session_options
from estream_runtime.evaluation import bits_per_byte, perplexity, read_text, token_log_likelihoods
from estream_runtime.session import Session
from estream_runtime.text import encode_continuation, encode_prompt, encode_scored


@click.command()
@session_options
@click.option("--prompt", help="The text before each choice.")
@click.option("--choice", "choices", multiple=True, help="A way to go on, with the space it begins with. Repeatable.")
@click.option("--text", type=FILE, help="A text file to predict, UTF-8.")
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens in a window.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    session: Session, prompt: str | None, choices: tuple[str, ...], text: Path | None, window: int, as_json: bool
) -> None:
    """Score choices after a prompt, or a whole text, with PACKAGE."""
    if text is not None and prompt is None and not choices:
        _score_text(session, text, window, as_json)
    elif text is None and prompt is not None and choices:
        _score_choices(session, prompt, choices, as_json)
    else:
        raise click.UsageError("give --prompt and --choice, or --text", click.get_current_context())


def _score_choices(session: Session, prompt: str, choices: tuple[str, ...], as_json: bool) -> None:
    token_ids = [encode_continuation(session.package, choice) for choice in choices]
    scores = session.score(encode_prompt(session.package, prompt), token_ids)
    best = scores.index(max(scores))
    if as_json:
        scored = [
            {"text": choice, "tokens": len(tokens), "log_likelihood": score}
            for choice, tokens, score in zip(choices, token_ids, scores, strict=True)
        ]
        print_json({"choices": scored, "best": best})
        return
    for number, (choice, score) in enumerate(zip(choices, scores, strict=True)):
        click.echo(f"{'*' if number == best else ' '} {score:10.4f}  {choice}")


def _score_text(session: Session, path: Path, window: int, as_json: bool) -> None:
    token_ids, scored_bytes = encode_scored(session.package, read_text(path))
    window = min(window, session.package.manifest.model.context_length)
    with open_progress("tokens") as progress:
        progress.begin("scoring", max(len(token_ids) - 1, 0))
        found = token_log_likelihoods(session, token_ids, window, progress.advance)
    result = {
        "tokens": len(found),
        "bytes": scored_bytes,
        "perplexity": perplexity(found),
        "bits_per_byte": bits_per_byte(found, scored_bytes),
    }
    if as_json:
        print_json(result)
    else:
        click.echo(f"perplexity     {result['perplexity']:.4f} over {len(found)} tokens")
        click.echo(f"bits per byte  {result['bits_per_byte']:.4f} over {scored_bytes} bytes")
