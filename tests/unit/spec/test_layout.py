"""Where tensors stand in a record."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from estream_spec.constants import TENSOR_ALIGNMENT
from estream_spec.errors import InvalidError
from estream_spec.layout import embedding_layout, expert_layout, final_layout, layer_layout, round_up
from estream_spec.manifest import RecordLayout
from estream_spec.model import Attention, Rotary
from fixtures.packages import MODEL


@pytest.mark.parametrize(
    ("length", "alignment", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (5, 1, 5)]
)
def test_round_up(length: int, alignment: int, expected: int) -> None:
    assert round_up(length, alignment) == expected


def names(layout: RecordLayout) -> list[str]:
    return [tensor.name for tensor in layout.tensors]


def test_records_hold_what_the_format_says_in_its_order() -> None:
    assert names(expert_layout(MODEL, 0, {})) == ["gate", "up", "down"]
    assert names(expert_layout(MODEL, 0, {"up": "w8", "down": "w4g64"})) == [
        "gate",
        "up",
        "up.scale",
        "down.nibbles",
        "down.multipliers",
        "down.scale",
    ]
    assert names(layer_layout(MODEL, 0, {})) == ["attention_norm", "expert_norm", "router", "q", "k", "v", "o"]
    assert names(embedding_layout(MODEL, {"embedding": "w8"})) == ["embedding", "embedding.scale"]
    assert names(final_layout(MODEL, {})) == ["final_norm", "head"]
    assert names(final_layout(replace(MODEL, tied_head=True), {})) == ["final_norm"]


def test_norms_of_queries_and_keys_are_there_when_asked_for() -> None:
    attention = Attention(heads=2, key_value_heads=1, head_dim=16, rotary=Rotary(theta=1.0), qk_norm="full")
    layout = layer_layout(replace(MODEL, attentions=(attention,)), 0, {})
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    assert (shapes["q_norm"], shapes["k_norm"]) == ((32,), (16,))


def test_shapes() -> None:
    model = replace(MODEL, hidden=40)
    shapes = {tensor.name: tensor.shape for tensor in expert_layout(model, 0, {"gate": "w4g32"}).tensors}
    assert shapes == {
        "gate.nibbles": (32, 32),
        "gate.multipliers": (2, 32),
        "gate.scale": (32,),
        "up": (40, 32),
        "down": (32, 40),
    }
    rows = {tensor.name: tensor.shape for tensor in embedding_layout(model, {"embedding": "w8"}).tensors}
    assert rows == {"embedding": (16, 40), "embedding.scale": (16,)}
    columns = {tensor.name: tensor.shape for tensor in final_layout(model, {"head": "w8"}).tensors}
    assert columns == {"final_norm": (40,), "head": (40, 16), "head.scale": (16,)}


def test_tensors_are_aligned_one_behind_the_other() -> None:
    for layout in (layer_layout(MODEL, 0, {"q": "w8"}), expert_layout(MODEL, 0, {"gate": "w4g32"})):
        end = 0
        for tensor in layout.tensors:
            assert tensor.offset == round_up(end, TENSOR_ALIGNMENT)
            end = tensor.offset + tensor.length
        assert layout.payload_length == end


@pytest.mark.parametrize("encoding", ["w4g32", "w4g64"])
def test_an_embedding_is_read_by_rows(encoding: str) -> None:
    with pytest.raises(InvalidError, match="embedding"):
        embedding_layout(MODEL, {"embedding": encoding})  # type: ignore[dict-item]
