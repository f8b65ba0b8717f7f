"""Where tensors stand inside a record. FORMAT.md sections 6 and 7.

The functions for each kind of record take the encoding of each matrix by name; a name left out means `f32`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from estream_spec.constants import TENSOR_ALIGNMENT
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
    """The record of one expert: gate and up `[hidden, intermediate]`, down `[intermediate, hidden]`."""
    hidden, inner = model.hidden, model.expert_blocks[shape_class].intermediate
    shapes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    return plan_record(_matrices(shapes, encodings))


def layer_layout(model: ModelDescription, layer: int, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The dense record of one layer: norms, router, and the four attention projections."""
    attention, experts = model.attention(layer), model.expert_block(layer).experts
    queries, keys = attention.heads * attention.head_dim, attention.key_value_heads * attention.head_dim
    vectors = [_vector("attention_norm", model.hidden), _vector("expert_norm", model.hidden)]
    if attention.qk_norm == "full":
        vectors += [_vector("q_norm", queries), _vector("k_norm", keys)]
    router = Matrix(name="router", encoding="f32", rows=model.hidden, columns=experts)
    shapes = {
        "q": (model.hidden, queries),
        "k": (model.hidden, keys),
        "v": (model.hidden, keys),
        "o": (queries, model.hidden),
    }
    return plan_record((router, *_matrices(shapes, encodings)), vectors)


def embedding_layout(model: ModelDescription, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The dense record of the embedding, `[vocabulary, hidden]`."""
    return plan_record(_matrices({"embedding": (model.vocabulary, model.hidden)}, encodings))


def final_layout(model: ModelDescription, encodings: Mapping[str, Encoding]) -> RecordLayout:
    """The last dense record: the final norm, and the head `[hidden, vocabulary]` unless it is tied."""
    shapes = {} if model.tied_head else {"head": (model.hidden, model.vocabulary)}
    return plan_record(_matrices(shapes, encodings), [_vector("final_norm", model.hidden)])


def _matrices(shapes: dict[str, tuple[int, int]], encodings: Mapping[str, Encoding]) -> tuple[Matrix, ...]:
    return tuple(
        Matrix(name=name, encoding=encodings.get(name, "f32"), rows=rows, columns=columns)
        for name, (rows, columns) in shapes.items()
    )


def _vector(name: str, length: int) -> Part:
    return Part(name=name, dtype="f32", shape=(length,))
