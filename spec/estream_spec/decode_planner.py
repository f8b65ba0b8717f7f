"""Plans decoding on a device: how large an arena it wants, what a token then costs, and whether prefetching can pay.

A token reads those of its experts that are in no slot, so that the more slots there are the better: decoding wants all
memory that the cap leaves. The arena is one for prompts and for decoding, so what it has is what the prompt leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from estream_spec.decode_compiler import READ_AHEAD, decode_program
from estream_spec.decode_model import (
    LEAST_GAIN,
    DecodeLayer,
    Reading,
    Strategy,
    TokenTime,
    decode_token,
    hidden_records,
    needed_by_overlap,
)
from estream_spec.energy import EnergySpent, Work, energy_spent, pairs, token_products, uses_floats
from estream_spec.model import ModelDescription
from estream_spec.planner import addressable_arena, available_arena, choose_lanes
from estream_spec.profile import DeviceProfile
from estream_spec.schedule import ExpertShape
from estream_spec.workload import Workload, block_weights, dense_weights, expert_weights, head_s

OVERLAP: Final = ((0.64, 0.936), (2.42, 0.978), (4.26, 0.992))
"""Mean extra experts, and the share of routed experts among those predicted: means of the four models that APEX (arXiv
2608.11688) was published with. What a prediction is taken to be worth before one was trained for a model."""
STRATEGIES: Final[tuple[Strategy, ...]] = ("none", "exact", "oracle")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """What a decoded token is expected to cost with one strategy.

    Attributes:
        strategy: how experts are read ahead, see `decode_model`.
        hit_rate: share of routed experts that are in memory before.
        time_s: seconds.
        stall_s: those in which computing waits for reading.
        read_bytes: bytes read.
        energy: what it takes; None where the profile does not say.
    """

    strategy: Strategy
    hit_rate: float
    time_s: float
    stall_s: float
    read_bytes: float
    energy: EnergySpent | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """How decoding after a prompt is expected to go.

    Attributes:
        tokens: tokens before the decoded one: the prompt.
        arena_cap: most bytes the arena may have beside them and what is kept of them.
        arena_bytes: the arena: room for `slots` records, or 0 where there is no room for a token's experts.
        slots: records that it holds.
        lanes: reads outstanding at a time.
        hidden_records: records that can be read behind the attention of a layer, the mean of those with experts.
        reads_ahead: whether the program reads any expert ahead; not where the arena holds all of them, or has no room
            beside those of a token.
        ways: without reading ahead, as predicted, and with a prediction that is always right; none without room.
    """

    tokens: int
    arena_cap: int
    arena_bytes: int
    slots: int
    lanes: int
    hidden_records: float
    reads_ahead: bool
    ways: tuple[TokenPlan, ...]

    @property
    def saving(self) -> float:
        """Share of a token that reading ahead as predicted is expected to save; below 0 where it costs."""
        none, exact, _ = self.ways
        return 1 - exact.time_s / none.time_s

    @property
    def best_saving(self) -> float:
        """Share of a token that a prediction without a fault saves; nothing any prefetch router does saves more."""
        none, _, oracle = self.ways
        return 1 - oracle.time_s / none.time_s

    @property
    def prefetching_pays(self) -> bool:
        """Whether a prefetch router is expected to be worth its bytes on this device."""
        return bool(self.ways) and self.saving >= LEAST_GAIN


def plan_decoding(workload: Workload, profile: DeviceProfile, memory_bytes: int, tokens: int) -> DecodePlan:
    """Plan the token after a prompt. Routing is taken to be even, in which no cache does better than its share.

    Args:
        workload: the model as it is stored.
        profile: the device.
        memory_bytes: most memory for everything.
        tokens: tokens of the prompt, at least 1.
    """
    model = workload.model
    cap = min(
        addressable_arena(workload, profile, tokens), available_arena(workload, profile, memory_bytes, tokens)
    ) - cache_bytes(model, tokens)
    record = max(workload.record_lengths)
    slots = min(max(cap, 0) // record, sum(model.expert_counts))
    lanes = choose_lanes(profile)
    if slots < max(model.top_k):
        slots = 0
    layers = list(decode_layers(workload, profile, tokens, [0.0] * len(model.layers), lanes))
    with_experts = [layers[number] for number in model.expert_layers]
    shape = expert_shape(workload)
    program = decode_program(shape, slots * shape.bank_bytes(1), predicts=True)
    reads_ahead = program is not None and program.reads_ahead
    ways = (_way(workload, profile, tokens, slots, each, reads_ahead=reads_ahead) for each in STRATEGIES)
    return DecodePlan(
        tokens=tokens,
        arena_cap=cap,
        arena_bytes=slots * record,
        slots=slots,
        lanes=lanes,
        hidden_records=sum(hidden_records(layer) for layer in with_experts) / len(with_experts),
        reads_ahead=reads_ahead,
        ways=tuple(ways) if slots else (),
    )


def decode_layers(
    workload: Workload, profile: DeviceProfile, context: int, hit_rates: Sequence[float], lanes: int
) -> Iterator[DecodeLayer]:
    """What each layer asks for a token.

    A token passes every weight of the dense matrices once, as it passes the head, and so it does with keys and values.
    Where a profile's rate of operations is the slower of the two, that counts.

    Args:
        workload: the model as it is stored.
        profile: the device.
        context: tokens it attends to.
        hit_rates: share of routed experts in memory, for each layer.
        lanes: reads outstanding at a time, one of those the profile has.
    """
    model, predicted = workload.model, workload.needed
    for layer, (experts, record) in enumerate(zip(model.expert_counts, workload.record_lengths, strict=True)):
        block = block_weights(model, layer)
        beside_s = _passed_s(profile, block, 2 * block)
        own = dense_weights(model, layer) - block
        operations = 2 * (own + context * pairs(model, layer))
        before_s = _passed_s(profile, own + context * _kept(model, layer), operations)
        if not experts:
            yield DecodeLayer(before_s=before_s + beside_s)
            continue
        described = model.expert_block(layer)
        expert_s = profile.experts.expert_s(expert_weights(model, layer), described.intermediate, 1)
        yield DecodeLayer(
            before_s=before_s,
            beside_s=beside_s,
            top_k=described.router.top_k,
            expert_s=expert_s + profile.experts.group_call_s.value,
            record_bytes=record,
            read_s=record / profile.rate(record, lanes),
            hit_rate=hit_rates[layer],
            needed=needed_by_overlap(described.router.top_k, experts, OVERLAP)
            if predicted is None
            else predicted[layer],
        )


def kept_records(shape: ExpertShape, slots: int, *, predicts: bool) -> tuple[int, ...]:
    """How many records each layer keeps from one token to the next: what the program for so many slots says.

    Args:
        shape: experts of the model.
        slots: records that the arena holds, enough for a token's experts of one layer.
        predicts: whether experts are read ahead, for which some slots are kept free.
    """
    program = decode_program(shape, slots * shape.bank_bytes(1), predicts=predicts)
    assert program is not None
    return tuple(program.kept.get(layer, 0) for layer in range(len(shape.counts)))


def expert_shape(workload: Workload) -> ExpertShape:
    """What programs depend on in a workload."""
    model = workload.model
    return ExpertShape(
        counts=model.expert_counts,
        record_lengths=workload.record_lengths,
        top_k=model.top_k,
        dense_layers=model.dense_layers,
    )


def hit_rates(counts: Sequence[int], kept: Sequence[int]) -> tuple[float, ...]:
    """The share of picks that go to what each layer keeps of so many experts, where all are picked alike."""
    return tuple(own / count if count else 0.0 for count, own in zip(counts, kept, strict=True))


def cache_bytes(model: ModelDescription, tokens: int) -> int:
    """Bytes of the keys and values of all layers for so many tokens, in f32."""
    return 4 * tokens * sum(_kept(model, layer) for layer in range(len(model.layers)))


def _way(
    workload: Workload, profile: DeviceProfile, tokens: int, slots: int, strategy: Strategy, *, reads_ahead: bool
) -> TokenPlan:
    model, lanes = workload.model, choose_lanes(profile)
    kept = kept_records(expert_shape(workload), slots, predicts=strategy != "none")
    rates = hit_rates(model.expert_counts, kept)
    toll = 0.0 if profile.read_toll_s is None else profile.read_toll_s.value
    layers = tuple(decode_layers(workload, profile, tokens, rates, lanes))
    found = decode_token(
        layers,
        strategy if reads_ahead else "none",
        extra=READ_AHEAD,
        after_s=head_s(model, profile),
        reading=Reading(start_s=profile.read_start_s.value, toll_s=toll),
    )
    routed = sum(layer.top_k for layer in layers)
    return TokenPlan(
        strategy=strategy,
        hit_rate=sum(layer.top_k * layer.hit_rate for layer in layers) / routed,
        time_s=found.time_s,
        stall_s=found.stall_s,
        read_bytes=found.read_bytes,
        energy=_token_energy(workload, profile, layers, found, tokens),
    )


def _token_energy(
    workload: Workload, profile: DeviceProfile, layers: Sequence[DecodeLayer], found: TokenTime, tokens: int
) -> EnergySpent | None:
    """What a token takes: all that computes it comes from memory once, and what is read is written there before."""
    if profile.energy is None:
        return None
    experts = sum(layer.top_k * layer.record_bytes for layer in layers)
    from_memory = workload.dense_bytes + experts + cache_bytes(workload.model, tokens)
    work = Work(
        read_bytes=found.read_bytes,
        memory_bytes=found.read_bytes + from_memory,
        products=token_products(workload.model, tokens),
        idle_s=found.stall_s,
    )
    return energy_spent(work, profile.energy, floats=uses_floats(profile))


def _passed_s(profile: DeviceProfile, numbers: int, operations: int) -> float:
    """Seconds for one token to pass so many weights, which takes so many operations."""
    return max(numbers * profile.head_weight_s.value, operations / profile.layer_flops(1))


def _kept(model: ModelDescription, layer: int) -> int:
    """Numbers that a layer keeps of each token: keys and values."""
    if model.layers[layer].attention is None:
        return 0
    attention = model.attention(layer)
    return attention.key_value_heads * (attention.head_dim + attention.value_width)
