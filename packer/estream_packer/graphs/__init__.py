"""Builds graphs, each once per shape class, with weights as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from estream_packer.graphs.builder import Builder
from estream_packer.graphs.half import HalfArithmetic
from estream_packer.graphs.portable import PortableArithmetic
from estream_packer.graphs.roles import compute
from estream_spec.binary_interface import fixed_interface, label, tensor_name
from estream_spec.errors import InvalidError
from estream_spec.graph_interface import COMBINATIONS, interface, role_shape
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import ModelDescription
from estream_spec.weights import Encoding


def build_graph(
    role: GraphRole, model: ModelDescription, shape_class: int, weights: GraphWeights, activations: Activations
) -> bytes:
    """Builds a portable graph.

    Args:
        role: what the graph is for.
        model: the model it belongs to.
        shape_class: which of the role's shape classes it serves, see `estream_spec.graph_interface.interface`.
        weights: what its matrix inputs hold.
        activations: how rows are multiplied with matrices.

    Returns:
        An ONNX model; equal arguments give equal bytes.

    Raises:
        InvalidError: there is no such shape class, or the weights do not go with the role or the activations.
    """
    if (activations, weights) not in COMBINATIONS:
        raise InvalidError(f"activations {activations!r} do not go with weights {weights!r}", path=f"graph {role}")
    graph = Builder(f"{role}.{shape_class}.{weights}.{activations}", interface(role, model, shape_class, weights))
    compute(graph, PortableArithmetic(graph, weights, activations), role, model, shape_class)
    return graph.finish()


def build_fixed_graph(
    role: GraphRole,
    model: ModelDescription,
    shape_class: int,
    tokens: int,
    keys: int = 0,
    encodings: Sequence[Encoding] = (),
) -> bytes:
    """Builds a graph for an accelerator that computes in fp16 and knows no symbolic dimension.

    Args:
        role: what the graph is for.
        model: the model it belongs to.
        shape_class: which of the role's shape classes it serves.
        tokens: its rows.
        keys: its keys, for `attend`.
        encodings: how the role's matrices are stored, in the role's order.

    Returns:
        An ONNX model whose names are those of FORMAT.md section 10.3; equal arguments give equal bytes.

    Raises:
        InvalidError: there is no such shape class, or another number of matrices.
    """
    name = label(role, shape_class, tokens, keys, encodings)
    graph = Builder(name, fixed_interface(role, model, shape_class, tokens, keys, encodings))
    matrices = role_shape(role, model, shape_class).matrices
    stored = {each.name: (encoding, each.rows) for each, encoding in zip(matrices, encodings, strict=True)}
    compute(graph, HalfArithmetic(graph, stored), role, model, shape_class)
    return graph.finish(partial(tensor_name, name))


__all__ = ["build_fixed_graph", "build_graph"]
