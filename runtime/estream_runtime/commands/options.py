"""What every verb of `estream-run` needs to open a package and a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import click
import numpy as np
import numpy.typing as npt

from estream_loader import Integrity, open_package
from estream_loader.console import FILE, SIZE_HELP, FiniteRange, size
from estream_loader.keys import read_signature
from estream_loader.memory import ARENA_KINDS, ArenaKind
from estream_loader.package import Package
from estream_loader.policy_options import policy_of, policy_options
from estream_runtime.backends import BACKENDS, fallback_notice
from estream_runtime.decoding import SUBSTITUTE_SHARE, Mode
from estream_runtime.programs import POLICIES
from estream_runtime.session import MAX_THREADS, Session
from estream_runtime.stats import Laps, process_age_s
from estream_spec.limits import MAX_LANES

SEED: Final = 0
"""Of random token ids: every run takes the same ones."""


def backend_name(text: str) -> str:
    """The name of a backend, that of `htp` with or without a chip; anything else is a usage error."""
    if text not in BACKENDS and not text.startswith("htp:"):
        raise click.BadParameter(f"{text!r} is not one of {', '.join(map(repr, BACKENDS))}.")
    return text


def tell_of_fallback() -> None:
    """Say so where the backend that is taken by default is not the fast one."""
    if (notice := fallback_notice()) is not None:
        click.echo(f"notice: {notice}", err=True)


def sampling_options(max_new_tokens: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options that say which tokens are chosen and how many; by default `max_new_tokens`."""
    options = (
        click.option(
            "--max-new-tokens",
            type=click.IntRange(min=0),
            default=max_new_tokens,
            show_default=True,
            help="Where to stop.",
        ),
        click.option(
            "--temperature", type=FiniteRange(0), default=0.0, show_default=True, help="0 takes the likeliest token."
        ),
        click.option(
            "--top-p",
            type=FiniteRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="Draw from the tokens that reach this sum.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            help="The same seed gives the same text, on one backend.  [default: another every time]",
        ),
    )

    def with_options(verb: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return with_options


substitute_share_option: Final = click.option(
    "--substitute-share",
    type=FiniteRange(0, 1, min_open=True),
    help="In the mode stall-free: the largest share of a layer's weights that an expert has to be replaced."
    f"  [default: {SUBSTITUTE_SHARE}, and models that route to at most two experts are refused]",
)
"""How far the mode `stall-free` may go."""


def decoding_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb that makes tokens the options of how, beside those of `session_options`."""
    prefetch = click.option(
        "--prefetch/--no-prefetch",
        default=True,
        help="Whether experts are read before it is known which are needed, where that turns out to pay. Does nothing"
        " where the package has no prefetch router.  [default: prefetch]",
    )
    mode = click.option(
        "--mode",
        type=click.Choice(get_args(Mode)),
        default="exact",
        show_default=True,
        help="Whether a token waits for all of its experts, or may take others in place of those that are late, which"
        " changes what is made.",
    )
    return prefetch(mode(substitute_share_option(verb)))


def random_ids(count: int, vocabulary: int) -> npt.NDArray[np.int64]:
    """A prompt of so many random tokens, always the same."""
    return np.random.default_rng(SEED).integers(vocabulary, size=count)


def session_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the argument PACKAGE and the options of a session, and pass it the open session."""

    @opener_options
    @functools.wraps(verb)
    def with_session(
        _package: Package,
        open_session: Callable[..., Session],
        prefetch: bool = True,
        mode: Mode = "exact",
        substitute_share: float | None = None,
        **rest: Any,
    ) -> None:
        if substitute_share is not None and mode == "exact":
            raise click.UsageError("--substitute-share needs --mode stall-free", click.get_current_context())
        with open_session(prefetch=prefetch, mode=mode, substitute_share=substitute_share) as session:
            verb(session, **rest)

    return with_session


def opener_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The same for a verb that needs several sessions: pass it the open package, and what opens sessions of it.

    What opens them takes further keyword arguments of `Session`.
    """

    @click.argument("package", type=FILE)
    @click.option(
        "--device",
        metavar="NAME",
        help="Whose configurations of the package to use, each for other lengths of the prompt."
        "  [default: the one configured last, or else the package's first]",
    )
    @click.option(
        "--arena",
        type=size,
        metavar="SIZE",
        help=f"Most memory for experts: {SIZE_HELP}; whole groups of them are used.  [default: the package's]",
    )
    @click.option(
        "--arena-kind",
        type=click.Choice(ARENA_KINDS),
        help="What memory for experts is: this process's own, or what it shares with the NPU of a Snapdragon device."
        "  [default: ordinary]",
    )
    @click.option(
        "--backend",
        type=backend_name,
        metavar=f"[{'|'.join(BACKENDS)}]",
        help="What computes. htp is the NPU of a Snapdragon device; where there is none it is simulated, slowly, and"
        " htp:sm8650 says which one.  [default: native where that was compiled, otherwise portable]",
    )
    @click.option(
        "--policy",
        type=click.Choice(POLICIES),
        help="When experts are read: before it is known which are needed, after that, or one group at a time."
        " Resident, which needs an arena for all of them, is for a package that was configured so."
        "  [default: as the package says, and pre-routing with --arena]",
    )
    @click.option(
        "--lanes",
        type=click.IntRange(1, MAX_LANES),
        help="Reads outstanding at a time.  [default: the most that the device's configurations ask for]",
    )
    @click.option(
        "--threads",
        type=click.IntRange(1, MAX_THREADS),
        help="Threads for computing.  [default: all processors this process may use]",
    )
    @click.option(
        "--integrity",
        type=click.Choice(get_args(Integrity)),
        help="What is proven: the manifest, each expert as it is read, or everything before the start."
        "  [default: full with --key, else paged]",
    )
    @policy_options
    @functools.wraps(verb)
    def with_package(
        package: Path,
        device: str | None,
        arena: int | None,
        arena_kind: ArenaKind | None,
        backend: str | None,
        policy: str | None,
        lanes: int | None,
        threads: int | None,
        integrity: Integrity | None,
        keys: tuple[str, ...],
        minimum_counter: int | None,
        signatures: tuple[Path, ...],
        **rest: Any,
    ) -> None:
        if signatures and not keys:
            raise click.UsageError("--signature needs --key", click.get_current_context())
        trusted = policy_of(keys, minimum_counter, tuple(read_signature(path) for path in signatures))
        if backend is None:
            tell_of_fallback()
        laps, age_s = Laps(), process_age_s()
        with open_package(package, integrity=integrity, policy=trusted) as opened:
            laps.end("package")

            def open_session(**changes: Any) -> Session:
                session = Session(
                    opened,
                    backend,
                    arena,
                    arena_kind=arena_kind,
                    threads=threads,
                    lanes=lanes,
                    policy=policy,
                    device=device,
                    **changes,
                )
                process = {} if age_s is None else {"process": age_s}
                session.start_up_s = {**process, **laps.seconds, **session.start_up_s}
                return session

            verb(opened, open_session, **rest)

    return with_package
