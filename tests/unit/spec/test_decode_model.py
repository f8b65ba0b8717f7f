"""The recurrence of decoding, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estream_spec.decode_model import (
    DecodeLayer,
    Reading,
    Strategy,
    decode_token,
    hidden_records,
    needed_by_overlap,
    perfectly_predicted,
)

LAYER = DecodeLayer(
    before_s=3.0, top_k=2, expert_s=0.5, record_bytes=100, read_s=2.0, hit_rate=0.0, needed=(0.8, 0.8, 0.2, 0.1)
)
"""Two experts of 2 s each; attention hides one and a half."""


def time_of(layer: DecodeLayer, strategy: Strategy, extra: int = 0, reading: Reading | None = None) -> float:
    return decode_token([layer], strategy, extra=extra, reading=reading).time_s


def test_without_reading_ahead_each_expert_is_waited_for_after_routing() -> None:
    token = decode_token([LAYER] * 3, "none", after_s=1.0)
    assert token.time_s == pytest.approx(3 * (3 + 2 * 2 + 0.5) + 1)
    assert token.compute_s == pytest.approx(3 * (3 + 2 * 0.5) + 1)
    assert token.stall_s == pytest.approx(token.time_s - token.compute_s)
    assert (token.read_bytes, token.wasted_bytes, token.replaced) == (600, 0, 0)


def test_fixed_reads_all_it_predicts_before_what_is_missing() -> None:
    """Four are read by second 8; 0.8 of those routed to come late, 0.1 is still missing."""
    token = decode_token([LAYER], "fixed", extra=2)
    assert token.time_s == pytest.approx(8 + 0.1 * 2 + 0.8 * 0.5)
    assert token.read_bytes == pytest.approx(410)
    assert token.wasted_bytes == pytest.approx(210)


def test_exact_stops_where_another_read_costs_more_than_it_saves() -> None:
    """Both ranks are worth it: the second hides half of itself, and is right in four of five."""
    assert time_of(LAYER, "exact", extra=2) == pytest.approx(time_of(LAYER, "fixed"))
    unsure = replace(LAYER, needed=(0.8, 0.4))
    assert decode_token([unsure], "exact").read_bytes == pytest.approx(100 * (1 + 1.2))
    assert time_of(replace(LAYER, before_s=0.0), "exact", extra=2) == time_of(replace(LAYER, before_s=0.0), "none")


def test_faultless_prediction_waits_for_no_more_than_cannot_be_hidden() -> None:
    assert time_of(LAYER, "oracle") == pytest.approx(3 + (2 * 2 - 3) + 0.5 * 0.5)
    assert time_of(replace(LAYER, before_s=4.0), "oracle") == pytest.approx(4 + 2 * 0.5)
    assert perfectly_predicted(LAYER).needed == (1.0, 1.0)


def test_stall_free_never_waits_and_replaces_what_is_missing() -> None:
    """One and a half ranks are read in time; the second, half done, holds up the next layer."""
    quick = replace(LAYER, before_s=3.0, expert_s=0.1)
    one = decode_token([quick], "stall-free")
    assert one.time_s == pytest.approx(3.2)
    assert one.stall_s == 0
    assert one.replaced == pytest.approx((2 - 0.8 - 0.4) / 2)
    assert one.read_bytes == 200
    two = decode_token([quick] * 2, "stall-free")
    assert two.time_s == pytest.approx(6.4)
    assert two.replaced > one.replaced
    none_in_time = decode_token([replace(quick, before_s=0.5)] * 2, "stall-free", reading=Reading(start_s=1.0))
    assert (none_in_time.replaced, none_in_time.read_bytes) == (1, 0)


def test_what_is_in_memory_is_not_read() -> None:
    token = decode_token([replace(LAYER, hit_rate=1.0)], "fixed", extra=2, reading=Reading(start_s=9.0, toll_s=9.0))
    assert (token.time_s, token.read_bytes, token.stall_s) == (4.0, 0, 0)


def test_dense_block_hides_reading_that_follows_routing() -> None:
    assert time_of(replace(LAYER, beside_s=2.0), "none") == time_of(LAYER, "none")
    assert time_of(replace(LAYER, beside_s=9.0), "none") == pytest.approx(3 + 9 + 2 * 0.5)


def test_slow_computing_begins_with_the_first_that_arrives() -> None:
    assert time_of(replace(LAYER, expert_s=5.0), "none") == pytest.approx(3 + 2 + 2 * 5)


def test_reads_take_time_to_begin_and_from_computing() -> None:
    started = Reading(start_s=0.5)
    assert time_of(LAYER, "none", reading=started) == pytest.approx(time_of(LAYER, "none") + 0.5)
    assert time_of(LAYER, "oracle", reading=started) == pytest.approx(time_of(LAYER, "oracle") + 0.5 + 0.5 * 0.25)
    tolled = Reading(toll_s=0.001)
    assert time_of(LAYER, "fixed", reading=tolled) == pytest.approx(time_of(LAYER, "fixed") + 0.2)


def test_layer_without_experts_takes_its_time() -> None:
    plain = DecodeLayer(before_s=2.0, beside_s=1.0)
    for strategy in ("none", "fixed", "exact", "stall-free", "oracle"):
        token = decode_token([plain], strategy, extra=3, after_s=0.5)
        assert (token.time_s, token.compute_s, token.read_bytes, token.replaced) == (3.5, 3.5, 0, 0)


def test_hidden_records_is_the_hiding_condition() -> None:
    assert hidden_records(LAYER) == 1.5
    assert hidden_records(DecodeLayer(before_s=1.0)) == float("inf")


def test_ranks_cover_what_the_overlap_says() -> None:
    overlap = ((1.0, 0.9), (3.0, 0.975))
    ranks = needed_by_overlap(4, 16, overlap)
    assert len(ranks) == 16
    assert sum(ranks[:5]) / 4 == pytest.approx(0.9)
    assert sum(ranks[:7]) / 4 == pytest.approx(0.975)
    assert sum(ranks[:4]) / 4 == pytest.approx(1 - 0.1 * 2)  # half of what is missed for each extra expert
    assert sum(ranks[:9]) / 4 == pytest.approx(1 - 0.025 / 4)
    assert list(ranks) == sorted(ranks, reverse=True)
