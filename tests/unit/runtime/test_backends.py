"""Every graph on every backend against plain numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from estream_packer.graphs import build_graph
from estream_runtime.backends import GRAPH_BACKENDS, Backend, GraphKey, open_graph_backend, portable
from estream_runtime.backends.saturation import is_exact
from estream_spec.errors import InvalidError, LinkError, TrapError
from estream_spec.graph_interface import ROLES, class_count, interface, role_shape
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import ExpertBlock, ModelDescription
from estream_spec.trace import Activity
from fixtures.formulas import Array, Feeds, activated, expected_of, product, quantise
from fixtures.models import HIDDEN, MIXED, MODELS, PLAIN

MODEL = PLAIN
WITHOUT_EPSILON = msgspec.structs.replace(MODEL, norm_epsilon=0.0)
"""Here the norm of a row of ones and minus ones is exact, so what follows it can be compared bit for bit."""
KINDS: dict[str, tuple[Activations, tuple[GraphWeights, ...]]] = {
    "f32": ("f32", ("f32",)),
    "int8": ("f32", ("int8",)),
    "dynamic": ("dynamic-int8", ("int8", "uint8")),
    "dynamic-unsigned": ("dynamic-int8", ("uint8",)),
}
DYNAMIC = ["dynamic", "dynamic-unsigned"]
named = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def graph_names(model: ModelDescription = MODEL) -> list[tuple[GraphRole, int]]:
    """Role and shape class of every graph of a model that has matrices."""
    return [(role, index) for role in ROLES if role != "attend" for index in range(class_count(role, model))]


build = cache(build_graph)


def graphs_of(kind: str, model: ModelDescription = MODEL) -> dict[GraphKey, bytes]:
    """All graphs of a package."""
    activations, variants = KINDS[kind]
    attend = [GraphKey("attend", index, "f32") for index in range(len(model.attentions))]
    others = [GraphKey(*name, weights) for name in graph_names(model) for weights in variants]
    return {key: build(key.role, model, key.shape_class, key.weights, "f32") for key in attend} | {
        key: build(key.role, model, key.shape_class, key.weights, activations) for key in others
    }


def open_kind(backend: str, kind: str, model: ModelDescription = MODEL) -> Backend:
    return open_graph_backend(backend, model, graphs_of(kind, model), threads=1)


def random_feeds(
    role: GraphRole, shape_class: int, kind: str, tokens: int, keys: int = 0, model: ModelDescription = MODEL
) -> Feeds:
    """Inputs of a graph; of integer matrices the int8 ones, which `run` turns into what the backend wants."""
    rng = np.random.default_rng([len(role), shape_class, tokens])
    weights: GraphWeights = "f32" if kind == "f32" or role == "attend" else "int8"
    feeds: Feeds = {}
    for value in interface(role, model, shape_class, weights).inputs:
        shape = tuple(size if isinstance(size, int) else {"T": tokens, "S": keys}[size] for size in value.shape)
        if value.dtype == "i8":
            feeds[value.name] = rng.integers(-127, 128, shape, np.int8)
        elif value.name.endswith(".scale"):
            feeds[value.name] = rng.uniform(0.001, 0.003, shape).astype(np.float32)
        else:
            small = (*role_shape(role, model, shape_class).matrix_names, "router", "share")
            feeds[value.name] = (rng.standard_normal(shape) * (0.15 if value.name in small else 1)).astype(np.float32)
    return feeds


def expert_inputs(backend: Backend, model: ModelDescription, shape_class: int, kind: str, seed: int) -> Feeds:
    """Matrices of an expert as the backend takes them, other ones for every seed."""
    feeds = random_feeds("expert", shape_class, kind, seed, model=model)
    names = role_shape("expert", model, shape_class).matrix_names
    unsigned = backend.weights_of("expert", shape_class) == "uint8"
    return {
        name: (array.astype(np.int16) + 128).astype(np.uint8) if unsigned and name in names else array
        for name, array in feeds.items()
        if name != "normed"
    }


def during(activity: Activity) -> AbstractContextManager[None]:
    """Nobody is told of activities."""
    return nullcontext()


def run(
    backend: Backend, role: GraphRole, shape_class: int, feeds: Mapping[str, Array], model: ModelDescription = MODEL
) -> Feeds:
    fed = dict(feeds)
    if backend.weights_of(role, shape_class) == "uint8":
        for name in role_shape(role, model, shape_class).matrix_names:
            fed[name] = (feeds[name].astype(np.int16) + 128).astype(np.uint8)
    return backend.run(role, shape_class, fed)


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


def causal_mask(tokens: int, keys: int, window: int | None = None) -> Array:
    own = np.arange(keys - tokens, keys)[:, None]
    allowed = np.arange(keys) <= own
    if window is not None:
        allowed &= np.arange(keys) > own - window
    return np.where(allowed, np.float32(0), np.finfo(np.float32).min)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@named
def test_graphs_compute_what_the_formulas_say(model: ModelDescription, backend: str, kind: str, tokens: int) -> None:
    opened, activations = open_kind(backend, kind, model), KINDS[kind][0]
    for role, shape_class in graph_names(model):
        feeds = random_feeds(role, shape_class, kind, tokens, model=model)
        expected = expected_of(role, model, shape_class, feeds, activations)
        assert_close(run(opened, role, shape_class, feeds, model), expected, activations)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 40), (2, 2), (2, 9), (33, 33), (33, 40)])
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@named
def test_attention(model: ModelDescription, backend: str, tokens: int, keys: int, window: int | None) -> None:
    opened = open_kind(backend, "f32", model)
    mask = causal_mask(tokens, keys, window)
    for shape_class in range(len(model.attentions)):
        feeds = random_feeds("attend", shape_class, "f32", tokens, keys, model) | {"mask": mask}
        found = opened.run("attend", shape_class, feeds)
        assert_close(found, expected_of("attend", model, shape_class, feeds, "f32"))
        for name in ("keys", "values"):  # What a token may not see has no influence at all on it.
            feeds[name][:, mask[0] != 0] *= 1000
        unseen = opened.run("attend", shape_class, feeds)
        assert np.array_equal(found["attended"][0], unseen["attended"][0])


@named
def test_the_compiled_kernel_needs_no_graph(model: ModelDescription) -> None:
    """Where activations are quantised, it computes every role itself."""
    graphs = dict.fromkeys(graphs_of("dynamic", model), b"no graph")
    opened = open_graph_backend("native", model, graphs, threads=1)
    for role, shape_class in [*graph_names(model), *(("attend", each) for each in range(len(model.attentions)))]:
        feeds = random_feeds(role, shape_class, "dynamic", 3, 3, model)
        expected = expected_of(role, model, shape_class, feeds, "dynamic-int8")
        assert_close(opened.run(role, shape_class, feeds), expected, "dynamic-int8")


@pytest.mark.parametrize("threads", [1, 3])
@named
def test_on_the_compiled_kernel_a_row_comes_out_the_same_alone_and_among_others(
    model: ModelDescription, threads: int
) -> None:
    opened = open_graph_backend("native", model, graphs_of("dynamic", model), threads)
    for role, shape_class in graph_names(model):
        shape, feeds = role_shape(role, model, shape_class), random_feeds(role, shape_class, "dynamic", 33, model=model)
        whole = opened.run(role, shape_class, feeds)
        for row in (0, 7, 32):
            own = {each.name: feeds[each.name][row : row + 1] for each in shape.inputs}
            alone = opened.run(role, shape_class, feeds | own)
            for each in shape.outputs:
                expected = whole[each.name].take([row], each.shape.index("T"))
                assert np.array_equal(alone[each.name], expected), (role, shape_class, each.name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@named
def test_experts_of_one_row_give_what_each_adds_to_zeros(model: ModelDescription, backend: str, kind: str) -> None:
    opened = open_kind(backend, kind, model)
    for shape_class in range(class_count("expert", model)):
        x = random_feeds("expert", shape_class, kind, 1, model=model)["normed"]
        experts = [expert_inputs(opened, model, shape_class, kind, seed) for seed in (2, 3, 4)]
        shares = np.array([0.5, 0.125, 0.3], np.float32)
        rows, out = opened.expert_rows(x), np.full((3, HIDDEN), np.nan, np.float32)
        bound = [opened.bind_expert(shape_class, partial(dict, each)) for each in experts]
        opened.expert_outputs(shape_class, rows, shares, bound, out, during)
        for share, weights, found in zip(shares, experts, out, strict=True):
            total, row = np.zeros((1, HIDDEN), np.float32), np.zeros(1, np.int64)
            opened.add_expert(shape_class, rows, row, share[None], weights, total, during)
            np.testing.assert_array_equal(found, total[0])


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

    width = MODEL.attentions[1].head_dim
    upright = {"cos": np.ones((tokens, width), np.float32), "sin": np.zeros((tokens, width), np.float32)}
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
@named
def test_zeros_and_one_huge_value(model: ModelDescription, backend: str, kind: str) -> None:
    opened, activations = open_kind(backend, kind, model), KINDS[kind][0]
    for role, shape_class in graph_names(model):
        name = role_shape(role, model, shape_class).inputs[0].name
        feeds = random_feeds(role, shape_class, kind, 2, model=model)
        feeds[name][:] = 0
        expected = expected_of(role, model, shape_class, feeds, activations)
        assert_close(run(opened, role, shape_class, feeds, model), expected, activations)
        feeds[name][1, 7] = 1e6
        expected = expected_of(role, model, shape_class, feeds, activations)
        assert_close(run(opened, role, shape_class, feeds, model), expected, activations)


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
    assert_close(opened.run("expert", 0, feeds), expected_of("expert", MODEL, 0, feeds, "f32"))
    assert all(np.array_equal(feeds[name], before[name]) for name in feeds)


def test_signed_weights_are_used_only_where_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[object, ...]] = []

    def answer(exact: bool) -> Any:
        def try_it(run: object, *sizes: object) -> bool:
            tried.append(sizes)
            return exact

        return try_it

    for exact, weights in ((True, "int8"), (False, "uint8")):
        monkeypatch.setattr(portable, "is_exact", answer(exact))
        opened = open_kind("portable", "dynamic")
        assert {opened.weights_of(role, index) for role, index in graph_names()} == {weights}
        assert opened.weights_of("attend", 1) == "f32"
    assert tried == [(HIDDEN, MODEL.expert_blocks[0])] * 2


def test_without_an_expert_graph_to_try_unsigned_weights_are_used() -> None:
    graphs = {key: data for key, data in graphs_of("dynamic").items() if key.role != "expert"}
    assert open_graph_backend("portable", MODEL, graphs, 1).weights_of("head", 0) == "uint8"


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_nothing_is_tried_where_there_is_no_choice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "is_exact", lambda run, *sizes: pytest.fail("no products of integers here"))
    assert open_kind("portable", kind).weights_of("expert", 0) == kind


def saturating(sums_of: Iterable[Array]) -> Array:
    return np.sum([np.clip(pair, -32768, 32767) for pair in sums_of], axis=0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("block", [*PLAIN.expert_blocks, *MIXED.expert_blocks], ids=["silu", "clamped", "sigmoids"])
@pytest.mark.parametrize("saturates", [False, True])
def test_a_saturating_processor_is_found_out(saturates: bool, block: ExpertBlock) -> None:
    def multiply(rows: Array, feeds: Mapping[str, Array], name: str) -> Array:
        """uint8 times int8 in pairs, as such a processor does it, then corrected for the zero point."""
        integers, scale = quantise(rows)
        unsigned, weights = integers + 128, feeds[name].astype(np.int64)
        pairs = [unsigned[:, k : k + 2] @ weights[k : k + 2] for k in range(0, len(weights), 2)]
        sums = (saturating(pairs) if saturates else sum(pairs)) - 128 * weights.sum(axis=0)
        return (sums * scale * feeds[f"{name}.scale"] + feeds.get(f"{name}.bias", 0)).astype(np.float32)  # type: ignore[no-any-return]

    def run_expert(feeds: Mapping[str, Array]) -> Feeds:
        assert feeds.keys() == {each.name for each in interface("expert", model, 0, "int8").inputs}
        gate, up = (multiply(feeds["normed"], feeds, name) for name in ("gate", "up"))
        return {"y": multiply(activated(gate, up, block.limit).astype(np.float32), feeds, "down")}

    model = msgspec.structs.replace(MODEL, expert_blocks=(block,))
    assert is_exact(run_expert, HIDDEN, block) is not saturates


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
