"""Decodes one token row at a time: reads the experts it is routed to, some ahead of that where it pays, and computes.

Each expert computes as soon as it is there, and what they give is added in ascending expert id, so that logits do not
depend on what arrived when. In the mode `stall-free` an expert that is not there in time may be replaced by one that
is, which does change logits; each replacement is counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from estream_loader.pager import Binding, Pager
from estream_loader.slots import DemandStats, Slots
from estream_runtime.backends import Backend
from estream_runtime.judge import Judge
from estream_runtime.prefetching import Pace, Prediction, Predictor, worthwhile
from estream_runtime.recorder import Recorder
from estream_runtime.routing import substituted
from estream_runtime.sampling import as_number
from estream_runtime.weights import ExpertWeights
from estream_spec.errors import LinkError
from estream_spec.model import ModelDescription
from estream_spec.schedule import Program
from estream_spec.weights import Floats

Mode = Literal["exact", "stall-free"]
"""Whether a token waits for every expert it is routed to, or takes others in place of those that are late."""


SUBSTITUTE_SHARE: Final = 0.25
"""Largest share of its layer's weights that an expert has to be replaced, unless a share is given. Not measured."""
FEW_EXPERTS: Final = 2
"""Models that route to no more experts lose much by replacing one: 4 points of 65 in APEX (arXiv 2608.11688)."""


def substitution_bound(model: ModelDescription, mode: str, share: float | None) -> float | None:
    """The largest share of a layer's weights that a replaced expert may have; None where none is replaced.

    Raises:
        LinkError: no such mode, a share out of its range or without the mode, or a model that the mode does not suit.
    """
    if mode not in get_args(Mode):
        raise LinkError(f"unknown mode {mode!r}, expected one of: {', '.join(get_args(Mode))}")
    if mode == "exact":
        if share is not None:
            raise LinkError("substitute_share without the mode 'stall-free', in which alone experts are replaced")
        return None
    if share is not None and not 0 < as_number(share) <= 1:
        raise LinkError(f"substitute_share is {share!r}, expected a number above 0 and up to 1")
    routers = [block.router for block in model.expert_blocks]
    if any(each.family == "sparsemixer" for each in routers):
        raise LinkError("the mode 'stall-free' does not know how to weigh substitutes for a router 'sparsemixer'")
    if share is None and (fewest := min(each.top_k for each in routers)) <= FEW_EXPERTS:
        message = f"the mode 'stall-free' loses too much in a model that routes to {fewest} expert{'s' * (fewest > 1)}"
        raise LinkError(message, hint="a substitute_share of your own says that you want it all the same")
    return SUBSTITUTE_SHARE if share is None else float(share)


