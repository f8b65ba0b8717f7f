"""Laws of the recurrence and the planner, for any model and device."""

from __future__ import annotations

from dataclasses import astuple
from math import isfinite
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_spec.errors import LinkError
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router
from estream_spec.planner import configure
from estream_spec.profile import (
    Count,
    Curve,
    DeviceProfile,
    Duration,
    ExpertTimes,
    NpuLimits,
    ReadRate,
    ShareCurve,
    decode_profile,
    encode_profile,
)
from estream_spec.recurrence import LayerTimes, busy_layer, simulate
from estream_spec.workload import RUNTIME_BYTES, Workload, activation_bytes
from fixtures.estream import device

ROUNDING = 1 + 1e-9
times = st.floats(0, 10)


@st.composite
def busy_layers(draw: st.DrawFn) -> list[LayerTimes]:
    """Layers all of whose experts have tokens, in groups of different lengths."""
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        groups = draw(st.lists(st.tuples(times, times), min_size=1, max_size=8))
        layers.append(busy_layer(draw(times), [load for load, _ in groups], [compute for _, compute in groups]))
    return layers


@st.composite
def any_layers(draw: st.DrawFn) -> list[LayerTimes]:
    """Layers with idle groups, and with some experts that have no token."""
    layers = []
    for layer in draw(busy_layers()):
        idle = draw(st.lists(st.booleans(), min_size=len(layer.load_s), max_size=len(layer.load_s)))
        share = draw(st.floats(0, 1))
        layers.append(
            LayerTimes(
                before_s=layer.before_s,
                load_s=layer.load_s,
                routed_load_s=[share * load for load in layer.load_s],
                compute_s=[0 if none else each for none, each in zip(idle, layer.compute_s, strict=True)],
                idle=idle,
            )
        )
    return layers


banks = st.integers(1, 6)


@settings(max_examples=50, deadline=None)
@given(busy_layers(), banks)
def test_another_bank_never_makes_reading_ahead_slower(layers: list[LayerTimes], count: int) -> None:
    fewer, more = (simulate(layers, "pre-routing", each).total_s for each in (count, count + 1))
    assert more <= fewer * ROUNDING


@settings(max_examples=50, deadline=None)
@given(busy_layers(), banks)
def test_the_earlier_reads_start_the_sooner_it_ends(layers: list[LayerTimes], count: int) -> None:
    on_demand = simulate(layers, "on-demand", count).total_s
    post_routing = simulate(layers, "post-routing", count).total_s
    pre_routing = simulate(layers, "pre-routing", count).total_s
    assert pre_routing <= post_routing * ROUNDING
    assert post_routing <= on_demand * ROUNDING


@settings(max_examples=50, deadline=None)
@given(any_layers(), banks, times, times)
def test_no_policy_is_faster_than_computing_and_reading_what_is_needed(
    layers: list[LayerTimes], count: int, before: float, after: float
) -> None:
    computing = before + after + sum(layer.before_s + sum(layer.compute_s) for layer in layers)
    needed = sum(
        seconds for layer in layers for seconds, idle in zip(layer.routed_load_s, layer.idle, strict=True) if not idle
    )
    for policy in ("on-demand", "post-routing", "pre-routing"):
        found = simulate(layers, policy, count, before_s=before, after_s=after)
        assert found.total_s * ROUNDING >= max(computing, needed)
        assert found.io_busy_s * ROUNDING >= needed
        assert 0 <= found.bubble <= 1


@settings(max_examples=50, deadline=None)
@given(any_layers(), banks)
def test_banks_are_never_read_into_before_they_are_free(layers: list[LayerTimes], count: int) -> None:
    found = simulate(layers, "pre-routing", count)
    read = found.reading > 0
    for index in range(count, read.size):
        if read[index] and read[index - count]:
            assert found.read_start_s[index] >= found.compute_end_s[index - count]
    starts, ends = found.read_start_s[read], found.read_end_s[read]
    assert (starts[1:] >= ends[:-1]).all()
    assert (found.compute_start_s >= found.read_end_s).all()


