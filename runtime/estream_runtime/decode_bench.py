"""Measures decoding: the same tokens, with experts brought in each of several ways, to tell what each way is worth.

Each run has a session of its own, so that it begins with an empty arena, takes the prompt in, and decodes. The ways
take turns in rounds, and medians count: storage and processors wander.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from estream_loader.package import Package
from estream_loader.progress import Progress
from estream_runtime.batch import Ids
from estream_runtime.decoding import DecodeStats, substitution_bound
from estream_runtime.prefetching import Prediction, Predictor
from estream_runtime.programs import no_room_to_decode
from estream_runtime.session import Session
from estream_spec.errors import LinkError, TrapError
from estream_spec.weights import Floats

CACHE: Final = "cache"
"""The way that the others are compared with."""
JUDGED: Final = "cache, APEX, judged"
"""The way of a session that is asked for nothing."""
Routing = dict[int, list[Sequence[int]]]
"""By layer the experts of each token."""


class Recording:
    """Predicts nothing, and notes what layers need.

    Attributes:
        routing: that.
    """

    def __init__(self) -> None:
        self.routing: Routing = {}

    def predict(self, layer: int, x: Floats) -> Prediction:
        """See `Predictor.predict`."""
        return Prediction((), ())

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """See `Predictor.routed`."""
        self.routing.setdefault(layer, []).append(experts)


class Oracle:
    """Predicts what the same tokens needed in an earlier run: nothing can predict better.

    Args:
        routing: that.
    """

    def __init__(self, routing: Routing):
        self._routing = {layer: iter(tokens) for layer, tokens in routing.items()}

    def predict(self, layer: int, x: Floats) -> Prediction:
        """See `Predictor.predict`."""
        experts = next(self._routing[layer], ())
        return Prediction(experts, [1.0] * len(experts))

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing that is not known."""


class PreviousToken:
    """Predicts what the layer needed for the token before, as likely as that has come true so far."""

    def __init__(self) -> None:
        self._last: dict[int, Sequence[int]] = {}
        self._again, self._seen = 1, 2  # half of them, until more is known

    def predict(self, layer: int, x: Floats) -> Prediction:
        """See `Predictor.predict`."""
        experts = self._last.get(layer, ())
        return Prediction(experts, [self._again / self._seen] * len(experts))

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """See `Predictor.routed`."""
        if before := self._last.get(layer):
            self._again += len(set(before).intersection(experts))
            self._seen += len(before)
        self._last[layer] = experts


