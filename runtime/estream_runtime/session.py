"""A package ready to run: the library's front door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from estream_loader.dense import EmbeddingRows
from estream_loader.memory import ARENA_KINDS, ArenaKind
from estream_loader.package import Package
from estream_loader.pager import Pager
from estream_loader.tokenizing import tokenizer_faults
from estream_runtime.backends import Backend, default_backend, fallback_notice, open_backend
from estream_runtime.batch import Batch, Ids
from estream_runtime.cache import Kept
from estream_runtime.context import Context
from estream_runtime.decoding import Decoding, Mode, substitution_bound
from estream_runtime.host_processors import usable_processors
from estream_runtime.interpreter import ROW_BLOCK, Interpreter, OnRoute
from estream_runtime.likelihood import log_probabilities
from estream_runtime.prefetching import LearnedPredictor
from estream_runtime.programs import POLICIES, Sizes, choose_programs, no_room_to_decode
from estream_runtime.sampling import Sampler, check_count, is_whole
from estream_runtime.stats import Laps, Meter, Stats
from estream_runtime.tracing import recorded, trace_of
from estream_runtime.weights import DenseWeights, ExpertWeights, read_dense, scratch_for
from estream_spec.errors import LinkError, TrapError
from estream_spec.limits import MAX_LANES
from estream_spec.schedule import POLICY_NAMES, Policy, Program
from estream_spec.trace import Trace
from estream_spec.weights import Floats

_LAST: Final = np.array([-1])
"""The row that the next token follows."""
MAX_THREADS: Final = 256
"""Most threads a session computes with. Far more than processors do not help, and thousands bring a machine down."""
TokenIds = Sequence[int] | npt.NDArray[np.integer]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prompt leads to.

    Attributes:
        logits: f32 `[vocabulary]`, of the token after the prompt.
        stats: what it cost.
    """

    logits: Floats
    stats: Stats


class Generation(Iterator[int]):
    """Token ids, each computed when it is asked for."""

    def __init__(self, tokens: Iterator[int], meter: Meter):
        self._tokens, self._meter = tokens, meter

    def __next__(self) -> int:
        with self._meter.running():
            token = next(self._tokens)
        self._meter.token_made()
        return token

    @property
    def stats(self) -> Stats:
        """What it cost so far."""
        return self._meter.stats()


