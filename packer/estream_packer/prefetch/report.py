"""What a prefetch router is worth: measured on text that is kept for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from estream_packer.prefetch.calibrating import missed
from estream_packer.prefetch.confidence import Doubles
from estream_packer.prefetch.fitting import Start
from estream_packer.prefetch.recording import Ids

BINS: Final = 10
"""Equal ranges of the chance that predicted experts are enough."""


class Measured(Struct, frozen=True, kw_only=True):
    """Predicted sets, however they were chosen. Means are over tokens, and of all layers over layers.

    Attributes:
        overlap: share of needed experts that were predicted.
        covered: share of tokens whose needed experts were all predicted.
        precision: share of predicted experts that were needed.
        extra: predicted experts beyond `top_k`, mean.
    """

    overlap: float
    covered: float
    precision: float
    extra: float


class Asked(Struct, frozen=True, kw_only=True):
    """What comes of asking for an overlap.

    Attributes:
        overlap: what was asked for.
        found: what came of it.
        fixed_extra: experts beyond `top_k`, the same number for every token, that give the overlap that was found:
            between two whole numbers where overlap is, in a straight line.
    """

    overlap: float
    found: Measured
    fixed_extra: float


class Bin(Struct, frozen=True, kw_only=True):
    """Chances that were told in one range.

    Attributes:
        count: how many.
        told: their mean.
        found: how often predicted experts were enough.
    """

    count: int
    told: float
    found: float


class Worth(Struct, frozen=True, kw_only=True):
    """What predictions are worth, and what others would be.

    Attributes:
        found: at the targets that calibration has set.
        fixed_extra: see `Asked.fixed_extra`.
        fixed: the first `top_k + d` for every d from 0 on, or all experts where there are fewer.
        calibration_error: mean distance between chance and frequency, weighted by how often each was told.
        reliability: chances and frequencies.
        previous_token: overlap with what the token before was routed to.
        shuffled: overlap of the predicted sets with what other tokens needed, drawn at random.
        untrained: overlap of the first `top_k` where the true router takes the place of the trained map.
    """

    found: Measured
    fixed_extra: float
    fixed: tuple[Measured, ...]
    calibration_error: float
    reliability: tuple[Bin, ...]
    previous_token: float
    shuffled: float
    untrained: float


class LayerReport(Worth, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        layer: its number.
        experts: routed experts.
        top_k: of which a token needs so many.
        start: what training began with.
        start_loss: KL divergence from the router's distribution before training, nats, on the text that stops it.
        loss: likewise after training.
        target: how sure the confidence model must be.
    """

    layer: int
    experts: int
    top_k: int
    start: Start
    start_loss: float
    loss: float
    target: float


class PrefetchReport(Worth, frozen=True, kw_only=True):
    """All layers: overlaps and errors are means over them, and a fixed number is the same in each.

    Attributes:
        output: the file that was written.
        package: what it was trained with.
        texts: names of the texts.
        test: name of the text that was kept for this report; None where it is a part of those.
        distribution: what the linear maps were trained to.
        tokens: for each purpose.
        asked: overlap that was asked for.
        others: what asking for other overlaps would have brought.
        layers: each by itself.
    """

    output: str
    package: str
    texts: tuple[str, ...]
    test: str | None
    distribution: str
    tokens: dict[str, int]
    asked: float
    others: tuple[Asked, ...]
    layers: tuple[LayerReport, ...]


def measured(ranks: Ids, extras: Ids | int) -> Measured:
    """Judge the first `k + extras` of each token's ranking.

    Args:
        ranks: int32 `[T, k]`, at which rank each needed expert was predicted.
        extras: int32 `[T]`, or one number for all.
    """
    count, top_k = ranks.shape
    sizes = np.broadcast_to(top_k + np.asarray(extras), count)
    hits = (ranks < sizes[:, None]).sum(axis=1)
    return Measured(
        overlap=1 - missed(ranks, sizes),
        covered=float((hits == top_k).mean()),
        precision=float(hits.sum() / sizes.sum()),
        extra=float(sizes.mean()) - top_k,
    )


def fixed_curve(ranks: Ids, experts: int) -> tuple[Measured, ...]:
    """The first `k + d` for d from 0 to all."""
    return tuple(measured(ranks, d) for d in range(experts - ranks.shape[1] + 1))


def fixed_extra(curve: Sequence[Measured], overlap: float) -> float:
    """Where a curve reaches an overlap, see `Asked.fixed_extra`."""
    at = next((d for d, each in enumerate(curve) if each.overlap >= overlap), len(curve) - 1)
    if at == 0:
        return 0.0
    below, above = curve[at - 1].overlap, curve[at].overlap
    return at - 1 + min(1.0, (overlap - below) / (above - below)) if above > below else float(at)


def mean_of(found: Sequence[Measured]) -> Measured:
    """The mean of several, such as of all layers."""
    names = Measured.__struct_fields__
    return Measured(**{name: float(np.mean([getattr(each, name) for each in found])) for name in names})


def mean_curve(curves: Sequence[Sequence[Measured]]) -> tuple[Measured, ...]:
    """The same number of extras in every layer; one that has fewer experts gives all it has."""
    longest = max(map(len, curves))
    return tuple(mean_of([curve[min(d, len(curve) - 1)] for curve in curves]) for d in range(longest))


def binned(told: Doubles, covered: NDArray[np.bool_]) -> tuple[Bin, ...]:
    """Chances f64 `[T, D]` beside whether predicted experts were enough; the last d, always enough, tells nothing."""
    chances, found = told[:, :-1].ravel(), covered[:, :-1].ravel()
    places = np.minimum((chances * BINS).astype(int), BINS - 1)
    bins = []
    for place in range(BINS):
        here = places == place
        if count := int(here.sum()):
            bins.append(Bin(count=count, told=float(chances[here].mean()), found=float(found[here].mean())))
    return tuple(bins)


def together(layers: Sequence[Sequence[Bin]]) -> tuple[Bin, ...]:
    """The bins of several layers as one."""
    found = dict[int, list[Bin]]()
    for each in (each for bins in layers for each in bins):
        found.setdefault(min(int(each.told * BINS), BINS - 1), []).append(each)
    merged = []
    for _, bins in sorted(found.items()):
        weights = [each.count for each in bins]
        told, frequency = (
            float(np.average(values, weights=weights))
            for values in zip(*((each.told, each.found) for each in bins), strict=True)
        )
        merged.append(Bin(count=sum(weights), told=told, found=frequency))
    return tuple(merged)


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error; 0 where nothing was told."""
    count = sum(each.count for each in bins)
    return sum(each.count * abs(each.told - each.found) for each in bins) / count if count else 0.0


def previous_overlap(needed: Ids, begins: NDArray[np.bool_]) -> float:
    """Share of needed experts int32 `[T, k]` that the token before was routed to, where there is one."""
    later = np.flatnonzero(~begins)
    if not len(later):
        return 0.0
    same = needed[later][:, :, None] == needed[later - 1][:, None, :]
    return float(same.any(axis=2).mean())
