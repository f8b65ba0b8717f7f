"""The shapes are those of the published models: the number of their parameters says so."""

import pytest

from estream_spec.shapes import SHAPES
from fixtures.published import PARAMETERS, parameters


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert parameters(SHAPES[name]) == PARAMETERS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_layers_without_experts_route_to_none(name: str) -> None:
    model = SHAPES[name]
    assert max(model.top_k) > 0
    for layer, (top_k, experts) in enumerate(zip(model.top_k, model.expert_counts, strict=True)):
        assert (top_k > 0) == (layer in model.expert_layers)
        assert top_k <= experts
