"""Arithmetic of graphs for accelerators, run in f32 on the CPU. What fp16 costs, the proof measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from estream_packer.graphs import build_fixed_graph
from estream_packer.graphs.builder import Builder
from estream_packer.graphs.half import HalfArithmetic
from estream_spec.binary_interface import HIDDEN, fixed_interface, label, tensor_name
from estream_spec.errors import InvalidError
from estream_spec.graph_interface import ROLES, Interface, Value, class_count, role_shape
from estream_spec.manifest import GraphRole
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router
from estream_spec.weights import GROUP_SIZES, MAX_MULTIPLIER, Encoding, expand_nibbles, matrix_parts, pack_nibbles
from fixtures.formulas import activated
from fixtures.models import LAYER_NORMS, MIXED

Array = npt.NDArray[Any]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
EPSILON = 1e-5
HIGHEST = float(np.finfo(np.float16).max)
MODEL = ModelDescription(
    family="test",
    hidden=48,
    vocabulary=50,
    context_length=64,
    norm_epsilon=EPSILON,
    layers=(Layer(attention=0, experts=0), Layer(attention=1, experts=1)),
    attentions=(
        Attention(heads=4, key_value_heads=2, head_dim=8, rotary=Rotary(theta=1e4), qk_norm="full", clip_qkv=0.5),
        Attention(heads=6, key_value_heads=6, head_dim=8, rotary=Rotary(theta=1e4)),
    ),
    expert_blocks=(
        ExpertBlock(experts=6, intermediate=40, router=Router(family="softmax-topk", top_k=2)),
        ExpertBlock(experts=12, intermediate=24, router=Router(family="softmax-topk", top_k=3)),
    ),
)
WHOLE = msgspec.structs.replace(MODEL, hidden=64)


def random() -> np.random.Generator:
    return np.random.default_rng(5)


def evaluated(
    add: Callable[[HalfArithmetic], object], matrices: dict[str, tuple[Encoding, int]], **inputs: Array
) -> Array:
    """What a graph makes whose result is called `y`."""
    names = {np.dtype(np.float32): "f32", np.dtype(np.int8): "i8", np.dtype(np.uint8): "u8"}
    values = tuple(Value(name, names[each.dtype], each.shape) for name, each in inputs.items())  # type: ignore[arg-type]
    rows, columns = inputs["x"].shape[0], list(inputs.values())[-1].shape[-1]
    graph = Builder("test", Interface(values, (Value("y", "f32", (rows, columns)),)))
    add(HalfArithmetic(graph, matrices))
    return ran(graph.finish(), inputs)["y"]


def ran(model: bytes, inputs: dict[str, Array]) -> dict[str, Array]:
    """Outputs of a model, every node of it computed as it stands there."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def stored(encoding: Encoding, rows: int, columns: int) -> tuple[dict[str, Array], npt.NDArray[np.int64]]:
    """The parts of a matrix that has every value its encoding has, without scales, and the integers they stand for."""
    count = np.arange(rows * columns).reshape(rows, columns)
    if encoding == "f32":
        return {"m": (count % 255 - 127).astype(np.float32)}, count % 255 - 127
    if encoding == "w8":
        return {"m": (count % 255 - 127).astype(np.int8)}, count % 255 - 127
    group = GROUP_SIZES[encoding]
    nibbles = pack_nibbles((count % 16 - 8).astype(np.int8), group)
    groups = -(-rows // group)
    sizes = np.arange(groups * columns).reshape(groups, columns) % MAX_MULTIPLIER + 1
    multipliers = (sizes * random().choice([-1, 1], sizes.shape)).astype(np.int8)
    integers = expand_nibbles(nibbles, multipliers, group, rows)
    return {"m.nibbles": nibbles, "m.multipliers": multipliers}, integers.astype(np.int64)


# Products


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 63, 64, 65, 100])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_product_is_exact_whatever_rows_a_group_divides(encoding: Encoding, rows: int) -> None:
    parts, integers = stored(encoding, rows, 96)
    assert list(parts) == [part.name for part in matrix_parts("m", encoding, rows, 96) if part.name != "m.scale"]
    x = random().integers(-8, 9, (5, rows))
    expected = x @ integers
    if encoding != "f32":
        parts["m.scale"] = np.ldexp(np.float32(1), random().integers(-12, 3, 96)).astype(np.float32)
        expected = expected * parts["m.scale"]
    found = evaluated(
        lambda half: half.product("x", "m", "y"), {"m": (encoding, rows)}, x=x.astype(np.float32), **parts
    )
    assert np.array_equal(found, expected.astype(np.float32))


