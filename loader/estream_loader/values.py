"""Judging the values in a record, a block of rows at a time. FORMAT.md sections 7.1 and 7.3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from estream_loader.records import DTYPES, RecordPlace
from estream_loader.sections import check_zero
from estream_loader.source import read
from estream_spec.manifest import Matrix, Tensor
from estream_spec.rulebook import refusal
from estream_spec.weights import GROUP_SIZES, invalid_values

if TYPE_CHECKING:
    from estream_loader.package import Package

_BLOCK: Final = 1 << 22
"""Bytes of a large tensor looked at together."""


def check_values(package: Package, place: RecordPlace) -> None:
    """Prove that a record's numbers are legal and that the bytes between its tensors are zero.

    Raises:
        InvalidError: the first tensor with a value that is not.
    """
    tensors = {tensor.name: tensor for tensor in place.layout.tensors}
    end = 0
    for tensor in place.layout.tensors:
        gap = read(package.source, place.offset + end, tensor.offset - end)
        check_zero(gap, "EMOE-REC-004", "padding between tensors", place.path, place.offset + end)
        end = tensor.offset + tensor.length
    in_matrices = set[str]()
    for matrix in place.layout.matrices:
        own = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] == matrix.name}
        in_matrices |= own.keys()
        _check_matrix(package, place, matrix, own)
    for vector in place.layout.tensors:
        if vector.name not in in_matrices:
            _refuse(invalid_values("f32", {"": read_tensor(package, place, vector)}, 1), place, vector.name)


def _check_matrix(package: Package, place: RecordPlace, matrix: Matrix, tensors: dict[str, Tensor]) -> None:
    parts = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    weights = parts.pop("", None)
    # Any nibble is legal; only those that pad the last group are looked at.
    skipped = {"nibbles": parts["nibbles"].shape[0] - GROUP_SIZES[matrix.encoding] // 2} if weights is None else {}
    small = {part: read_tensor(package, place, tensor, skipped.get(part, 0)) for part, tensor in parts.items()}
    if weights is None:
        _refuse(invalid_values(matrix.encoding, small, matrix.rows), place, matrix.name)
        return
    for block in _blocks(package, place, weights):
        _refuse(invalid_values(matrix.encoding, {"": block, **small}, matrix.rows), place, matrix.name)


def _blocks(package: Package, place: RecordPlace, tensor: Tensor) -> Iterator[NDArray[Any]]:
    """A tensor in blocks of whole rows."""
    step = max(1, _BLOCK * tensor.shape[0] // tensor.length)
    for first in range(0, tensor.shape[0], step):
        yield read_tensor(package, place, tensor, first, step)


def read_tensor(
    package: Package, place: RecordPlace, tensor: Tensor, first: int = 0, count: int | None = None
) -> NDArray[Any]:
    """Some rows of a record's tensor, to the end where no count is given."""
    row = tensor.length // tensor.shape[0]
    rows = min(count or tensor.shape[0], tensor.shape[0] - first)
    data = read(package.source, place.offset + tensor.offset + first * row, rows * row)
    return np.frombuffer(data, DTYPES[tensor.dtype]).reshape(rows, *tensor.shape[1:])


def _refuse(fault: tuple[str, str] | None, place: RecordPlace, name: str) -> None:
    if fault is not None:
        raise refusal(*fault, path=f"{place.path}.{name}", offset=place.offset)
