"""The native backend: the compiled kernel, which takes matrices as they are stored. FORMAT.md section 10, annex A.

It computes what the graphs of dynamic-int8 activations mean, and attention, without them. Graphs of other activations
are left to the portable backend, which is made when the first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from estream_runtime.backends.protocol import Array, Backend, During, GraphKey, MatrixForm
from estream_runtime.native.library import Kernel, QuantisedRows, StoredExpert, StoredMatrix
from estream_spec.graph_interface import role_shape
from estream_spec.manifest import GraphRole
from estream_spec.model import Attention, Latent, ModelDescription
from estream_spec.weights import Floats


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
        names = role_shape(role, self._model, shape_class).matrix_names
        matrices = {name: StoredMatrix.of(name, feeds) for name in names}
        match role:
            case "qkv":
                return self._qkv(self._model.attentions[shape_class], feeds, matrices)
            case "convolve":
                rows = self._normed(feeds["x"], feeds, "attention_norm")
                entry, entry_gate, exit_gate = map(rows.product, matrices.values())
                return {"entered": entry * entry_gate, "exit": exit_gate}
            case "out":
                return self._out(feeds, matrices["o"])
            case "expert":
                everything = np.ones(len(feeds["normed"]), np.float32)
                limit = self._model.expert_blocks[shape_class].limit
                return {"y": self._feed_forward(feeds["normed"], everything, StoredExpert.of(feeds), limit)}
            case "dense":
                block = StoredExpert.of(feeds, names)
                return {"y": self._feed_forward(feeds["normed"], self._shares(feeds), block, None)}
            case "head":
                return {"logits": self._normed(feeds["x"], feeds, "final_norm").product(matrices["head"])}

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

    def _qkv(
        self, attention: Attention, feeds: Mapping[str, Array], matrices: Mapping[str, StoredMatrix]
    ) -> dict[str, Array]:
        rows, tables = self._normed(feeds["x"], feeds, "attention_norm"), (feeds["cos"], feeds["sin"])
        if attention.latent is not None:
            return self._latent(attention, attention.latent, rows, tables, feeds, matrices)
        kernel, epsilon = self._kernel, self._model.norm_epsilon
        queries, keys, values = (rows.product(matrices[name]) for name in ("q", "k", "v"))
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
        rows: Rows,
        tables: tuple[Floats, Floats],
        feeds: Mapping[str, Array],
        matrices: Mapping[str, StoredMatrix],
    ) -> dict[str, Array]:
        """Queries, keys and values by way of narrow rows."""
        kernel, heads, rotated = self._kernel, attention.heads, attention.rotated

        def narrow(name: str) -> Rows:
            made = rows.product(matrices[name])
            return Rows(kernel, kernel.norm(made, feeds[f"{name}_norm"], latent.norm_epsilon))

        queries = (rows if latent.query_rank is None else narrow("query_latent")).product(matrices["q"])
        shared = kernel.heads_first(rows.product(matrices["k_rotated"]), 1, tables)
        made = narrow("latent")
        keys = np.empty((heads, len(rows.x), attention.head_dim), np.float32)
        keys[..., :rotated] = shared  # the same for every head
        keys[..., rotated:] = kernel.heads_first(made.product(matrices["k"]), heads)
        return {
            "queries": kernel.heads_first(queries, heads, tables),
            "keys": keys,
            "values": kernel.heads_first(made.product(matrices["v"]), heads),
        }

    def _attend(self, attention: Attention, feeds: Mapping[str, Array]) -> dict[str, Array]:
        queries, keys, values, mask = (feeds[name] for name in ("queries", "keys", "values", "mask"))
        scale, sinks = attention.score_scale, feeds.get("sinks")
        return {"attended": self._kernel.attend(queries, keys, values, mask, scale, sinks)}

    def _out(self, feeds: Mapping[str, Array], matrix: StoredMatrix) -> dict[str, Array]:
        x = Rows(self._kernel, feeds["attended"]).product(matrix)
        x += feeds["residual"]
        made = {"x": x, "normed": self._norm(x, feeds, "expert_norm")}
        if "router" in feeds:
            made["scores"] = self._kernel.mix(made["normed"], feeds["router"])
        if "router.bias" in feeds:
            made["scores"] += feeds["router.bias"]
        return made

    def _serves(self, role: GraphRole, shape_class: int) -> bool:
        """Whether the package has quantised activations for a role: then it has graphs of both signs of weights."""
        return all(GraphKey(role, shape_class, kind) in self._graphs for kind in ("int8", "uint8"))

    @cached_property
    def _portable(self) -> Backend:
        # Imported when needed: most packages need it never.
        from estream_runtime.backends.portable import PortableBackend

        return PortableBackend(self._model, self._graphs, self._threads)
