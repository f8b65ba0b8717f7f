"""A context binary made ready to run: one ONNX Runtime session for each graph in it. FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any, Final

from estream_runtime.npu.qnn import PROVIDER, quiet, session_options
from estream_spec.binary_interface import interface_of, label_of, tensor_name
from estream_spec.chips import Chip
from estream_spec.errors import LinkError
from estream_spec.graph_interface import Interface
from estream_spec.manifest import BinaryGraph
from estream_spec.model import ModelDescription

OPSET: Final = 17
IR_VERSION: Final = 10
_sharing = Lock()
"""Graphs of one context find each other by way of the process, so that only one context may be made ready at a time."""
_openings = count()


def open_context(data: bytes, graphs: Sequence[BinaryGraph], model: ModelDescription, chip: Chip) -> list[Any]:
    """Make a context binary ready to run.

    Whether it is one for this device has to be found out before: what the vendor's library makes of another is not
    known, and may be the end of the process. Bytes that are none at all it refuses, but a sound one that was changed
    and given a digest anew may do anything: of 240 in which a few bits or a stretch were changed, 8 ended the process
    and one never came back, in the simulator of SDK 2.51. Only a signature tells whose binary it is.

    Args:
        data: the binary.
        graphs: all that is in it, or one of them: of several, what they leave stays in the process.
        model: what the graphs belong to.
        chip: the chip that it was compiled for.

    Returns:
        A session for each of the graphs, in their order. None of them computes on the CPU.

    Raises:
        LinkError: the provider is not installed or refuses the binary.
    """
    with _sharing, quiet():
        if len(graphs) == 1:
            return [_open(graphs[0], model, chip, data, {})]
        return _open_shared(data, graphs, model, chip)


def _open_shared(data: bytes, graphs: Sequence[BinaryGraph], model: ModelDescription, chip: Chip) -> list[Any]:
    """Opens all graphs of a context. The first one brings them into the process, from where the others take theirs.

    What another context left there is in the way where names are alike: the provider refuses a second graph of a name,
    or takes the one that was left and does not look at the data.
    """
    if next(_openings):  # there was another context
        _take_away(graphs, model, chip)
    try:
        return [
            _open(graph, model, chip, None if number else data, _shared(last=number == len(graphs) - 1))
            for number, graph in enumerate(graphs)
        ]
    except LinkError:
        _take_away(graphs, model, chip)
        raise


def _take_away(graphs: Sequence[BinaryGraph], model: ModelDescription, chip: Chip) -> None:
    """Takes graphs of these names out of the process that were left there; usually there are none."""
    for graph in graphs:
        with suppress(LinkError):
            _open(graph, model, chip, None, _shared(last=False))


def _shared(last: bool) -> dict[str, str]:
    """Entries of a session whose graph is one of several in a context."""
    return {"ep.share_ep_contexts": "1", "ep.stop_share_ep_contexts": str(int(last))}


def _open(
    graph: BinaryGraph, model: ModelDescription, chip: Chip, data: bytes | None, entries: Mapping[str, str]
) -> Any:
    """A session for one graph of the context that is given, or that another session has brought."""
    wrapped = _wrapper(graph, interface_of(graph, model), data)
    options = session_options(chip, {"session.disable_cpu_ep_fallback": "1", **entries}, {})
    return _session(wrapped, options, graph)


def _session(model: bytes, options: Any, graph: BinaryGraph) -> Any:
    from estream_runtime.onnx_runtime import onnxruntime

    try:
        return onnxruntime.InferenceSession(model, options, enable_fallback=False)
    except Exception as error:  # what ONNX Runtime raises has no common base of its own
        raise LinkError(f"the binary does not load: {str(error)!r}", path=f"graph {label_of(graph)}") from error


def _wrapper(graph: BinaryGraph, interface: Interface, data: bytes | None) -> bytes:
    """An ONNX model that has a binary's graph as its one node; the first of a context carries the binary."""
    from onnx import AttributeProto, TensorProto, helper

    types = {"f32": TensorProto.FLOAT, "i8": TensorProto.INT8, "u8": TensorProto.UINT8}
    name = label_of(graph)
    inputs, outputs = (
        [helper.make_tensor_value_info(tensor_name(name, each.name), types[each.dtype], each.shape) for each in values]
        for values in (interface.inputs, interface.outputs)
    )
    node = helper.make_node(
        "EPContext",
        [each.name for each in inputs],
        [each.name for each in outputs],
        name=graph.name,
        domain="com.microsoft",
        source=PROVIDER,
        embed_mode=1,
        main_context=int(data is not None),
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], name, inputs, outputs), ir_version=IR_VERSION, opset_imports=opsets
    )
    if data is not None:  # only now: whatever is built around a node copies it
        model.graph.node[0].attribute.add(name="ep_cache_context", type=AttributeProto.STRING, s=data)
    wrapped: bytes = model.SerializeToString()
    return wrapped
