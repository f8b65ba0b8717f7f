"""`estream-run chat`: talk with a model, a line a turn."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from estream_loader.console import REFUSED, tell_error
from estream_runtime.commands.generate import figures
from estream_runtime.commands.options import decoding_options, sampling_options, session_options
from estream_runtime.conversation import MAX_NEW_TOKENS, Conversation, Ended
from estream_runtime.session import Session
from estream_spec.errors import TrapError

PROGRAM: Final = "estream-run"
FORGET: Final = "/new"
"""The line that begins the conversation anew."""
_WHY: Final[dict[Ended, str]] = {
    "length": "the answer was cut off; --max-new-tokens allows longer ones",
    "context": f"the context is full; {FORGET} begins anew",
    "interrupted": "interrupted",
}


@click.command()
@session_options
@click.option("--system", help="What the model is told before the conversation; not every model takes that.")
@sampling_options(MAX_NEW_TOKENS)
@decoding_options
@click.option("--json", "as_json", is_flag=True, help="Print each answer, or why there is none, as one line of JSON.")
def command(session: Session, system: str | None, as_json: bool, **sampling: Any) -> None:
    """Talk with PACKAGE, by the chat template that comes with it.

    Each line is one turn, typed or from a file or pipe; empty ones are passed over. The model sees all of the
    conversation, of which only what is new is computed. Ctrl-C stops an answer, Ctrl-D ends the conversation, and the
    line /new begins it anew. Of a model that thinks in a channel of its own all is shown, and only the last message
    stays in the conversation. A turn that is refused, as when the conversation outgrows the context, leaves it as it
    was. The exit code is 1 where that happened to lines that were not typed.
    """
    conversation = Conversation(session, system)
    refused = False
    for line in _lines():
        if line == FORGET:
            conversation.forget()
        elif line.strip():
            refused |= not _turn(conversation, session, line, as_json, sampling)
    if refused and not _typed():
        click.get_current_context().exit(REFUSED)


def _turn(conversation: Conversation, session: Session, line: str, as_json: bool, sampling: dict[str, Any]) -> bool:
    """Answer one line; false where that was refused."""
    shown = list[str]()
    try:
        answer = conversation.answer(
            line, (lambda _: None) if as_json else (lambda each: _show(each, shown)), **sampling
        )
    except TrapError as error:
        if any(shown):
            click.echo()
        if as_json:
            _print_line({"error": str(error), "hint": error.hint})
        else:
            tell_error(PROGRAM, str(error), error.hint)
        return False
    if as_json:
        cost = figures(answer.stats, session.package.container.superblock.file_length)
        _print_line({"text": answer.text, "token_ids": answer.token_ids, "ended": answer.ended, "stats": cost})
    else:
        click.echo()
        if answer.ended in _WHY:
            click.echo(f"({_WHY[answer.ended]})", err=True)
    return True


def _lines() -> Iterator[str]:
    """What is said, line by line. Bytes that are no text are told when they are to be encoded."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not _typed():
        yield from (line.rstrip("\r\n") for line in sys.stdin or ())
        return
    import readline  # noqa: F401 - makes input() a line that can be edited

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            click.echo(err=True)  # what was typed is thrown away, as in a shell
        except EOFError:
            click.echo(err=True)
            return


def _typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _show(piece: str, shown: list[str]) -> None:
    shown.append(piece)
    if piece:
        click.echo(piece.encode(), nl=False)  # UTF-8 whatever the terminal claims to be


def _print_line(value: object) -> None:
    click.echo(msgspec.json.encode(value))
