"""Chooses how to run a prompt on a device: arena, group size, prefetch depth, lanes, and when reads start.

Every (policy, group size, depth) is predicted with `recurrence.simulate` from a device profile and the routing that is
expected. Of those that fit the memory cap, the smallest arena within 2 % of the best time is chosen. Short prompts thus
get a plan that reads after routing, and only what is routed. A model that fits the cap stays resident.

Source: the configuration algorithm of EStream (arXiv 2609.06551): lanes first, then arenas by simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Final, Literal

from estream_spec import limits
from estream_spec.errors import LinkError
from estream_spec.profile import DeviceProfile
from estream_spec.recurrence import Policy, simulate
from estream_spec.routing_load import Floats, even_layers, expected_load, few_tokens
from estream_spec.sizes import bytes_text
from estream_spec.workload import RUNTIME_BYTES, GroupedWork, Workload, activation_bytes, grouped_work, head_s

PlanPolicy = Literal["on-demand", "post-routing", "pre-routing", "resident"]
"""What a group's read waits for; `resident` reads everything once, before any prompt."""
Mode = Literal["on-demand", "paged", "resident"]

LANES_SHARE: Final = 0.95
"""More lanes are not worth it once so much of the peak rate is reached."""
PEAK_REQUESTS: Final = tuple(1 << shift for shift in range(20, 24))
"""Bytes of the requests, 1 to 8 MiB, that a device reads fastest."""
TIME_SLACK: Final = 0.02
"""Share of the best time that a smaller arena may cost. The model is not more exact than that."""
MAX_DEPTH: Final = 7
"""Deepest prefetch that is tried; larger groups take an arena further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One way to run a prompt, and what it is expected to cost.

    Attributes:
        mode: how experts come to memory, in a word: `on-demand` reads after routing, `paged` before it.
        policy: what reads wait for.
        arena_bytes: memory for experts: `prefetch_depth + 1` banks of `group_size` records.
        group_size: experts read together.
        prefetch_depth: groups read ahead.
        lanes: reads outstanding at a time.
        time_s: from the prompt to the first token; a resident plan has read its experts before.
        bubble: share of that in which computing waits for reading.
        io_floor_s: what reading the records of routed experts takes at the best rate of these lanes.
        compute_floor_s: what computing takes with groups of this size and nothing read beside it.
        bytes_read: bytes read for the prompt.
        load_s: what reading everything beforehand takes; 0 but for a resident plan.
    """

    mode: Mode
    policy: PlanPolicy
    arena_bytes: int
    group_size: int
    prefetch_depth: int
    lanes: int
    time_s: float
    bubble: float
    io_floor_s: float
    compute_floor_s: float
    bytes_read: int
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """The plan for one prompt length.

    Attributes:
        tokens: the length.
        arena_cap: most bytes the arena may have.
        choice: how to run it.
        frontier: ways of which none is both smaller and faster than another, by arena; those above the cap too.
    """

    tokens: int
    arena_cap: int
    choice: Prediction
    frontier: tuple[Prediction, ...]


def configure(
    workload: Workload,
    profile: DeviceProfile,
    memory_bytes: int,
    tokens: int,
    shares: Sequence[Floats] | None = None,
) -> PromptPlan:
    """Plan a prompt.

    Args:
        workload: the model as it is stored.
        profile: the device.
        memory_bytes: most memory to use for everything.
        tokens: tokens of the prompt, at least 1.
        shares: for each layer, f64 `[experts]`: the probability of each expert to be picked by a token; None takes even
            routing.

    Raises:
        LinkError: the model cannot run in so little memory on this device, or in no time that can be told.
    """
    limit = addressable_arena(workload, profile, tokens)
    possible = [each for each in predictions(workload, profile, tokens, shares) if isfinite(each.time_s)]
    if not possible:
        raise LinkError(f"by the figures of {profile.name} a prompt of {tokens} tokens would never end")
    candidates = [each for each in possible if each.arena_bytes <= limit]
    cap = min(limit, available_arena(workload, profile, memory_bytes, tokens))
    within = [each for each in candidates if each.arena_bytes <= cap]
    if not within:
        needed = max(workload.record_lengths)
        if limit < needed:
            message = f"{profile.name} can address an arena of {max(limit, 0)} bytes beside the other weights"
            raise LinkError(f"{message}, one expert takes {needed}", hint="plan a shorter prompt or store fewer bits")
        usable = usable_memory(profile, memory_bytes)
        most = f", which is all that {profile.name} has," if usable < memory_bytes else ""
        message = f"{bytes_text(usable)} of memory{most} for a prompt of {tokens} tokens"
        message += f", expected at least {ceil((usable - cap + needed) / (1 << 20))} MiB"
        parts = {
            "the program": RUNTIME_BYTES,
            "weights other than experts": workload.dense_bytes,
            "the prompt": activation_bytes(workload.model, tokens),
            "one expert": needed,
        }
        raise LinkError(message, hint=", ".join(f"{what} {bytes_text(length)}" for what, length in parts.items()))
    resident = [each for each in within if each.mode == "resident"]
    return PromptPlan(tokens=tokens, arena_cap=cap, choice=choose(resident or within), frontier=frontier(candidates))


