"""Every graph on every backend against plain numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import pytest

from estream_packer.graphs import build_graph
from estream_runtime.backends import GRAPH_BACKENDS, Backend, GraphKey, open_graph_backend, portable
from estream_runtime.backends.saturation import is_exact
from estream_spec.errors import InvalidError, LinkError, TrapError
from estream_spec.graph_interface import ROLES, class_count, interface, role_shape
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

HIDDEN, WIDTH = 48, 8
MODEL = ModelDescription(
    family="test",
    hidden=HIDDEN,
    vocabulary=50,
    context_length=64,
    norm_epsilon=1e-5,
    layers=(Layer(attention=0, experts=0), Layer(attention=1, experts=0)),
    attentions=(
        Attention(heads=6, key_value_heads=2, head_dim=WIDTH, rotary=Rotary(theta=1e4), qk_norm="full", clip_qkv=0.75),
        Attention(heads=4, key_value_heads=4, head_dim=WIDTH, rotary=Rotary(theta=1e4)),
    ),
    expert_blocks=(ExpertBlock(experts=6, intermediate=21, router=Router(family="softmax-topk", top_k=2)),),
)
WITHOUT_EPSILON = msgspec.structs.replace(MODEL, norm_epsilon=0.0)
"""Here the norm of a row of ones and minus ones is exact, so what follows it can be compared bit for bit."""
KINDS: dict[str, tuple[Activations, tuple[GraphWeights, ...]]] = {
    "f32": ("f32", ("f32",)),
    "int8": ("f32", ("int8",)),
    "dynamic": ("dynamic-int8", ("int8", "uint8")),
    "dynamic-unsigned": ("dynamic-int8", ("uint8",)),
}
DYNAMIC = ["dynamic", "dynamic-unsigned"]
ALL_GRAPHS: list[tuple[GraphRole, int]] = [(role, index) for role in ROLES for index in range(class_count(role, MODEL))]
WITH_MATRICES = [(role, index) for role, index in ALL_GRAPHS if role != "attend"]


def graphs_of(kind: str, model: ModelDescription = MODEL) -> dict[GraphKey, bytes]:
    """All graphs of a package."""
    activations, variants = KINDS[kind]
    graphs = {}
    for role, index in ALL_GRAPHS:
        for weights in variants if role != "attend" else ("f32",):
            used = activations if role != "attend" else "f32"
            graphs[GraphKey(role, index, weights)] = build_graph(role, model, index, weights, used)
    return graphs


def open_kind(backend: str, kind: str, model: ModelDescription = MODEL) -> Backend:
    return open_graph_backend(backend, model, graphs_of(kind, model), threads=1)


def random_feeds(role: GraphRole, shape_class: int, kind: str, tokens: int, keys: int = 0) -> Feeds:
    """Inputs of a graph; of integer matrices the int8 ones, which `run` turns into what the backend wants."""
    rng = np.random.default_rng([len(role), shape_class, tokens])
    weights: GraphWeights = "f32" if kind == "f32" or role == "attend" else "int8"
    feeds: Feeds = {}
    for value in interface(role, MODEL, shape_class, weights).inputs:
        shape = tuple(size if isinstance(size, int) else {"T": tokens, "S": keys}[size] for size in value.shape)
        if value.dtype == "i8":
            feeds[value.name] = rng.integers(-127, 128, shape, np.int8)
        elif value.name.endswith(".scale"):
            feeds[value.name] = rng.uniform(0.001, 0.003, shape).astype(np.float32)
        else:
            size = 0.15 if value.name in (*role_shape(role, MODEL, shape_class).matrix_names, "router") else 1
            feeds[value.name] = (rng.standard_normal(shape) * size).astype(np.float32)
    return feeds


def run(backend: Backend, role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> Feeds:
    fed = dict(feeds)
    if backend.weights_of(role, shape_class) == "uint8":
        for name in role_shape(role, MODEL, shape_class).matrix_names:
            fed[name] = (feeds[name].astype(np.int16) + 128).astype(np.uint8)
    return backend.run(role, shape_class, fed)


def quantise(rows: Array) -> tuple[Array, Array]:
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    scale[scale == 0] = 1
    return np.rint(rows / scale).astype(np.int64), scale


def product(rows: Array, feeds: Feeds, name: str, activations: Activations) -> Array:
    """f32 products in f64; integer products exactly, and in the written order afterwards."""
    if f"{name}.scale" not in feeds:
        return rows.astype(np.float64) @ feeds[name]
    if activations == "f32":
        return rows.astype(np.float64) @ feeds[name] * feeds[f"{name}.scale"]
    integers, scale = quantise(rows.astype(np.float32))
    sums = integers @ feeds[name].astype(np.int64)
    return sums.astype(np.float32) * scale * feeds[f"{name}.scale"]


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + MODEL.norm_epsilon) * weight  # type: ignore[no-any-return]


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x.astype(np.float64)))  # type: ignore[no-any-return]


def expected_qkv(feeds: Feeds, shape_class: int, activations: Activations) -> Feeds:
    attention = MODEL.attentions[shape_class]
    normed = rms_norm(feeds["x"], feeds["attention_norm"])
    projected = {name: product(normed, feeds, name, activations) for name in "qkv"}
    if attention.qk_norm == "full":
        projected |= {name: rms_norm(projected[name], feeds[f"{name}_norm"]) for name in "qk"}
    if attention.clip_qkv is not None:
        projected = {name: value.clip(-attention.clip_qkv, attention.clip_qkv) for name, value in projected.items()}
    heads = {name: value.reshape(len(normed), -1, WIDTH).transpose(1, 0, 2) for name, value in projected.items()}
    for name in "qk":
        low, high = np.split(heads[name], 2, axis=-1)
        heads[name] = heads[name] * feeds["cos"] + np.concatenate([-high, low], axis=-1) * feeds["sin"]
    return {"queries": heads["q"], "keys": heads["k"], "values": heads["v"]}


def expected_attend(feeds: Feeds, shape_class: int) -> Feeds:
    attention = MODEL.attentions[shape_class]
    repeats = attention.heads // attention.key_value_heads
    keys, values = (np.repeat(feeds[name], repeats, axis=0).astype(np.float64) for name in ("keys", "values"))
    scores = feeds["queries"] @ keys.transpose(0, 2, 1) * WIDTH**-0.5 + feeds["mask"]
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return {"attended": (shares @ values).transpose(1, 0, 2).reshape(feeds["mask"].shape[0], -1)}


def expected_out(feeds: Feeds, activations: Activations) -> Feeds:
    x = feeds["residual"] + product(feeds["attended"], feeds, "o", activations)
    normed = rms_norm(x, feeds["expert_norm"])
    return {"x": x, "normed": normed, "scores": normed @ feeds["router"].astype(np.float64)}


def expected_expert(feeds: Feeds, activations: Activations) -> Feeds:
    gate, up = (product(feeds["normed"], feeds, name, activations) for name in ("gate", "up"))
    return {"y": product(silu(gate) * up, feeds, "down", activations)}


def expected_head(feeds: Feeds, activations: Activations) -> Feeds:
    return {"logits": product(rms_norm(feeds["x"], feeds["final_norm"]), feeds, "head", activations)}


def expected_of(role: GraphRole, shape_class: int, feeds: Feeds, activations: Activations) -> Feeds:
    match role:
        case "qkv":
            return expected_qkv(feeds, shape_class, activations)
        case "attend":
            return expected_attend(feeds, shape_class)
        case "out":
            return expected_out(feeds, activations)
        case "expert":
            return expected_expert(feeds, activations)
        case "head":
            return expected_head(feeds, activations)
        case _:
            raise AssertionError(role)


def assert_close(found: Feeds, expected: Feeds, activations: Activations = "f32") -> None:
    """To 1e-5 in f32; quantised, a value that lies at a half after f32 steps may round to either side."""
    assert list(found) == list(expected)
    for name, array in found.items():
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.shape == expected[name].shape
        size = max(1.0, np.abs(expected[name]).max())
        tolerance = 1e-5 if activations == "f32" else 1e-2
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=tolerance * size)


def causal_mask(tokens: int, keys: int) -> Array:
    allowed = np.arange(keys) <= np.arange(keys - tokens, keys)[:, None]
    return np.where(allowed, np.float32(0), np.finfo(np.float32).min)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_graphs_compute_what_the_formulas_say(backend: str, kind: str, tokens: int) -> None:
    opened, activations = open_kind(backend, kind), KINDS[kind][0]
    for role, shape_class in WITH_MATRICES:
        feeds = random_feeds(role, shape_class, kind, tokens)
        assert_close(
            run(opened, role, shape_class, feeds), expected_of(role, shape_class, feeds, activations), activations
        )


@pytest.mark.parametrize("shape_class", [0, 1])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 40), (2, 2), (2, 9), (33, 33), (33, 40)])
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_attention(backend: str, tokens: int, keys: int, shape_class: int) -> None:
    opened = open_kind(backend, "f32")
    feeds = random_feeds("attend", shape_class, "f32", tokens, keys) | {"mask": causal_mask(tokens, keys)}
    found = opened.run("attend", shape_class, feeds)
    assert_close(found, expected_of("attend", shape_class, feeds, "f32"))
    for name in ("keys", "values"):  # What a token may not see has no influence at all on it.
        feeds[name][:, keys - tokens + 1 :] *= 1000
    unseen = opened.run("attend", shape_class, feeds)
    assert np.array_equal(found["attended"][0], unseen["attended"][0])


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_attention_of_extreme_scores_looks_at_one_key(backend: str) -> None:
    feeds = random_feeds("attend", 1, "f32", 2, 5) | {"mask": causal_mask(2, 5)}
    feeds["keys"][:] = 0
    feeds["keys"][:, 1] = 1e6
    feeds["queries"][:] = 1e6
    found = open_kind(backend, "f32").run("attend", 1, feeds)["attended"]
    assert np.array_equal(found, np.broadcast_to(feeds["values"][:, 1].ravel(), found.shape))


@pytest.mark.parametrize("kind", DYNAMIC)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_integer_products_are_exact(backend: str, kind: str, tokens: int) -> None:
    """Inputs such that all f32 steps before an integer product are exact: then so is the result, bit for bit."""
    opened = open_kind(backend, kind, WITHOUT_EPSILON)
    signs = np.where(np.random.default_rng(tokens).random((tokens, HIDDEN)) < 0.5, np.float32(-1), np.float32(1))

    feeds = random_feeds("out", 0, kind, tokens)
    expected = feeds["residual"] + product(feeds["attended"], feeds, "o", "dynamic-int8")
    assert np.array_equal(run(opened, "out", 0, feeds)["x"], expected)

    feeds = random_feeds("head", 0, kind, tokens) | {"x": signs}
    expected = product(signs * feeds["final_norm"], feeds, "head", "dynamic-int8")
    assert np.array_equal(run(opened, "head", 0, feeds)["logits"], expected)

    upright = {"cos": np.ones((tokens, WIDTH), np.float32), "sin": np.zeros((tokens, WIDTH), np.float32)}
    feeds = random_feeds("qkv", 1, kind, tokens) | {"x": signs} | upright
    found = run(opened, "qkv", 1, feeds)
    for matrix, name in (("q", "queries"), ("k", "keys"), ("v", "values")):
        expected = product(signs * feeds["attention_norm"], feeds, matrix, "dynamic-int8")
        assert np.array_equal(found[name].transpose(1, 0, 2).reshape(tokens, -1), expected)

    feeds = random_feeds("expert", 0, kind, tokens)
    feeds["normed"], feeds["gate"] = np.abs(feeds["normed"]) + 1, np.abs(feeds["gate"]) + np.int8(0)
    feeds["gate.scale"] += 1  # Gates so large that silu leaves them as they are.
    gate, up = (product(feeds["normed"], feeds, name, "dynamic-int8") for name in ("gate", "up"))
    assert np.array_equal(run(opened, "expert", 0, feeds)["y"], product(gate * up, feeds, "down", "dynamic-int8"))


@pytest.mark.parametrize("kind", DYNAMIC)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@pytest.mark.parametrize("row", [[0.0], [1.0], [-1.0], [1e-45], [3e-43, 1e-45], [1e30, 1.0], [3e38, -3e38], [0.5, 127]])
def test_extreme_rows_are_quantised_as_written(backend: str, kind: str, row: list[float]) -> None:
    """The largest sums, no scale at all, subnormal scales, and halves."""
    opened = open_kind(backend, kind)
    feeds = random_feeds("out", 0, kind, 2)
    feeds["attended"][0] = np.resize(np.array(row, np.float32), HIDDEN)
    feeds["residual"][:] = 0
    feeds["o"][:, 0], feeds["o"][:, 1] = 127, -127
    with np.errstate(over="ignore"):
        expected = product(feeds["attended"], feeds, "o", "dynamic-int8")
    assert np.array_equal(run(opened, "out", 0, feeds)["x"], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_zeros_and_one_huge_value(backend: str, kind: str) -> None:
    opened, activations = open_kind(backend, kind), KINDS[kind][0]
    rows: dict[GraphRole, str] = {"qkv": "x", "out": "attended", "expert": "normed", "head": "x"}
    for role, name in rows.items():
        feeds = random_feeds(role, 0, kind, 2)
        feeds[name][:] = 0
        assert_close(run(opened, role, 0, feeds), expected_of(role, 0, feeds, activations))
        feeds[name][1, 7] = 1e6
        assert_close(run(opened, role, 0, feeds), expected_of(role, 0, feeds, activations), activations)


def test_threads_and_repetition_change_no_bit() -> None:
    feeds = random_feeds("expert", 0, "f32", 33)
    graphs = graphs_of("f32")
    results = [
        backend.run("expert", 0, feeds)["y"]
        for backend in (
            open_graph_backend("portable", MODEL, graphs, 1),
            open_graph_backend("portable", MODEL, graphs, 2),
        )
        for _ in range(2)
    ]
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_weights_may_be_read_only_and_are_left_alone(backend: str) -> None:
    feeds = random_feeds("expert", 0, "f32", 2)
    before = {name: array.copy() for name, array in feeds.items()}
    for array in feeds.values():
        array.flags.writeable = False
    opened = open_kind(backend, "f32")
    assert_close(opened.run("expert", 0, feeds), expected_of("expert", 0, feeds, "f32"))
    assert all(np.array_equal(feeds[name], before[name]) for name in feeds)


def test_signed_weights_are_used_only_where_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def answer(exact: bool) -> Any:
        def try_it(run: object, *sizes: int) -> bool:
            tried.append(sizes)
            return exact

        return try_it

    for exact, weights in ((True, "int8"), (False, "uint8")):
        monkeypatch.setattr(portable, "is_exact", answer(exact))
        opened = open_kind("portable", "dynamic")
        assert {opened.weights_of(role, index) for role, index in WITH_MATRICES} == {weights}
        assert opened.weights_of("attend", 1) == "f32"
    assert tried == [(HIDDEN, 21)] * 2


def test_without_an_expert_graph_to_try_unsigned_weights_are_used() -> None:
    graphs = {key: data for key, data in graphs_of("dynamic").items() if key.role != "expert"}
    assert open_graph_backend("portable", MODEL, graphs, 1).weights_of("head", 0) == "uint8"


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_nothing_is_tried_where_there_is_no_choice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "is_exact", lambda run, *sizes: pytest.fail("no products of integers here"))
    assert open_kind("portable", kind).weights_of("expert", 0) == kind


def saturating(sums_of: Iterable[Array]) -> Array:
    return np.sum([np.clip(pair, -32768, 32767) for pair in sums_of], axis=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("saturates", [False, True])
def test_a_saturating_processor_is_found_out(saturates: bool) -> None:
    def multiply(rows: Array, feeds: Mapping[str, Array], name: str) -> Array:
        """uint8 times int8 in pairs, as such a processor does it, then corrected for the zero point."""
        integers, scale = quantise(rows)
        unsigned, weights = integers + 128, feeds[name].astype(np.int64)
        pairs = [unsigned[:, k : k + 2] @ weights[k : k + 2] for k in range(0, len(weights), 2)]
        sums = (saturating(pairs) if saturates else sum(pairs)) - 128 * weights.sum(axis=0)
        return (sums * scale * feeds[f"{name}.scale"]).astype(np.float32)  # type: ignore[no-any-return]

    def run_expert(feeds: Mapping[str, Array]) -> Feeds:
        gate, up = (multiply(feeds["normed"], feeds, name) for name in ("gate", "up"))
        return {"y": multiply((silu(gate) * up).astype(np.float32), feeds, "down")}

    assert is_exact(run_expert, 48, 22) is not saturates


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(LinkError, match="unknown backend 'gpu', expected one of: native, portable, reference"):
        open_graph_backend("gpu", MODEL, {}, 1)


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_a_graph_that_is_not_there_is_refused(backend: str) -> None:
    opened = open_kind(backend, "f32")
    with pytest.raises(LinkError, match="no graph for role 'qkv', shape class 2"):
        opened.run("qkv", 2, {})
    opened.close()
    with pytest.raises(LinkError, match="no graph for role 'head', shape class 0"):
        opened.run("head", 0, {})


@pytest.mark.parametrize("data", [b"", b"not a graph", b"\x08\x08"])
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_bytes_that_are_no_graph_are_refused(backend: str, data: bytes) -> None:
    opened = open_graph_backend(backend, MODEL, {GraphKey("head", 0, "f32"): data}, 1)
    with pytest.raises(LinkError, match=r"does not load the graph.*graph head\.0\.f32"):
        opened.run("head", 0, {})


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_a_run_with_other_inputs_is_stopped(backend: str) -> None:
    opened = open_kind(backend, "f32")
    feeds = random_feeds("head", 0, "f32", 2)
    with pytest.raises(TrapError, match=r"the run failed.*graph head\.0\.f32"):
        opened.run("head", 0, {name: feeds[name] for name in ("x", "head")})
    with pytest.raises(TrapError, match=r"the run failed.*graph head\.0\.f32"):
        opened.run("head", 0, feeds | {"head": feeds["head"][:-1]})


def test_a_graph_of_another_role_is_not_tried_as_an_expert() -> None:
    graphs = graphs_of("dynamic")
    graphs[GraphKey("expert", 0, "int8")] = graphs[GraphKey("head", 0, "int8")]
    with pytest.raises(InvalidError, match=r"input 0 is 'x', f32 \[T, 48\], expected 'normed', f32 \[T, 48\]"):
        open_graph_backend("portable", MODEL, graphs, 1).weights_of("head", 0)


def changed(change: Callable[[onnx.GraphProto], object]) -> dict[GraphKey, bytes]:
    """The head's graph after a change."""
    key = GraphKey("head", 0, "f32")
    model = onnx.load_model_from_string(graphs_of("f32")[key])
    change(model.graph)
    return {key: model.SerializeToString()}