@st.composite
def models(draw: st.DrawFn) -> Workload:
    experts = draw(st.integers(1, 20))
    layers = draw(st.integers(1, 3))
    block = ExpertBlock(
        experts=experts,
        intermediate=draw(st.integers(1, 512)),
        router=Router(family="softmax-topk", top_k=draw(st.integers(1, experts))),
    )
    model = ModelDescription(
        family="any",
        hidden=draw(st.integers(1, 512)),
        vocabulary=1000,
        context_length=1 << 14,
        norm_epsilon=1e-5,
        layers=(Layer(attention=0, experts=0),) * layers,
        attentions=(Attention(heads=2, key_value_heads=1, head_dim=16, rotary=Rotary(theta=1e4)),),
        expert_blocks=(block,),
    )
    lengths = draw(st.lists(st.integers(1, 1 << 24), min_size=layers, max_size=layers))
    return Workload(model=model, record_lengths=tuple(lengths), dense_bytes=draw(st.integers(0, 1 << 28)))


@st.composite
def devices(draw: st.DrawFn) -> DeviceProfile:
    def count(value: int) -> Count:
        return Count(value=value, basis="estimated", source="a test")

    buffer_bytes, session_bytes = draw(st.integers(1, 1 << 28)), draw(st.integers(1, 1 << 29))
    npu = NpuLimits(buffer_bytes=count(buffer_bytes), session_bytes=count(session_bytes))
    return msgspec.structs.replace(device(), npu=draw(st.sampled_from([None, npu])))


@settings(max_examples=50, deadline=None)
@given(models(), devices(), st.integers(1, 1 << 30), st.integers(1, 5000))
def test_plan_fits_and_keeps_its_floors_or_is_refused(
    workload: Workload, profile: DeviceProfile, memory: int, tokens: int
) -> None:
    beside = workload.dense_bytes + activation_bytes(workload.model, tokens)
    try:
        plan = configure(workload, profile, memory, tokens)
    except LinkError:
        smallest = max(workload.record_lengths)
        unaddressable = profile.npu is not None and (
            smallest >= profile.npu.buffer_bytes.value or smallest + beside >= profile.npu.session_bytes.value
        )
        assert unaddressable or smallest + beside + RUNTIME_BYTES > memory
        return
    choice = plan.choice
    assert choice.arena_bytes == (choice.prefetch_depth + 1) * choice.group_size * max(workload.record_lengths)
    assert choice.arena_bytes + beside + RUNTIME_BYTES <= memory
    assert 1 <= choice.group_size <= workload.expert_counts[0]
    for each in (choice, *plan.frontier):
        assert each.time_s * ROUNDING >= max(each.io_floor_s, each.compute_floor_s)
        if profile.npu is not None:
            assert each.arena_bytes < profile.npu.buffer_bytes.value
            assert each.arena_bytes + beside < profile.npu.session_bytes.value


@st.composite
def extreme_devices(draw: st.DrawFn) -> DeviceProfile:
    """Figures at the ends of what profiles may say."""

    def seconds() -> Duration:
        return Duration(value=draw(st.sampled_from([0.0, 5e-324, 604800.0])), basis="estimated", source="a test")

    def points(least: float, most: float) -> dict[str, Any]:
        at = draw(st.sampled_from([(1e-3,), (float(1 << 44),), (1e-3, float(1 << 44))]))
        values = tuple(draw(st.sampled_from([least, most])) for _ in at)
        return {"at": at, "values": values, "basis": "estimated", "source": "a test"}

    share = ShareCurve(**points(1e-6, 2.0))
    return DeviceProfile(
        name="extreme",
        about="a test",
        read_rates=tuple(ReadRate(lanes=lanes, **points(1.0, 1e18)) for lanes in (1, 64)),
        read_start_s=seconds(),
        experts=ExpertTimes(
            group_call_s=seconds(),
            weight_s=seconds(),
            flops=Curve(**points(1.0, 1e18)),
            row_tile=Count(value=draw(st.sampled_from([1, 1 << 44])), basis="estimated", source="a test"),
            flops_share=draw(st.sampled_from([None, share])),
        ),
        layer_flops=Curve(**points(1.0, 1e18)),
        head_weight_s=seconds(),
        read_toll_s=seconds(),
        read_group_toll_s=seconds(),
    )


@settings(max_examples=50, deadline=None)
@given(models(), extreme_devices(), st.integers(1, 1 << 30), st.integers(1, 1 << 14))
def test_plan_for_a_device_at_the_ends_of_what_profiles_may_say_is_finite_or_refused(
    workload: Workload, profile: DeviceProfile, memory: int, tokens: int
) -> None:
    assert decode_profile(encode_profile(profile), "extreme") == profile
    try:
        plan = configure(workload, profile, memory, tokens)
    except LinkError:
        return
    for each in (plan.choice, *plan.frontier):
        assert all(isfinite(figure) for figure in astuple(each) if isinstance(figure, float))
