"""Measures how long the interpreter computes, on programs of one layer whose experts are in the arena already.

What is timed is what a prompt goes through, instruction by instruction: attention with its masks and tables of
positions, routing, the dense block, and experts from their records in the arena to what they add to each row. The layer
is the first that has experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, quantiles
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_loader.progress import Progress
from estream_runtime.batch import Batch
from estream_runtime.recorder import Timed
from estream_runtime.session import Session
from estream_spec.errors import LinkError
from estream_spec.model import ModelDescription
from estream_spec.profile_fit import LEAST, Loss, fit_toll
from estream_spec.schedule import OPERANDS, ExpertShape, Instruction, Opcode, Phase, Policy, Program
from estream_spec.schedule_compiler import compile_program
from estream_spec.weights import Floats

HELD_BYTES: Final = 512 << 20
"""Most memory for experts while measuring, unless one alone takes more."""
HELD_SHARE: Final = 4
"""A part of all memory that is spent on them at most: a quarter."""
BANK_BYTES: Final = 32 << 20
"""About how many bytes of experts are in a large group."""
MOST_TOKENS: Final = 256
"""Tokens of an expert in the longest prompt that is measured."""
LONGEST: Final = 2048
"""Tokens of the longest prompt that is measured, whatever its experts have of them."""
_CALL_TOKENS: Final = 32
"""The prompt whose groups are timed apart from their experts."""
_CALL_ROUNDS: Final = 5
_CALL_REPEATS: Final = 4
"""How often each group is called in a round."""
_TOLL_TOKENS: Final = (32, 128)
"""Prompts beside which is read."""
_TOLL_LAYERS: Final = 2
_TOLL_DEPTH: Final = 3
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 9
BUDGET_S: Final = 20.0
"""How often each prompt is run: so many rounds at least and at most, and between as long as there is time."""
_WARM_UP: Final = 16
_TOLL_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """How long one layer takes a prompt.

    Attributes:
        tokens: of the prompt.
        other_s: seconds for all but experts.
        experts_s: seconds for the experts that are in the arena.
        head_s: seconds for the head, of one row.
        active: how many of those experts have tokens.
        groups: in how many groups.
        rows: tokens they have together.
    """

    tokens: int
    other_s: float
    experts_s: float
    head_s: float
    active: int
    groups: int
    rows: int

    def alone_s(self, call_s: float) -> float:
        """Seconds for the experts without what their groups take, `call_s` each."""
        return max(self.experts_s - self.groups * call_s, LEAST * self.experts_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTime:
    """How long layers took while experts were read, from the first one's routing on.

    Attributes:
        layers: how many.
        computing_s: seconds, those left out in which computing waited.
        reads: groups read in that time.
        bytes_read: their bytes.
    """

    layers: int
    computing_s: float
    reads: int
    bytes_read: int

    def loss(self, layer: LayerTime, rows: int, call_s: float) -> Loss:
        """What reading took from computing.

        Args:
            layer: a layer of the same prompt with nothing read, and some or all of its experts in the arena.
            rows: tokens that all experts of a layer have together.
            call_s: seconds that a group takes with nothing read.
        """
        experts_s = self.layers * layer.alone_s(call_s) * rows / layer.rows
        alone_s = experts_s + self.reads * call_s + (self.layers - 1) * layer.other_s
        return Loss(seconds=self.computing_s - alone_s, groups=self.reads, bytes_read=self.bytes_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Experts of a layer that stay in the arena: `banks` groups of `group_size`.

    Attributes:
        layer: the first that has any.
        before: the steps of the layer up to its experts.
        group_size: experts in a group.
        banks: groups.
        bank_bytes: room of each.
    """

    layer: int
    before: tuple[Opcode, ...]
    group_size: int
    banks: int
    bank_bytes: int

    @classmethod
    def of(cls, shape: ExpertShape, memory_bytes: int, beside: int) -> Held:
        """As many as are to be held with so much memory, of which `beside` is for all else.

        Raises:
            LinkError: not even one is.
        """
        layer = _with_experts(shape)[0]
        count, record = shape.counts[layer], max(shape.record_lengths)
        share, left = memory_bytes // HELD_SHARE, memory_bytes - beside
        if record > share:
            message = f"one expert takes {record} bytes, expected at most {share}, a quarter of the memory"
            raise LinkError(message, hint="probe with a package of smaller experts")
        if record > left:
            message = f"{memory_bytes} bytes of memory, expected at least {beside + record}"
            raise LinkError(message, hint="probe with a package of a smaller model")
        room = max(record, min(HELD_BYTES, share, left))
        fitting = max(1, min(count // 2, BANK_BYTES // record, room // record // 2))  # two banks, if there can be
        group_size = 1 << fitting.bit_length() - 1
        bank_bytes = shape.bank_bytes(group_size)
        banks = min(-(-count // group_size), room // bank_bytes)
        before = shape.steps(layer)[:-1]
        return cls(layer=layer, before=before, group_size=group_size, banks=banks, bank_bytes=bank_bytes)

    @property
    def arena_bytes(self) -> int:
        """What the arena takes."""
        return self.banks * self.bank_bytes

    def load(self) -> Program:
        """Brings them into the arena."""
        return self._program(Phase.LOAD, [*self._of_groups(Opcode.FILL), *self._of_groups(Opcode.AWAIT)])

    def prefill(self) -> Program:
        """The layer: all but its experts twice, of which from routing to routing is timed; then its experts.

        The second time ends with routing, so that nothing comes between it and the experts.
        """
        steps = [*self.before, Opcode.ATTEND, Opcode.ROUTE]
        experts = self._of_groups(Opcode.AWAIT, Opcode.EXPERTS, Opcode.RELEASE)
        return self._prefill([*self._steps(*steps), *self._of_groups(Opcode.FILL), *experts])

    def calls(self) -> Program:
        """The layer, whose groups are called several times each."""
        experts = self._of_groups(Opcode.FILL, Opcode.AWAIT, Opcode.EXPERTS, Opcode.RELEASE)
        return self._prefill([*self._steps(Opcode.ATTEND, Opcode.ROUTE), *experts * _CALL_REPEATS])

    def paged(self, shape: ExpertShape, group_size: int) -> Program:
        """The first layers that have experts, which are read beside computing; those of several do not all stay.

        What stands before the first layer's routing is not timed, so its dense block, which comes later, is left out.
        """
        layers = _with_experts(shape)[:_TOLL_LAYERS]
        program = compile_program(
            ExpertShape(
                counts=tuple(shape.counts[layer] for layer in layers),
                record_lengths=tuple(shape.record_lengths[layer] for layer in layers),
                top_k=tuple(shape.top_k[layer] for layer in layers),
                dense_layers=frozenset(at for at, layer in enumerate(layers) if at and layer in shape.dense_layers),
            ),
            arena_bytes=self.arena_bytes,
            group_size=group_size,
            prefetch_depth=min(_TOLL_DEPTH, self.banks - 1),
        )
        own = (
            each._replace(layer=layers[each.layer]) if OPERANDS[each.opcode] else each for each in program.instructions
        )
        return replace(program, instructions=tuple(own))

    def _steps(self, *opcodes: Opcode) -> list[Instruction]:
        return [Instruction(opcode, self.layer) for opcode in opcodes]

    def _of_groups(self, *opcodes: Opcode) -> list[Instruction]:
        """What is done with each group in turn, in the bank of its number."""
        return [Instruction(opcode, self.layer, bank, bank) for bank in range(self.banks) for opcode in opcodes]

    def _prefill(self, instructions: Sequence[Instruction]) -> Program:
        ending = [*self._steps(Opcode.COMBINE), Instruction(Opcode.HEAD)]
        return self._program(Phase.PREFILL, [Instruction(Opcode.EMBED), *instructions, *ending])

    def _program(self, phase: Phase, instructions: Sequence[Instruction]) -> Program:
        return Program(
            phase=phase,
            policy=Policy.POST_ROUTING,
            group_size=self.group_size,
            prefetch_depth=self.banks - 1,
            bank_count=self.banks,
            arena_bytes=self.arena_bytes,
            instructions=(*instructions, Instruction(Opcode.HALT)),
        )


def _with_experts(shape: ExpertShape) -> list[int]:
    """The layers that have experts."""
    return [layer for layer, count in enumerate(shape.counts) if count]


class LayerClock:
    """Runs a layer and looks at the clock.

    Args:
        session: one whose arena is as `held` says.
        held: the experts in the arena.
    """

    def __init__(self, session: Session, held: Held):
        self.model = session.package.manifest.model
        self.held = held
        self._interpreter, self._prefill, self._calls = session.interpreter, held.prefill(), held.calls()
        shape = session.package.expert_shape
        self._large, self._small = held.paged(shape, held.group_size), held.paged(shape, 1)
        self.load()
        self.run(min(_WARM_UP, self.model.context_length))  # makes graphs ready

    def load(self) -> None:
        """Bring the experts into the arena."""
        self._interpreter.load(self.held.load())

    def run(self, tokens: int) -> LayerTime:
        """Take a prompt of so many tokens through the layer, whose experts are in the arena."""
        routed: list[float] = []
        chosen: list[npt.NDArray[np.int32]] = []
        ended: list[float] = []

        def on_route(layer: int, expert_ids: npt.NDArray[np.int32], weights: Floats) -> None:
            chosen.append(expert_ids)
            routed.append(time.perf_counter())

        def head(x: Floats) -> None:
            ended.append(time.perf_counter())
            self._interpreter.last_logits(x)
            ended.append(time.perf_counter())

        self._interpreter.run(self._prefill, self._batch(tokens), head, on_route=on_route)
        held = self.held.group_size * self.held.banks
        counts = np.bincount(chosen[-1].ravel(), minlength=held)[:held]
        return LayerTime(
            tokens=tokens,
            other_s=routed[1] - routed[0],
            experts_s=ended[0] - routed[1],
            head_s=ended[1] - ended[0],
            active=int(np.count_nonzero(counts)),
            groups=int(np.count_nonzero(counts.reshape(self.held.banks, -1).any(axis=1))),
            rows=int(counts.sum()),
        )

    def run_calls(self, tokens: int) -> list[Timed]:
        """Take a prompt of so many tokens through the layer, its groups several times; what computed them."""
        recorder, found = self._interpreter.recorder, list[Timed]()
        recorder.events = found
        try:
            self._interpreter.run(self._calls, self._batch(tokens), lambda x: None)
        finally:
            recorder.events = None
        return [each for each in found if each.expert is not None]

    def run_paged(self, tokens: int) -> tuple[PagedTime, PagedTime]:
        """Take a prompt through some layers while their experts are read, in large groups and one by one.

        The experts of the layer have to be loaded again then.
        """
        large, small = (self._run_paged(program, tokens) for program in (self._large, self._small))
        return large, small

    def _run_paged(self, program: Program, tokens: int) -> PagedTime:
        marks: list[tuple[float, int, int]] = []

        def mark(*_: object) -> None:
            waited, stats = self._interpreter.recorder.seconds["wait"], self._interpreter.pager.stats
            marks.append((time.perf_counter() - waited, stats.reads, stats.bytes_read))

        self._interpreter.run(program, self._batch(tokens), mark, on_route=mark)
        first, *_, last = marks
        computing_s, reads, bytes_read = (after - before for before, after in zip(first, last, strict=True))
        return PagedTime(layers=len(marks) - 1, computing_s=computing_s, reads=int(reads), bytes_read=int(bytes_read))

    def _batch(self, tokens: int) -> Batch:
        return Batch.of(np.random.default_rng(tokens).integers(0, self.model.vocabulary, tokens))


def prompt_lengths(model: ModelDescription) -> list[int]:
    """Powers of two up to as many tokens as give each expert of the layer 256, or as the context holds."""
    block = model.expert_block(model.expert_layers[0])
    most = min(model.context_length, LONGEST, MOST_TOKENS * block.experts // block.router.top_k)
    return [1 << shift for shift in range(most.bit_length())]


def layer_times(clock: LayerClock, lengths: Sequence[int], progress: Progress) -> tuple[list[LayerTime], float]:
    """Medians for each prompt length, and how far the measurements behind them are apart.

    All lengths are run once a round, so that what disturbs one disturbs all.
    """
    found: list[list[LayerTime]] = [[] for _ in lengths]
    begun = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - begun > BUDGET_S:
            break
        for runs, tokens in zip(found, lengths, strict=True):
            runs.append(clock.run(tokens))
            progress.advance(1)
    return [_typical(runs) for runs in found], median(_spread(runs[1:]) for runs in found)


def group_call_s(clock: LayerClock, progress: Progress) -> float:
    """Seconds that the interpreter takes to await, use and release a group that is there, its experts left out."""
    events = list[list[Timed]]()
    for _ in range(_CALL_ROUNDS):
        events.append(clock.run_calls(min(_CALL_TOKENS, clock.model.context_length)))
        progress.advance(1)
    return group_seam_s(events)


def group_seam_s(runs: Sequence[Sequence[Timed]]) -> float:
    """How much longer than between two experts of one group it takes from the last of a group to the first of the next.

    Args:
        runs: what was done for experts, in the order of time.

    Returns:
        Seconds, in the median; 0 where no group followed another.
    """
    within, between = list[float](), list[float]()
    for run in runs:
        for last, first in pairwise(run):
            if first.activity != "expand":
                continue  # the same expert goes on
            # A group that follows itself begins again with its first expert.
            goes_on = last.group == first.group and (last.expert or 0) < (first.expert or 0)
            (within if goes_on else between).append(first.begun - last.ended)
    if not between:
        return 0.0
    return max(0.0, median(between) - (median(within) if within else 0.0))


def toll(clock: LayerClock, call_s: float, progress: Progress) -> tuple[float, float]:
    """Seconds that computing takes longer for each group, and for each byte, that is read beside it.

    Each prompt is run once beside reading large groups, once beside reading small ones, and at once again without. Both
    are 0 where nothing can be read beside computing, since the arena holds all there is or has a single bank. What a
    group takes with nothing read, `call_s`, is not in them.
    """
    if clock.held.banks == 1:
        return 0.0, 0.0
    losses = []
    for _ in range(_TOLL_ROUNDS):
        for tokens in _TOLL_TOKENS:
            length = min(tokens, clock.model.context_length)
            paged = clock.run_paged(length)
            clock.load()
            layer = clock.run(length)
            progress.advance(1)
            if layer.rows and all(each.bytes_read for each in paged):
                rows = length * clock.model.expert_block(clock.held.layer).router.top_k
                large, small = (each.loss(layer, rows, call_s) for each in paged)
                losses.append((large, small))
    return fit_toll(losses) if losses else (0.0, 0.0)


def measurements(lengths: Sequence[int]) -> int:
    """How many steps `layer_times`, `group_call_s` and `toll` report to their progress, at most."""
    return MAX_ROUNDS * len(lengths) + _CALL_ROUNDS + _TOLL_ROUNDS * len(_TOLL_TOKENS)


def _spread(runs: Sequence[LayerTime]) -> float:
    """How far the middle half of the runs is apart, as a share of the median: a few that are long do no harm."""
    seconds = [run.other_s + run.experts_s for run in runs]
    first, _, third = quantiles(seconds, n=4, method="inclusive")
    return (third - first) / median(seconds)


def _typical(runs: Sequence[LayerTime]) -> LayerTime:
    """The same prompt every time: what differs is the clock."""
    return LayerTime(
        tokens=runs[0].tokens,
        other_s=median(run.other_s for run in runs),
        experts_s=median(run.experts_s for run in runs),
        head_s=median(run.head_s for run in runs),
        active=runs[0].active,
        groups=runs[0].groups,
        rows=runs[0].rows,
    )
