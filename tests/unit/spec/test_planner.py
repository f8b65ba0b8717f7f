"""What the planner chooses, and why."""

from dataclasses import replace
from itertools import pairwise
from math import ceil
from operator import attrgetter

import msgspec
import numpy as np
import pytest

from estream_spec.errors import LinkError
from estream_spec.planner import (
    Prediction,
    choose,
    choose_lanes,
    configure,
    frontier,
    group_sizes,
    predictions,
)
from estream_spec.profile import Count, DeviceProfile, Duration, NpuLimits
from estream_spec.profiles import shipped_profile
from estream_spec.recurrence import simulate
from estream_spec.routing_load import expected_load, shares_of
from estream_spec.shapes import OLMOE_1B_7B
from estream_spec.sizes import bytes_text
from estream_spec.workload import RUNTIME_BYTES, Workload, activation_bytes, grouped_work
from fixtures.estream import device, workload

GIB = 1 << 30
MIB = 1 << 20
ELITE = shipped_profile("snapdragon-8-elite-gen-5")


def with_npu(buffer_bytes: int, session_bytes: int) -> DeviceProfile:
    def count(value: int) -> Count:
        return Count(value=value, basis="estimated", source="a test")

    limits = NpuLimits(buffer_bytes=count(buffer_bytes), session_bytes=count(session_bytes))
    return msgspec.structs.replace(device(), npu=limits)


def prediction(arena_bytes: int, time_s: float) -> Prediction:
    return Prediction(
        mode="paged",
        policy="pre-routing",
        arena_bytes=arena_bytes,
        group_size=1,
        prefetch_depth=1,
        lanes=1,
        time_s=time_s,
        bubble=0,
        io_floor_s=0,
        compute_floor_s=0,
        bytes_read=0,
    )


