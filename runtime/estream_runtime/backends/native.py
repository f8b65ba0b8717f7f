"""The native backend: the compiled kernel, which takes matrices as they are stored. FORMAT.md section 10, annex A.

It computes what the graphs of dynamic-int8 activations mean, and attention, without them. Graphs of other activations
are left to the portable backend, which is made when the first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from estream_runtime.backends.protocol import Array, Backend, During, GraphKey, MatrixForm
from estream_runtime.native.library import (
    Kernel,
    Norm,
    QuantisedRows,
    RowOut,
    RowProducts,
    StoredExpert,
    StoredMatrix,
)
from estream_spec.manifest import GraphRole
from estream_spec.model import Attention, Latent, ModelDescription
from estream_spec.weights import Floats

T = TypeVar("T")

_ROWS: Final = frozenset({"x", "cos", "sin", "attended", "residual", "normed"})
"""Inputs that are no weights."""


class Rows:
    """Token rows f32 `[T, K]`, quantised once for all matrices of a kind that they meet."""

    def __init__(self, kernel: Kernel, x: Floats):
        self._kernel, self.x = kernel, x
        self._quantised: dict[bool, QuantisedRows] = {}

    def quantised(self, packed: bool) -> QuantisedRows:
        """See `Kernel.quantise`."""
        if packed not in self._quantised:
            self._quantised[packed] = self._kernel.quantise(self.x, packed)
        return self._quantised[packed]

    def product(self, matrix: StoredMatrix) -> Floats:
        """See `Kernel.product`."""
        return self._kernel.product(self.quantised(bool(matrix.group)), matrix)


class NativeBackend:
    """Computes with the compiled kernel.

    Args:
        model: what to compute.
        graphs: ONNX models by name; those that the kernel serves are not looked at.
        threads: threads that compute.

    Raises:
        LinkError: the kernel was not compiled or does not load, or memory is wanting.
    """

    name: ClassVar[str] = "native"
    tile_rows = 0
    padded_rows = 0
    most_tokens: int | None = None

    def __init__(self, model: ModelDescription, graphs: Mapping[GraphKey, bytes], threads: int):
        self._model, self._graphs, self._threads = model, graphs, threads
        self._kernel = Kernel(threads)
        self._served: dict[tuple[GraphRole, int], bool] = {}
        self._made: dict[tuple[int, ...], Any] = {}

    @property
    def detail(self) -> str:
        """The kernel's path."""
        return self._kernel.path

    def weights_of(self, role: GraphRole, shape_class: int) -> MatrixForm:
        """Matrices as they are stored, where the kernel serves the role."""
        if role == "attend":
            return "f32"
        return "stored" if self._serves(role, shape_class) else self._portable.weights_of(role, shape_class)

    def run(self, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Computes what a graph would, see `Backend.run`."""
        if role == "attend":
            return self._attend(self._model.attentions[shape_class], feeds)
        if not self._serves(role, shape_class):
            return self._portable.run(role, shape_class, feeds)
        match role:
            case "qkv":
                return self._qkv(self._model.attentions[shape_class], feeds)
            case "convolve":
                entry, entry_gate, exit_gate = self._entering(
                    feeds, "attention_norm", ("entry", "entry_gate", "exit_gate")
                )
                return {"entered": entry * entry_gate, "exit": exit_gate}
            case "out":
                return self._out(feeds)
            case "expert":
                everything = np.ones(len(feeds["normed"]), np.float32)
                limit = self._model.expert_blocks[shape_class].limit
                return {"y": self._feed_forward(feeds["normed"], everything, StoredExpert.of(feeds), limit)}
            case "dense":
                block = self._kept(feeds, lambda: StoredExpert.of(feeds, ("dense_gate", "dense_up", "dense_down")))
                return {"y": self._feed_forward(feeds["normed"], self._shares(feeds), block, None)}
            case "head":
                [logits] = self._entering(feeds, "final_norm", ("head",))
                return {"logits": logits}

    def expert_rows(self, normed: Floats) -> Rows:
        """See `Backend.expert_rows`."""
        return Rows(self._kernel, normed)

    def add_expert(
        self,
        shape_class: int,
        rows: Rows,
        chosen: npt.NDArray[np.int64],
        shares: Floats,
        weights: Mapping[str, Array],
        total: Floats,
        during: During,
    ) -> None:
        """See `Backend.add_expert`."""
        if not self._serves("expert", shape_class):
            self._portable.add_expert(shape_class, rows.x, chosen, shares, weights, total, during)
            return
        expert = StoredExpert.of(weights)
        with during("products"):
            self._add(rows, chosen, shares, expert, self._model.expert_blocks[shape_class].limit, total)

    def bind_expert(self, shape_class: int, weights: Callable[[], Mapping[str, Array]]) -> Any:
        """See `Backend.bind_expert`."""
        if not self._serves("expert", shape_class):
            return self._portable.bind_expert(shape_class, weights)
        return StoredExpert.of(weights())

    def expert_outputs(
        self, shape_class: int, rows: Rows, shares: Floats, experts: Sequence[Any], out: Floats, during: During
    ) -> None:
        """See `Backend.expert_outputs`."""
        if not self._serves("expert", shape_class):
            self._portable.expert_outputs(shape_class, rows.x, shares, experts, out, during)
            return
        limit = self._model.expert_blocks[shape_class].limit
        with during("products"):
            self._kernel.experts(rows.x, experts, shares, limit, out)

    def close(self) -> None:
        """Ends the kernel's threads, and the portable backend if there is one."""
        self._kernel.close()
        self._made.clear()
        portable = self.__dict__.get("_portable")
        if portable is not None:
            portable.close()

    def _add(
        self,
        rows: Rows,
        chosen: npt.NDArray[np.int64],
        shares: Floats,
        expert: StoredExpert,
        limit: float | None,
        total: Floats,
    ) -> None:
        for_gate, for_up = map(rows.quantised, expert.packed)
        self._kernel.add_expert(for_gate, for_up, chosen, shares, expert, limit, total)

    def _feed_forward(self, normed: Floats, shares: Floats, expert: StoredExpert, limit: float | None) -> Floats:
        """What gate, up and down make of all rows, times their shares."""
        if len(normed) == 1:
            y = np.empty_like(normed)
            self._kernel.experts(normed, [expert], shares, limit, y)
            return y
        total = np.zeros_like(normed)
        self._add(self.expert_rows(normed), np.arange(len(normed)), shares, expert, limit, total)
        return total

    def _shares(self, feeds: Mapping[str, Array]) -> Floats:
        """What a dense block's result counts for each row."""
        normed: Floats = feeds["normed"]
        if "share" not in feeds:
            return np.ones(len(normed), np.float32)
        with np.errstate(over="ignore"):  # 1 / inf is 0, which is right
            scores = self._kernel.mix(normed, feeds["share"][:, None])[:, 0]
            return np.float32(1) / (np.float32(1) + np.exp(-scores))

    def _norm(self, x: Floats, feeds: Mapping[str, Array], name: str) -> Floats:
        """The model's norm over the residual stream; a layer norm is one that has a bias."""
        return self._kernel.norm(x, feeds[name], self._model.norm_epsilon, feeds.get(f"{name}.bias"))

    def _normed(self, x: Floats, feeds: Mapping[str, Array], name: str) -> Rows:
        return Rows(self._kernel, self._norm(x, feeds, name))

    def _kept(self, weights: Mapping[str, Array], make: Callable[[], T]) -> T:
        """What is made of weights for one row, where looking at them takes longer than computing.

        It is made once for the same arrays, which it holds, so that no other arrays can be taken for them.
        """
        key = tuple(id(each) for name, each in weights.items() if name not in _ROWS)
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def _entering(self, feeds: Mapping[str, Array], norm: str, names: Sequence[str]) -> list[Floats]:
        """Products of `x`, normed, with matrices."""
        x: Floats = feeds["x"]
        if len(x) > 1:
            rows = self._normed(x, feeds, norm)
            return [rows.product(StoredMatrix.of(name, feeds)) for name in names]

        def make() -> RowProducts:
            before = Norm(feeds[norm], self._model.norm_epsilon, feeds.get(f"{norm}.bias"))
            return RowProducts([StoredMatrix.of(name, feeds) for name in names], x.shape[1], before)

        return self._kernel.row_products(self._kept(feeds, make), x)

    def _qkv(self, attention: Attention, feeds: Mapping[str, Array]) -> dict[str, Array]:
        tables = feeds["cos"], feeds["sin"]
        if attention.latent is not None:
            return self._latent(attention, attention.latent, tables, feeds)
        kernel, epsilon = self._kernel, self._model.norm_epsilon
        queries, keys, values = self._entering(feeds, "attention_norm", ("q", "k", "v"))
        if attention.qk_norm == "full":
            queries = kernel.norm(queries, feeds["q_norm"], epsilon)
            keys = kernel.norm(keys, feeds["k_norm"], epsilon)
        if attention.clip_qkv is not None:
            for each in (queries, keys, values):
                np.clip(each, -attention.clip_qkv, attention.clip_qkv, out=each)
        if attention.qk_norm == "head":  # rows of one head each
            by_head = -1, attention.head_dim
            queries = kernel.norm(queries.reshape(by_head), feeds["q_norm"], epsilon).reshape(queries.shape)
            keys = kernel.norm(keys.reshape(by_head), feeds["k_norm"], epsilon).reshape(keys.shape)
        return {
            "queries": kernel.heads_first(queries, attention.heads, tables),
            "keys": kernel.heads_first(keys, attention.key_value_heads, tables),
            "values": kernel.heads_first(values, attention.key_value_heads),
        }

    def _latent(
        self,
        attention: Attention,
        latent: Latent,
        tables: tuple[Floats, Floats],
        feeds: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Queries, keys and values by way of narrow rows."""
        kernel, heads, rotated = self._kernel, attention.heads, attention.rotated
        rows = self._normed(feeds["x"], feeds, "attention_norm")

        def product(rows: Rows, name: str) -> Floats:
            return rows.product(StoredMatrix.of(name, feeds))

        def narrow(name: str) -> Rows:
            return Rows(kernel, kernel.norm(product(rows, name), feeds[f"{name}_norm"], latent.norm_epsilon))

        queries = product(rows if latent.query_rank is None else narrow("query_latent"), "q")
        shared = kernel.heads_first(product(rows, "k_rotated"), 1, tables)
        made = narrow("latent")
        keys = np.empty((heads, len(rows.x), attention.head_dim), np.float32)
        keys[..., :rotated] = shared  # the same for every head
        keys[..., rotated:] = kernel.heads_first(product(made, "k"), heads)
        return {
            "queries": kernel.heads_first(queries, heads, tables),
            "keys": keys,
            "values": kernel.heads_first(product(made, "v"), heads),
        }

    def _attend(self, attention: Attention, feeds: Mapping[str, Array]) -> dict[str, Array]:
        queries, keys, values, mask = (feeds[name] for name in ("queries", "keys", "values", "mask"))
        scale, sinks = attention.score_scale, feeds.get("sinks")
        return {"attended": self._kernel.attend(queries, keys, values, mask, scale, sinks)}

    def _out(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        attended: Floats = feeds["attended"]
        if len(attended) == 1:
            return self._row_out(attended, feeds)
        x = Rows(self._kernel, attended).product(StoredMatrix.of("o", feeds))
        x += feeds["residual"]
        made = {"x": x, "normed": self._norm(x, feeds, "expert_norm")}
        if "router" in feeds:
            made["scores"] = self._kernel.mix(made["normed"], feeds["router"])
        if "router.bias" in feeds:
            made["scores"] += feeds["router.bias"]
        return made

    def _row_out(self, attended: Floats, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The same for one row."""

        def make() -> RowOut:
            after = Norm(feeds["expert_norm"], self._model.norm_epsilon, feeds.get("expert_norm.bias"))
            router = feeds.get("router"), feeds.get("router.bias")
            return RowOut(StoredMatrix.of("o", feeds), attended.shape[1], after, *router)

        x, normed, scores = self._kernel.row_out(self._kept(feeds, make), attended, feeds["residual"])
        return {"x": x, "normed": normed, **({"scores": scores} if "router" in feeds else {})}

    def _serves(self, role: GraphRole, shape_class: int) -> bool:
        """Whether the package has quantised activations for a role: then it has graphs of both signs of weights."""
        key = role, shape_class
        if key not in self._served:
            self._served[key] = all(GraphKey(*key, kind) in self._graphs for kind in ("int8", "uint8"))
        return self._served[key]

    @cached_property
    def _portable(self) -> Backend:
        # Imported when needed: most packages need it never.
        from estream_runtime.backends.portable import PortableBackend

        return PortableBackend(self._model, self._graphs, self._threads)
