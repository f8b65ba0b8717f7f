"""The options by which a command line takes a signature policy, the same for every verb that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from estream_loader.console import FILE
from estream_loader.keys import read_public_key
from estream_loader.trust import MAX_COUNTER, SignaturePolicy

Verb = TypeVar("Verb", bound=Callable[..., Any])


def policy_options(verb: Verb) -> Verb:
    """Give a verb the options `--key`, `--minimum-counter` and `--signature`.

    They arrive as `keys` (strings), `minimum_counter` (an integer or None) and `signatures` (paths).
    """
    key = click.option(
        "--key",
        "keys",
        multiple=True,
        help="Public key that must have signed the package, as a PEM file or 64 hexadecimal digits; may be repeated.",
    )
    minimum_counter = click.option(
        "--minimum-counter",
        type=click.IntRange(0, MAX_COUNTER),
        help="Lowest security counter accepted of each key's newest signature.  [default: 0]",
    )
    signature = click.option(
        "--signature",
        "signatures",
        type=FILE,
        multiple=True,
        help="A signature that came beside the package; may be repeated.",
    )
    return key(minimum_counter(signature(verb)))


def policy_of(
    keys: Sequence[str], minimum_counter: int | None, detached: tuple[bytes, ...] = ()
) -> SignaturePolicy | None:
    """What the options ask of signatures; None where no key is named, which leaves nothing to ask.

    Args:
        keys: names of PEM files, or hexadecimal digits.
        minimum_counter: lowest security counter accepted; None accepts any.
        detached: the bytes of signatures that came beside the package.

    Raises:
        UsageError: a counter without a key.
        LinkError: a key cannot be read, or none can be used here.
    """
    if not keys:
        if minimum_counter is not None:
            raise click.UsageError("--minimum-counter needs --key", click.get_current_context())
        return None
    return SignaturePolicy(tuple(read_public_key(key) for key in keys), minimum_counter or 0, detached)