@dataclass(frozen=True, slots=True)
class Way:
    """How experts are brought.

    Attributes:
        name: of the way.
        options: of the session.
        predictor: makes what predicts in place of the package's prefetch router; None leaves that.
        judged: whether the session decides by itself if reading ahead pays.
        forgets: whether the arena is empty for every token.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: {"prefetch": False})
    predictor: Callable[[], Predictor] | None = None
    judged: bool = False
    forgets: bool = False

    @property
    def exact(self) -> bool:
        """Whether tokens are the same as by all other exact ways."""
        return self.options.get("mode") != "stall-free"


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        token_ids: all tokens made, the first one by the prompt.
        seconds: that decoding the others took.
        waiting_s: of those, seconds in which computing waited for weights.
        decoded: what became of them.
        prefetching: whether experts were read ahead in the end, in words.
    """

    token_ids: list[int]
    seconds: float
    waiting_s: float
    decoded: DecodeStats
    prefetching: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one way came to: medians over its runs.

    Attributes:
        name: of the way.
        exact: whether its tokens have to be those of all other exact ways.
        tokens: tokens decoded in one run.
        tokens_per_s: of them a second.
        rates: that of each run, in their order.
        bytes_per_token: bytes of expert records read.
        hit_rate: share of the experts needed that were there from earlier tokens, 0 to 1.
        stalls_per_token: layers that had to wait for an expert.
        timeliness: share of the experts read ahead and needed that were there in time; None where there are none.
        precision: share of the experts read ahead that were needed; None where none were read ahead.
        waiting_s: seconds a token in which computing waited for weights.
        substituted_per_token: experts replaced by others.
        lost_share: share of the weights that those had, 0 to 1.
        agreeing: tokens up to the first that another one stands for in the way `CACHE`, that one not counted; the
            first is the prompt's.
        prefetching: whether experts were read ahead at the end of the last run, in words.
    """

    name: str
    exact: bool
    tokens: int
    tokens_per_s: float
    rates: tuple[float, ...]
    bytes_per_token: float
    hit_rate: float
    stalls_per_token: float
    timeliness: float | None
    precision: float | None
    waiting_s: float
    substituted_per_token: float
    lost_share: float
    agreeing: int
    prefetching: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench:
    """What was found.

    Attributes:
        ways: one way after the other.
        same_tokens: whether all exact ways made the same tokens in every run.
        notices: ways that were left out, and why.
        reading_mode: whether the page cache is bypassed.
        arena_bytes: memory for experts.
    """

    ways: tuple[Figures, ...]
    same_tokens: bool
    notices: tuple[str, ...]
    reading_mode: str
    arena_bytes: int


def decode_bench(
    package: Package,
    open_session: Callable[..., Session],
    prompt: Ids,
    tokens: int,
    rounds: int,
    substitute_share: float | None,
    progress: Progress,
) -> DecodeBench:
    """Decode the tokens that follow a prompt in all ways.

    Args:
        package: an open package.
        open_session: opens a session of it, given further keyword arguments of `Session`.
        prompt: token ids, int64 `[T]`.
        tokens: tokens to decode in each run, beside the first, which the prompt makes; fewer where the text ends.
        rounds: runs of each way.
        substitute_share: see `Session`, for the mode `stall-free`.
        progress: told of each run.

    Raises:
        LinkError: the arena has no room for decoding, or as `Session` does.
        TrapError: prompt and tokens do not fit the context, the text ends with the prompt's token, or as
            `Session.generate` does.
    """
    recording = Recording()
    first = Way("recording", predictor=lambda: recording)
    ways, notices = _ways(package, recording, substitute_share)
    progress.begin("decoding", 1 + rounds * len(ways))
    with open_session(**first.options) as session:
        _require_context(session, len(prompt), tokens)
        _decode(session, first, prompt, tokens)
        reading_mode, arena_bytes = session.interpreter.pager.mode, session.interpreter.pager.arena.length
    progress.advance(1)
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            with open_session(**way.options) as session:
                runs[way.name].append(_decode(session, way, prompt, tokens))
            progress.advance(1)
    expected = runs[CACHE][0].token_ids
    return DecodeBench(
        ways=tuple(_figures(way, runs[way.name], expected) for way in ways),
        same_tokens=all(run.token_ids == expected for way in ways if way.exact for run in runs[way.name]),
        notices=tuple(notices),
        reading_mode=reading_mode,
        arena_bytes=arena_bytes,
    )


def _ways(package: Package, recording: Recording, substitute_share: float | None) -> tuple[list[Way], list[str]]:
    """The ways that this package allows, and notices of the others."""
    ways = [Way("no cache", forgets=True), Way(CACHE), Way("cache, previous token", predictor=PreviousToken)]
    notices = []
    if package.prefetch_router is None:
        hint = "'estream-pack train-prefetch' trains one, and 'estream-pack build --prefetch' takes it in"
        notices.append(f"without a prefetch router, nothing is read ahead by APEX; {hint}")
    else:
        ways += [Way("cache, APEX", {}), Way(JUDGED, {}, judged=True)]
    stall_free = Way("stall-free", {"mode": "stall-free", "substitute_share": substitute_share})
    try:
        substitution_bound(package.manifest.model, "stall-free", substitute_share)
        ways.append(stall_free)
    except LinkError as error:
        hint = "" if error.hint is None else "; --substitute-share asks for it all the same"
        notices.append(f"{error.message}, so that is left out{hint}")
    return [*ways, Way("cache, oracle", predictor=lambda: Oracle(recording.routing))], notices


def _require_context(session: Session, prompt: int, tokens: int) -> None:
    """Refuse more tokens than the context holds, before any are computed."""
    needed, limit = prompt + 1 + tokens, session.most_tokens
    if needed > limit:
        message = f"{needed} tokens: {prompt} of the prompt, one that follows it and {tokens} decoded"
        hint = "give a shorter prompt or fewer tokens to decode; the context holds all of them together"
        raise TrapError(f"{message}, the context holds {limit}", hint=hint)


def _decode(session: Session, way: Way, prompt: Ids, tokens: int) -> Run:
    """Take the prompt in and decode in one way."""
    decoding, pager = session.interpreter.decoding, session.interpreter.pager
    if way.predictor is not None:
        decoding.predictor = way.predictor()
    if not way.judged:
        decoding.judge = None
    generation = session.generate(prompt, tokens + 1)
    token_ids = [next(generation)]
    before, already = generation.stats, decoding.stats
    if way.forgets:
        pager.forget()
    for token in generation:
        token_ids.append(token)
        if way.forgets:
            pager.forget()
    if len(token_ids) == 1:
        raise TrapError("the text ends with its first token, nothing is decoded", hint="take another prompt")
    after, decoded = generation.stats, decoding.stats - already
    if not decoded.tokens:
        raise no_room_to_decode(session.package.expert_shape, pager.arena.length)
    return Run(
        token_ids=token_ids,
        seconds=after.total_s - before.total_s,
        waiting_s=after.activity_s["wait"] - before.activity_s["wait"],
        decoded=decoded,
        prefetching=decoding.prefetching,
    )


def _figures(way: Way, runs: Sequence[Run], expected: Sequence[int]) -> Figures:
    """Medians of a way; `expected` are the tokens it is compared with."""

    def per_token(figure: Callable[[Run], float]) -> float:
        return median(figure(run) / run.decoded.tokens for run in runs)

    rates = tuple(run.decoded.tokens / run.seconds for run in runs)
    return Figures(
        name=way.name,
        exact=way.exact,
        tokens=runs[0].decoded.tokens,
        tokens_per_s=median(rates),
        rates=rates,
        bytes_per_token=per_token(lambda run: run.decoded.bytes_read),
        hit_rate=median(run.decoded.hit_rate for run in runs),
        stalls_per_token=per_token(lambda run: run.decoded.stalls),
        timeliness=_median(run.decoded.timeliness for run in runs),
        precision=_median(run.decoded.precision for run in runs),
        waiting_s=per_token(lambda run: run.waiting_s),
        substituted_per_token=per_token(lambda run: run.decoded.substituted),
        lost_share=median(run.decoded.lost_share / run.decoded.layers for run in runs),
        agreeing=min(_agreeing(run.token_ids, expected) for run in runs),
        prefetching=runs[-1].prefetching,
    )


def _median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [each for each in values if each is not None]
    return median(known) if known else None


def _agreeing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens are the same, up to the first that is not."""
    pairs = zip(tokens, expected, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(expected)))
