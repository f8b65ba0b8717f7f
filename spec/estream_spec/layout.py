"""Where tensors stand inside a record. FORMAT.md sections 6 and 7.

The functions for each kind of record take the encoding of each matrix by name; a name left out means `f32`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from estream_spec.constants import TENSOR_ALIGNMENT
from estream_spec.graph_interface import MatrixInput, Value, layer_classes, role_shape
from estream_spec.manifest import Matrix, RecordLayout, Tensor
from estream_spec.model import ModelDescription
from estream_spec.weights import Encoding, Part, embedding_parts, matrix_parts


def round_up(length: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `length`."""
    return -(-length // alignment) * alignment


def matrix_tensors(matrix: Matrix) -> tuple[Part, ...]:
    """The parts a matrix is stored as; the embedding's scale goes by row, every other one's by column."""
    parts = embedding_parts if matrix.name == "embedding" else matrix_parts
    return parts(matrix.name, matrix.encoding, matrix.rows, matrix.columns)


def plan_record(matrices: Sequence[Matrix], vectors: Sequence[Part] = ()) -> RecordLayout:
    """Lay out a record: vectors first, then each matrix's parts, every tensor at a multiple of 128 bytes."""
    parts = [*vectors, *(part for matrix in matrices for part in matrix_tensors(matrix))]
    starts = accumulate((round_up(part.length, TENSOR_ALIGNMENT) for part in parts), initial=0)
    tensors = tuple(
        Tensor(name=part.name, dtype=part.dtype, shape=part.shape, offset=start)
        for part, start in zip(parts, starts, strict=False)
    )
    last = tensors[-1]
    return RecordLayout(payload_length=last.offset + last.length, matrices=tuple(matrices), tensors=tensors)


def expert_layout(model: ModelDescription, shape_class: int, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The record of one expert: its biases, and gate, up and down."""
    shape = role_shape("expert", model, shape_class)
    return plan_record(_matrices(shape.matrices, encodings), _vectors(shape.vectors))


def layer_layout(model: ModelDescription, layer: int, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The dense record of one layer: what its graphs take, experts left out, and what is computed without any."""
    shapes = [
        role_shape(role, model, shape_class)
        for role, shape_class in layer_classes(model, layer).items()
        if role != "expert"
    ]
    vectors = [vector for shape in shapes for vector in shape.vectors]
    described = model.layers[layer]
    if described.convolution is not None:
        taps = model.convolutions[described.convolution].taps
        vectors.append(Value("taps", "f32", (taps, model.hidden)))
    routers = []
    if described.experts is not None:
        block = model.expert_blocks[described.experts]
        routers.append(Matrix(name="router", encoding="f32", rows=model.hidden, columns=block.experts))
        if block.router.selection_bias:
            vectors.append(Value("selection_bias", "f32", (block.experts,)))
    matrices = _matrices([matrix for shape in shapes for matrix in shape.matrices], encodings)
    return plan_record((*routers, *matrices), _vectors(each for each in vectors if each.name != "router"))


def embedding_layout(model: ModelDescription, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The dense record of the embedding, `[vocabulary, hidden]`."""
    return plan_record(_matrices([MatrixInput("embedding", model.vocabulary, model.hidden)], encodings))


def final_layout(model: ModelDescription, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The last dense record: the final norm, and the head `[hidden, vocabulary]` unless it is tied."""
    shape = role_shape("head", model, 0)
    return plan_record(_matrices(() if model.tied_head else shape.matrices, encodings), _vectors(shape.vectors))


def _matrices(inputs: Iterable[MatrixInput], encodings: Mapping[str, Encoding]) -> tuple[Matrix, ...]:
    return tuple(
        Matrix(name=name, encoding=encodings.get(name, "f32"), rows=rows, columns=columns)
        for name, rows, columns in inputs
    )


def _vectors(values: Iterable[Value]) -> list[Part]:
    return [Part(name=each.name, dtype="f32", shape=tuple(map(int, each.shape))) for each in values]