def with_tensor(value: onnx.ValueInfoProto, kind: int, *shape: int | str) -> None:
    value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, shape))


F32 = onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.input.reverse(), "input 0 is 'head', f32 [48, 50], expected 'x', f32 [T, 48]"),
        (
            lambda graph: graph.input.append(onnx.helper.make_tensor_value_info("more", F32, [1])),
            "input 3 is 'more', f32 [1], expected absent",
        ),
        (
            lambda graph: with_tensor(graph.input[1], F32, "T"),
            "input 1 is 'final_norm', f32 [T], expected 'final_norm', f32 [48]",
        ),
        (
            lambda graph: with_tensor(graph.input[0], F32, 7, HIDDEN),
            "input 0 is 'x', f32 [7, 48], expected 'x', f32 [T, 48]",
        ),
        (
            lambda graph: graph.output.append(onnx.helper.make_tensor_value_info("x", F32, ["T", HIDDEN])),
            "output 1 is 'x', f32 [T, 48], expected absent",
        ),
    ],
)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_a_graph_of_another_interface_is_refused(
    backend: str, change: Callable[[onnx.GraphProto], object], message: str
) -> None:
    feeds = random_feeds("head", 0, "f32", 2)
    with pytest.raises(InvalidError, match=re.escape(message) + r" \(at graph head\.0\.f32\)"):
        open_graph_backend(backend, MODEL, changed(change), 1).run("head", 0, feeds)


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_an_output_of_another_shape_is_stopped(backend: str) -> None:
    """One row whatever goes in, which the shapes a graph declares cannot tell."""

    def one_row(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "all"
        for name, number in (("first", 0), ("second", 1)):
            tensor = onnx.numpy_helper.from_array(np.array([number]), f"{name}.value")
            graph.node.append(onnx.helper.make_node("Constant", [], [name], value=tensor))
        graph.node.append(onnx.helper.make_node("Slice", ["all", "first", "second", "first"], ["logits"]))

    opened = open_graph_backend(backend, MODEL, changed(one_row), 1)
    with pytest.raises(TrapError, match=r"output 'logits' is float32 \[1, 50\], expected float32 \[2, 50\]"):
        opened.run("head", 0, random_feeds("head", 0, "f32", 2))


def test_a_failing_run_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    opened = open_kind("portable", "f32")
    with pytest.raises(TrapError, match="the run failed"):
        opened.run("head", 0, random_feeds("head", 0, "f32", 2) | {"head": np.zeros((3, 3), np.float32)})
    with pytest.raises(LinkError, match="does not load the graph"):
        open_graph_backend("portable", MODEL, {GraphKey("head", 0, "f32"): b"no graph"}, 1).run("head", 0, {})
    assert capfd.readouterr() == ("", "")
