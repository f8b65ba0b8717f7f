"""What the layout of each record must be: FORMAT.md section 7, and EMOE-GRA-005 of section 10.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from second_reader import limits
from second_reader.model_rules import ALL_F32, ELEMENT_BYTES, GraphSets, out_class, out_classes
from second_reader.roles import Matrix, weights_of
from second_reader.rules import require
from second_reader.source import round_up

TENSOR_ALIGNMENT: Final = 128
GROUPS: Final = {"w4g32": 32, "w4g64": 64}

Part = tuple[str, str, list[int]]
"""Name, dtype and shape of a stored tensor."""
Vector = tuple[str, list[int]]
"""Name and shape."""


def parts(matrix: Matrix, encoding: str) -> list[Part]:
    """What a matrix is stored as, in order."""
    name, rows, columns = matrix
    if encoding == "f32":
        return [(name, "f32", [rows, columns])]
    # The embedding is read row by row and has a scale for each row.
    scale: Part = (f"{name}.scale", "f32", [rows if name == "embedding" else columns])
    if encoding == "w8":
        return [(name, "i8", [rows, columns]), scale]
    group = GROUPS[encoding]
    padded = round_up(rows, group)
    return [
        (f"{name}.nibbles", "u8", [padded // 2, columns]),
        (f"{name}.multipliers", "i8", [padded // group, columns]),
        scale,
    ]


class Layouts:
    """The layouts of a package beside the model and the graphs that they serve."""

    def __init__(self, manifest: dict[str, Any], graphs: GraphSets) -> None:
        self.model: Final[dict[str, Any]] = manifest["model"]
        self.layouts: Final[list[dict[str, Any]]] = manifest["layouts"]
        self.graphs: Final = graphs
        self.out_classes: Final = out_classes(self.model)

    def check(self, dense: Sequence[int], experts: Sequence[int]) -> None:
        """EMOE-LAY-003, then range by range EMOE-LAY-004, EMOE-GRA-005 and EMOE-LAY-005.

        Args:
            dense: the layout of each range of DENSE_TABLE.
            experts: likewise of EXPERT_TABLE.
        """
        for layout in self.layouts:
            for matrix in layout["matrices"]:
                is_free = matrix["encoding"] == "f32" or matrix["name"] == "embedding"
                require(is_free or matrix["rows"] <= limits.MAX_INTEGER_ROWS, "LAY-003")
        self._check_embedding(dense[0])
        for layer, index in zip(self.model["layers"], dense[1:-1], strict=True):
            self._check_layer(layer, index)
        self._check_final(dense[-1], dense[0])
        for layer, index in zip(self.model["layers"], experts, strict=True):
            if layer["experts"] is not None:
                self._check_expert(layer["experts"], index)

    def _encoding(self, index: int, name: str) -> str:
        encodings: dict[str, str] = {matrix["name"]: matrix["encoding"] for matrix in self.layouts[index]["matrices"]}
        return encodings.get(name, "f32")

    def _check_embedding(self, index: int) -> None:
        require(self._encoding(index, "embedding") in ("f32", "w8"), "LAY-004")
        self._check_layout(index, [], [("embedding", self.model["vocabulary"], self.model["hidden"])])

    def _check_layer(self, layer: dict[str, Any], index: int) -> None:
        roles = {
            "qkv": layer["attention"],
            "attend": layer["attention"],
            "convolve": layer["convolution"],
            "out": self.out_classes.index(out_class(layer)),
            "dense": layer["dense"],
        }
        vectors: list[Vector] = []
        matrices: list[Matrix] = []
        for role, shape_class in roles.items():
            if shape_class is not None:
                own = weights_of(role, self.model, shape_class)
                if own.matrices:
                    self._check_graph(role, shape_class, [self._encoding(index, name) for name, _, _ in own.matrices])
                vectors += [(name, [length]) for name, length in own.vectors]
                matrices += own.matrices
        if layer["convolution"] is not None:
            taps = self.model["convolutions"][layer["convolution"]]["taps"]
            vectors.append(("taps", [taps, self.model["hidden"]]))
        if layer["experts"] is not None:
            block = self.model["expert_blocks"][layer["experts"]]
            if block["router"]["selection_bias"]:
                vectors.append(("selection_bias", [block["experts"]]))
            matrices.insert(0, ("router", self.model["hidden"], block["experts"]))
            require(self._encoding(index, "router") == "f32", "LAY-005")
        self._check_layout(index, vectors, matrices)

    def _check_final(self, index: int, embedding: int) -> None:
        is_tied = self.model["tied_head"]
        encoding = self._encoding(embedding, "embedding") if is_tied else self._encoding(index, "head")
        self._check_graph("head", 0, [encoding])
        vectors, matrices = weights_of("head", self.model, 0)
        self._check_layout(index, [(name, [length]) for name, length in vectors], [] if is_tied else matrices)

    def _check_expert(self, shape_class: int, index: int) -> None:
        vectors, matrices = weights_of("expert", self.model, shape_class)
        self._check_graph("expert", shape_class, [self._encoding(index, name) for name, _, _ in matrices])
        self._check_layout(index, [(name, [length]) for name, length in vectors], matrices)

    def _check_graph(self, role: str, shape_class: int, encodings: Sequence[str]) -> None:
        """EMOE-GRA-005 for one graph in one layer."""
        is_f32 = self.graphs[role, shape_class] == ALL_F32
        require(all((encoding == "f32") == is_f32 for encoding in encodings), "GRA-005")

    def _check_layout(self, index: int, vectors: Sequence[Vector], matrices: Sequence[Matrix]) -> None:
        """EMOE-LAY-005."""
        tensors: list[Part] = [(name, "f32", shape) for name, shape in vectors]
        expected_matrices = []
        for matrix in matrices:
            name, rows, columns = matrix
            encoding = self._encoding(index, name)
            expected_matrices.append({"name": name, "encoding": encoding, "rows": rows, "columns": columns})
            tensors += parts(matrix, encoding)
        require(self.layouts[index]["matrices"] == expected_matrices, "LAY-005")
        require(self.layouts[index]["tensors"] == _place(tensors), "LAY-005")


def _place(tensors: Sequence[Part]) -> list[dict[str, Any]]:
    """The tensors one behind the other, as the manifest describes them."""
    placed = []
    end = 0
    for name, dtype, shape in tensors:
        offset = round_up(end, TENSOR_ALIGNMENT)
        placed.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset})
        elements = shape[0] * shape[1] if len(shape) == 2 else shape[0]
        end = offset + elements * ELEMENT_BYTES[dtype]
    return placed