def test_lanes_are_the_fewest_that_reach_the_rate() -> None:
    assert choose_lanes(shipped_profile("ufs-4.0")) == 2
    assert choose_lanes(ELITE) == 2
    assert choose_lanes(shipped_profile("nvme")) == 8


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (60, (1, 2, 4, 8, 16, 32, 60))])
def test_group_sizes_are_powers_of_two_and_the_layer(most: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(most) == sizes


def test_smallest_arena_within_two_percent_is_chosen() -> None:
    fast, near, slow = prediction(100, 1.0), prediction(50, 1.019), prediction(10, 1.021)
    assert choose([fast, near, slow]) == near
    assert choose([fast, replace(near, time_s=1.01), near]).time_s == 1.01


def test_frontier_holds_what_nothing_beats() -> None:
    kept = [prediction(1, 3), prediction(2, 2), prediction(5, 1)]
    assert frontier([prediction(3, 2), kept[2], kept[0], prediction(2, 2.5), kept[1], prediction(9, 1)]) == tuple(kept)


def test_long_prompt_is_paged_through_an_arena_of_a_few_percent() -> None:
    plan = configure(workload("olmoe-1b-7b"), device(), GIB, 1024)
    choice = plan.choice
    assert (choice.mode, choice.policy) == ("paged", "pre-routing")
    assert 20e6 < choice.arena_bytes < 130e6
    assert choice.time_s == pytest.approx(1.07, rel=0.02)
    assert choice.bytes_read == workload("olmoe-1b-7b").expert_bytes
    assert choice.arena_bytes <= plan.arena_cap
    assert choice in plan.frontier


def test_short_prompt_reads_after_routing_and_only_what_is_routed() -> None:
    choice = configure(workload("olmoe-1b-7b"), device(), GIB, 1).choice
    assert choice.mode == "on-demand"
    assert choice.bytes_read == pytest.approx(16 * 8 * 3.539e6, rel=0.01)
    modes = [configure(workload("olmoe-1b-7b"), device(), GIB, tokens).choice.mode for tokens in (1, 2, 8, 32, 512)]
    crossover = modes.index("paged")
    assert modes == ["on-demand"] * crossover + ["paged"] * (len(modes) - crossover)


def test_model_that_fits_stays_resident() -> None:
    stored = workload("olmoe-1b-7b")
    choice = configure(stored, device(), 8 * GIB, 512).choice
    assert choice.mode == "resident"
    assert (choice.bytes_read, choice.bubble, choice.io_floor_s) == (0, 0, 0)
    assert choice.arena_bytes == stored.expert_bytes == (choice.prefetch_depth + 1) * choice.group_size * 3538944
    assert choice.load_s == pytest.approx(stored.expert_bytes / 3.5e9, rel=0.2)


def test_accelerator_that_cannot_address_the_model_pages_it_whatever_the_memory() -> None:
    for limits in ((1 << 31, 100 * GIB), (100 * GIB, 3 * GIB)):
        plan = configure(workload("olmoe-1b-7b"), with_npu(*limits), 64 * GIB, 512)
        assert plan.choice.mode == "paged"
        assert all(each.arena_bytes < min(limits) for each in plan.frontier)


def test_session_holds_dense_weights_too() -> None:
    stored = replace(workload("olmoe-1b-7b"), dense_bytes=10**9)
    beside = 10**9 + activation_bytes(OLMOE_1B_7B, 512)
    bank = stored.record_lengths[0]
    plan = configure(stored, with_npu(1 << 31, beside + 3 * bank), 64 * GIB, 512)
    assert plan.arena_cap == 3 * bank - 1
    assert plan.choice.arena_bytes == 2 * bank
    with pytest.raises(LinkError, match=r"fit can address an arena of \d+ bytes beside the other weights, one expert"):
        configure(stored, with_npu(1 << 31, beside + bank), 64 * GIB, 512)
    with pytest.raises(LinkError, match="can address an arena of 0 bytes"):
        configure(stored, with_npu(1 << 31, GIB // 2), 64 * GIB, 512)


def test_device_has_no_more_memory_than_it_has() -> None:
    small = msgspec.structs.replace(device(), memory_bytes=Count(value=GIB, basis="estimated", source="a test"))
    assert configure(workload("olmoe-1b-7b"), small, 8 * GIB, 512) == configure(
        workload("olmoe-1b-7b"), small, GIB, 512
    )


def test_what_the_device_lacks_is_not_asked_for_in_vain() -> None:
    stored = replace(workload("olmoe-1b-7b"), dense_bytes=2 * GIB)
    small = msgspec.structs.replace(device(), memory_bytes=Count(value=GIB, basis="estimated", source="a test"))
    least = RUNTIME_BYTES + 2 * GIB + activation_bytes(stored.model, 64) + stored.record_lengths[0]
    message = "1.00 GiB of memory, which is all that fit has, for a prompt of 64 tokens, expected at least "
    with pytest.raises(LinkError) as caught:
        configure(stored, small, 8 * GIB, 64)
    assert caught.value.message == f"{message}{ceil(least / MIB)} MiB"


def test_plan_that_reads_nothing_pays_nothing_for_reading() -> None:
    toll = Duration(value=1.0, basis="measured", source="a test")
    slow = msgspec.structs.replace(device(), read_group_toll_s=toll, read_toll_s=toll)
    key = attrgetter("policy", "group_size", "prefetch_depth")
    free = {key(each): each for each in predictions(workload("olmoe-1b-7b"), device(), 64)}
    for each in predictions(workload("olmoe-1b-7b"), slow, 64):
        same = each.policy in {"resident", "on-demand"} or each.prefetch_depth == 0
        assert (each.time_s == free[key(each)].time_s) == same
        assert each.compute_floor_s == free[key(each)].compute_floor_s


def test_least_memory_is_named_and_enough() -> None:
    stored = replace(workload("mixtral-8x7b"), dense_bytes=10**8)
    with pytest.raises(LinkError, match="expected at least") as caught:
        configure(stored, device(), 1 << 20, 64)
    least = RUNTIME_BYTES + 10**8 + activation_bytes(stored.model, 64) + stored.record_lengths[0]
    assert caught.value.message.endswith(f" {ceil(least / MIB)} MiB")
    assert caught.value.hint == (
        f"the program 192.0 MiB, weights other than experts 95.4 MiB, the prompt "
        f"{bytes_text(activation_bytes(stored.model, 64))}, one expert {bytes_text(stored.record_lengths[0])}"
    )
    assert configure(stored, device(), least, 64).choice.prefetch_depth == 0
    with pytest.raises(LinkError):
        configure(stored, device(), least - 1, 64)


def test_more_memory_is_never_slower() -> None:
    caps = [512 << 20, 640 << 20, 768 << 20, GIB, 40 * GIB]
    times = [configure(workload("mixtral-8x7b"), device(), cap, 512).choice.time_s for cap in caps]
    assert all(later <= earlier * 1.02 for earlier, later in pairwise(times))


def test_skewed_routing_reads_less_for_a_short_prompt() -> None:
    block = OLMOE_1B_7B.expert_blocks[0]
    counts = [1000] * 8 + [1] * 56
    shares = [shares_of(counts, block)] * 16
    skewed = configure(workload("olmoe-1b-7b"), device(), GIB, 4, shares).choice
    even = configure(workload("olmoe-1b-7b"), device(), GIB, 4).choice
    assert skewed.bytes_read < even.bytes_read / 2
    assert skewed.time_s < even.time_s


def test_shares_follow_counts_and_are_even_without_any() -> None:
    block = OLMOE_1B_7B.expert_blocks[0]
    assert shares_of([0] * 64, block).tolist() == [8 / 64] * 64
    assert shares_of([1] * 64, block) == pytest.approx(np.full(64, 8 / 64))
    assert shares_of([100] + [0] * 63, block).tolist() == [1.0] + [0.0] * 63


@pytest.mark.parametrize(("tokens", "active"), [(1, 8), (2, 15), (4, 26.5), (8, 42), (16, 56.4), (32, 63.1)])
def test_expected_active_experts(tokens: int, active: float) -> None:
    load = expected_load(np.full(64, 8 / 64), tokens)
    assert load.active.sum() == pytest.approx(active, abs=0.1)
    assert (load.active * load.tokens).sum() == pytest.approx(8 * tokens)


def test_experts_that_are_never_or_always_picked() -> None:
    load = expected_load(np.array([0.0, 1.0]), 3)
    assert load.active.tolist() == [0, 1]
    assert load.tokens.tolist() == [0, 3]


def test_as_many_groups_are_idle_as_expected_and_ragged_ones_are_smaller() -> None:
    block = msgspec.structs.replace(OLMOE_1B_7B.expert_blocks[0], experts=60)
    model = msgspec.structs.replace(OLMOE_1B_7B, expert_blocks=(block,))
    stored = Workload(model=model, record_lengths=(1000,) * 16, dense_bytes=0)
    loads = [expected_load(np.full(60, 8 / 60), 1)] * 16
    work = grouped_work(stored, device(), 1, loads, 8, 2)
    assert work.whole_bytes.tolist() == ([8000] * 7 + [4000]) * 16
    chance = 7 * (1 - 8 / 60) ** 8 + (1 - 8 / 60) ** 4
    idle = sum(sum(layer.idle) for layer in work.layers)
    assert idle == pytest.approx(16 * chance, abs=1)
    assert work.routed_bytes.sum() == pytest.approx(16 * 8 * 1000, rel=0.05)
    assert work.bytes_read(simulate(work.layers, "post-routing", 2)) == work.routed_bytes.sum()


def test_experts_nobody_picks_are_neither_read_nor_computed() -> None:
    load = expected_load(np.array([1.0] * 8 + [0.0] * 56), 4)
    work = grouped_work(workload("olmoe-1b-7b"), device(), 4, [load] * 16, 8, 2)
    for layer in work.layers:
        assert list(layer.idle) == [False] + [True] * 7
        assert list(layer.compute_s[1:]) == [0.0] * 7


def test_every_group_size_and_depth_is_tried() -> None:
    found = list(predictions(workload("mixtral-8x7b"), device(), 64))
    tried = {(each.policy, each.group_size, each.prefetch_depth) for each in found}
    assert len(tried) == len(found) == 4 * (1 + 7 + 7 + 1)
    for each in found:
        assert each.arena_bytes == (each.prefetch_depth + 1) * each.group_size * 99090432


@pytest.mark.parametrize(("tokens", "ahead"), [(15, False), (16, True)])
def test_nothing_is_planned_to_be_read_ahead_of_routing_where_no_session_does(tokens: int, ahead: bool) -> None:
    policies = {each.policy for each in predictions(workload("olmoe-1b-7b"), device(), tokens)}
    assert policies == {"on-demand", "post-routing", "resident"} | ({"pre-routing"} if ahead else set())


def test_depth_is_not_deeper_than_there_are_groups() -> None:
    model = msgspec.structs.replace(OLMOE_1B_7B, layers=OLMOE_1B_7B.layers[:1])
    stored = Workload(model=model, record_lengths=(4096,), dense_bytes=0)
    depths = {each.prefetch_depth for each in predictions(stored, device(), 64) if each.group_size == 32}
    assert depths == {0, 1}


def test_device_on_which_nothing_ever_ends_is_refused() -> None:
    never = Duration(value=float("inf"), basis="estimated", source="a test")
    slow = msgspec.structs.replace(device(), head_weight_s=never)
    with pytest.raises(LinkError, match="by the figures of fit a prompt of 64 tokens would never end"):
        configure(workload("olmoe-1b-7b"), slow, GIB, 64)
