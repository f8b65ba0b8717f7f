"""What the simulator makes of compiled graphs is held against the reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from multiprocessing import active_children
from typing import Any

import numpy as np
import onnxruntime
import pytest
from msgspec.structs import replace
from onnx import TensorProto

from estream_loader.progress import Quiet
from estream_packer.graphs.builder import Builder
from estream_packer.graphs.half import HalfArithmetic
from estream_packer.graphs.roles import compute
from estream_packer.htp.compiler import Tile
from estream_packer.htp.local import LocalCompiler
from estream_packer.htp.proof import MOST_ERROR, Proof, check_simulator, compare, expected_of, inputs_of, prove_binary
from estream_packer.htp.targets import Target
from estream_runtime import vendor_sdk
from estream_spec.binary_interface import fixed_interface, label, label_of, tensor_name
from estream_spec.chips import chip_named
from estream_spec.errors import LinkError, PackError
from estream_spec.graph_interface import ROLES, class_count, role_shape
from estream_spec.manifest import Binary, BinaryGraph
from estream_spec.weights import GROUP_SIZES, NIBBLE_ZERO, Encoding
from fixtures import dying
from fixtures.models import LAYER_NORMS, MIXED
from fixtures.npu import binary_for, compiled_for
from fixtures.packages import MODEL

CHIP = chip_named("sm8650")
HEAD = BinaryGraph(
    name=label("head", 0, 32, encodings=("w4g32",)), role="head", shape_class=0, tokens=32, encodings=("w4g32",)
)


def proven(binary: Binary, data: bytes) -> list[Proof]:
    return prove_binary(binary, data, MODEL, Quiet())


def refused(binary: Binary, data: bytes) -> PackError:
    with pytest.raises(PackError) as refusal:
        proven(binary, data)
    assert active_children() == []
    return refusal.value


class UnpackedWrongly(HalfArithmetic):
    """Unpacks nibbles in a way that ONNX defines well, and a compiler may take and compute something else."""

    def _by_halves(self, rows: str, matrix: str, group: int, count: int) -> str:
        graph = self._graph
        byte_rows, columns = graph.sizes(f"{matrix}.nibbles")
        half = group // 2
        groups = byte_rows // half
        low, high = self._nibbles(f"{matrix}.nibbles")
        multipliers = graph.reshape(self._shrunk(f"{matrix}.multipliers"), groups, 1, columns)
        sums = []
        for part, nibbles in zip(self._halves(rows, groups, half, count), (low, high), strict=True):
            weights = graph.add("Mul", graph.reshape(nibbles, groups, half, columns), multipliers)
            sums.append(graph.add("MatMul", part, graph.reshape(weights, byte_rows, columns)))
        return graph.add("Add", *sums)

    def _nibbles(self, packed: str) -> tuple[str, str]:
        raise NotImplementedError


class ByCast(UnpackedWrongly):
    """From uint8 by `Cast`."""

    def _nibbles(self, packed: str) -> tuple[str, str]:
        graph = self._graph
        pairs = graph.add("Cast", packed, to=TensorProto.FLOAT)
        high = graph.add("Floor", graph.add("Mul", pairs, graph.number(1 / 16)))
        low = graph.add("Sub", pairs, graph.add("Mul", high, graph.number(16)))
        zero = graph.number(NIBBLE_ZERO)
        return graph.add("Sub", low, zero), graph.add("Sub", high, zero)


class ByTwoZeroPoints(UnpackedWrongly):
    """By `DequantizeLinear`, twice, with zero points of 128 and 136, so that no number has to be taken away later."""

    def _nibbles(self, packed: str) -> tuple[str, str]:
        graph = self._graph
        by_sixteen = graph.number(1 / 16)
        high = graph.add("Floor", graph.add("DequantizeLinear", packed, by_sixteen, graph.byte(128)))
        shifted = graph.add("DequantizeLinear", packed, by_sixteen, graph.byte(136))
        return graph.add("Mul", graph.add("Sub", shifted, high), graph.number(16)), high


def head_tile(arithmetic: type[HalfArithmetic]) -> Tile:
    """The graph `HEAD`, unpacked in some way."""
    name = label_of(HEAD)
    graph = Builder(name, fixed_interface("head", MODEL, 0, HEAD.tokens, 0, HEAD.encodings))
    compute(graph, arithmetic(graph, {"head": ("w4g32", MODEL.hidden)}), "head", MODEL, 0)
    return Tile(HEAD, graph.finish(partial(tensor_name, name)))


def on_the_cpu(tile: Tile) -> Proof:
    """The proof of what ONNX Runtime makes of a tile in f32, where nothing is compiled."""
    stored, plain = inputs_of(tile.graph, MODEL)
    session = onnxruntime.InferenceSession(tile.onnx, providers=["CPUExecutionProvider"])
    [logits] = session.run(None, {tensor_name(tile.label, name): each for name, each in stored.items()})
    return compare(tile.graph, {"logits": logits}, expected_of(tile.graph, MODEL, plain))


def test_good_graphs_pass() -> None:
    binary = binary_for("sm8650")
    proofs = proven(binary, compiled_for("sm8650").data)
    assert [each.graph for each in proofs] == list(binary.graphs)
    assert all(0 < each.error < MOST_ERROR for each in proofs)
    outputs = [{"queries", "keys", "values"}, {"attended"}, {"x", "normed", "scores"}, {"y"}, {"logits"}]
    assert all(each.output in names for each, names in zip(proofs, outputs, strict=True))


@pytest.mark.parametrize("arithmetic", [ByCast, ByTwoZeroPoints])
def test_a_graph_that_compiles_and_computes_something_else_is_refused(arithmetic: type[HalfArithmetic]) -> None:
    """The compiler takes both, and neither says a word; on the CPU they are right."""
    tile = head_tile(arithmetic)
    assert on_the_cpu(tile).error < 1e-5
    made = LocalCompiler().compile([tile], CHIP, Quiet())
    error = refused(Target(CHIP, made).binary(0), made.data)
    assert error.path == f"graph {tile.label} for sm8650"
    found, bound = error.message.split(" of a row's size, expected at most ")
    assert found.startswith("output 'logits' is off by ")
    assert float(found.removeprefix("output 'logits' is off by ")) > MOST_ERROR
    assert float(bound) == MOST_ERROR
    assert error.hint is not None


def test_the_same_graph_unpacked_well_passes() -> None:
    made = LocalCompiler().compile([head_tile(HalfArithmetic)], CHIP, Quiet())
    [proof] = proven(Target(CHIP, made).binary(0), made.data)
    assert proof.error < MOST_ERROR


# Comparing


def rows(*values: float) -> dict[str, Any]:
    return {"logits": np.array([[each, 0.0] for each in values], np.float32)}


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        (rows(1, 2), rows(1, 2), 0.0),
        (rows(1, 2.5), rows(1, 2), 0.25),
        (rows(0.001, 1), rows(0, 1), 0.004),  # judged as if it had half of the median
        (rows(0.001, 0, 0, 1), rows(0, 0, 0, 1), 0.1),  # or a hundredth of the largest
        (rows(0, 0), rows(0, 0), 0.0),
        (rows(1e-3, 0), rows(0, 0), float("inf")),
        (rows(np.nan, 1), rows(1, 1), float("inf")),
        (rows(np.inf, 1), rows(1, 1), float("inf")),
    ],
)
def test_rows_are_compared_by_their_size(found: dict[str, Any], expected: dict[str, Any], error: float) -> None:
    proof = compare(HEAD, found, expected)
    assert proof.output == "logits"
    if error == float("inf"):
        assert proof.error > 1e6
    else:
        assert proof.error == pytest.approx(error)


def test_the_output_that_is_the_furthest_off_is_named() -> None:
    found = {"x": np.ones((2, 4)), "normed": np.ones((2, 4)), "scores": np.full((2, 4), 1.5)}
    expected = {name: np.ones((2, 4)) for name in found}
    assert compare(HEAD, found, expected) == Proof(HEAD, "scores", 0.5)


def test_inputs_are_the_same_every_time_and_of_all_kinds() -> None:
    first, again = inputs_of(HEAD, MODEL), inputs_of(HEAD, MODEL)
    for one, other in zip(first, again, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    stored, plain = first
    x = plain["x"]
    assert (x[1::4] == 0).all()
    assert np.allclose(np.abs(x[2::4]).max(axis=1), np.abs(x).max())
    assert ((x[3::4] != 0).sum(axis=1) == 1).all()
    assert set(stored["head.nibbles"].ravel() & 15) == set(range(16))
    assert (stored["head.scale"] == 0).any()
    assert len(stored["head.multipliers"]) == MODEL.hidden // GROUP_SIZES["w4g32"]


def test_biases_and_sinks_are_of_both_signs_and_shares_of_the_size_of_one() -> None:
    """Where they were all positive, or as large as norms, much of what a compiler gets wrong would not show."""
    for model in (MIXED, LAYER_NORMS):
        for role in ROLES:
            for index in range(class_count(role, model)):
                alone: tuple[Encoding] = ("f32",)
                encodings = alone * len(role_shape(role, model, index).matrices)
                graph = BinaryGraph(name="graph", role=role, shape_class=index, tokens=32, keys=9, encodings=encodings)
                _, plain = inputs_of(graph, model)
                for name, vector in plain.items():
                    if name.endswith((".bias", "sinks", "share")):
                        assert vector.min() < 0 < vector.max(), (model.family, role, name)
                if "share" in plain:
                    assert 0.2 < np.abs(plain["normed"][0] @ plain["share"]) < 5


# Children that end


@pytest.mark.parametrize("way", dying.WAYS)
def test_a_graph_that_ends_the_process(way: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_packer.htp.proof.check_contents", lambda *_: None)
    monkeypatch.setattr("estream_packer.htp.proof.prove_here", way)
    error = refused(replace(binary_for("sm8650"), graphs=(HEAD,)), b"")
    assert error.message == f"the vendor's library ended the process while proving graph {HEAD.name} for sm8650"
    assert error.hint == "memory may have run out; otherwise it is a fault of the library"


def test_the_graph_that_ends_the_process_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are at work when one of them ends the process of all."""
    monkeypatch.setattr("estream_packer.htp.proof.check_contents", lambda *_: None)
    monkeypatch.setattr("estream_packer.htp.proof.prove_here", dying.at_the_head)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    error = refused(binary_for("sm8650"), b"")
    assert "while proving graph head_0_w8_32 for sm8650" in error.message


