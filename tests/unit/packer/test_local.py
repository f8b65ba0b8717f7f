"""The compiler on this machine, and the one model into which it is given all graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from msgspec.structs import replace as changed
from onnx import TensorProto, helper

from estream_loader.progress import Quiet
from estream_packer.htp.compiler import Tile
from estream_packer.htp.joined import join, names_in_context
from estream_packer.htp.local import LocalCompiler
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.binary_interface import label, tensor_name
from estream_spec.chips import chip_named
from estream_spec.errors import PackError
from estream_spec.manifest import BinaryGraph
from fixtures.dying import WAYS
from fixtures.npu import compiled_for, small_tiles

CHIP = chip_named("sm8650")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def tile(tokens: int, *nodes: Any, constants: tuple[Any, ...] = ()) -> Tile:
    """A graph of our own of the role `head`; nodes lead from `x` to `logits`."""
    name = label("head", 0, tokens, encodings=("f32",))
    for node in nodes:
        node.input[:] = [tensor_name(name, each) for each in node.input]
        node.output[:] = [tensor_name(name, each) for each in node.output]
    x, logits = (
        helper.make_tensor_value_info(tensor_name(name, each), TensorProto.FLOAT, [tokens, 32])
        for each in ("x", "logits")
    )
    model = helper.make_model(
        helper.make_graph(list(nodes), name, [x], [logits], list(constants)),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )
    graph = BinaryGraph(name=name, role="head", shape_class=0, tokens=tokens, encodings=("f32",))
    return Tile(graph, model.SerializeToString())


def doubled(tokens: int) -> Tile:
    return tile(tokens, helper.make_node("Add", ["x", "x"], ["logits"]))


# Joined


def test_joined_tiles_keep_their_inputs_outputs_and_nodes() -> None:
    tiles = small_tiles()
    joined = onnx.load_model_from_string(join(tiles))
    onnx.checker.check_model(joined, full_check=True)
    assert join(tiles) == join(tiles)
    apart = [onnx.load_model_from_string(each.onnx).graph for each in tiles]
    inner = [value for graph in apart[1:] for value in graph.input]
    expected = [*(each.name for each in apart[0].input), *(f"{each.name}.outer" for each in inner)]
    assert [value.name for value in joined.graph.input] == expected
    assert [each.name for each in joined.graph.output] == [each.name for graph in apart for each in graph.output]
    for graph in apart:
        assert all(node in joined.graph.node for node in graph.node)


def test_a_tile_alone_is_joined_to_nothing() -> None:
    [first, *_] = small_tiles()
    joined, alone = onnx.load_model_from_string(join([first])), onnx.load_model_from_string(first.onnx)
    assert list(joined.graph.node) == list(alone.graph.node)
    assert list(joined.graph.input) == list(alone.graph.input)


def wrapper(*nodes: Any) -> bytes:
    graph = helper.make_graph(list(nodes), "wrapper", [], [])
    model: bytes = helper.make_model(graph).SerializeToString()
    return model


def context(of: Tile, name: str, **changes: Any) -> Any:
    graph = onnx.load_model_from_string(of.onnx).graph
    inputs, outputs = ([each.name for each in values] for values in (graph.input, graph.output))
    told = {"inputs": inputs, "outputs": outputs, **changes}
    return helper.make_node("EPContext", told["inputs"], told["outputs"], name=name, domain="com.microsoft")


def test_graphs_are_told_by_their_outputs() -> None:
    tiles = [doubled(32), doubled(64)]
    made = wrapper(context(tiles[1], "first"), context(tiles[0], "second"))
    assert names_in_context(made, tiles) == {tiles[0].label: "second", tiles[1].label: "first"}


def test_a_tile_that_is_not_one_whole_graph_is_refused() -> None:
    whole = doubled(32)
    node = helper.make_node("Add", [tensor_name(whole.label, "x")] * 2, [tensor_name(whole.label, "logits")])
    for made, left in (
        (wrapper(), "parts"),
        (wrapper(node), "Add"),
        (wrapper(context(whole, "a", inputs=["another"])), "parts"),
        (wrapper(context(whole, "a", outputs=[tensor_name(whole.label, "logits"), "another"])), "parts"),
    ):
        with pytest.raises(PackError) as refusal:
            names_in_context(made, [whole])
        assert str(refusal.value) == f"not compiled whole, left are: {left} (at graph {whole.label})"


# Compiled


@pytest.mark.parametrize("chip", ["sm8650", "soc60-v73"])
def test_tiles_become_one_binary(chip: str, temporary: Path) -> None:
    made = compiled_for(chip)
    tiles = small_tiles()
    assert [changed(each, name="") for each in made.graphs] == [changed(each.graph, name="") for each in tiles]
    names = [each.name for each in made.graphs]
    assert len(set(names)) == len(names)
    assert all(name.encode() in made.data for name in names)
    assert made.sdk == installed_sdk()
    assert made.compiler.startswith("onnxruntime-qnn ")
    assert "enable_htp_fp16_precision=1" in made.options
    assert list(temporary.iterdir()) == []


def test_equal_tiles_make_equal_bytes() -> None:
    first = compiled_for("sm8650")
    assert LocalCompiler().compile(small_tiles(), CHIP, Quiet()) == first


def test_binaries_for_different_chips_differ() -> None:
    assert compiled_for("sm8650").data != compiled_for("soc60-v73").data


def test_an_operator_that_the_chip_does_not_take_is_named() -> None:
    odd = tile(64, helper.make_node("Erf", ["x"], ["part"]), helper.make_node("Add", ["x", "part"], ["logits"]))
    with pytest.raises(PackError) as refusal:
        LocalCompiler().compile([doubled(32), odd], CHIP, Quiet())
    assert str(refusal.value) == f"not compiled whole, left are: Erf (at graph {odd.label})"


def test_what_is_no_model_is_refused_in_one_message(temporary: Path) -> None:
    bad = tile(64, helper.make_node("NoSuchOperator", ["x"], ["logits"]))
    with pytest.raises(PackError, match=r"the compiler for Snapdragon 8 Gen 3 .* failed: '.*NoSuchOperator") as refusal:
        LocalCompiler().compile([bad], CHIP, Quiet())
    assert "\n" not in str(refusal.value)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_compiler_that_ends_its_process(
    way: Callable[..., object], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estream_packer.htp.local.compile_here", way)
    with pytest.raises(PackError) as refusal:
        LocalCompiler().compile([doubled(32)], CHIP, Quiet())
    assert refusal.value.message == "the vendor's library ended the process while compiling for sm8650"
    assert refusal.value.hint == "memory may have run out; otherwise it is a fault of the library"
    assert list(temporary.iterdir()) == []
