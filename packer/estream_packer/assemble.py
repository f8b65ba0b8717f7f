"""Makes one record: reads its tensors, stores them in their encodings, and names the bytes that result.

A matrix goes through in blocks, so that memory is that of the record and of one block, however large the matrix is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from estream_loader.records import tensors
from estream_packer.checkpoint import Checkpoint
from estream_packer.families import TensorSource
from estream_packer.families.sources import BLOCK_WEIGHTS
from estream_packer.quantise import Parts, quantise_embedding, quantise_matrix
from estream_packer.writer import PackedRecord
from estream_spec.layout import matrix_tensors
from estream_spec.manifest import Matrix, RecordLayout
from estream_spec.weights import Encoding, Floats

WORKING_BYTES: Final = 32 * BLOCK_WEIGHTS * 4
"""About what making a record takes besides the record: a block as it is read, widened, transposed, and tried."""

Tensors = dict[str, npt.NDArray[Any]]


def assemble(
    checkpoint: Checkpoint,
    layout: RecordLayout,
    length: int,
    sources: Mapping[str, TensorSource],
    importance: Mapping[str, Floats],
) -> PackedRecord:
    """Make one record.

    Args:
        checkpoint: where the tensors are.
        layout: what the record holds.
        length: bytes of the record, padding included.
        sources: where each matrix and vector of the layout comes from, by name.
        importance: what a squared error counts in each input channel, by matrix, where that is known.

    Raises:
        PackError: a tensor cannot be read, or is not finite.
    """
    data = np.zeros(length, np.uint8)
    stored = tensors(layout, data.data)
    of_matrices = {part.name for matrix in layout.matrices for part in matrix_tensors(matrix)}
    for name, tensor in stored.items():
        if name not in of_matrices:
            tensor[...] = sources[name].read(checkpoint)
    for matrix in layout.matrices:
        _store(matrix, sources[matrix.name], checkpoint, stored, importance.get(matrix.name))
    return PackedRecord.seal(data.data, layout.payload_length)


def _store(
    matrix: Matrix, source: TensorSource, checkpoint: Checkpoint, stored: Tensors, importance: Floats | None
) -> None:
    """Store a matrix block by block: some columns at a time, whose scales are their own, or some rows of the embedding.

    How the checkpoint lays it out makes no difference to the bytes.
    """
    by_row = matrix.name == "embedding"
    assert (source.place.layout == "as-is") == by_row, source
    quantise: Callable[[Floats, Encoding], Parts] = partial(quantise_matrix, importance=importance)
    if by_row:
        quantise = quantise_embedding
    for block, weights in source.blocks(checkpoint, BLOCK_WEIGHTS):
        for part, values in quantise(weights, matrix.encoding).items():
            target = stored[f"{matrix.name}.{part}" if part else matrix.name]
            target[block if by_row else (..., block)] = values
