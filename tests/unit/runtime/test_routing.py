from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from estream_runtime.routing import by_expert, route
from estream_spec.errors import TrapError
from estream_spec.model import Router

Floats = npt.NDArray[np.float32]
KEEP = Router(family="softmax-topk", top_k=2)
RENORMALISE = Router(family="softmax-topk-renormalise", top_k=2)


def f32(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


@pytest.mark.parametrize(("router", "expected"), [(KEEP, [0.64391, 0.23688]), (RENORMALISE, [0.73106, 0.26894])])
def test_weights_of_each_family(router: Router, expected: list[float]) -> None:
    expert_ids, weights = route(f32([2, 1, 0, -1]), router)
    assert expert_ids.tolist() == [[0, 1]]
    assert weights[0] == pytest.approx(expected, abs=1e-5)
    assert expert_ids.dtype == np.int32
    assert weights.dtype == np.float32


def test_weights_of_all_experts_add_up_to_one() -> None:
    _, weights = route(f32([2, 1, 0, -1]), Router(family="softmax-topk", top_k=4))
    assert weights.sum() == pytest.approx(1, abs=1e-6)


def test_experts_come_from_the_largest_score_down() -> None:
    expert_ids, weights = route(f32([-1, 3, 0, 5, 4]), Router(family="softmax-topk", top_k=3))
    assert expert_ids.tolist() == [[3, 4, 1]]
    assert np.all(np.diff(weights) < 0)


@pytest.mark.parametrize("family", ["softmax-topk", "softmax-topk-renormalise"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_near_ties_are_decided_in_f32(family: str, tokens: int) -> None:
    """The fourth and fifth scores are 1e-4 apart, one unit in the last place apart, and equal, at magnitude 10."""
    router = Router(family=family, top_k=4)  # type: ignore[arg-type]
    above = np.nextafter(np.float32(10), np.float32(11))
    for higher, expected in ((10.0001, 5), (above, 5), (10, 2)):
        row = [12, 0, 10, 11, 0, higher, 13, 0]
        expert_ids, _ = route(f32(*[row] * tokens), router)
        assert expert_ids.tolist() == [[6, 0, 3, expected]] * tokens


def test_equal_scores_go_to_the_lower_ids() -> None:
    expert_ids, weights = route(f32([0.0] * 8, [0, -0.0, 0, 0, 0, 0, 0, -1]), KEEP)
    assert expert_ids.tolist() == [[0, 1], [0, 1]]
    assert weights[0].tolist() == [0.125, 0.125]


@pytest.mark.parametrize("router", [KEEP, RENORMALISE])
def test_extreme_scores(router: Router) -> None:
    expert_ids, weights = route(f32([3e38, -3e38, 0, 1], [-3e38, -3e38, -3e38, -3e38], [1e-45, 0, 0, 0]), router)
    assert expert_ids.tolist() == [[0, 3], [0, 1], [0, 1]]
    assert weights[0].tolist() == [1, 0]
    assert weights[1:].tolist() == ([[0.25, 0.25]] * 2 if router is KEEP else [[0.5, 0.5]] * 2)


def test_a_row_is_routed_alike_alone_and_among_others() -> None:
    scores = np.random.default_rng(3).standard_normal((33, 60)).astype(np.float32)
    router = Router(family="softmax-topk-renormalise", top_k=8)
    expert_ids, weights = route(scores, router)
    for token in range(33):
        alone_ids, alone_weights = route(scores[token : token + 1], router)
        assert np.array_equal(alone_ids[0], expert_ids[token])
        assert np.array_equal(alone_weights[0], weights[token])
    transposed_ids, transposed_weights = route(np.asfortranarray(scores), router)
    assert np.array_equal(transposed_ids, expert_ids)
    assert np.array_equal(transposed_weights, weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_refused(bad: float) -> None:
    scores = np.zeros((3, 4), np.float32)
    scores[2, 1] = bad
    with pytest.raises(TrapError, match=rf"{bad} of token row 2, expert 1 is not finite"):
        route(scores, KEEP)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    """Sigmoids of scores far below 0 are 0 in f32, and so is their sum."""
    low = np.full((1, 3), -200, np.float32)
    with pytest.raises(TrapError, match="weight is not finite"):
        route(low, Router(family="sigmoid-topk-renormalise", top_k=2))
    assert not route(low, Router(family="sigmoid-topk-renormalise", top_k=2, epsilon=1e-20))[1].any()


TEXT = (Path(__file__).parents[3] / "spec" / "FORMAT.md").read_text(encoding="utf-8")
BIASED = Router(family="sigmoid-topk", top_k=2, groups=2, selection_bias=True)
EXAMPLES: list[tuple[Router, list[int], list[float]]] = [
    (Router(family="softmax-topk", top_k=2), [0, 1], [0.64391, 0.23688]),
    (Router(family="softmax-topk-renormalise", top_k=2), [0, 1], [0.73106, 0.26894]),
    (Router(family="sigmoid-topk", top_k=2), [0, 1], [0.8808, 0.73106]),
    (BIASED, [2, 3], [0.5, 0.26894]),
    (Router(family="sparsemixer", top_k=2, tolerance=0.3), [0, 1], [0.73106, 1]),
]


@pytest.mark.parametrize(("router", "experts", "weights"), EXAMPLES)
def test_examples_of_the_format(router: Router, experts: list[int], weights: list[float]) -> None:
    bias = np.array([0, 0, 1, 1], np.float32) if router.selection_bias else None
    chosen, shares = route(np.array([[2, 1, 0, -1]], np.float32), router, bias)
    assert chosen.tolist() == [experts]
    np.testing.assert_allclose(shares, [weights], atol=5e-6)
    examples = TEXT.partition("Examples, with `top_k` 2")[2].partition("###")[0]
    assert all(format(weight, ".5g") in examples for weight in weights)


def test_each_expert_gets_its_tokens_in_order() -> None:
    expert_ids = np.array([[3, 0], [0, 2], [2, 3], [3, 2]], np.int32)
    weights = f32([0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8])
    routed = by_expert(expert_ids, weights, experts=5)
    expected = [([0, 1], [0.2, 0.3]), ([], []), ([1, 2, 3], [0.4, 0.5, 0.8]), ([0, 2, 3], [0.1, 0.6, 0.7]), ([], [])]
    assert routed.counts.tolist() == [2, 0, 3, 3, 0]
    for expert, (rows, shares) in enumerate(expected):
        found_rows, found_weights = routed.tokens_of(expert)
        assert found_rows.tolist() == rows
        assert found_weights.tolist() == np.array(shares, np.float32).tolist()
        assert found_rows.dtype == np.int64
        assert found_weights.dtype == np.float32


def test_every_choice_is_served_once() -> None:
    scores = np.random.default_rng(5).standard_normal((257, 64)).astype(np.float32)
    expert_ids, weights = route(scores, Router(family="softmax-topk", top_k=8))
    routed = by_expert(expert_ids, weights, experts=64)
    dense, expected = np.zeros((257, 64), np.float32), np.zeros((257, 64), np.float32)
    for expert in range(64):
        rows, shares = routed.tokens_of(expert)
        assert np.all(np.diff(rows) > 0)
        dense[rows, expert] += shares
    np.put_along_axis(expected, expert_ids.astype(np.int64), weights, axis=1)
    assert np.array_equal(dense, expected)


def test_all_tokens_to_one_expert() -> None:
    routed = by_expert(np.full((40, 1), 11, np.int32), np.ones((40, 1), np.float32), experts=12)
    assert routed.tokens_of(11)[0].tolist() == list(range(40))
    assert routed.counts.tolist() == [0] * 11 + [40]
