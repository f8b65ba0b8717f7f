"""What a graph inside a binary takes and gives. FORMAT.md section 10.3.

The graphs are those of `estream_spec.graph_interface` with two differences: every dimension is a number, and a matrix
comes as its stored parts, so that records are used where they lie. Names are unlike in all graphs of a binary and made
of letters, digits and underscores alone, since compilers want them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from estream_spec.errors import InvalidError
from estream_spec.graph_interface import Interface, Value, role_shape
from estream_spec.manifest import BinaryGraph, GraphRole
from estream_spec.model import ModelDescription
from estream_spec.weights import Encoding, matrix_parts

HIDDEN: Final = -30000.0
"""What the mask of `attend` has where a key is not seen: fp16 has it, and it and a score together as well."""
LARGEST: Final = 65504.0
"""The largest number of fp16. Accelerators differ in what they make of larger ones."""


def label(role: GraphRole, shape_class: int, tokens: int, keys: int = 0, encodings: Sequence[Encoding] = ()) -> str:
    """What a graph's inputs and outputs are named after, such as `expert_0_w4g32_w4g32_w4g32_64`.

    Args:
        role: what it is for.
        shape_class: which of the role's shape classes.
        tokens: its rows.
        keys: its keys; 0 for every role but `attend`.
        encodings: of the role's matrices, in the role's order.
    """
    parts = [role, str(shape_class), *encodings, str(tokens)]
    return "_".join([*parts, str(keys)] if keys else parts)


def label_of(graph: BinaryGraph) -> str:
    """The label of a graph that a manifest lists."""
    return label(graph.role, graph.shape_class, graph.tokens, graph.keys, graph.encodings)


def tensor_name(graph_label: str, name: str) -> str:
    """What a binary calls an input or output, such as `expert_0_f32_f32_f32_64_gate`.

    Args:
        graph_label: of its graph, see `label`.
        name: its name in the interface.
    """
    return f"{graph_label}_{name.replace('.', '_')}"


def fixed_interface(
    role: GraphRole,
    model: ModelDescription,
    shape_class: int,
    tokens: int,
    keys: int = 0,
    encodings: Sequence[Encoding] = (),
) -> Interface:
    """Inputs and outputs of one graph, by the names of section 10.1 and of the parts of section 7.1.

    Args:
        role: what the graph is for.
        model: the model it belongs to.
        shape_class: which of the role's shape classes.
        tokens: rows, in place of `T`.
        keys: keys, in place of `S`.
        encodings: how each of the role's matrices is stored, in the role's order.

    Raises:
        InvalidError: there is no such shape class, or another number of matrices.
    """
    shape = role_shape(role, model, shape_class)
    if len(encodings) != len(shape.matrices):
        found = f"{len(encodings)} encodings for role {role!r}, which has {len(shape.matrices)} matrices"
        raise InvalidError(found, path="binaries")
    sizes = {"T": tokens, "S": keys}

    def fixed(value: Value) -> Value:
        dimensions = (sizes[each] if isinstance(each, str) else each for each in value.shape)
        return Value(value.name, value.dtype, tuple(dimensions))

    parts = (
        Value(part.name, part.dtype, part.shape)
        for (name, rows, columns), encoding in zip(shape.matrices, encodings, strict=True)
        for part in matrix_parts(name, encoding, rows, columns)
    )
    return Interface(
        inputs=(*map(fixed, (*shape.inputs, *shape.vectors)), *parts), outputs=tuple(map(fixed, shape.outputs))
    )


def interface_of(graph: BinaryGraph, model: ModelDescription) -> Interface:
    """Inputs and outputs of a graph that a manifest lists, see `fixed_interface`."""
    return fixed_interface(graph.role, model, graph.shape_class, graph.tokens, graph.keys, graph.encodings)
