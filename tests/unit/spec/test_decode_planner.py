"""How decoding is planned, and what is said of prefetching."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from estream_packer.planning import find_workload
from estream_spec.decode_planner import (
    STRATEGIES,
    DecodePlan,
    cache_bytes,
    decode_layers,
    expert_shape,
    hit_rates,
    kept_records,
    plan_decoding,
)
from estream_spec.planner import addressable_arena, available_arena
from estream_spec.profile import DeviceProfile, Duration
from estream_spec.profiles import shipped_profile
from estream_spec.shapes import LFM2_8B_A1B, OLMOE_1B_7B
from fixtures.estream import device
from fixtures.estream import workload as stored

GIB = 1 << 30
MIB = 1 << 20
FLASH = shipped_profile("ufs-4.1")


def plan(memory_bytes: int, profile: DeviceProfile = FLASH, tokens: int = 64) -> DecodePlan:
    return plan_decoding(stored("olmoe-1b-7b"), profile, memory_bytes, tokens)


def test_decoding_wants_all_memory_that_the_prompt_leaves() -> None:
    model = stored("olmoe-1b-7b")
    found = plan(GIB)
    record = max(model.record_lengths)
    assert found.arena_cap == available_arena(model, FLASH, GIB, 64) - cache_bytes(OLMOE_1B_7B, 64)
    assert found.slots == found.arena_cap // record
    assert found.arena_bytes == found.slots * record
    assert plan(GIB, tokens=1024).slots < found.slots < plan(2 * GIB).slots


def test_keys_and_values_of_all_layers_are_kept() -> None:
    assert cache_bytes(OLMOE_1B_7B, 10) == 4 * 10 * 16 * 16 * 256
    attention = [layer for layer in LFM2_8B_A1B.layers if layer.attention is not None]
    assert cache_bytes(LFM2_8B_A1B, 10) == 4 * 10 * len(attention) * 8 * 128


def test_arena_is_one_that_the_accelerator_can_address() -> None:
    elite = shipped_profile("snapdragon-8-elite")
    model = stored("qwen3-30b-a3b")
    found = plan_decoding(model, elite, 64 * GIB, 64)
    assert found.arena_bytes <= addressable_arena(model, elite, 64) < 2 * GIB


def test_no_more_slots_than_experts() -> None:
    assert plan_decoding(stored("qwen3-30b-a3b"), FLASH, 64 * GIB, 64).slots == 48 * 128
    assert plan(64 * GIB).slots == 16 * 64


def test_without_room_for_a_tokens_experts_nothing_is_promised() -> None:
    least = available_arena(stored("olmoe-1b-7b"), FLASH, 0, 64)
    record = max(stored("olmoe-1b-7b").record_lengths)
    need = cache_bytes(OLMOE_1B_7B, 64) - least
    tight, less = plan(need + 8 * record), plan(need + 8 * record - 1)
    assert (tight.slots, len(tight.ways)) == (8, 3)
    assert (less.slots, less.arena_bytes, less.ways, less.prefetching_pays) == (0, 0, (), False)


def test_nothing_is_read_ahead_where_all_is_there_or_a_tokens_experts_take_all_room() -> None:
    model = stored("olmoe-1b-7b")
    need = cache_bytes(OLMOE_1B_7B, 64) - available_arena(model, FLASH, 0, 64)
    record = max(model.record_lengths)
    for slots, reads_ahead in ((8, False), (128, False), (129, True), (1023, True), (1024, False)):
        found = plan(need + slots * record)
        assert (found.slots, found.reads_ahead) == (slots, reads_ahead)
        if not reads_ahead:
            assert len({(way.time_s, way.read_bytes) for way in found.ways}) == 1
            assert not found.prefetching_pays


def test_more_memory_means_more_hits_and_faster_tokens() -> None:
    plans = [plan(memory) for memory in (GIB, 2 * GIB, 3 * GIB, 64 * GIB)]
    for number in range(3):
        ways = [found.ways[number] for found in plans]
        assert [way.strategy for way in ways] == [STRATEGIES[number]] * 4
        assert [way.hit_rate for way in ways] == sorted(way.hit_rate for way in ways)
        assert [way.time_s for way in ways] == sorted((way.time_s for way in ways), reverse=True)
    for way in plans[-1].ways:
        assert (way.hit_rate, way.read_bytes, way.stall_s) == (1, 0, 0)


def test_records_that_layers_keep_are_those_of_the_program() -> None:
    shape = expert_shape(stored("olmoe-1b-7b"))
    assert kept_records(shape, 1024, predicts=False) == (64,) * 16
    assert kept_records(shape, 176, predicts=False) == (11,) * 16
    assert kept_records(shape, 176, predicts=True) == (10,) * 16  # sixteen are free for reading ahead
    assert kept_records(shape, 8, predicts=False) == (0,) * 16
    dense = expert_shape(find_workload("deepseek-v2-lite")[1])
    assert kept_records(dense, 260, predicts=False) == (0, *(10,) * 26)


def test_a_prefetch_router_counts_by_what_it_was_measured_at() -> None:
    model = stored("olmoe-1b-7b")
    faultless = replace(model, needed=((1.0,) * 8 + (0.0,) * 56,) * 16)
    useless = replace(model, needed=((0.125,) * 64,) * 16)
    published, right, wrong = (plan_decoding(each, FLASH, GIB, 64).ways for each in (model, faultless, useless))
    assert right[1].time_s == right[2].time_s < published[1].time_s < published[0].time_s
    assert wrong[1].time_s > published[1].time_s


def test_hits_are_the_share_of_experts_that_a_layer_keeps() -> None:
    assert hit_rates((4, 0, 8), (2, 0, 8)) == (0.5, 0.0, 1.0)


def test_prefetching_pays_where_attention_takes_as_long_as_reading() -> None:
    """A phone's attention takes a fifth of a read; where it took a hundred times longer, it would hide all of them."""
    phone = shipped_profile("snapdragon-8-elite-gen-5")
    found = plan(GIB, phone)
    assert not found.prefetching_pays
    assert found.saving < found.best_saving < 0.04
    assert 0.1 < found.hidden_records < 0.5
    slow = msgspec.structs.replace(phone, head_weight_s=Duration(value=1.3e-9, basis="estimated", source="a test"))
    assert plan(GIB, slow).prefetching_pays
    assert plan(GIB, slow).hidden_records > 8


