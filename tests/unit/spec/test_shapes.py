"""The shapes are those of the published models: the number of their parameters says so."""

import pytest

from estream_spec.shapes import SHAPES
from fixtures.published import PARAMETERS, parameters


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert parameters(SHAPES[name]) == PARAMETERS[name]
