"""Faults that other engines had in public with families of models: shared experts, clamped activations, near ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.graphs import build_graph
from estream_runtime import Session
from estream_runtime.backends import GRAPH_BACKENDS, open_graph_backend
from estream_runtime.backends.protocol import GraphKey
from estream_runtime.routing import route
from estream_spec.manifest import GraphRole
from estream_spec.model import DenseBlock, ExpertBlock, ModelDescription, Router
from estream_spec.shapes import OLMOE_1B_7B
from fixtures.families import FAMILIES, prompt, write_checkpoint
from fixtures.packed import UNQUANTISED

Array = npt.NDArray[np.float32]
TINY = replace(OLMOE_1B_7B, hidden=4, vocabulary=8)
ROUTER = Router(family="softmax-topk-renormalise", top_k=1)
BACKENDS = pytest.mark.parametrize("backend", GRAPH_BACKENDS)


def run(backend: str, role: GraphRole, model: ModelDescription, feeds: dict[str, Array]) -> dict[str, Any]:
    graphs = {GraphKey(role, 0, "f32"): build_graph(role, model, 0, "f32", "f32")}
    return open_graph_backend(backend, model, graphs, threads=1).run(role, 0, feeds)


def random(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


# A shared expert's own gate, dropped or misapplied.


@BACKENDS
def test_a_shared_expert_with_a_gate_of_zero_counts_half(backend: str) -> None:
    feeds = {"normed": random(3, 4), "dense_gate": random(4, 8), "dense_up": random(4, 8), "dense_down": random(8, 4)}
    plain, shared = (replace(TINY, dense_blocks=(DenseBlock(intermediate=8, share=share),)) for share in (False, True))
    whole = run(backend, "dense", plain, feeds)["y"]
    half = run(backend, "dense", shared, feeds | {"share": np.zeros(4, np.float32)})["y"]
    np.testing.assert_allclose(half, whole / 2, rtol=1e-6)
    assert np.abs(whole).max() > 0.1


def test_a_package_has_the_gate_of_its_checkpoint(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "checkpoint", "qwen2_moe") / "model.safetensors"
    held = load_file(written)
    gates = [name for name in held if name.endswith("shared_expert_gate.weight")]
    logits = []
    for number, factor in enumerate((1, 0)):
        save_file(held | {name: held[name] * held[name].dtype.type(factor) for name in gates}, written)
        build(tmp_path / "checkpoint", tmp_path / f"{number}.emoe", UNQUANTISED)
        with open_package(tmp_path / f"{number}.emoe") as package, Session(package) as session:
            logits.append(session.forward(prompt("qwen2_moe", 7)))
    assert np.abs(logits[0] - logits[1]).max() > 0.1


# GPT-OSS: biases before the clamp, the gate clamped above only, and the bias of down before the routing weight.


@BACKENDS
@pytest.mark.parametrize(
    ("gate", "up", "value"), [(1.0, 0.5, 1.26869), (10.0, -9.0, -41.9997), (10.0, 9.0, 55.9996), (-9.0, 0.5, 0.0)]
)
def test_a_clamped_swiglu(backend: str, gate: float, up: float, value: float) -> None:
    block = ExpertBlock(experts=2, intermediate=1, router=ROUTER, activation="clamped-swiglu", limit=7.0, bias=True)
    feeds: dict[str, Array] = {
        "normed": np.array([[1, 0, 0, 0]], np.float32),
        "gate.bias": np.array([gate - 0.25], np.float32),
        "up.bias": np.array([up + 0.25], np.float32),
        "down.bias": np.array([0, 2, 0, 0], np.float32),
        "gate": np.array([[0.25], [9], [9], [9]], np.float32),
        "up": np.array([[-0.25], [9], [9], [9]], np.float32),
        "down": np.array([[1, 0, 0, 0]], np.float32),
    }
    y = run(backend, "expert", replace(TINY, expert_blocks=(block,)), feeds)["y"]
    np.testing.assert_allclose(y, [[value, 2, 0, 0]], atol=1e-4)


# Softmax over all experts, or over the chosen ones.


@pytest.mark.parametrize(
    ("family", "weights"),
    [("softmax-topk", (0.64391, 0.23688)), ("softmax-topk-renormalise", (0.73106, 0.26894))],
)
def test_the_weights_of_two_of_four_experts(family: Any, weights: tuple[float, float]) -> None:
    experts, found = route(np.array([[2, 1, 0, -1]], np.float32), Router(family=family, top_k=2))
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(found, [weights], atol=1e-5)


# Near ties, decided in f32, and exact ones by the lower id.


@pytest.mark.parametrize("family", ["softmax-topk", "sigmoid-topk", "sparsemixer"])
@pytest.mark.parametrize("gap", [1e-4, 9.5367431640625e-07, 0.0], ids=["1e-4", "one ulp", "none"])
def test_near_ties_are_decided_in_f32(family: Any, gap: float) -> None:
    scores = np.array([[1, 10, 2, 10 + gap, 3, 4]], np.float32)
    assert gap == 0 or scores[0, 3] > scores[0, 1]
    router = Router(family=family, top_k=1, tolerance=0.01 if family == "sparsemixer" else 0.0)
    experts, _ = route(scores, router)
    assert experts.tolist() == [[3 if gap else 1]]
    both, _ = route(np.repeat(scores, 5, axis=0), replace(router, top_k=2))
    assert both.tolist() == [[3, 1] if gap else [1, 3]] * 5


# Prompts of a few tokens take the same path as long ones.


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "gpt_oss", "lfm2_moe", "phimoe"])
def test_short_prompts_are_the_beginning_of_long_ones(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    build(write_checkpoint(tmp_path / "checkpoint", family), tmp_path / "model.emoe", UNQUANTISED)
    tokens = prompt(family, 64)
    with open_package(tmp_path / "model.emoe") as package, Session(package) as session:
        whole = session.forward(tokens)
        for length in (*range(1, 13), 63, 64):
            last = session.prefill(tokens[:length]).logits
            np.testing.assert_allclose(last, whole[length - 1], atol=1e-4)
