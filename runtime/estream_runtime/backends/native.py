"""The native backend: the compiled kernel, which takes matrices as they are stored. FORMAT.md section 10, annex A.

It computes what the graphs of dynamic-int8 activations mean, and attention, without them. Graphs of other activations
are left to the portable backend, which is made when the first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from estream_runtime.backends.protocol import Array, Backend, During, Floats, GraphKey, MatrixForm
from estream_runtime.native.library import Kernel, QuantisedRows, StoredMatrix
from estream_spec.graph_interface import output_classes, role_shape
from estream_spec.manifest import GraphRole
from estream_spec.model import ModelDescription


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
        if role == "attend" and self._attends(shape_class):
            return {"attended": self._kernel.attend(*(feeds[name] for name in ("queries", "keys", "values", "mask")))}
        if role == "attend" or not self._serves(role, shape_class):
            return self._portable.run(role, shape_class, feeds)
        names = role_shape(role, self._model, shape_class).matrix_names
        matrices = [StoredMatrix.of(name, feeds) for name in names]
        match role:
            case "qkv":
                return self._qkv(shape_class, feeds, matrices)
            case "out":
                return self._out(feeds, *matrices)
            case "head":
                normed = self._kernel.norm(feeds["x"], feeds["final_norm"], self._model.norm_epsilon)
                return {"logits": Rows(self._kernel, normed).product(*matrices)}
            case "expert":
                total = np.zeros_like(feeds["normed"])
                rows = self.expert_rows(feeds["normed"])
                everyone = np.arange(len(total))
                self._add(rows, everyone, np.ones(len(total), np.float32), matrices, total)
                return {"y": total}
            case _:
                raise AssertionError(role)

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
        with during("products"):
            self._add(rows, chosen, shares, [StoredMatrix.of(name, weights) for name in ("gate", "up", "down")], total)

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
        matrices: list[StoredMatrix],
        total: Floats,
    ) -> None:
        gate, up, down = matrices
        for_gate, for_up = (rows.quantised(bool(each.group)) for each in (gate, up))
        self._kernel.add_expert(for_gate, for_up, chosen, shares, (gate, up, down), total)

    def _qkv(self, shape_class: int, feeds: Mapping[str, Array], matrices: list[StoredMatrix]) -> dict[str, Array]:
        attention, kernel, epsilon = self._model.attentions[shape_class], self._kernel, self._model.norm_epsilon
        rows = Rows(kernel, kernel.norm(feeds["x"], feeds["attention_norm"], epsilon))
        queries, keys, values = (rows.product(matrix) for matrix in matrices)
        if attention.qk_norm == "full":
            queries = kernel.norm(queries, feeds["q_norm"], epsilon)
            keys = kernel.norm(keys, feeds["k_norm"], epsilon)
        if attention.clip_qkv is not None:
            for each in (queries, keys, values):
                np.clip(each, -attention.clip_qkv, attention.clip_qkv, out=each)
        tables = feeds["cos"], feeds["sin"]
        return {
            "queries": kernel.heads_first(queries, attention.heads, tables),
            "keys": kernel.heads_first(keys, attention.key_value_heads, tables),
            "values": kernel.heads_first(values, attention.key_value_heads),
        }

    def _out(self, feeds: Mapping[str, Array], matrix: StoredMatrix) -> dict[str, Array]:
        x = Rows(self._kernel, feeds["attended"]).product(matrix)
        x += feeds["residual"]
        normed = self._kernel.norm(x, feeds["expert_norm"], self._model.norm_epsilon)
        return {"x": x, "normed": normed, "scores": self._kernel.mix(normed, feeds["router"])}

    def _attends(self, shape_class: int) -> bool:
        """Whether the kernel knows a kind of attention."""
        attention = self._model.attentions[shape_class]
        return not attention.sinks and attention.scale is None and attention.value_width == attention.head_dim

    def _serves(self, role: GraphRole, shape_class: int) -> bool:
        """Whether the package has quantised activations for a role: then it has graphs of both signs of weights."""
        return self._knows(role, shape_class) and all(
            GraphKey(role, shape_class, kind) in self._graphs for kind in ("int8", "uint8")
        )

    def _knows(self, role: GraphRole, shape_class: int) -> bool:
        """Whether the kernel computes what a role does in this model."""
        model = self._model
        match role:
            case "qkv":
                attention = model.attentions[shape_class]
                plain = attention.latent is None and not attention.bias and attention.qk_norm != "head"
                return model.norm == "rms" and plain and attention.rotated == attention.head_dim
            case "out":
                both = output_classes(model)[shape_class]
                if both.attention is None or both.experts is None or model.attentions[both.attention].out_bias:
                    return False
                return model.norm == "rms" and not model.expert_blocks[both.experts].router.bias
            case "expert":
                return not model.expert_blocks[shape_class].bias and model.expert_blocks[shape_class].limit is None
            case "head":
                return model.norm == "rms" and not model.head_bias
            case _:
                return False

    @cached_property
    def _portable(self) -> Backend:
        # Imported when needed: most packages need it never.
        from estream_runtime.backends.portable import PortableBackend

        return PortableBackend(self._model, self._graphs, self._threads)