class Session:
    """One package in one arena on one backend. Not for several threads at a time.

    Opening one begins to read dense weights and returns before they are there. Calls wait for what they need of them
    and give no result before all that went into it is proven; so where they are damaged, it is the calls that raise.

    Every call begins anew; only experts that are still in the arena are not read again. A call that fails raises, and
    the session can be used afterwards. Results do not depend on `device`, `arena_bytes`, `group_size`,
    `prefetch_depth`, `lanes` or `policy`, to the last bit.

    A device may have several configurations, each for other lengths of the prompt: every call takes the one for its
    tokens, in the one arena, which is divided anew where they differ. Any of `arena_bytes`, `group_size`,
    `prefetch_depth` and `policy` makes one configuration for all lengths instead.

    Args:
        package: an open package, which must stay open.
        backend: `native`, `portable`, `reference` or `htp`, the NPU of a Snapdragon device, simulated where none is,
            which may be followed by a colon and the name of a chip; None takes `native` where it was compiled, else
            `portable`. Or what makes a backend of one's own, given the number of threads.
        arena_bytes: memory for experts; None takes what the device's configurations say.
        arena_kind: what that memory is: `ordinary`, or `rpcmem`, which the NPU of a Snapdragon device shares; None
            takes `ordinary`.
        group_size: experts read together, as far as the arena has room; None takes what the device's configuration
            says, or less, so that two groups find room.
        threads: threads for computing; None takes all processors this process may use.
        lanes: reads outstanding at a time; None takes the most that any of the device's configurations asks for.
        prefetch_depth: groups read ahead, as far as the arena has room; None takes what the device's configuration
            says, or in another arena at least one, and all where all find room.
        policy: when experts are read: `pre-routing`, before it is known which are needed, `post-routing`, once it is,
            or `on-demand`, one group at a time. None takes what the device's configurations say, or for other sizes
            `pre-routing`. Before routing nothing is read for a few tokens, since they need few experts.
        device: whose device configurations of the package count; None takes the default.
        prefetch: whether decoding reads experts ahead, where the package has a prefetch router and it turns out to pay.
        mode: `exact`, or `stall-free`: an expert that is not there when a token needs it may be replaced by one that
            is. Then logits do depend on arena, storage and time. Only decoding is concerned.
        substitute_share: in the mode `stall-free`, the largest share, above 0 and up to 1, that an expert may have of
            its layer's weights to be replaced; None takes `SUBSTITUTE_SHARE`, and refuses models that route to at most
            two experts, which lose too much.

    Attributes:
        threads: threads for computing.
        start_up_s: seconds it took to open the session, by part; dense weights are read meanwhile and may be read
            longer. Whoever opens it may add what came before.
        notice: why what computes is not the fast backend, where none was asked for; None where it is.

    Raises:
        LinkError: no such backend, policy or device, an arena smaller than one expert, in the mode `stall-free` than a
            token's experts of a layer, or of memory that cannot be had, or graphs and weights that do not fit each
            other.
        FormatError: the package turns out to be faulty.
    """

    def __init__(
        self,
        package: Package,
        backend: str | Callable[[int], Backend] | None = None,
        arena_bytes: int | None = None,
        *,
        arena_kind: ArenaKind | None = None,
        group_size: int | None = None,
        threads: int | None = None,
        lanes: int | None = None,
        prefetch_depth: int | None = None,
        policy: str | None = None,
        device: str | None = None,
        prefetch: bool = True,
        mode: Mode = "exact",
        substitute_share: float | None = None,
    ):
        manifest = package.manifest
        if arena_bytes is not None and not is_whole(arena_bytes):
            raise LinkError(f"arena_bytes is {arena_bytes!r}, expected a number of bytes")
        if arena_kind is not None and arena_kind not in ARENA_KINDS:
            raise LinkError(f"unknown arena kind {arena_kind!r}, expected one of: {', '.join(ARENA_KINDS)}")
        if group_size is not None and not is_whole(group_size, 1):
            raise LinkError(f"group_size is {group_size!r}, expected at least 1")
        if threads is not None and not is_whole(threads, 1, MAX_THREADS):
            raise LinkError(f"threads is {threads!r}, expected 1 to {MAX_THREADS}")
        if lanes is not None and not is_whole(lanes, 1, MAX_LANES):
            raise LinkError(f"lanes is {lanes!r}, expected 1 to {MAX_LANES}")
        if prefetch_depth is not None and not is_whole(prefetch_depth, 0):
            raise LinkError(f"prefetch_depth is {prefetch_depth!r}, expected at least 0")
        name = next((each for each in POLICIES if each == policy), None)
        if policy is not None and name is None:
            raise LinkError(f"unknown policy {policy!r}, expected one of: {', '.join(POLICIES)}")
        self._substitute_share = substitution_bound(manifest.model, mode, substitute_share)
        self._package, self._model = package, manifest.model
        self._closed = False
        self.threads = _plain(threads) or usable_processors()
        sizes = Sizes(
            arena_bytes=_plain(arena_bytes), group_size=_plain(group_size), prefetch_depth=_plain(prefetch_depth)
        )
        laps = Laps()
        with ExitStack() as stack:
            # Reading begins before all else: what follows takes its time, in which the disk would have nothing to do.
            self._embedding = stack.enter_context(EmbeddingRows(package))
            self._records = stack.enter_context(read_dense(package))
            laps.end("tables")
            self._programs = choose_programs(package, sizes, name, device)
            laps.end("programs")
            self.notice = fallback_notice() if backend is None else None
            if callable(backend):
                opened = backend(self.threads)
            else:
                opened = open_backend(backend or default_backend(), package, self.threads)
            stack.callback(opened.close)
            self._backend = opened
            laps.end("backend")
            lanes = _plain(lanes) or self._programs.lanes
            arena_bytes, kind = self._programs.arena_bytes, arena_kind or "ordinary"
            pager = stack.enter_context(Pager(package, arena_bytes=arena_bytes, lanes=lanes, arena_kind=kind))
            laps.end("arena")
            scratch = scratch_for(package)
            dense = DenseWeights(package, opened, scratch, self._records)
            learned = prefetch and package.prefetch_router is not None
            if mode == "stall-free" and self._programs.decode(predicts=learned) is None:
                raise no_room_to_decode(package.expert_shape, arena_bytes)
            self._learned = LearnedPredictor(package, dense) if learned else None
            experts = ExpertWeights(package, opened, scratch)
            decoding = Decoding(
                self._model, opened, experts, pager, self._learned, self._substitute_share, asked=prefetch
            )
            self._interpreter = Interpreter(self._model, opened, pager, self._embedding, dense, experts, decoding)
            laps.end("graphs chosen")
            self._resources = stack.pop_all()
        self.start_up_s: dict[str, float] = laps.seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give weights, arena and graphs back. The session cannot run afterwards; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._resources.close()
            del self._interpreter

    @property
    def package(self) -> Package:
        """The package that runs."""
        return self._package

    @property
    def interpreter(self) -> Interpreter:
        """What carries out programs, to run one's own; what it gives is proven once a call of the session was."""
        self._check_open()
        return self._interpreter

    @property
    def backend(self) -> Backend:
        """What runs graphs."""
        self._check_open()
        return self._backend

    @property
    def most_tokens(self) -> int:
        """Tokens that prompt and output may have together: what the model and the backend take."""
        context = self._model.context_length
        return context if self._backend.most_tokens is None else min(context, self._backend.most_tokens)

    def forward(self, token_ids: TokenIds, on_route: OnRoute | None = None) -> Floats:
        """Logits after every token.

        Args:
            token_ids: the prompt.
            on_route: told of each routing decision: layer, expert ids `[T, k]` int32 from the largest weight down, and
                weights `[T, k]` f32. That is before all is proven: disregard it if the call raises.

        Returns:
            f32 `[T, vocabulary]`.

        Raises:
            TrapError: an empty prompt, an id outside the vocabulary, a prompt longer than the context, or a value that
                is not finite.
            IntegrityError: an expert's checksum differs or its bytes are missing.
            LinkError: the device failed.
        """
        batch = Batch.of(self._prompt(token_ids))
        return self._run(batch, self._interpreter.logits, on_route=on_route)

    def hidden_rows(self, token_ids: TokenIds) -> Floats:
        """What the final norm takes after every token, f32 `[T, hidden]`; raises as `forward` does.

        They are many times smaller than logits, which `logits` makes of some of them at a time.
        """
        return self._run(Batch.of(self._prompt(token_ids)), lambda x: x)

    def logits(self, rows: Floats) -> Floats:
        """Logits f32 `[T, vocabulary]` of hidden rows f32 `[T, hidden]`.

        Raises:
            TrapError: one is not finite.
        """
        self._check_open()
        with np.errstate(over="ignore", invalid="ignore"):  # found in the logits
            return self._interpreter.logits(rows)

    def prefill(self, token_ids: TokenIds) -> Prefill:
        """Logits of the token after a prompt, and what they cost. Raises as `forward` does."""
        prompt = self._prompt(token_ids)
        meter = self._meter(len(prompt), len(prompt))
        with meter.running():
            logits = self._run(Batch.of(prompt), self._interpreter.last_logits, asked=_LAST)
        return Prefill(logits, meter.stats())

    def trace(self, token_ids: TokenIds) -> Trace:
        """What happens when in a prefill. Raises as `forward` does.

        What is read once is no part of it, but of the start: what is left of `dense weights`, the proof of the
        `embedding`, and `experts` where all of them stay in the arena.

        Args:
            token_ids: the prompt.

        Returns:
            What computed, was read and was in banks at what time; `estream_spec.trace.encode_trace` makes it a file.
        """
        prompt = self._prompt(token_ids)
        meter = self._meter(len(prompt), len(prompt))
        program, load = self._programs.for_rows(len(prompt), self._model)
        self._interpreter.pager.divide(program.bank_count, program.group_size)  # before anyone watches the banks
        laps = Laps()
        self._records.settle()
        laps.end("dense weights")
        self._embedding.prove()
        laps.end("embedding")
        if load is not None:
            self._interpreter.load(load)
            laps.end("experts")
        with recorded(self._interpreter) as recording, meter.running():
            self._run(Batch.of(prompt), self._interpreter.last_logits, asked=_LAST)
        return trace_of(
            recording,
            self._package,
            self._interpreter.pager,
            meter.stats(),
            {**self.start_up_s, **laps.seconds},
            device=self._programs.device,
            backend=self._backend.name,
            threads=self.threads,
        )

    def generate(
        self,
        token_ids: TokenIds,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        context: Context | None = None,
    ) -> Generation:
        """Continue a prompt.

        It ends after `max_new_tokens`, when prompt and output together fill the context, or with an end token, which is
        the last one given. A token the package's tokenizer does not know is never chosen.

        Args:
            token_ids: the prompt.
            max_new_tokens: most tokens to make.
            temperature: 0 takes the likeliest token, of equals the lower id.
            top_p: only the fewest tokens whose probabilities reach this sum are drawn from.
            seed: the same seed makes the same choices; None takes one that differs every time.
            context: of this session, what earlier calls computed: tokens that the prompt begins with and that are in it
                are not computed again, and it then holds those of this call. None begins anew.

        Raises:
            TrapError: as `forward` does, and for a value out of range or a context of another session; at once, not
                with the first token. Later, where another call has begun to use the context meanwhile.
            LinkError: the tokenizer cannot be used, or knows no token of the model's.
        """
        prompt = self._prompt(token_ids)
        check_count("max_new_tokens", max_new_tokens)
        count = min(max_new_tokens, self.most_tokens - len(prompt))
        sampler = Sampler(temperature, top_p, seed, self._known_tokens)
        context = self.new_context() if context is None else context
        if not context.is_made_by(self._interpreter.new_cache):
            raise TrapError(
                "the context is of another session", hint="take one that new_context() of this session made"
            )
        unseen = context.unseen(prompt) if count else prompt
        meter = self._meter(len(prompt), len(unseen))
        return Generation(self._tokens(unseen, count, sampler, context, context.uses), meter)

    def new_context(self) -> Context:
        """An empty context for calls of `generate` whose prompts begin alike, such as the turns of a conversation."""
        self._check_open()
        return Context(self._interpreter.new_cache)

    def score(self, token_ids: TokenIds, choices: Sequence[TokenIds]) -> list[float]:
        """Log-likelihood of each choice as what follows a prompt; all choices go through the layers together.

        Args:
            token_ids: the prompt.
            choices: token ids of each choice, at least one.

        Returns:
            For each choice the sum over its tokens of their natural log-probabilities.

        Raises:
            TrapError: as `forward` does, for the prompt with each choice; no choice, or one without a token.
        """
        prompt = self._prompt(token_ids)
        try:
            targets = [self._checked(choice, f"choice {number}") for number, choice in enumerate(choices)]
        except TypeError:
            raise TrapError(f"choices are {choices!r}, expected a list of them") from None
        if not targets:
            raise TrapError("no choices to score")
        for number, target in enumerate(targets):
            self._check_length(len(prompt) + len(target), f"prompt and choice {number} have")
        batch = Batch.of(prompt, [target[:-1] for target in targets])
        # The first token of a choice follows the prompt's last row, every other one the row of the token before it.
        last = len(prompt) - 1
        rows = [np.array([last, *range(start, stop)]) for start, stop in batch.segments[1:]]
        chosen, followers = np.concatenate(rows), np.concatenate(targets)
        found = self._run(batch, lambda x: self._followed_by(x, followers), asked=chosen)
        ends = np.cumsum([len(target) for target in targets])[:-1]
        return [float(each.sum()) for each in np.split(found, ends)]

    def log_likelihoods(self, token_ids: TokenIds) -> npt.NDArray[np.float64]:
        """Natural log-probability of each token but the first, given those before it. Raises as `forward` does.

        Args:
            token_ids: the text.

        Returns:
            f64 `[T - 1]`.
        """
        text = self._prompt(token_ids)
        if len(text) == 1:
            return np.empty(0)
        return self._run(Batch.of(text[:-1]), lambda x: self._followed_by(x, text[1:]))

    def _tokens(self, unseen: Ids, count: int, sampler: Sampler, context: Context, use: int) -> Iterator[int]:
        """At most `count` tokens after what the context holds and what it has not seen, the end token included."""
        for _ in range(count):
            if context.uses != use:
                hint = "give each call that goes on at the same time a context of its own"
                raise TrapError("another call has begun to use the context", hint=hint)
            with context.extended(unseen):
                logits = self._next_logits(unseen, context.cache)
            token = sampler.choose(logits)
            yield token
            if token in self._model.end_tokens:
                return
            unseen = np.array([token])

    def _next_logits(self, unseen: Ids, cache: Sequence[Kept]) -> Floats:
        self._check_open()
        decode = self._programs.decode(predicts=self._interpreter.decoding.predictor is not None)
        batch = Batch.of(unseen, past=cache[0].length)
        logits = self._run(batch, self._interpreter.last_logits, cache, asked=_LAST, decode=decode)
        if self._learned is not None:  # nothing is given out with a prefetch router for another model, used or not
            self._learned.prove()
        return logits

    def _run(
        self,
        batch: Batch,
        head: Callable[[Floats], T],
        cache: Sequence[Kept] | None = None,
        on_route: OnRoute | None = None,
        asked: Ids | None = None,
        decode: Program | None = None,
    ) -> T:
        """Take a batch through the layers by the program that suits it; see `Interpreter.run`."""
        program, load = self._programs.for_rows(len(batch.token_ids), self._model)
        if decode is not None and len(batch.token_ids) == 1 and (load is None or self._interpreter.pager.slots):
            # Of one length, records that are all there stay when the arena is divided into slots.
            program, load, decode = decode, None, None
        if load is not None:
            self._interpreter.load(load)
        self._records.postpone()  # rows of the embedding and the first experts are wanted first
        try:
            result = self._interpreter.run(program, batch, head, cache, on_route, asked, decode)
        except TrapError:
            self._prove_embedding()  # a value that is not finite may come from there, which says more
            raise
        self._prove_embedding()
        return result

    def _prove_embedding(self) -> None:
        """Wait for what a result is not given without."""
        if not self._embedding.proven:
            with self._interpreter.recorder.during("wait"):
                self._embedding.prove()

    def _meter(self, prompt_tokens: int, rows: int) -> Meter:
        """Of a call whose first pass through the layers takes so many rows."""
        program, _ = self._programs.for_rows(rows, self._model)
        return Meter(
            self._interpreter,
            prompt_tokens,
            policy=POLICY_NAMES[Policy(program.policy)],
            backend=self._backend,
            notice=self.notice,
        )

    def _followed_by(self, x: Floats, targets: Ids) -> npt.NDArray[np.float64]:
        """Log-probability of the token that follows each row, a block of rows at a time: logits are large."""
        blocks = [slice(start, start + ROW_BLOCK) for start in range(0, len(x), ROW_BLOCK)]
        return np.concatenate([log_probabilities(self._interpreter.logits(x[at]), targets[at]) for at in blocks])

    @cached_property
    def _known_tokens(self) -> npt.NDArray[np.bool_] | None:
        """Which ids the tokenizer knows; None where it knows all, or the package has none.

        Many models have more rows than tokens: the rows beyond were never trained and stand for nothing.
        """
        if self._package.tokenizer_json is None:
            return None
        known = np.zeros(self._model.vocabulary, np.bool_)
        with tokenizer_faults(self._package.source.name):
            ids = np.fromiter(self._package.tokenizer.get_vocab(with_added_tokens=True).values(), np.int64)
        known[ids[ids < len(known)]] = True
        if not known.any():
            raise LinkError("the tokenizer knows no token of the model's", path=self._package.source.name)
        return None if known.all() else known

    def _prompt(self, token_ids: TokenIds) -> Ids:
        self._check_open()
        prompt = self._checked(token_ids, "prompt")
        self._check_length(len(prompt), "prompt has")
        return prompt

    def _checked(self, token_ids: TokenIds, what: str) -> Ids:
        """Token ids as an array, each in the vocabulary."""
        try:
            given = np.asarray(token_ids)
        except (TypeError, ValueError):  # lists of different lengths
            raise TrapError(f"{what} is no list of token ids") from None
        if given.ndim == 1 and len(given) == 0:
            raise TrapError(f"{what} has no tokens")
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise TrapError(f"{what} is {given.dtype} of shape {list(given.shape)}, expected one list of token ids")
        outside = (given < 0) | (given >= self._model.vocabulary)
        if outside.any():
            at = int(np.argmax(outside))
            raise TrapError(
                f"token id {given[at]} is outside the vocabulary of {self._model.vocabulary}", path=f"{what}[{at}]"
            )
        return given.astype(np.int64)

    def _check_length(self, length: int, subject: str) -> None:
        limit = self.most_tokens
        if length > limit:
            hint = "give fewer tokens; the context holds prompt and output together"
            raise TrapError(f"{subject} {length} tokens, the context holds {limit}", hint=hint)

    def _check_open(self) -> None:
        if self._closed:
            raise TrapError("the session is closed")


def _plain(number: int | None) -> int | None:
    """Python's own number for one of numpy's."""
    return None if number is None else int(number)
