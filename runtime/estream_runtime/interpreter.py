"""Carries out programs: takes token rows through the layers of a model while experts pass through the arena.

A program says what happens when. Layers come one after the other and all rows of a batch go through a layer together,
so each expert is read once however long the prompt. Row blocks follow from the number of rows alone and experts are
added in the order of their ids: results are the same to the last bit whatever the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from estream_loader.dense import EmbeddingRows
from estream_loader.pager import Pager
from estream_loader.seeding import Seeding
from estream_runtime.backends import Array, Backend
from estream_runtime.batch import Batch, Ids
from estream_runtime.cache import Entered, Kept, KeyValues
from estream_runtime.decoding import Decoding
from estream_runtime.recorder import Recorder
from estream_runtime.rotary import rotary_tables
from estream_runtime.routing import Routed, by_expert, route
from estream_runtime.weights import DenseWeights, ExpertWeights
from estream_spec.errors import TrapError
from estream_spec.graph_interface import layer_classes
from estream_spec.manifest import GraphRole
from estream_spec.model import ModelDescription
from estream_spec.schedule import Instruction, Opcode, Phase, Policy, Program
from estream_spec.weights import Floats

T = TypeVar("T")
OnRoute = Callable[[int, npt.NDArray[np.int32], Floats], None]
"""Told of each routing decision: layer, expert ids `[T, k]` from the largest weight down, weights `[T, k]`."""

OnLayer = Callable[[int, Floats, Floats, npt.NDArray[np.int32]], None]
"""Told of each layer with experts once it is routed: layer, what entered it f32 `[T, hidden]`, the router's scores f32
`[T, experts]`, expert ids `[T, k]`."""

ROW_BLOCK: Final = 128
"""Rows that attend, or enter the head, together: bounds the memory of scores and logits."""
_FORBIDDEN: Final = np.finfo(np.float32).min


@dataclass(slots=True)
class _Rows:
    """A batch on its way through the layers.

    Attributes:
        batch: the rows.
        cache: what layers keep of the tokens before; None where none are there and none shall be kept.
        on_route: told of each routing decision.
        asked: which rows leave the last layer; None for all.
        tables: rotary tables, by attention.
        x: f32 `[T, hidden]`, from EMBED on.
        entered: what `x` was when its rows entered the layer, from ATTEND on.
        normed: f32 `[T, hidden]`, what experts take, from ATTEND of a layer to its COMBINE.
        ready: those as the backend takes them, from ROUTE on.
        scores: f32 `[T, experts]`, the router's, likewise; None where the layer has no experts.
        choice: expert ids int32 `[T, k]` and weights f32 `[T, k]`, from ROUTE of a layer to its COMBINE.
        routed: rows of each expert, likewise.
        total: f32 `[T, hidden]`, what the dense block and experts have added so far, from ROUTE or DENSE on.
    """

    batch: Batch
    cache: Sequence[Kept] | None
    on_route: OnRoute | None
    asked: Ids | None
    tables: list[tuple[Floats, Floats]]
    x: Floats = field(init=False)
    entered: Floats = field(init=False)
    normed: Floats = field(init=False)
    ready: Any = field(init=False)
    scores: Floats | None = field(init=False)
    choice: tuple[npt.NDArray[np.int32], Floats] = field(init=False)
    routed: Routed = field(init=False)
    total: Floats = field(init=False)


class Interpreter:
    """A model, its weights, and what computes with them.

    Args:
        model: what to compute.
        backend: runs graphs.
        pager: brings experts.
        embedding: gives rows of the embedding.
        dense: weights of the graphs `qkv`, `out` and `head`.
        experts: makes records ready for the graph `expert`.
        decoding: carries out the demand forms of decode programs.

    Attributes:
        recorder: adds up where time goes.
        decoding: see above.
        on_layer: told of each layer that is routed; None for nobody.
    """

    def __init__(
        self,
        model: ModelDescription,
        backend: Backend,
        pager: Pager,
        embedding: EmbeddingRows,
        dense: DenseWeights,
        experts: ExpertWeights,
        decoding: Decoding,
    ):
        self.model, self.pager, self.decoding = model, pager, decoding
        self.recorder = Recorder()
        self.on_layer: OnLayer | None = None
        self._backend, self._embedding, self._dense, self._experts = backend, embedding, dense, experts
        self._seeding: Seeding | None = None
        self._classes = [layer_classes(model, layer) for layer in range(len(model.layers))]

    def new_cache(self) -> list[Kept]:
        """Room for what every layer keeps, empty."""
        return [self._nothing_kept(layer) for layer in range(len(self.model.layers))]

    def load(self, program: Program) -> None:
        """Bring all experts into the arena, as resident programs need it, unless they are there.

        Args:
            program: one that loads, proven.

        Raises:
            IntegrityError: an expert's checksum differs or its bytes are missing.
            LinkError: the device failed.
        """
        self.pager.divide(program.bank_count, program.group_size)
        if self.pager.full:
            return
        with self._in_banks(program):
            for instruction in program.instructions:
                self._page(instruction)

    def run(
        self,
        program: Program,
        batch: Batch,
        head: Callable[[Floats], T],
        cache: Sequence[Kept] | None = None,
        on_route: OnRoute | None = None,
        asked: Ids | None = None,
        decode: Program | None = None,
    ) -> T:
        """Take rows through all layers.

        Args:
            program: what to do, proven; if it is resident, all experts are in the arena.
            batch: the rows.
            head: what HEAD does: takes f32 `[T, hidden]`, what the final norm takes of each row, or of those asked for.
            cache: what layers keep of the tokens before, extended by the batch's sequence; None where there are none
                before and none shall be kept.
            on_route: told of each routing decision.
            asked: the rows to be given to `head`, int64; None for all. The last layer computes nothing else of the
                others than their keys and values.
            decode: the decode program that will go on; experts that the rows are routed to most are kept for it. None
                keeps none.

        Returns:
            What `head` returned.

        Raises:
            TrapError: a value is not finite, or a graph failed.
            IntegrityError: an expert's checksum differs or its bytes are missing.
            LinkError: the device failed.
        """
        tables = [rotary_tables(attention, batch.positions) for attention in self.model.attentions]
        rows = _Rows(batch, cache, on_route, asked, tables)
        found: list[T] = []
        decoding, decodes = self.decoding, program.phase == Phase.DECODE
        # What is not finite is found in scores and logits.
        with np.errstate(over="ignore", invalid="ignore"), self._in_banks(program):
            self._seeding = None if decode is None else Seeding(self.pager, decoding.slots, decode.kept)
            for instruction in program.instructions:
                match instruction.opcode:
                    case Opcode.EMBED:
                        with self.recorder.during("embed", tokens=len(batch.token_ids)):
                            rows.x = self._embedding.gather(batch.token_ids)
                    case Opcode.ATTEND:
                        self._await_dense("out", instruction.layer)
                        with self.recorder.during("attention", instruction.layer, tokens=len(rows.x)):
                            self._attend(rows, instruction.layer)
                    case Opcode.ROUTE:
                        self._route(rows, instruction.layer)
                        if not decodes:
                            self._leave_unread(rows, instruction.layer)
                        self._tell(rows, instruction.layer)
                    case Opcode.DENSE:
                        with self.recorder.during("dense", instruction.layer, tokens=len(rows.x)):
                            rows.total = self._dense_graph("dense", instruction.layer, {"normed": rows.normed})["y"]
                    case Opcode.EXPERTS:
                        self._add_experts(rows, instruction)
                    case Opcode.PREDICT:
                        with self.recorder.during("route", instruction.layer, tokens=1):
                            decoding.predict(instruction.layer, rows.x)
                    case Opcode.PREFETCH:
                        decoding.prefetch(instruction.layer, instruction.group)
                    case Opcode.DEMAND_FILL:
                        assert rows.scores is not None
                        bias = self._selection_bias(instruction.layer)
                        decoding.demand(instruction.layer, rows.choice, rows.scores, bias)
                    case Opcode.DEMAND_AWAIT:
                        decoding.await_(instruction.layer, instruction.group, self.recorder)
                    case Opcode.DEMAND_EXPERTS:
                        shape_class = self._classes[instruction.layer]["expert"]
                        decoding.compute(instruction.layer, shape_class, rows.ready, rows.total, self.recorder)
                    case Opcode.DEMAND_RELEASE:
                        decoding.release(instruction.layer, instruction.group)
                    case Opcode.COMBINE:
                        with self.recorder.during("scatter", instruction.layer, tokens=len(rows.x)):
                            rows.x = rows.x + rows.total
                    case Opcode.HEAD:
                        found.append(head(rows.x))
                    case _:
                        self._page(instruction, keep=program.policy == Policy.RESIDENT)
        return found[0]

    def logits(self, x: Floats) -> Floats:
        """Logits of rows that went through all layers.

        Args:
            x: f32 `[T, hidden]`.

        Returns:
            f32 `[T, vocabulary]`.

        Raises:
            TrapError: one is not finite.
        """
        logits = np.empty((len(x), self.model.vocabulary), np.float32)
        self._await_dense("head")
        with self.recorder.during("head", tokens=len(x)):
            weights = self._dense.inputs("head")
            for start, stop in _blocks(0, len(x)):
                outputs = self._backend.run("head", 0, {"x": x[start:stop], **weights})
                logits[start:stop] = outputs["logits"]
            if not np.isfinite(logits).all():
                raise TrapError("a logit is not finite", path="head")
        return logits

    def last_logits(self, x: Floats) -> Floats:
        """Logits of the last row that is given, f32 `[vocabulary]`; see `logits`."""
        last: Floats = self.logits(x[-1:])[0]
        return last

    def _page(self, instruction: Instruction, *, keep: bool = False) -> None:
        """An instruction about a bank, or HALT."""
        opcode, *place = instruction
        match opcode:
            case Opcode.FILL:
                self.pager.fill(*place)
            case Opcode.AWAIT:
                with self.recorder.during("wait", instruction.layer, instruction.group):
                    self.pager.await_(*place)
            case Opcode.RELEASE:
                self.pager.release(instruction.bank, keep=keep)

    def _attend(self, rows: _Rows, layer: int) -> None:
        """The attention block, up to what the router and the experts take."""
        held = self._nothing_kept(layer) if rows.cache is None else rows.cache[layer]
        rows.entered = rows.x
        if isinstance(held, Entered):
            attended = self._convolution(layer, rows.x, rows.batch, held)
        else:
            attended = self._attention(layer, rows, held)
        if rows.asked is not None and layer == len(self.model.layers) - 1:
            attended, rows.x, rows.entered = attended[rows.asked], rows.x[rows.asked], rows.entered[rows.asked]
        out = self._dense_graph("out", layer, {"attended": attended, "residual": rows.x})
        rows.x, rows.normed, rows.scores = out["x"], out["normed"], out.get("scores")

    def _attention(self, layer: int, rows: _Rows, held: KeyValues) -> Floats:
        """Queries, keys and values of all rows; then each segment attends to what is held and to itself."""
        described, batch = self.model.layers[layer], rows.batch
        cos, sin = rows.tables[self._classes[layer]["qkv"]]
        projected = self._dense_graph("qkv", layer, {"x": rows.x, "cos": cos, "sin": sin})
        queries, keys, values = projected["queries"], projected["keys"], projected["values"]
        attended = np.empty((len(rows.x), queries.shape[0] * values.shape[2]), np.float32)
        sequence = held.length + batch.segments[0][1]
        for begin, end in batch.segments:
            held.append(keys[:, begin:end], values[:, begin:end])
            for start, stop in _blocks(begin, end):
                feeds = _attend_feeds(queries[:, start:stop], held, batch.positions[start:stop], described.window)
                attended[start:stop] = self._dense_graph("attend", layer, feeds)["attended"]
            held.truncate(sequence)
        return attended

    def _convolution(self, layer: int, x: Floats, batch: Batch, held: Entered) -> Floats:
        """What rows put in, and each segment's own convolution of it, which goes on from what is held."""
        made = self._dense_graph("convolve", layer, {"x": x})
        entered, taps = made["entered"], self._dense.vector(layer, "taps")
        mixed = np.zeros_like(entered)
        before: Floats | None = None
        for begin, end in batch.segments:
            own = np.concatenate([held.rows if before is None else before, entered[begin:end]])
            for number, tap in enumerate(taps):
                mixed[begin:end] += tap * own[number : number + end - begin]
            if before is None:
                held.append(entered[begin:end])
                before = held.rows
        mixed *= made["exit"]
        return mixed

    def _await_dense(self, role: GraphRole, layer: int | None = None) -> None:
        """Wait for dense weights that are still being read; those of `qkv` and `out` come together."""
        if not self._dense.is_there(role, layer or 0):
            with self.recorder.during("wait", layer):
                self._dense.await_(role, layer or 0)

    def _selection_bias(self, layer: int) -> Floats | None:
        """What is added for choosing experts, f32 `[experts]`; None for nothing."""
        router = self.model.expert_block(layer).router
        return self._dense.vector(layer, "selection_bias") if router.selection_bias else None

    def _leave_unread(self, rows: _Rows, layer: int) -> None:
        """Tell rows by expert, and leave unread what nobody chose."""
        rows.routed = by_expert(*rows.choice, self.model.expert_block(layer).experts)
        counts = rows.routed.counts
        self.pager.route(layer, np.flatnonzero(counts).tolist())
        if self._seeding is not None:
            self._seeding.routed(layer, rows.choice[0].tolist(), counts.tolist())

    def _route(self, rows: _Rows, layer: int) -> None:
        """Choose experts."""
        block = self.model.expert_blocks[self._classes[layer]["expert"]]
        bias = self._selection_bias(layer)
        with self.recorder.during("route", layer, tokens=len(rows.x)):
            assert rows.scores is not None
            try:
                expert_ids, weights = route(rows.scores, block.router, bias)
            except TrapError as error:
                raise TrapError(error.message, path=f"layer {layer}") from None
            rows.choice = expert_ids, weights
            rows.total = np.zeros_like(rows.normed)
            rows.ready = self._backend.expert_rows(rows.normed)

    def _tell(self, rows: _Rows, layer: int) -> None:
        """Tell who asked that a layer is routed, now that nothing is read in vain meanwhile."""
        if rows.on_route is not None:
            rows.on_route(layer, *rows.choice)
        if self.on_layer is not None:
            assert rows.scores is not None
            self.on_layer(layer, rows.entered, rows.scores, rows.choice[0])

    def _add_experts(self, rows: _Rows, instruction: Instruction) -> None:
        """Add what the chosen experts of one group give to their rows."""
        _, layer, group, number = instruction
        bound, shape_class = self.pager.use(number), self._classes[layer]["expert"]
        for expert in self.pager.wanted(layer, group):
            chosen, shares = rows.routed.tokens_of(expert)
            during = partial(self.recorder.during, layer=layer, group=group, expert=expert, tokens=len(chosen))
            record = self.pager.record(bound, expert)
            with during("expand"):
                inputs = self._experts.bind(layer, record)
            self._backend.add_expert(shape_class, rows.ready, chosen, shares, inputs, rows.total, during)
            if self._seeding is not None:
                self._seeding.passed(layer, expert, record)

    @contextmanager
    def _in_banks(self, program: Program) -> Iterator[None]:
        """A program's time in the arena: when it fails, nothing is being read any more and every bank is free."""
        self.pager.divide(program.bank_count, program.group_size)
        if program.phase == Phase.DECODE:
            self.decoding.begin(program)
        else:
            self.pager.begin(resident=program.policy == Policy.RESIDENT and program.phase == Phase.PREFILL)
        try:
            yield
        except BaseException:
            self.pager.settle()
            raise
        if program.phase == Phase.DECODE:
            self.decoding.end()

    def _dense_graph(self, role: GraphRole, layer: int, feeds: dict[str, Array]) -> dict[str, Array]:
        return self._backend.run(role, self._classes[layer][role], feeds | self._dense.inputs(role, layer))

    def _nothing_kept(self, layer: int) -> Kept:
        convolution = self.model.layers[layer].convolution
        if convolution is not None:
            return Entered(self.model.convolutions[convolution].taps, self.model.hidden)
        return KeyValues(self.model.attention(layer), self.model.context_length)


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges of `ROW_BLOCK`, the last one shorter."""
    for start in range(begin, end, ROW_BLOCK):
        yield start, min(start + ROW_BLOCK, end)


def _attend_feeds(
    queries: Floats, held: KeyValues, positions: npt.NDArray[np.int64], window: int | None
) -> dict[str, Array]:
    """Inputs of the graph `attend` for a block of consecutive rows of one sequence.

    A single row that sees all takes all the room there is, masked, since that needs no copy; otherwise rows take what
    they see.
    """
    first = 0 if window is None else max(0, int(positions[0]) + 1 - window)
    if len(positions) == 1 and first == 0:
        keys, values = held.whole()
    else:
        keys, values = (each[:, first:] for each in held.first(int(positions[-1]) + 1))
    seen = np.arange(first, first + keys.shape[1])
    allowed = seen <= positions[:, None]
    if window is not None:
        allowed &= seen > positions[:, None] - window
    mask = np.where(allowed, np.float32(0), _FORBIDDEN)
    return {"queries": np.ascontiguousarray(queries), "keys": keys, "values": values, "mask": mask}