def test_energy_is_told_where_the_profile_has_figures() -> None:
    none, _, oracle = plan(GIB).ways
    assert none.energy is not None
    assert oracle.energy is not None
    assert oracle.energy.idle_j < none.energy.idle_j
    assert none.energy.read_j == pytest.approx(none.read_bytes * 417e-12)
    assert all(way.energy is None for way in plan(2 * GIB, device()).ways)


def test_layer_is_bound_by_operations_or_by_bytes() -> None:
    """A token passes 16.9 million numbers of a layer; operations count where they take longer."""
    [bytes_bound, *_] = decode_layers(stored("olmoe-1b-7b"), FLASH, 0, [0.5] * 16, 2)
    weights = 4 * 2048**2 + 2048 * 64
    assert bytes_bound.before_s == pytest.approx(weights * 5e-11)
    assert (bytes_bound.beside_s, bytes_bound.top_k, bytes_bound.hit_rate) == (0, 8, 0.5)
    [longer, *_] = decode_layers(stored("olmoe-1b-7b"), FLASH, 1000, [0.5] * 16, 2)
    assert longer.before_s == pytest.approx((weights + 1000 * 4096) * 5e-11)
    [bound, *_] = decode_layers(stored("olmoe-1b-7b"), device(), 0, [0.5] * 16, 2)
    assert bound.before_s == pytest.approx(2 * weights / 6.6e12)


def test_dense_blocks_stand_beside_experts_or_in_their_place() -> None:
    first, second, *_ = decode_layers(find_workload("deepseek-v2-lite")[1], FLASH, 0, [0.0] * 27, 2)
    assert (first.top_k, first.beside_s, first.record_bytes) == (0, 0, 0)
    assert second.top_k == 6
    assert second.beside_s == pytest.approx(3 * 2048 * 2816 * 5e-11)
