"""Every feature that a model may have, compiled and computed by the simulator, against the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from estream_packer.htp.proof import MOST_ERROR, prove_here
from estream_runtime.backends.htp import HtpBackend
from estream_spec.graph_interface import ROLES, class_count, role_shape
from estream_spec.manifest import GraphRole
from fixtures.compiled import CHIP, Array, case, compiled_features, encoded, expected_of, worst_row
from fixtures.models import LAYER_NORMS, MIXED, MODELS

FEATURES: list[tuple[str, GraphRole, int]] = [
    (model.family, role, index)
    for model in (MIXED, LAYER_NORMS)
    for role in ROLES
    for index in range(class_count(role, model))
]


@pytest.fixture(scope="module")
def opened() -> Callable[[str], HtpBackend]:
    """`opened(name)`: the backend over all graphs of a model."""

    @cache
    def open_model(name: str) -> HtpBackend:
        made = compiled_features(name)
        return HtpBackend(MODELS[name], made.data, made.graphs, CHIP)

    return open_model


@pytest.mark.parametrize(("name", "role", "shape_class"), FEATURES)
def test_a_graph_computes_what_the_reference_does(
    name: str, role: GraphRole, shape_class: int, opened: Callable[[str], HtpBackend]
) -> None:
    """More rows than a tile has, the second of which is not full."""
    model = MODELS[name]
    encodings = encoded(role, "w8", model, shape_class)
    given = case(role, shape_class, encodings, 40, 64 if role == "attend" else 0, model)
    found, expected = (
        opened(name).run(role, shape_class, given.stored),
        expected_of(role, shape_class, given.plain, model),
    )
    assert found.keys() == expected.keys()
    for output, array in found.items():
        assert worst_row(array, expected[output]) < MOST_ERROR, output


@pytest.mark.parametrize(("name", "role", "shape_class"), FEATURES)
def test_a_row_comes_out_the_same_alone_and_among_others(
    name: str, role: GraphRole, shape_class: int, opened: Callable[[str], HtpBackend]
) -> None:
    model = MODELS[name]
    shape = role_shape(role, model, shape_class)
    given = case(role, shape_class, encoded(role, "w8", model, shape_class), 40, 64 if role == "attend" else 0, model)
    whole = opened(name).run(role, shape_class, given.stored)
    rows = {each.name: each.shape.index("T") for each in (*shape.inputs, *shape.outputs) if "T" in each.shape}
    for row in (0, 39):
        alone = {each: array.take([row], rows[each]) if each in rows else array for each, array in given.stored.items()}
        for output, array in opened(name).run(role, shape_class, alone).items():
            assert np.array_equal(array, whole[output].take([row], rows[output])), output


@pytest.mark.parametrize("name", ["mixed", "layer-norms"])
def test_every_graph_is_proven(name: str) -> None:
    """On rows of all kinds, and biases, sinks and shares such as models have."""
    made = compiled_features(name)
    errors = {graph.name: prove_here(made.data, graph, MODELS[name], CHIP).error for graph in made.graphs}
    assert max(errors.values()) < MOST_ERROR, errors


@pytest.mark.parametrize("name", ["mixed", "layer-norms"])
def test_norms_of_rows_with_numbers_as_large_as_fp16_has(name: str, opened: Callable[[str], HtpBackend]) -> None:
    """Some channels of trained models are that far from others; 1 divided by such a number is 0 to the processor."""
    model = MODELS[name]
    given = case("convolve", 0, encoded("convolve", "w8", model), 7, model=model)
    rows: Array = given.stored["x"]
    rows[:, 5] = np.array([1e3, 1.5e4, 1.7e4, -2e4, 4e4, -6e4, 6.5e4], np.float16)
    found, expected = opened(name).run("convolve", 0, given.stored), expected_of("convolve", 0, given.plain, model)
    assert worst_row(found["exit"], expected["exit"]) < MOST_ERROR


def test_large_numbers_pass_a_dense_block(opened: Callable[[str], HtpBackend]) -> None:
    """What `up` makes is beyond 16384, of whose reciprocal the same is true; what comes out is not."""
    given = case("dense", 0, encoded("dense", "w8", MIXED), 32, model=MIXED)
    for name, factor in (("dense_up", 1e4), ("dense_down", 1 / 256)):
        given.stored[f"{name}.scale"] *= np.float32(factor)
        given.plain[name] *= np.float32(factor)
    assert np.abs(given.plain["normed"] @ given.plain["dense_up"]).max() > 16384
    found, expected = opened("mixed").run("dense", 0, given.stored), expected_of("dense", 0, given.plain, MIXED)
    assert worst_row(found["y"], expected["y"]) < MOST_ERROR


@pytest.mark.parametrize("size", [-6e4, -100, 100, 6e4])
def test_a_clamped_gate_may_be_as_large_as_fp16_lets_it(size: float, opened: Callable[[str], HtpBackend]) -> None:
    given = case("expert", 0, encoded("expert", "w8", MIXED), 4, model=MIXED)
    for name in ("gate.bias", "up.bias"):
        given.stored[name][:] = size  # both forms share it
    found, expected = opened("mixed").run("expert", 0, given.stored), expected_of("expert", 0, given.plain, MIXED)
    assert worst_row(found["y"], expected["y"]) < MOST_ERROR
