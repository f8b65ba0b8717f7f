"""Takes token rows through the layers of a model.

Layers are the outer loop and all rows of a batch go through a layer together, so each expert is read once however long
the prompt. Row blocks follow from the number of rows alone and experts are added in the order of their ids: results are
the same to the last bit however large the arena is and however experts are grouped in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_loader.arena import Bank
from estream_loader.dense import EmbeddingRows
from estream_loader.pager import Pager
from estream_runtime.backends import Array, Backend
from estream_runtime.batch import Batch
from estream_runtime.cache import KeyValues
from estream_runtime.rotary import rotary_tables
from estream_runtime.routing import by_expert, route
from estream_runtime.weights import DenseWeights, ExpertWeights
from estream_spec.errors import TrapError
from estream_spec.graph_interface import shape_class_of
from estream_spec.manifest import GraphRole
from estream_spec.model import ModelDescription

Floats = npt.NDArray[np.float32]
OnRoute = Callable[[int, npt.NDArray[np.int32], Floats], None]
"""Told of each routing decision: layer, expert ids `[T, k]` from the largest weight down, weights `[T, k]`."""

ROW_BLOCK: Final = 128
"""Rows that attend, or enter the head, together: bounds the memory of scores and logits."""
_FORBIDDEN: Final = np.finfo(np.float32).min


@dataclass(slots=True)
class Busy:
    """Where time went so far, in seconds."""

    computing: float = 0.0
    """Graphs and what prepares their inputs."""
    waiting: float = 0.0
    """Computing stood still until experts were in the arena."""


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
        self.busy = Busy()
        self._backend, self._embedding, self._dense, self._experts = backend, embedding, dense, experts
        layers = range(len(model.layers))
        self._classes = {role: [shape_class_of(role, model, layer) for layer in layers] for role in _LAYER_ROLES}

    def new_cache(self) -> list[KeyValues]:
        """Room for keys and values of every layer, empty."""
        return [self._key_values(layer) for layer in range(len(self.model.layers))]

    def run(self, batch: Batch, cache: Sequence[KeyValues] | None = None, on_route: OnRoute | None = None) -> Floats:
        """Take rows through all layers.

        Args:
            batch: the rows.
            cache: keys and values of the tokens before, extended by the batch's sequence; None where there are none
                before and none shall be kept.
            on_route: told of each routing decision.

        Returns:
            f32 `[T, hidden]`, what the final norm takes.

        Raises:
            TrapError: a value is not finite, or a graph failed.
            IntegrityError: an expert's checksum differs or its bytes are missing.
            LinkError: the device failed.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found in scores and logits
            return self._run(batch, cache, on_route)

    def _run(self, batch: Batch, cache: Sequence[KeyValues] | None, on_route: OnRoute | None) -> Floats:
        x = self._embedding.gather(batch.token_ids)
        tables = [rotary_tables(attention, batch.positions) for attention in self.model.attentions]
        for layer, described in enumerate(self.model.layers):
            held = self._key_values(layer) if cache is None else cache[layer]
            attended = self._attention(layer, x, batch, tables[described.attention], held)
            out = self._graph("out", layer, {"attended": attended, "residual": x, **self._dense.out[layer]})
            x = out["x"] + self._routed_experts(layer, out["normed"], out["scores"], on_route)
        return x

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
        for start, stop in _blocks(0, len(x)):
            with self._computing():
                outputs = self._backend.run("head", 0, {"x": x[start:stop], **self._dense.head})
            logits[start:stop] = outputs["logits"]
        if not np.isfinite(logits).all():
            raise TrapError("a logit is not finite", path="head")
        return logits

    def last_logits(self, x: Floats) -> Floats:
        """Logits of the last row, f32 `[vocabulary]`; see `logits`."""
        last: Floats = self.logits(x[-1:])[0]
        return last

    def _attention(self, layer: int, x: Floats, batch: Batch, tables: tuple[Floats, Floats], held: KeyValues) -> Floats:
        """Queries, keys and values of all rows; then each segment attends to what is held and to itself."""
        cos, sin = tables
        projected = self._graph("qkv", layer, {"x": x, "cos": cos, "sin": sin, **self._dense.qkv[layer]})
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

    def _routed_experts(self, layer: int, normed: Floats, scores: Floats, on_route: OnRoute | None) -> Floats:
        """What the chosen experts add to each row."""
        block = self.model.expert_block(layer)
        try:
            expert_ids, weights = route(scores, block.router)
        except TrapError as error:
            raise TrapError(error.message, path=f"layer {layer}") from None
        if on_route is not None:
            on_route(layer, expert_ids, weights)
        routed = by_expert(expert_ids, weights, block.experts)
        total = np.zeros_like(normed)
        for group, wanted in self.pager.groups(np.flatnonzero(routed.counts).tolist()):
            with self._in_arena(layer, group, wanted) as bank:
                for expert in wanted:
                    rows, shares = routed.tokens_of(expert)
                    with self._computing():
                        inputs = self._experts.bind(layer, self.pager.record(bank, expert))
                        total[rows] += shares[:, None] * self._expert(layer, {"normed": normed[rows], **inputs})
        return total

    def _expert(self, layer: int, feeds: dict[str, Array]) -> Floats:
        return self._backend.run("expert", self._classes["expert"][layer], feeds)["y"]

    @contextmanager
    def _in_arena(self, layer: int, group: int, experts: Sequence[int]) -> Iterator[Bank]:
        """A bank that holds the experts, given back whatever happens."""
        begun = time.perf_counter()
        bank = self.pager.acquire(layer, group, experts)
        self.busy.waiting += time.perf_counter() - begun
        try:
            yield bank
        finally:
            self.pager.release(bank)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.busy.computing += time.perf_counter() - begun

    def _graph(self, role: GraphRole, layer: int, feeds: dict[str, Array]) -> dict[str, Array]:
        with self._computing():
            return self._backend.run(role, self._classes[role][layer], feeds)

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
