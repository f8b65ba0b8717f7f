"""How long one decoded token takes where its experts are read: a recurrence over layers, in expected numbers.

In a layer with `k` routed experts, of which a share `h` is in memory already, reading a record takes `r`. Predicted
experts are read from the start of the layer, in order of rank, beside its attention, which takes `b`; those among them
that are not routed to hold up the ones that are demanded at `b`, when the layer is routed. After reading ahead `m`
ranks, of which `f(m)` are expected to be routed to, the layer's experts are all there at

    b + max(0, m (1-h) r - b) + (k - f(m)) (1-h) r

Reading ahead hides everything where `m (1-h) r <= b`, the hiding condition. How many ranks are read is the strategy:

- `none`: none. Every routed expert is read once it is demanded.
- `fixed`: always `k + extra`, whole, before anything else.
- `exact`: at most `k + extra`, and never one more than pays: the number that the layer is expected to end soonest with.
- `stall-free`: at most `k + extra`, as many as are whole when the layer is routed. Nothing is read after that; experts
  that are missing are replaced. A read that is under way ends and holds up the next layer.
- `oracle`: as `exact`, with a prediction that is always right. No exact strategy is faster.

Plans use `none`, `exact` and `oracle`. The other two are here because published figures are of them: those are what the
recurrence is held against, in `tests/bench/apex_simulation.py`, and they share its arithmetic.

Numbers are expected ones: a layer has a tenth of an expert to read where one token in ten has one. Where reading is
partly hidden, stalls are somewhat longer in truth.

Source: the hiding condition of APEX (arXiv 2608.11688); its exact and its stall-free mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, log
from typing import Final, Literal

LEAST_GAIN: Final = 0.01
"""Share of a token's time that reading ahead has to save to be worth what it reads in vain: chosen, not measured."""
Strategy = Literal["none", "fixed", "exact", "stall-free", "oracle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayer:
    """What a layer asks for one token. Where it has no experts, `top_k` is 0.

    Attributes:
        before_s: seconds until it is routed: attention, norms, router.
        beside_s: seconds of computing that needs no routed expert, after that: a dense block.
        top_k: experts a token is routed to.
        expert_s: seconds to compute one of them.
        record_bytes: bytes of one.
        read_s: seconds to read one, while others are read before and behind it.
        hit_rate: share of routed experts that are in memory before anything is read for this token, 0 to 1.
        needed: probability that the predicted expert of each rank is routed to. At most as many as the layer has
            experts, and in sum at most `top_k`.
    """

    before_s: float
    beside_s: float = 0.0
    top_k: int = 0
    expert_s: float = 0.0
    record_bytes: int = 0
    read_s: float = 0.0
    hit_rate: float = 0.0
    needed: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How records are read, beside the time of each.

    Attributes:
        start_s: seconds from asking for some to the first byte, however many they are.
        toll_s: seconds that computing loses to each byte read beside it.
    """

    start_s: float = 0.0
    toll_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """What one decoded token is expected to cost.

    Attributes:
        time_s: seconds.
        compute_s: those in which something is computed.
        read_bytes: bytes read.
        wasted_bytes: those of experts that were not routed to.
        replaced: share of routed experts that were replaced by others; 0 but where a strategy is stall-free.
    """

    time_s: float
    compute_s: float
    read_bytes: float
    wasted_bytes: float
    replaced: float

    @property
    def stall_s(self) -> float:
        """Seconds in which computing waits for reading."""
        return self.time_s - self.compute_s


def decode_token(
    layers: Sequence[DecodeLayer],
    strategy: Strategy,
    *,
    extra: int = 0,
    after_s: float = 0.0,
    reading: Reading | None = None,
) -> TokenTime:
    """Run the recurrence for one token.

    Args:
        layers: in order of computation.
        strategy: how many predicted experts are read ahead.
        extra: those beyond `top_k`, at least 0: as many as `fixed` reads, as many as others may.
        after_s: computing after the last layer, the head.
        reading: how records are read.
    """
    reading = reading or Reading()
    carried, replaced, experts = 0.0, 0.0, 0
    ends = list[_End]()
    for layer in layers:
        most = min(layer.top_k + extra, len(layer.needed))
        match strategy:
            case "none":
                end = _read_ahead(layer, 0, reading)
            case "fixed":
                end = _read_ahead(layer, most, reading)
            case "exact":
                end = _soonest(layer, most, reading)
            case "oracle":
                end = _soonest(perfectly_predicted(layer), layer.top_k, reading)
            case "stall-free":
                end, carried = _until_routed(layer, most, reading, carried)
        ends.append(end)
        replaced += end.replaced
        experts += layer.top_k
    return TokenTime(
        time_s=sum(end.time_s for end in ends) + after_s,
        compute_s=sum(end.compute_s for end in ends) + after_s,
        read_bytes=sum(end.read_bytes for end in ends),
        wasted_bytes=sum(end.wasted_bytes for end in ends),
        replaced=replaced / experts if experts else 0.0,
    )


def perfectly_predicted(layer: DecodeLayer) -> DecodeLayer:
    """The layer where each of the first `top_k` ranks is right."""
    return replace(layer, needed=(1.0,) * layer.top_k)


def hidden_records(layer: DecodeLayer) -> float:
    """How many records can be read behind a layer's attention: where there are as many, reading ahead hides them."""
    return layer.before_s / layer.read_s if layer.read_s else float("inf")


def needed_by_overlap(top_k: int, experts: int, overlap: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """The probability of each rank of a prediction to be routed to, from how much of the routed it covers.

    What is not covered falls by the same factor with each extra expert between two points, and beyond them as between
    the nearest two. Of the first `top_k` ranks all are taken to be alike.

    Args:
        top_k: experts a token is routed to.
        experts: experts of the layer.
        overlap: extra experts, increasing, and the share of routed experts that are then among the first `top_k` and
            those, increasing and below 1; at least two.

    Returns:
        One for each expert, not increasing.
    """
    points = [(extra, log(1 - share)) for extra, share in overlap]

    def missed(extra: float) -> float:
        (x0, y0), (x1, y1) = next((pair for pair in pairwise(points) if extra <= pair[1][0]), (points[-2], points[-1]))
        return min(1.0, exp(y0 + (y1 - y0) * (extra - x0) / (x1 - x0)))

    ranks = [1 - missed(0)] * top_k
    for extra in range(experts - top_k):
        found = top_k * (missed(extra) - missed(extra + 1))
        ranks.append(min(ranks[-1] if ranks else 1.0, found))
    return tuple(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """What one layer came to. `replaced` counts experts."""

    time_s: float
    compute_s: float
    read_bytes: float
    wasted_bytes: float
    replaced: float = 0.0


def _soonest(layer: DecodeLayer, most: int, reading: Reading) -> _End:
    """The layer with the number of ranks read ahead, up to `most`, that ends soonest; of equal ones the smallest."""
    return min((_read_ahead(layer, ranks, reading) for ranks in range(most + 1)), key=lambda end: end.time_s)


def _read_ahead(layer: DecodeLayer, ranks: int, reading: Reading) -> _End:
    """The layer when `ranks` predicted experts are read before anything else, and then all that are missing."""
    top_k, absent = layer.top_k, 1 - layer.hit_rate
    each_s = absent * layer.read_s
    found = min(top_k, sum(layer.needed[:ranks]))
    late = top_k - found
    start_s = reading.start_s * (1 - layer.hit_rate**ranks)
    overrun_s = max(0.0, start_s + ranks * each_s - layer.before_s)
    demand_s = late * each_s + reading.start_s * _any(late * absent, top_k)
    there = min(top_k, _found(layer.needed[:ranks], each_s, layer.before_s - start_s))
    toll_s = reading.toll_s * ranks * absent * layer.record_bytes
    compute_s = layer.before_s + layer.beside_s + top_k * layer.expert_s + toll_s
    time_s = layer.before_s + toll_s + _experts_s(layer, overrun_s + demand_s, absent * (top_k - there))
    return _End(
        time_s=time_s,
        compute_s=compute_s,
        read_bytes=absent * (ranks + late) * layer.record_bytes,
        wasted_bytes=absent * (ranks - found) * layer.record_bytes,
    )


def _experts_s(layer: DecodeLayer, last_s: float, late: float) -> float:
    """Seconds from routing until the experts are computed, `late` of them as they arrive, the last one after `last_s`.

    Either computing is what takes time, or the last one's arrival, or, where computing is the slower of the two, that
    of the first that is late.
    """
    return max(
        layer.beside_s + layer.top_k * layer.expert_s,
        last_s + min(1.0, late) * layer.expert_s,
        min(last_s, layer.read_s) + late * layer.expert_s,
    )


def _until_routed(layer: DecodeLayer, most: int, reading: Reading, carried_s: float) -> tuple[_End, float]:
    """The layer when nothing is read once it is routed, and how long its last read holds up the next layer.

    `carried_s` is how long the one before does so to this one.
    """
    absent = 1 - layer.hit_rate
    each_s = absent * layer.read_s
    start_s = carried_s + reading.start_s * (1 - layer.hit_rate**most)
    window_s = layer.before_s - start_s
    whole = _whole(most, each_s, window_s)
    begun = ceil(whole) if window_s > 0 else 0
    found = min(layer.top_k, _found(layer.needed[:most], each_s, window_s))
    toll_s = reading.toll_s * begun * absent * layer.record_bytes
    time_s = layer.before_s + layer.beside_s + layer.top_k * layer.expert_s + toll_s
    left_s = carried_s if begun == 0 else start_s + begun * each_s
    end = _End(
        time_s=time_s,
        compute_s=time_s,
        read_bytes=absent * begun * layer.record_bytes,
        wasted_bytes=absent * (begun - sum(layer.needed[:begun])) * layer.record_bytes,
        replaced=absent * (layer.top_k - found),
    )
    return end, max(0.0, left_s - time_s)


def _whole(ranks: int, each_s: float, window_s: float) -> float:
    """How many of so many ranks are read within a time."""
    if window_s <= 0:
        return 0.0
    return min(float(ranks), window_s / each_s) if each_s else float(ranks)


def _found(needed: Sequence[float], each_s: float, window_s: float) -> float:
    """Routed experts among the ranks that are read within a time."""
    whole = _whole(len(needed), each_s, window_s)
    return sum(each * min(1.0, max(0.0, whole - rank)) for rank, each in enumerate(needed))


def _any(expected: float, most: int) -> float:
    """Probability that there is one of `most` alike, of which `expected` are expected."""
    return 1 - (1 - min(1.0, expected / most)) ** most if most else 0.0