@dataclass(slots=True, kw_only=True)
class DecodeStats(DemandStats):
    """What became of tokens that were decoded, beside what became of the experts that they needed.

    Attributes:
        tokens: tokens decoded, each a pass of one row through the layers.
        seconds: that took.
        bytes_read: bytes of expert records read for them, and between them in vain.
        substituted: experts replaced by others, in the mode `stall-free`.
        lost_share: sum of the shares, 0 to 1, that those had of the weights in their layers.
    """

    tokens: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    substituted: int = 0
    lost_share: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the experts needed whose records were there from earlier tokens; 0 where none was needed."""
        return self.hits / self.demanded if self.demanded else 0.0

    @property
    def timeliness(self) -> float | None:
        """Share of the experts read ahead and needed that were there in time; None where there are none."""
        useful = self.timely + self.late
        return self.timely / useful if useful else None

    @property
    def precision(self) -> float | None:
        """Share of the experts read ahead that were needed; None where none were read ahead."""
        read = self.prefetched - self.dropped
        return (self.timely + self.late) / read if read else None

    def __add__(self, other: DecodeStats) -> DecodeStats:
        """What became of both."""
        return DecodeStats(**{name: number + getattr(other, name) for name, number in asdict(self).items()})

    def __sub__(self, earlier: DecodeStats) -> DecodeStats:
        """What came since."""
        return DecodeStats(**{name: number - getattr(earlier, name) for name, number in asdict(self).items()})


@dataclass(slots=True)
class _Layer:
    """The layer at work.

    Attributes:
        routed: what the token was routed to.
        experts: what it demands, ascending.
        shares: what each counts, f32 `[k]`.
        out: f32 `[k, hidden]`, what each gives.
        computed: how many have.
    """

    routed: Sequence[int]
    experts: Sequence[int]
    shares: Floats
    out: Floats
    computed: int = 0


class Decoding:
    """What decode programs do with experts.

    Args:
        model: what to compute.
        backend: runs experts.
        weights: makes records ready.
        pager: its arena has the slots.
        predictor: says what to read ahead; None reads nothing ahead.
        substitute_share: the largest share of a layer's weights that an expert may have to be replaced; None replaces
            none, which is the mode `exact`.
        asked: whether reading ahead was asked for, so that without a predictor it is the package that has none.

    Attributes:
        slots: where records are.
        predictor: see above.
        judge: decides whether reading ahead pays; None does not ask, as in the mode `stall-free`, where time does not
            tell what it is good for.
        pace: how long reading takes, and what time there is for it.
    """

    def __init__(
        self,
        model: ModelDescription,
        backend: Backend,
        weights: ExpertWeights,
        pager: Pager,
        predictor: Predictor | None = None,
        substitute_share: float | None = None,
        *,
        asked: bool = True,
    ):
        self.slots = Slots(pager, pager.shape)
        self.predictor, self.pace = predictor, Pace()
        self.judge = Judge() if predictor is not None and substitute_share is None else None
        self._model, self._backend, self._weights, self._pager = model, backend, weights, pager
        self._substitute_share, self._asked = substitute_share, asked
        self._bound: dict[int, tuple[int, Any]] = {}
        """By slot what the backend takes of its record, and the slot's epoch when that was made."""
        self._prediction: Prediction | None = None
        self._predicted_at = 0.0
        self._layer: _Layer | None = None
        self._program: Program | None = None
        self._tokens = self._bytes_read = self._substituted = 0
        self._seconds = self._lost_share = self._started = 0.0
        self._read, self._uses = pager.stats, pager.uses

    @property
    def stats(self) -> DecodeStats:
        """What became of all tokens so far."""
        return DecodeStats(
            tokens=self._tokens,
            seconds=self._seconds,
            bytes_read=self._bytes_read,
            substituted=self._substituted,
            lost_share=self._lost_share,
            **asdict(self.slots.stats),
        )

    @property
    def prefetching(self) -> str:
        """Whether experts are read ahead, and what is known of its use, in words."""
        if self.predictor is None:
            return "off: the package has no prefetch router" if self._asked else "off: not asked for"
        if self._program is not None and not self._program.reads_ahead:
            all_there = sum(self._program.kept.values()) == sum(self._pager.shape.counts)
            return "off: all experts are in the arena" if all_there else "off: the arena has no room for it"
        return "on" if self.judge is None else self.judge.verdict

    def begin(self, program: Program) -> None:
        """A token begins."""
        self._started = time.perf_counter()
        if self._pager.uses != self._uses:  # what was read since belongs to another program
            self._read = self._pager.stats
        self._program = program
        if not self.slots.begin(program.kept):
            self._bound.clear()

    def end(self) -> None:
        """The token is through all layers."""
        self.slots.end()
        stats, seconds = self._pager.stats, time.perf_counter() - self._started
        read = stats.bytes_read - self._read.bytes_read
        self.pace.read(stats.reads - self._read.reads, stats.io_busy_s - self._read.io_busy_s)
        self._read, self._uses = stats, self._pager.uses
        if self.judge is not None and self._program is not None and self._program.reads_ahead:
            self.judge.took(seconds)
        self._tokens += 1
        self._bytes_read += read
        self._seconds += seconds

    def predict(self, layer: int, x: Floats) -> None:
        """Find out what the layer will probably need."""
        self._predicted_at, self._prediction = time.perf_counter(), None
        if self.predictor is not None and (self.judge is None or self.judge.on):
            self._prediction = self.predictor.predict(layer, x)

    def prefetch(self, layer: int, count: int) -> None:
        """Begin to read at most `count` of that, as far as it is not there and as it pays."""
        if self._prediction is None or self.pace.record_s is None:
            return
        needed = dict(zip(self._prediction.experts, self._prediction.needed, strict=True))
        missing = self.slots.missing(layer, needed)[:count]
        chances = [needed[expert] for expert in missing]
        count = worthwhile(chances, self.pace.before_need(layer), self.pace.record_s)
        self.slots.prefetch(layer, missing[:count])

    def demand(
        self, layer: int, routed: tuple[npt.NDArray[np.int32], Floats], scores: Floats, bias: Floats | None
    ) -> None:
        """The layer is routed; begin to read what is not there.

        Args:
            layer: the layer.
            routed: expert ids int32 `[1, k]` and their weights f32 `[1, k]`.
            scores: f32 `[1, E]`, the router's.
            bias: f32 `[E]`, what is added for choosing; None for nothing.
        """
        expert_ids, weights = routed
        chosen = expert_ids[0].tolist()
        if self._predicted_at:
            self.pace.elapsed(layer, time.perf_counter() - self._predicted_at)
            self._predicted_at = 0.0
        later: list[int] = []
        if self._substitute_share is not None:
            router = self._model.expert_block(layer).router
            found = substituted(scores, router, bias, routed, self.slots.ready(layer), self._substitute_share)
            expert_ids, weights, later = found.expert_ids, found.weights, found.replaced
            self._substituted += len(later)
            self._lost_share += found.lost_share
        order = np.argsort(expert_ids[0])
        experts = expert_ids[0, order].tolist()
        self.slots.demand(layer, experts, later)
        if self.predictor is not None:
            self.predictor.routed(layer, chosen)
        out = np.empty((len(experts), self._model.hidden), np.float32)
        self._layer = _Layer(chosen, experts, weights[0, order], out)

    def await_(self, layer: int, count: int, recorder: Recorder) -> None:
        """Wait until at least `count` of the demanded experts are there."""
        with recorder.during("wait", layer):
            self.slots.await_(layer, count)

    def compute(self, layer: int, shape_class: int, ready: Any, total: Floats, recorder: Recorder) -> None:
        """Compute the experts that are there; with the last one, add what all of them give.

        Args:
            layer: the layer.
            shape_class: of its experts.
            ready: the row as the backend takes it.
            total: f32 `[1, hidden]`, added to.
            recorder: told what goes on.
        """
        at_work, taken = self._layer, self.slots.take()
        assert at_work is not None
        if not taken:
            return
        bound = [self._bind(layer, shape_class, expert, binding) for expert, binding in taken]
        places = [at_work.experts.index(expert) for expert, _ in taken]
        during = partial(recorder.during, layer=layer, tokens=len(taken))
        shares = np.ascontiguousarray(at_work.shares[places])
        out = np.empty((len(taken), at_work.out.shape[1]), np.float32)
        self._backend.expert_outputs(shape_class, ready, shares, bound, out, during)
        at_work.out[places] = out
        at_work.computed += len(taken)
        if at_work.computed == len(at_work.experts):
            for each in at_work.out:
                total[0] += each

    def release(self, layer: int, count: int) -> None:
        """The layer is done with its experts; it keeps at most `count` records."""
        assert self._layer is not None
        self.slots.release(layer, count, self._layer.routed)
        self._layer = None

    def _bind(self, layer: int, shape_class: int, expert: int, binding: Binding) -> Any:
        """What the backend takes of an expert, made once for as long as its record lies there."""
        number = binding.bank.index
        found = self._bound.get(number)
        if found is None or found[0] != binding.epoch:
            record = self._pager.record(binding, expert)
            bound = self._backend.bind_expert(shape_class, partial(self._weights.bind, layer, record))
            self._bound[number] = found = binding.epoch, bound
        return found[1]