def addressable_arena(workload: Workload, profile: DeviceProfile, tokens: int) -> int:
    """Bytes of the largest arena that the device's accelerator can address with a prompt's other data; may be below 0.

    The arena is one buffer, and both limits of an accelerator are to be stayed below.
    """
    if profile.npu is None:
        return limits.MAX_FILE_LENGTH
    other = workload.dense_bytes + activation_bytes(workload.model, tokens)
    return min(profile.npu.buffer_bytes.value, profile.npu.session_bytes.value - other) - 1


def available_arena(workload: Workload, profile: DeviceProfile, memory_bytes: int, tokens: int) -> int:
    """Bytes that are left for the arena under a memory cap, or in the device's memory; may be below 0."""
    return (
        usable_memory(profile, memory_bytes)
        - workload.dense_bytes
        - activation_bytes(workload.model, tokens)
        - RUNTIME_BYTES
    )


def usable_memory(profile: DeviceProfile, memory_bytes: int) -> int:
    """Bytes of a memory cap that the device has."""
    return memory_bytes if profile.memory_bytes is None else min(memory_bytes, profile.memory_bytes.value)


def choose_lanes(profile: DeviceProfile) -> int:
    """The fewest lanes that reach 95 % of the device's peak rate with requests of 1 to 8 MiB."""
    peaks = {rate.lanes: max(map(rate, PEAK_REQUESTS)) for rate in profile.read_rates}
    return min(lanes for lanes, peak in peaks.items() if peak >= LANES_SHARE * max(peaks.values()))


def group_sizes(most: int) -> tuple[int, ...]:
    """The group sizes that are tried: powers of two, and the whole layer of `most` experts."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def choose(candidates: Sequence[Prediction]) -> Prediction:
    """The smallest arena within 2 % of the best time, of equal arenas the fastest. At least one candidate is needed."""
    slowest = min(each.time_s for each in candidates) * (1 + TIME_SLACK)
    near = [each for each in candidates if each.time_s <= slowest]
    return min(near, key=lambda each: (each.arena_bytes, each.time_s))


def frontier(candidates: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """The candidates that no other matches in arena and beats in time or the other way round, by arena."""
    best: list[Prediction] = []
    for each in sorted(candidates, key=lambda each: (each.arena_bytes, each.time_s)):
        if not best or each.time_s < best[-1].time_s:
            best.append(each)
    return tuple(best)


def predictions(
    workload: Workload, profile: DeviceProfile, tokens: int, shares: Sequence[Floats] | None = None
) -> Iterator[Prediction]:
    """Every way to run a prompt that is worth a thought, whatever memory it takes. Arguments as for `configure`.

    A session reads nothing before routing for few tokens, so no plan does.
    """
    shares = even_layers(workload.model) if shares is None else shares
    loads = [expected_load(share, tokens) for share in shares]
    lanes = choose_lanes(profile)
    ahead: tuple[Policy, ...] = (
        ("post-routing",) if few_tokens(workload.model, tokens) else ("post-routing", "pre-routing")
    )
    for group_size in group_sizes(max(workload.expert_counts)):
        work = grouped_work(workload, profile, tokens, loads, group_size, lanes)
        yield predict(workload, profile, work, "on-demand", group_size, 0, lanes)
        deepest = min(MAX_DEPTH, len(work.whole_bytes) - 1)
        for depth in range(1, deepest + 1):
            for policy in ahead:
                yield predict(workload, profile, work, policy, group_size, depth, lanes)
        if len(work.whole_bytes) <= limits.MAX_EXPERTS:  # else no configuration can say so deep a prefetch
            yield _predict_resident(workload, profile, work, group_size, lanes)


def predict(
    workload: Workload,
    profile: DeviceProfile,
    work: GroupedWork,
    policy: Policy,
    group_size: int,
    depth: int,
    lanes: int,
) -> Prediction:
    """Predict a plan that reads experts for each prompt."""
    bank_bytes = group_size * max(workload.record_lengths)
    toll = profile.read_toll(bank_bytes, lanes)
    after_s = head_s(workload.model, profile)
    timeline = simulate(work.layers, policy, depth + 1, after_s=after_s, toll=toll, group_toll_s=profile.group_toll_s)
    return Prediction(
        mode="paged" if policy == "pre-routing" else "on-demand",
        policy=policy,
        arena_bytes=(depth + 1) * bank_bytes,
        group_size=group_size,
        prefetch_depth=depth,
        lanes=lanes,
        time_s=timeline.total_s,
        bubble=timeline.bubble,
        io_floor_s=int(work.routed_bytes.sum()) / profile.best_rate(lanes),
        compute_floor_s=work.compute_s + after_s,
        bytes_read=work.bytes_read(timeline),
    )


def _predict_resident(
    workload: Workload, profile: DeviceProfile, work: GroupedWork, group_size: int, lanes: int
) -> Prediction:
    """Predict a plan that has read all experts before: a bank for each group, and nothing to wait for."""
    banks = len(work.whole_bytes)
    seconds = work.compute_s + head_s(workload.model, profile)
    return Prediction(
        mode="resident",
        policy="resident",
        arena_bytes=banks * group_size * max(workload.record_lengths),
        group_size=group_size,
        prefetch_depth=banks - 1,
        lanes=lanes,
        time_s=seconds,
        bubble=0.0,
        io_floor_s=0.0,
        compute_floor_s=seconds,
        bytes_read=0,
        load_s=sum(sum(layer.load_s) for layer in work.layers),
    )