def test_what_ends_a_process_once_may_succeed_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Memory may be enough for one graph, and not for two."""
    monkeypatch.setattr("estream_packer.htp.proof.check_contents", lambda *_: None)
    monkeypatch.setattr("estream_packer.htp.proof.prove_here", dying.the_first_time)
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    graphs = binary_for("sm8650").graphs[:2]
    assert [each.graph for each in proven(replace(binary_for("sm8650"), graphs=graphs), b"")] == list(graphs)
    assert (tmp_path / "died").exists()


# What is not given to the vendor's library


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_packer.htp.proof.installed_sdk", str)
    with pytest.raises(LinkError) as refusal:
        proven(binary_for("sm8650"), b"")
    assert refusal.value.message == "compiling and proving graphs needs onnxruntime-qnn, which is not installed"
    assert refusal.value.hint == "pip install 'estream-pack[npu]'"


def test_on_a_machine_without_a_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(LinkError, match="needs Qualcomm's simulator, which there is for x86-64 alone"):
        check_simulator()


def test_a_binary_that_a_newer_sdk_made(monkeypatch: pytest.MonkeyPatch) -> None:
    here = vendor_sdk.installed_sdk()
    monkeypatch.setattr("estream_packer.htp.proof.prove_here", dying.exits)
    with pytest.raises(LinkError) as refusal:
        proven(replace(binary_for("sm8650"), sdk="2.99.0"), b"")
    found = "the binary for Snapdragon 8 Gen 3 (sm8650, Hexagon v75) was made by SDK 2.99.0"
    assert refusal.value.message == f"{found}, which is newer than the one here, {here}"
    assert refusal.value.hint == "install onnxruntime-qnn with SDK 2.99.0 or later to prove it"


def test_data_that_is_no_binary() -> None:
    """Told from its bytes; no process is begun for it."""
    with pytest.raises(LinkError, match="891 bytes that name no build of the QNN SDK, expected a context binary"):
        proven(replace(binary_for("sm8650"), graphs=(HEAD,)), b"no binary" * 99)
