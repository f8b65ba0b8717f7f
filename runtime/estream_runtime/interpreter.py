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
from estream_runtime.backends import Array, Backend
from estream_runtime.batch import Batch, Ids
from estream_runtime.cache import KeyValues
from estream_runtime.recorder import Recorder
from estream_runtime.rotary import rotary_tables
from estream_runtime.routing import Routed, by_expert, route
from estream_runtime.weights import DenseWeights, ExpertWeights
from estream_spec.errors import TrapError
from estream_spec.graph_interface import shape_class_of
from estream_spec.manifest import GraphRole
from estream_spec.model import ModelDescription
from estream_spec.schedule import Instruction, Opcode, Phase, Policy, Program

T = TypeVar("T")
Floats = npt.NDArray[np.float32]
OnRoute = Callable[[int, npt.NDArray[np.int32], Floats], None]
"""Told of each routing decision: layer, expert ids `[T, k]` from the largest weight down, weights `[T, k]`."""

ROW_BLOCK: Final = 128
"""Rows that attend, or enter the head, together: bounds the memory of scores and logits."""
_FORBIDDEN: Final = np.finfo(np.float32).min


@dataclass(slots=True)
class _Rows:
    """A batch on its way through the layers.

    Attributes:
        batch: the rows.
        cache: keys and values of the tokens before, by layer; None where none are there and none shall be kept.
        on_route: told of each routing decision.
        asked: which rows leave the last layer; None for all.
        tables: rotary tables, by attention.
        x: f32 `[T, hidden]`, from EMBED on.
        normed: f32 `[T, hidden]`, what experts take, from ATTEND of a layer to its COMBINE.
        ready: those as the backend takes them, from ROUTE on.
        scores: f32 `[T, experts]`, the router's, likewise.
        routed: rows of each expert, from ROUTE of a layer to its COMBINE.
        total: f32 `[T, hidden]`, what experts have added so far, likewise.
    """

    batch: Batch
    cache: Sequence[KeyValues] | None
    on_route: OnRoute | None
    asked: Ids | None
    tables: list[tuple[Floats, Floats]]
    x: Floats = field(init=False)
    normed: Floats = field(init=False)
    ready: Any = field(init=False)
    scores: Floats = field(init=False)
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
    """

    def __init__(
        self,
        model: ModelDescription,
        backend: Backend,
        pager: Pager,
        embedding: EmbeddingRows,
        dense: DenseWeights,
        experts: ExpertWeights,
    ):
        self.model, self.pager = model, pager
        self.recorder = Recorder()
        self._backend, self._embedding, self._dense, self._experts = backend, embedding, dense, experts
        layers = range(len(model.layers))
        self._classes = {role: [shape_class_of(role, model, layer) for layer in layers] for role in _LAYER_ROLES}

    def new_cache(self) -> list[KeyValues]:
        """Room for keys and values of every layer, empty."""
        return [self._key_values(layer) for layer in range(len(self.model.layers))]

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
        cache: Sequence[KeyValues] | None = None,
        on_route: OnRoute | None = None,
        asked: Ids | None = None,
    ) -> T:
        """Take rows through all layers.

        Args:
            program: what to do, proven; if it is resident, all experts are in the arena.
            batch: the rows.
            head: what HEAD does: takes f32 `[T, hidden]`, what the final norm takes of each row, or of those asked for.
            cache: keys and values of the tokens before, extended by the batch's sequence; None where there are none
                before and none shall be kept.
            on_route: told of each routing decision.
            asked: the rows to be given to `head`, int64; None for all. The last layer computes nothing else of the
                others than their keys and values.

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
        # What is not finite is found in scores and logits.
        with np.errstate(over="ignore", invalid="ignore"), self._in_banks(program):
            for instruction in program.instructions:
                match instruction.opcode:
                    case Opcode.EMBED:
                        with self.recorder.during("embed", tokens=len(batch.token_ids)):
                            rows.x = self._embedding.gather(batch.token_ids)
                    case Opcode.ATTEND:
                        self._await_dense("qkv", instruction.layer)
                        with self.recorder.during("attention", instruction.layer, tokens=len(rows.x)):
                            self._attend(rows, instruction.layer)
                    case Opcode.ROUTE:
                        self._route(rows, instruction.layer)
                    case Opcode.EXPERTS:
                        self._add_experts(rows, instruction)
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
        held = self._key_values(layer) if rows.cache is None else rows.cache[layer]
        tables = rows.tables[self.model.layers[layer].attention]
        attended = self._attention(layer, rows.x, rows.batch, tables, held)
        if rows.asked is not None and layer == len(self.model.layers) - 1:
            attended, rows.x = attended[rows.asked], rows.x[rows.asked]
        out = self._dense_graph("out", layer, {"attended": attended, "residual": rows.x})
        rows.x, rows.normed, rows.scores = out["x"], out["normed"], out["scores"]

    def _attention(self, layer: int, x: Floats, batch: Batch, tables: tuple[Floats, Floats], held: KeyValues) -> Floats:
        """Queries, keys and values of all rows; then each segment attends to what is held and to itself."""
        cos, sin = tables
        projected = self._dense_graph("qkv", layer, {"x": x, "cos": cos, "sin": sin})
        queries, keys, values = projected["queries"], projected["keys"], projected["values"]
        attended = np.empty((len(x), queries.shape[0] * queries.shape[2]), np.float32)
        sequence = held.length + batch.segments[0][1]
        for begin, end in batch.segments:
            held.append(keys[:, begin:end], values[:, begin:end])
            for start, stop in _blocks(begin, end):
                feeds = _attend_feeds(queries[:, start:stop], held, batch.positions[start:stop])
                attended[start:stop] = self._graph("attend", layer, feeds)["attended"]
            held.truncate(sequence)
        return attended

    def _await_dense(self, role: GraphRole, layer: int | None = None) -> None:
        """Wait for dense weights that are still being read; those of `qkv` and `out` come together."""
        if not self._dense.is_there(role, layer or 0):
            with self.recorder.during("wait", layer):
                self._dense.await_(role, layer or 0)

    def _route(self, rows: _Rows, layer: int) -> None:
        """Choose experts, and leave unread what nobody chose."""
        block = self.model.expert_block(layer)
        with self.recorder.during("route", layer, tokens=len(rows.x)):
            try:
                expert_ids, weights = route(rows.scores, block.router)
            except TrapError as error:
                raise TrapError(error.message, path=f"layer {layer}") from None
            rows.routed = by_expert(expert_ids, weights, block.experts)
            self.pager.route(layer, np.flatnonzero(rows.routed.counts).tolist())
            rows.total = np.zeros_like(rows.normed)
            rows.ready = self._backend.expert_rows(rows.normed)
        if rows.on_route is not None:
            rows.on_route(layer, expert_ids, weights)

    def _add_experts(self, rows: _Rows, instruction: Instruction) -> None:
        """Add what the chosen experts of one group give to their rows."""
        _, layer, group, number = instruction
        bound, shape_class = self.pager.use(number), self._classes["expert"][layer]
        for expert in self.pager.wanted(layer, group):
            chosen, shares = rows.routed.tokens_of(expert)
            during = partial(self.recorder.during, layer=layer, group=group, expert=expert, tokens=len(chosen))
            with during("expand"):
                inputs = self._experts.bind(layer, self.pager.record(bound, expert))
            self._backend.add_expert(shape_class, rows.ready, chosen, shares, inputs, rows.total, during)

    @contextmanager
    def _in_banks(self, program: Program) -> Iterator[None]:
        """A program's time in the arena: when it fails, nothing is being read any more and every bank is free."""
        self.pager.divide(program.bank_count, program.group_size)
        self.pager.begin(resident=program.policy == Policy.RESIDENT and program.phase == Phase.PREFILL)
        try:
            yield
        except BaseException:
            self.pager.settle()
            raise

    def _graph(self, role: GraphRole, layer: int, feeds: dict[str, Array]) -> dict[str, Array]:
        return self._backend.run(role, self._classes[role][layer], feeds)

    def _dense_graph(self, role: GraphRole, layer: int, feeds: dict[str, Array]) -> dict[str, Array]:
        return self._graph(role, layer, feeds | self._dense.inputs(role, layer))

    def _key_values(self, layer: int) -> KeyValues:
        return KeyValues(self.model.attention(layer), self.model.context_length)


_LAYER_ROLES: Final[tuple[GraphRole, ...]] = ("qkv", "attend", "out", "expert")


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges of `ROW_BLOCK`, the last one shorter."""
    for start in range(begin, end, ROW_BLOCK):
        yield start, min(start + ROW_BLOCK, end)


def _attend_feeds(queries: Floats, held: KeyValues, positions: npt.NDArray[np.int64]) -> dict[str, Array]:
    """Inputs of the graph `attend` for a block of consecutive rows of one sequence.

    A single row takes all the room there is, masked, since that needs no copy; a block takes what its last row sees.
    """
    keys, values = held.whole() if len(positions) == 1 else held.first(int(positions[-1]) + 1)
    allowed = np.arange(keys.shape[1]) <= positions[:, None]
    mask = np.where(allowed, np.float32(0), _FORBIDDEN)
    return {"queries": np.ascontiguousarray(queries), "keys": keys, "values": values, "mask": mask}
