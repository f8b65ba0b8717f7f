"""The shapes are those of the published models: the number of their parameters says so."""

from math import prod

import pytest

from estream_spec.layout import embedding_layout, expert_layout, final_layout, layer_layout
from estream_spec.manifest import RecordLayout
from estream_spec.model import ModelDescription
from estream_spec.shapes import SHAPES

QK_NORM_OF_ALL_HEADS = 48 * ((32 + 4) * 128 - 2 * 128)
"""What Qwen3's shape has beyond the model, which has one norm weight for all heads of a layer."""
PARAMETERS = {
    "olmoe-1b-7b": 6_919_161_856,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624 + QK_NORM_OF_ALL_HEADS,
}


def parameters(model: ModelDescription) -> int:
    def elements(layout: RecordLayout) -> int:
        return sum(prod(tensor.shape) for tensor in layout.tensors)

    layers = range(len(model.layers))
    experts = (elements(expert_layout(model, layer.experts or 0, {})) for layer in model.layers)
    return (
        elements(embedding_layout(model, {}))
        + sum(elements(layer_layout(model, layer, {})) for layer in layers)
        + sum(model.expert_block(layer).experts * each for layer, each in zip(layers, experts, strict=True))
        + elements(final_layout(model, {}))
    )


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert parameters(SHAPES[name]) == PARAMETERS[name]
