"""The model that the programs compared with run: what its file holds, and that no expert is preferred."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from msgspec.structs import replace

from bench.gguf_model import LABELS, Label, planned, write_gguf
from bench.routing import gguf_routing
from estream_spec.model import Attention, Layer, Rotary
from estream_spec.shapes import OLMOE_1B_7B

MODEL = replace(
    OLMOE_1B_7B,
    hidden=128,
    vocabulary=512,
    layers=(Layer(attention=0, experts=0),) * 2,
    attentions=(Attention(heads=4, key_value_heads=4, head_dim=32, rotary=Rotary(theta=10000.0), qk_norm="full"),),
    expert_blocks=(replace(OLMOE_1B_7B.expert_blocks[0], experts=16, intermediate=64),),
)
TOKENS = 200


@pytest.fixture(params=LABELS)
def label(request: pytest.FixtureRequest) -> Label:
    label: Label = request.param
    return label


@pytest.fixture
def path(tmp_path: Path, label: Label) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, MODEL, label)
    return path


def test_a_file_holds_every_tensor_in_its_shape(path: Path, label: Label) -> None:
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    shapes = {name: tuple(reversed(each.shape.tolist())) for name, each in tensors.items()}
    assert shapes == {each.name: each.shape for each in planned(MODEL, label)}


def test_weights_have_the_deviation_they_were_given_and_no_mean(path: Path, label: Label) -> None:
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for each in planned(MODEL, label):
        weights = gguf.dequantize(tensors[each.name].data, tensors[each.name].tensor_type)
        if each.deviation is None:
            assert (weights == 1).all()
        else:
            assert np.std(weights) == pytest.approx(each.deviation, rel=0.05)
            assert abs(np.mean(weights)) < 5 * each.deviation / np.sqrt(weights.size)


def test_no_expert_is_preferred_in_any_layer(path: Path) -> None:
    layers = list(gguf_routing(path, TOKENS))
    assert len(layers) == len(MODEL.layers)
    assert all(each.even and each.counts.sum() == TOKENS * 8 for each in layers)


def test_a_model_with_a_mean_below_zero_prefers_experts(
    tmp_path: Path, label: Label, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    pairs = np.array([high << 4 | low for high in range(12) for low in range(12)], np.uint8)
    monkeypatch.setattr("bench.gguf_model.PAIRS", pairs)
    write_gguf(path, MODEL, label)
    assert not all(each.even for each in gguf_routing(path, TOKENS))