def test_a_scale_of_zero_makes_zeros() -> None:
    parts, _ = stored("w4g32", 32, 4)
    x = np.ones((2, 32), np.float32)
    found = evaluated(
        lambda half: half.product("x", "m", "y"), {"m": ("w4g32", 32)}, x=x, **parts, **{"m.scale": np.zeros(4, "<f4")}
    )
    assert not found.any()


def test_rows_are_taken_apart_once_for_matrices_that_are_stored_alike() -> None:
    model = onnx.load_model_from_string(build_fixed_graph("expert", MODEL, 0, 32, 0, ("w4g32",) * 3))
    operators = [node.op_type for node in model.graph.node]
    assert (operators.count("Gather"), operators.count("Split")) == (4, 0)  # for gate and up together, and for down
    model = onnx.load_model_from_string(build_fixed_graph("qkv", WHOLE, 0, 32, 0, ("w4g32",) * 3))
    operators = [node.op_type for node in model.graph.node]
    assert (operators.count("Gather"), operators.count("Split")) == (0, 3)  # for all three together, and two rotations


# Norms


def norm(x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * weight)


ROWS: dict[str, npt.NDArray[np.float64]] = {
    "zeros": np.zeros((2, 48)),
    "large": random().uniform(-6e4, 6e4, (2, 48)),
    "tiny": random().standard_normal((2, 48)) * 1e-6,
    "one hot": np.eye(48)[:3] * 6e4,
    "negative one hot": np.eye(48)[:3] * -6e4,
    "as epsilon": np.full((2, 48), EPSILON**0.5),
    "random": random().standard_normal((4, 48)),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_norm(rows: npt.NDArray[np.float64]) -> None:
    x = rows.astype(np.float32)
    weight = random().uniform(0.5, 2, 48).astype(np.float32)
    found = evaluated(lambda half: half.norm("x", "weight", EPSILON, "y"), {}, x=x, weight=weight)
    np.testing.assert_allclose(found, norm(x.astype(np.float64), weight.astype(np.float64)), rtol=2e-6, atol=0)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_nothing_in_a_norm_leaves_the_range_of_fp16(rows: npt.NDArray[np.float64]) -> None:
    """A row of numbers that fp16 has: every number on the way is one that fp16 has, too."""
    x = rows.astype(np.float32)
    graph = Builder("test", Interface((Value("x", "f32", x.shape),), (Value("y", "f32", x.shape),)))
    HalfArithmetic(graph, {}).norm("x", graph.number(1), EPSILON, "y")
    model = onnx.load_model_from_string(graph.finish())
    inner = [each for node in model.graph.node for each in node.output if each != "y"]
    model.graph.output.extend(onnx.ValueInfoProto(name=each) for each in inner)
    values = ran(model.SerializeToString(), {"x": x})
    assert len(values) > 8
    assert max(float(np.abs(each).max()) for each in values.values()) <= HIGHEST
    divided = [each for name, each in values.items() if name.startswith("Sqrt")]
    assert all((each > np.finfo(np.float16).smallest_normal).all() for each in divided)


# Scores


def test_scores_and_masks() -> None:
    queries, keys = random().standard_normal((3, 16)), random().standard_normal((16, 7))
    x, k = queries.astype(np.float32), keys.astype(np.float32)
    found = evaluated(lambda half: half._graph.add("Identity", half.scores("x", "k", 0.25), result="y"), {}, x=x, k=k)
    np.testing.assert_allclose(found, queries @ keys / 4, rtol=1e-5, atol=1e-6)


def test_a_gated_product_is_divided_and_multiplied_again() -> None:
    """Gate and up of 600 make 360,000, which fp16 has not. That it need not, the tests of the backend show."""
    gate, up = np.full((2, 16), 600, np.float32), np.full((2, 16), 600, np.float32)
    matrix = (random().standard_normal((16, 7)) / 1e4).astype(np.float32)
    graph_inputs = {"x": gate, "u": up, "w": matrix}
    found = evaluated(lambda half: half.gated("x", "u", "w", "y"), {"w": ("f32", 16)}, **graph_inputs)
    np.testing.assert_allclose(found, (gate * up) @ matrix, rtol=1e-4)


def test_a_clamped_product_is_divided_and_multiplied_again() -> None:
    gate, up = (random().standard_normal((2, 16)).astype(np.float32) * 9 for _ in range(2))
    matrix = random().standard_normal((16, 7)).astype(np.float32)
    graph_inputs = {"x": gate, "u": up, "w": matrix}
    found = evaluated(lambda half: half.clamped("x", "u", 7.0, "w", "y"), {"w": ("f32", 16)}, **graph_inputs)
    np.testing.assert_allclose(found, activated(gate, up, 7.0) @ matrix, rtol=1e-4, atol=1e-4)


def test_exponentials_are_nothing_in_fp16_where_keys_are_hidden() -> None:
    x = np.array([[0, -1, -9, -20, -32, HIDDEN, -65504]], np.float32)
    found = evaluated(lambda half: half._graph.add("Identity", half.exponential("x"), result="y"), {}, x=x)
    np.testing.assert_allclose(found, np.exp(x), rtol=1e-5, atol=float(np.finfo(np.float16).smallest_subnormal) / 4)


# Whole graphs

DESCRIBED = {each.family: each for each in (MODEL, MIXED, LAYER_NORMS)}
CASES: list[tuple[str, GraphRole, int, tuple[Encoding, ...]]] = [
    (name, role, shape_class, encodings)
    for name, model in DESCRIBED.items()
    for role in ROLES
    for shape_class in range(class_count(role, model))
    for encodings in dict.fromkeys((each,) * len(role_shape(role, model, shape_class).matrices) for each in ENCODINGS)
]


@pytest.mark.parametrize(("name", "role", "shape_class", "encodings"), CASES)
def test_a_fixed_graph_has_the_names_and_shapes_of_its_interface(
    name: str, role: GraphRole, shape_class: int, encodings: tuple[Encoding, ...]
) -> None:
    model, keys = DESCRIBED[name], 64 if role == "attend" else 0
    data = build_fixed_graph(role, model, shape_class, 32, keys, encodings)
    assert data == build_fixed_graph(role, model, shape_class, 32, keys, encodings)
    graph = onnx.load_model_from_string(data).graph
    expected = fixed_interface(role, model, shape_class, 32, keys, encodings)
    assert graph.name == label(role, shape_class, 32, keys, encodings)
    types = {onnx.TensorProto.FLOAT: "f32", onnx.TensorProto.INT8: "i8", onnx.TensorProto.UINT8: "u8"}
    for found, values in ((graph.input, expected.inputs), (graph.output, expected.outputs)):
        described = [
            (
                each.name,
                types[each.type.tensor_type.elem_type],
                tuple(axis.dim_value for axis in each.type.tensor_type.shape.dim),
            )
            for each in found
        ]
        assert described == [(tensor_name(graph.name, each.name), each.dtype, each.shape) for each in values]


def test_no_two_graphs_share_a_name() -> None:
    taken = set[str]()
    for name, role, shape_class, encodings in CASES:
        if name != MIXED.family:  # models have no binary in common
            continue
        for tokens in (32, 64):
            for keys in (64, 128) if role == "attend" else (0,):
                graph = onnx.load_model_from_string(
                    build_fixed_graph(role, MIXED, shape_class, tokens, keys, encodings)
                ).graph
                made = [each.name for each in (*graph.input, *graph.initializer)]
                made += [each for node in graph.node for each in node.output]
                assert len(set(made)) == len(made)
                assert taken.isdisjoint(made)
                assert all(each.replace("_", "").replace(".", "").replace("-", "").isalnum() for each in made)
                taken.update(made)


def test_no_weight_is_baked_into_a_fixed_graph() -> None:
    for name, role, shape_class, encodings in CASES:
        data = build_fixed_graph(role, DESCRIBED[name], shape_class, 32, 64 if role == "attend" else 0, encodings)
        constants = onnx.load_model_from_string(data).graph.initializer
        assert all(np.prod(each.dims) <= 8 for each in constants if each.data_type != onnx.TensorProto.INT64)


def test_another_number_of_matrices_is_refused() -> None:
    with pytest.raises(InvalidError, match="2 encodings for role 'expert', which has 3 matrices"):
        build_fixed_graph("expert", MODEL, 0, 32, 0, ("w8", "w8"))
    with pytest.raises(InvalidError, match="shape class 2 of role 'expert', the model has 2"):
        build_fixed_graph("expert", MODEL, 2, 32, 0, ("w8",) * 3)
