"""Many tiles in one ONNX model, so that one context binary holds them all.

ONNX Runtime makes one context of what it compiles at once, and one graph of nodes that hang together. Its own way to
put graphs of several models into a context makes them share weights, which ours do not have, and such contexts end the
simulator. So tiles are joined and kept apart at once: whatever enters a tile comes out of a sequence, at a place that
depends on the tile before. No accelerator computes with sequences, so between two tiles compiling stops; and as the
model never runs, it matters to nobody what the sequences hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

from estream_packer.graphs.builder import IR_VERSION, OPSET
from estream_packer.htp.compiler import Tile
from estream_spec.errors import PackError

_KEPT_APART_BY = frozenset({"SequenceConstruct", "SequenceAt", "SequenceLength"})


def join(tiles: Sequence[Tile]) -> bytes:
    """One ONNX model of all tiles.

    Args:
        tiles: whose names are all unlike.
    """
    nodes, constants, known = list[Any](), list[Any](), list[Any]()
    inputs, outputs = list[Any](), list[Any]()
    before: str | None = None
    for tile in tiles:
        graph = onnx.load_model_from_string(tile.onnx).graph
        if before is None:
            inputs += graph.input
        else:
            at = f"{tile.label}.at"
            nodes.append(helper.make_node("SequenceConstruct", [before], [f"{at}.sequence"]))
            nodes.append(helper.make_node("SequenceLength", [f"{at}.sequence"], [at]))
            for value in graph.input:
                outer = onnx.ValueInfoProto()
                outer.CopyFrom(value)
                outer.name = f"{value.name}.outer"
                inputs.append(outer)
                known.append(value)  # or its shape would be lost on the way
                sequence = f"{value.name}.sequence"
                nodes.append(helper.make_node("SequenceConstruct", [outer.name], [sequence]))
                nodes.append(helper.make_node("SequenceAt", [sequence, at], [value.name]))
        nodes += graph.node
        constants += graph.initializer
        outputs += graph.output
        before = graph.output[0].name
    joined = helper.make_graph(nodes, "joined", inputs, outputs, constants, value_info=known)
    model = helper.make_model(joined, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)])
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def names_in_context(wrapper: bytes, tiles: Sequence[Tile]) -> dict[str, str]:
    """What a context calls the graph of each tile, by label.

    Args:
        wrapper: the ONNX model that ONNX Runtime wrote around the context.
        tiles: what was joined.

    Raises:
        PackError: a tile was not compiled whole, and into one graph.
    """
    graph = onnx.load_model_from_string(wrapper).graph
    by_output = {output: node for node in graph.node if node.op_type == "EPContext" for output in node.output}
    left = [node for node in graph.node if node.op_type not in _KEPT_APART_BY | {"EPContext"}]
    return {tile.label: _name(tile, by_output, left) for tile in tiles}


def _name(tile: Tile, by_output: Mapping[str, Any], left: Sequence[Any]) -> str:
    graph = onnx.load_model_from_string(tile.onnx).graph
    inputs, outputs = ({value.name for value in values} for values in (graph.input, graph.output))
    node = by_output.get(graph.output[0].name)
    if node is not None and set(node.output) == outputs and set(node.input) <= inputs:
        name: str = node.name
        return name
    results = {each for made in graph.node for each in made.output}
    refused = sorted({each.op_type for each in left if results.intersection(each.output)})
    raise PackError(f"not compiled whole, left are: {', '.join(refused) or 'parts'}", path=f"graph {tile.label}")
