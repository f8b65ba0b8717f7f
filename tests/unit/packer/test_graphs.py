from __future__ import annotations

from typing import Any

import onnx
import pytest

from estream_packer.graphs import build_graph
from estream_spec.errors import InvalidError
from estream_spec.graph_interface import (
    COMBINATIONS,
    ROLES,
    Value,
    class_count,
    interface,
    layer_classes,
)
from estream_spec.manifest import Activations, GraphRole, GraphWeights
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router
from fixtures.models import LAYER_NORMS, MIXED

MODEL = ModelDescription(
    family="test",
    hidden=48,
    vocabulary=50,
    context_length=64,
    norm_epsilon=1e-5,
    layers=(
        Layer(attention=0, experts=0),
        Layer(attention=1, experts=0),
        Layer(attention=0, experts=1),
        Layer(attention=0, experts=0),
    ),
    attentions=(
        Attention(heads=4, key_value_heads=2, head_dim=8, rotary=Rotary(theta=1e4), qk_norm="full", clip_qkv=0.5),
        Attention(heads=6, key_value_heads=6, head_dim=8, rotary=Rotary(theta=1e4)),
    ),
    expert_blocks=(
        ExpertBlock(experts=6, intermediate=20, router=Router(family="softmax-topk", top_k=2)),
        ExpertBlock(experts=12, intermediate=10, router=Router(family="softmax-topk-renormalise", top_k=3)),
    ),
)
KINDS: list[tuple[GraphRole, GraphWeights, Activations]] = [
    (role, weights, activations)
    for role in ROLES
    for activations, weights in sorted(COMBINATIONS)
    if role != "attend" or (activations, weights) == ("f32", "f32")
]
DESCRIBED = {each.family: each for each in (MODEL, MIXED, LAYER_NORMS)}
CASES = [
    (name, *kind, shape_class)
    for name, model in DESCRIBED.items()
    for kind in KINDS
    for shape_class in range(class_count(kind[0], model))
]


def described(values: Any) -> list[Value]:
    types = {onnx.TensorProto.FLOAT: "f32", onnx.TensorProto.INT8: "i8", onnx.TensorProto.UINT8: "u8"}
    return [
        Value(
            value.name,
            types[value.type.tensor_type.elem_type],  # type: ignore[arg-type]
            tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim),
        )
        for value in values
    ]


@pytest.mark.parametrize(("name", "role", "weights", "activations", "shape_class"), CASES)
def test_a_graph_has_the_interface_of_its_role(
    name: str, role: GraphRole, weights: GraphWeights, activations: Activations, shape_class: int
) -> None:
    model = onnx.load_from_string(build_graph(role, DESCRIBED[name], shape_class, weights, activations))
    expected = interface(role, DESCRIBED[name], shape_class, weights)
    assert described(model.graph.input) == list(expected.inputs)
    assert described(model.graph.output) == list(expected.outputs)


@pytest.mark.parametrize(("role", "weights", "activations"), KINDS)
def test_a_graph_is_the_same_bytes_every_time_and_standard(
    role: GraphRole, weights: GraphWeights, activations: Activations
) -> None:
    data = build_graph(role, MIXED, 0, weights, activations)
    assert data == build_graph(role, MIXED, 0, weights, activations)
    model = onnx.load_from_string(data)
    assert [(used.domain, used.version) for used in model.opset_import] == [("", 17)]
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ir_version == 8


def test_no_weight_is_baked_into_a_graph() -> None:
    for name, role, weights, activations, shape_class in CASES:
        assert len(build_graph(role, DESCRIBED[name], shape_class, weights, activations)) < 6144


def test_interface_of_the_attention_projections() -> None:
    inputs = interface("qkv", MODEL, 0, "uint8").inputs
    assert [(value.name, value.dtype, value.shape) for value in inputs] == [
        ("x", "f32", ("T", 48)),
        ("cos", "f32", ("T", 8)),
        ("sin", "f32", ("T", 8)),
        ("attention_norm", "f32", (48,)),
        ("q_norm", "f32", (32,)),
        ("k_norm", "f32", (16,)),
        ("q", "u8", (48, 32)),
        ("q.scale", "f32", (32,)),
        ("k", "u8", (48, 16)),
        ("k.scale", "f32", (16,)),
        ("v", "u8", (48, 16)),
        ("v.scale", "f32", (16,)),
    ]
    without_norm = interface("qkv", MODEL, 1, "f32").inputs
    assert [value.name for value in without_norm] == ["x", "cos", "sin", "attention_norm", "q", "k", "v"]


def test_the_router_is_f32_whatever_the_weights() -> None:
    router = next(value for value in interface("out", MODEL, 0, "int8").inputs if value.name == "router")
    assert router == Value("router", "f32", (48, 6))


def test_layers_find_the_layer_classes_each_role() -> None:
    assert MODEL.output_classes == ((0, None, 0), (1, None, 0), (0, None, 1))
    found = {
        role: [layer_classes(MODEL, layer)[role] for layer in range(4)] for role in ("qkv", "attend", "out", "expert")
    }
    assert found == {
        "qkv": [0, 1, 0, 0],
        "attend": [0, 1, 0, 0],
        "out": [0, 1, 2, 0],
        "expert": [0, 0, 1, 0],
    }


@pytest.mark.parametrize(("role", "count"), [("qkv", 2), ("attend", 2), ("out", 3), ("expert", 2), ("head", 1)])
def test_a_shape_class_that_is_not_there_is_refused(role: GraphRole, count: int) -> None:
    for shape_class in (count, -1):
        with pytest.raises(InvalidError, match=rf"shape class {shape_class} of role '{role}', the model has {count}"):
            build_graph(role, MODEL, shape_class, "f32", "f32")


def test_kinds_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidError, match="activations 'f32' do not go with weights 'uint8'"):
        build_graph("expert", MODEL, 0, "uint8", "f32")
    with pytest.raises(InvalidError, match="activations 'dynamic-int8' do not go with weights 'f32'"):
        build_graph("head", MODEL, 0, "f32", "dynamic-int8")
    with pytest.raises(InvalidError, match="weights 'int8' of role 'attend', expected 'f32'"):
        build_graph("attend", MODEL, 0, "int8", "dynamic-int8")
