"""Holds a graph to its interface: before it first runs, and after each run. FORMAT.md section 10.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np

from estream_runtime.backends.protocol import Array, GraphKey
from estream_spec.errors import InvalidError, TrapError
from estream_spec.graph_interface import Interface, Value

Found = Sequence[tuple[str, str, tuple[int | str | None, ...]]]
"""Name, element type and shape of the inputs or outputs of a graph, in order; None for a dimension without a name."""


def check_interface(key: GraphKey, expected: Interface, inputs: Found, outputs: Found) -> None:
    """Compare what a graph takes and gives with what it must.

    Args:
        key: the graph.
        expected: its interface.
        inputs: its inputs.
        outputs: its outputs.

    Raises:
        InvalidError: they differ, with the first difference.
    """
    _check_values(key, "input", expected.inputs, inputs)
    _check_values(key, "output", expected.outputs, outputs)


def check_outputs(key: GraphKey, expected: Interface, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Check what a graph gave: f32 and of the right shapes, as many rows as went in.

    Args:
        key: the graph.
        expected: its interface.
        feeds: what it was given.
        outputs: what it gave, by name.

    Raises:
        TrapError: an output is of another type or shape.
    """
    first = expected.inputs[0]  # in every role a dimension of it is `T`, the only one that outputs leave open
    rows = feeds[first.name].shape[first.shape.index("T")]
    for value in expected.outputs:
        output, shape = outputs[value.name], tuple(rows if size == "T" else size for size in value.shape)
        if output.shape != shape or output.dtype != np.float32:
            found = f"{output.dtype} {list(output.shape)}"
            raise TrapError(f"output {value.name!r} is {found}, expected float32 {list(shape)}", path=str(key))


def _check_values(key: GraphKey, what: str, expected: Sequence[Value], found: Found) -> None:
    wanted: Found = [(value.name, value.dtype, value.shape) for value in expected]
    for number, (each, other) in enumerate(zip_longest(found, wanted)):
        if each != other:
            message = f"{what} {number} is {_spelled(each)}, expected {_spelled(other)}"
            raise InvalidError(message, path=str(key), rule="EMOE-GRA-006")


def _spelled(value: tuple[str, str, tuple[int | str | None, ...]] | None) -> str:
    if value is None:
        return "absent"
    name, dtype, shape = value
    return f"{name!r}, {dtype} [{', '.join('?' if size is None else str(size) for size in shape)}]"
