"""What graphs inside a binary take and give, and how it is called. FORMAT.md section 10.3."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from estream_spec.binary_interface import fixed_interface, label, label_of, tensor_name
from estream_spec.errors import InvalidError
from estream_spec.graph_interface import ROLES, Value, interface, role_shape
from estream_spec.manifest import BinaryGraph, GraphRole
from estream_spec.model import Convolution, DenseBlock
from estream_spec.weights import Encoding
from fixtures.packages import MODEL

TEXT = (Path(__file__).parents[3] / "spec" / "FORMAT.md").read_text(encoding="utf-8")


def graph(role: GraphRole, *encodings: Encoding, tokens: int = 64, keys: int = 0) -> BinaryGraph:
    return BinaryGraph(name="g", role=role, shape_class=0, tokens=tokens, keys=keys, encodings=encodings)


def test_names_and_shapes_are_those_of_the_text() -> None:
    found = fixed_interface("expert", MODEL, 0, 64, encodings=("w8", "w4g32", "f32"))
    assert found.inputs == (
        Value("normed", "f32", (64, 32)),
        Value("gate", "i8", (32, 32)),
        Value("gate.scale", "f32", (32,)),
        Value("up.nibbles", "u8", (16, 32)),
        Value("up.multipliers", "i8", (1, 32)),
        Value("up.scale", "f32", (32,)),
        Value("down", "f32", (32, 32)),
    )
    assert found.outputs == (Value("y", "f32", (64, 32)),)
    own = label_of(graph("expert", "w8", "w8", "w8"))
    names = [tensor_name(own, each) for each in ("gate", "gate.scale")]
    assert f"`gate` of\n`{own}` is two inputs, `{names[0]}` and `{names[1]}`" in TEXT


def test_labels() -> None:
    assert label_of(graph("attend", tokens=32, keys=4096)) == "attend_0_32_4096"
    assert label_of(graph("out", "w4g64", tokens=128)) == "out_0_w4g64_128"
    assert label("head", 3, 1, encodings=("f32",)) == "head_3_f32_1"


@pytest.mark.parametrize("role", ROLES)
def test_no_dimension_is_left_open_and_all_else_is_as_in_portable_graphs(role: GraphRole) -> None:
    f32: Encoding = "f32"
    model = replace(MODEL, dense_blocks=(DenseBlock(intermediate=7),), convolutions=(Convolution(taps=2),))
    encodings = (f32,) * len(role_shape(role, model, 0).matrices)
    fixed, portable = fixed_interface(role, model, 0, 5, 9, encodings), interface(role, model, 0, "f32")
    sizes = {"T": 5, "S": 9}
    for one, other in ((fixed.inputs, portable.inputs), (fixed.outputs, portable.outputs)):
        assert [(each.name, each.dtype) for each in one] == [(each.name, each.dtype) for each in other]
        assert [each.shape for each in one] == [
            tuple(sizes[size] if isinstance(size, str) else size for size in each.shape) for each in other
        ]


@pytest.mark.parametrize(
    ("role", "shape_class", "encodings"),
    [("expert", 0, ("w8", "w8")), ("attend", 0, ("f32",)), ("out", 0, ()), ("expert", 1, ("w8",) * 3)],
)
def test_what_no_graph_can_be(role: GraphRole, shape_class: int, encodings: tuple[Encoding, ...]) -> None:
    with pytest.raises(InvalidError):
        fixed_interface(role, MODEL, shape_class, 32, 32, encodings)
