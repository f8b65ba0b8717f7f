"""The numerics of `train-prefetch`, on data whose answer is known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from estream_packer.prefetch.blocks import (
    BLOCK_CHARACTERS,
    CYCLE,
    LEAST_BLOCKS,
    PURPOSES,
    blocks_of,
    windows_by_purpose,
)
from estream_packer.prefetch.calibrating import calibrated_target, missed, needed_by_rank, ranks_of
from estream_packer.prefetch.confidence import chances, extras_needed, fit_confidence
from estream_packer.prefetch.fitting import chosen_by_scores, fit_linear
from estream_packer.prefetch.recording import Recorded
from estream_packer.prefetch.report import (
    Bin,
    Measured,
    binned,
    calibration_error,
    fixed_curve,
    fixed_extra,
    mean_curve,
    measured,
    previous_overlap,
    together,
)
from estream_spec.errors import PackError
from estream_spec.model import Router
from estream_spec.weights import Floats

HIDDEN, EXPERTS, TOP_K = 24, 8, 2
ROUTER = Router(family="softmax-topk", top_k=TOP_K)


def rows_of(count: int, seed: int) -> Floats:
    rows = np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)
    found: Floats = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    return found


def recorded_from(weights: Floats, count: int, seed: int) -> Recorded:
    """Tokens whose router says just what a map gives."""
    rows = rows_of(count, seed)
    scores = rows @ weights
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    return Recorded(rows.astype(np.float16), scores, chosen.astype(np.int32))


def test_blocks_are_the_text_in_whole_paragraphs() -> None:
    text = "".join(f"{'word ' * (number % 90 + 1)}\n\n" for number in range(200))
    blocks = list(blocks_of(text))
    assert "".join(blocks) == text
    assert all(block.endswith("\n\n") for block in blocks)
    assert all(BLOCK_CHARACTERS <= len(block) <= 2 * BLOCK_CHARACTERS for block in blocks[:-1])


def test_a_text_without_paragraphs_is_cut_and_ends_of_lines_do_not_matter() -> None:
    assert [len(block) for block in blocks_of("x" * (3 * BLOCK_CHARACTERS))] == [2 * BLOCK_CHARACTERS, BLOCK_CHARACTERS]
    paragraph = "y" * BLOCK_CHARACTERS
    assert list(blocks_of(f"{paragraph}\r\n\r\n{paragraph}")) == [f"{paragraph}\r\n\r\n", paragraph]
    assert list(blocks_of("")) == []


def test_texts_take_turns_and_no_token_serves_two_purposes() -> None:
    paragraphs = [[f"{text}{number:02}".ljust(BLOCK_CHARACTERS) + "\n\n" for number in range(30)] for text in "ab"]
    ids = {
        block: number for number, block in enumerate(block for pair in zip(*paragraphs, strict=True) for block in pair)
    }
    found = windows_by_purpose(["".join(each) for each in paragraphs], 1 << 20, 4, lambda block: [ids[block]] * 6)
    assert set(found) == set(PURPOSES)
    seen = [id_ for windows in found.values() for window in windows for id_ in window]
    assert Counter(seen) == dict.fromkeys(range(60), 6)
    assert all(len(window) in (4, 2) for windows in found.values() for window in windows)
    for purpose in PURPOSES:
        blocks = {window[0] for window in found[purpose]}
        assert blocks == {number for number in range(60) if CYCLE[number % len(CYCLE)] == purpose}


def test_only_as_many_tokens_are_used_as_was_said() -> None:
    text = "z" * (2 * BLOCK_CHARACTERS * 40)
    found = windows_by_purpose([text], 1000, 64, lambda block: [7] * 100)
    assert sum(len(window) for windows in found.values() for window in windows) == 1000
    with pytest.raises(PackError, match=rf"text is too short: 5 blocks .* expected {LEAST_BLOCKS}"):
        windows_by_purpose([text], 500, 64, lambda block: [7] * 100)


@pytest.mark.parametrize("start", ["router", "least-squares"])
def test_training_finds_the_map_wherever_it_begins(start: str) -> None:
    random = np.random.default_rng(3)
    weights = random.standard_normal((HIDDEN, EXPERTS)).astype(np.float32) / np.float32(2)
    gain = random.uniform(0.5, 2, HIDDEN).astype(np.float32)
    router = weights / gain[:, None] if start == "router" else random.standard_normal(weights.shape).astype(np.float32)
    tensors = {"expert_norm": gain, "router": router}
    train, stop = (recorded_from(weights, count, count) for count in (3000, 300))
    fitted = fit_linear(train, stop, tensors, ROUTER, np.random.default_rng(0))
    assert fitted.start == start
    assert fitted.loss <= fitted.start_loss
    assert fitted.loss < 1e-3
    np.testing.assert_array_equal(fitted.linear.weights, fitted.linear.weights.astype(np.float16))
    ranking = np.argsort(-fitted.linear.scores(rows_of(500, 9)), axis=1)[:, :TOP_K].astype(np.int32)
    assert missed(ranks_of(np.argsort(-(rows_of(500, 9) @ weights), axis=1).astype(np.int32), ranking), TOP_K) < 0.02


def test_biases_of_norm_and_router_are_part_of_the_untrained_map() -> None:
    random = np.random.default_rng(5)
    tensors = {
        "expert_norm": random.standard_normal(HIDDEN).astype(np.float32),
        "expert_norm.bias": random.standard_normal(HIDDEN).astype(np.float32),
        "router": random.standard_normal((HIDDEN, EXPERTS)).astype(np.float32),
        "router.bias": random.standard_normal(EXPERTS).astype(np.float32),
    }
    rows = rows_of(50, 1)
    scores = (rows * tensors["expert_norm"] + tensors["expert_norm.bias"]) @ tensors["router"] + tensors["router.bias"]
    found = recorded_from(random.standard_normal((HIDDEN, EXPERTS)).astype(np.float32), 300, 2)
    fitted = fit_linear(found, found, tensors, ROUTER, np.random.default_rng(0))
    np.testing.assert_allclose(fitted.untrained.scores(rows), scores, rtol=1e-4, atol=1e-4)


def test_experts_that_could_not_be_chosen_are_ranked_behind_and_nothing_is_nan() -> None:
    weights = np.random.default_rng(1).standard_normal((HIDDEN, EXPERTS)).astype(np.float32) / np.float32(20)
    found = recorded_from(weights, 2000, 4)
    preferences = found.preferences.copy()
    preferences[:, 3:5] = -np.inf
    masked = Recorded(found.rows, preferences, found.experts)
    router = Router(family="sigmoid-topk", top_k=TOP_K, groups=4, top_groups=2)
    assert not chosen_by_scores(router)
    fitted = fit_linear(
        masked,
        masked,
        {"expert_norm": np.ones(HIDDEN, np.float32), "router": weights},
        router,
        np.random.default_rng(0),
    )
    assert np.isfinite(fitted.loss)
    first = np.argsort(-fitted.linear.scores(rows_of(500, 8)), axis=1)[:, :TOP_K]
    assert np.isin(first, [3, 4]).mean() < 0.02
    assert fitted.loss < 0.05  # though shares differ by little, their order is learned


def test_confidence_finds_the_model_that_made_the_data() -> None:
    random = np.random.default_rng(0)
    features = random.standard_normal((60_000, 3)).astype(np.float32)
    thetas, weights = np.array([-1.0, 0.5, 2.0]), np.array([1.0, -2.0, 0.0])
    told = 1 / (1 + np.exp(-(thetas - (features @ weights)[:, None])))
    needed = (random.uniform(size=(len(told), 1)) > told).sum(axis=1).astype(np.int32)
    found = fit_confidence(features, needed, 3)
    np.testing.assert_allclose(found.weights, weights, atol=0.05)
    np.testing.assert_allclose(found.thresholds[:3], thetas, atol=0.06)
    np.testing.assert_allclose(chances(features, found)[:, :3], told, atol=0.04)
    bins = binned(chances(features, found), np.arange(4) >= needed[:, None])
    assert calibration_error(bins) < 0.01


def test_thresholds_never_fall_and_stay_finite() -> None:
    random = np.random.default_rng(1)
    features = np.concatenate([random.standard_normal((40, 5)), np.full((40, 1), 3.0)], axis=1).astype(np.float32)
    for needed in (np.zeros(40), np.full(40, 6), random.integers(0, 3, 40)):  # always enough; never; few rows
        found = fit_confidence(features, needed.astype(np.int32), 6)
        assert np.isfinite(found.thresholds).all()
        assert np.isfinite(found.weights).all()
        assert (np.diff(found.thresholds) >= 0).all()
    only = fit_confidence(features, np.zeros(40, np.int32), 0)
    assert only.thresholds.shape == (1,)


def test_ranks_extras_and_how_often_a_rank_is_needed() -> None:
    ranking = np.array([[2, 0, 3, 1], [1, 3, 0, 2]], np.int32)
    ranks = ranks_of(ranking, np.array([[0, 2], [2, 1]], np.int32))
    assert ranks.tolist() == [[1, 0], [3, 0]]
    assert extras_needed(ranks, 2).tolist() == [0, 2]
    assert needed_by_rank(ranks, 4).tolist() == [1.0, 0.5, 0.0, 0.5]
    assert missed(ranks, 2) == 0.25
    assert missed(ranks, np.array([1, 4], np.int32)) == 0.25


def test_the_target_is_the_least_that_keeps_the_promise() -> None:
    random = np.random.default_rng(2)
    doubts, thresholds = random.standard_normal(2000).astype(np.float32), np.arange(-2, 5, dtype=np.float32)
    ranks = np.stack([np.zeros(2000), random.integers(0, 8, 2000)], axis=1).astype(np.int32)

    def share_missed(target: float) -> float:
        told = 1 / (1 + np.exp(doubts[:, None] - thresholds))
        sure = told >= target
        extras = np.where(sure.any(axis=1), sure.argmax(axis=1), len(thresholds) - 1)
        return (missed(ranks, (2 + extras).astype(np.int32)) * 2000 + 1) / 2001

    for overlap in (0.7, 0.8, 0.95):
        target = calibrated_target(doubts, thresholds, ranks, overlap)
        assert share_missed(target) <= 1 - overlap + 1e-3  # one token may be where rounding decides
        assert share_missed(target - 2e-3) > 1 - overlap
    everywhere = np.full((2000, 2), 9, np.int32)
    assert calibrated_target(doubts, thresholds, everywhere, 0.9) == 1.0  # out of reach: all are asked for


def test_predicted_sets_are_judged_by_hand() -> None:
    ranks = np.array([[0, 1], [0, 3]], np.int32)
    assert measured(ranks, 0) == Measured(overlap=0.75, covered=0.5, precision=0.75, extra=0.0)
    assert measured(ranks, np.array([0, 2], np.int32)) == Measured(overlap=1, covered=1, precision=4 / 6, extra=1.0)
    curve = fixed_curve(ranks, 5)
    assert [each.overlap for each in curve] == [0.75, 0.75, 1.0, 1.0]
    assert fixed_extra(curve, 0.7) == 0
    assert fixed_extra(curve, 0.875) == 1.5
    assert fixed_extra(curve, 1.0) == 2.0
    assert [each.extra for each in mean_curve([curve, curve[:1]])] == [0, 0.5, 1, 1.5]


def test_the_token_before_tells_nothing_where_a_window_begins() -> None:
    needed = np.array([[0, 1], [1, 2], [3, 4], [4, 3]], np.int32)
    assert previous_overlap(needed, np.array([True, False, True, False])) == 0.75
    assert previous_overlap(needed[:1], np.array([True])) == 0


def test_chances_are_held_against_what_happened_in_bins() -> None:
    told = np.array([[0.05, 0.95, 1.0], [0.05, 0.95, 1.0]])
    bins = binned(told, np.array([[False, True, True], [True, True, True]]))
    assert bins == (Bin(count=2, told=0.05, found=0.5), Bin(count=2, told=0.95, found=1.0))
    assert calibration_error(bins) == pytest.approx(0.25)
    both = together([bins, (Bin(count=6, told=0.01, found=0.0),)])
    assert [each.count for each in both] == [8, 2]
    assert both[0].told == pytest.approx(0.02)
    assert both[0].found == pytest.approx(0.125)
    assert calibration_error(()) == 0
