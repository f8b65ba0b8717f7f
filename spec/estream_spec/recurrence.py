"""When each group of experts is read and computed: the max-plus recurrence of a bounded pipeline.

One reader brings groups into banks in the order of the schedule, one computer takes them out in the same order. With
`D` banks, group `i` of all groups of all layers follows

    start[i]   = max(read[i-1], free[i-D], since)            read[i] = start[i] + load[i]
    compute[i] = max(compute[i-1], routed, read[i]) + c[i]   free[i] = compute[i]
    routed     = compute[last group of the layer before] + non-expert time of the layer

where `since` is what the reading policy waits for: nothing (`pre-routing`), the layer's routing (`post-routing`), or
that and the group before having been computed (`on-demand`).

A group without tokens is idle. Where its read has not started when the layer is routed, it is skipped; else its read
finishes and its bank is free again at once. A read that starts once the layer is routed brings routed experts only.

Where reading takes time of the processors that compute, each read makes computing longer, by the same for every group
and by a share of its own time: its toll. It is counted with the group that was read, which comes to the same in sum.

Source: the recurrence of EStream (arXiv 2609.06551), idle groups, partial reads and the toll added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Policy = Literal["on-demand", "post-routing", "pre-routing"]
"""What a group's read waits for."""
Seconds = npt.NDArray[np.float64]

SKIPPED: Final = 0
"""The group had no token and was not read."""
ROUTED: Final = 1
"""Only the records of routed experts were read."""
WHOLE: Final = 2
"""Every record of the group was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What one layer asks of the reader and the computer. Sequences have one entry per group, in order.

    Attributes:
        before_s: from the layer's start until its tokens are routed: attention, norms, router.
        load_s: seconds to read the whole group.
        routed_load_s: seconds to read the records of its routed experts alone.
        compute_s: seconds to compute its routed experts; 0 for an idle group.
        idle: whether no token goes to the group.
    """

    before_s: float
    load_s: Sequence[float]
    routed_load_s: Sequence[float]
    compute_s: Sequence[float]
    idle: Sequence[bool]


def busy_layer(before_s: float, load_s: Sequence[float], compute_s: Sequence[float]) -> LayerTimes:
    """A layer in which every expert has tokens, as in any long prompt."""
    return LayerTimes(
        before_s=before_s, load_s=load_s, routed_load_s=load_s, compute_s=compute_s, idle=(False,) * len(load_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What the recurrence says of one run. Arrays are f64 seconds since its start, one entry per group of all layers.

    Attributes:
        total_s: when the run ends.
        io_busy_s: seconds the reader read.
        compute_busy_s: seconds the computer computed.
        layer: int64, the layer of each group.
        reading: uint8, `SKIPPED`, `ROUTED` or `WHOLE`.
        read_start_s: when its read starts; for a skipped group, when it was skipped.
        read_end_s: when its read ends.
        compute_start_s: when computing with it starts.
        compute_end_s: when that ends and its bank is free.
    """

    total_s: float
    io_busy_s: float
    compute_busy_s: float
    layer: npt.NDArray[np.int64]
    reading: npt.NDArray[np.uint8]
    read_start_s: Seconds
    read_end_s: Seconds
    compute_start_s: Seconds
    compute_end_s: Seconds

    @property
    def bubble(self) -> float:
        """Share of the run in which the computer waited for the reader."""
        return max(0.0, 1 - self.compute_busy_s / self.total_s) if self.total_s else 0.0


def simulate(
    layers: Sequence[LayerTimes],
    policy: Policy,
    banks: int,
    *,
    before_s: float = 0.0,
    after_s: float = 0.0,
    toll: float = 0.0,
    group_toll_s: float = 0.0,
) -> Timeline:
    """Run the recurrence.

    Args:
        layers: in order of computation.
        policy: what reads wait for.
        banks: groups the arena holds, at least 1; `on-demand` never uses more than one.
        before_s: computing before the first layer, such as the embedding. Reads may start before it ends.
        after_s: computing after the last layer, such as the head.
        toll: seconds that computing loses to each second of reading beside it; with one bank nearly all reading is
            waited for, and there is none.
        group_toll_s: seconds that it loses to each group read beside it, likewise.
    """
    assert banks >= 1
    pre, on_demand = policy == "pre-routing", policy == "on-demand"
    if on_demand or banks == 1:
        toll = group_toll_s = 0.0
    rows: list[tuple[int, int, float, float, float, float]] = []
    free = [0.0] * banks
    read_end, computed, io_busy, compute_busy = 0.0, before_s, 0.0, before_s + after_s
    for number, layer in enumerate(layers):
        routed = computed = computed + layer.before_s
        compute_busy += layer.before_s
        groups = zip(layer.load_s, layer.routed_load_s, layer.compute_s, layer.idle, strict=True)
        for load, routed_load, compute, idle in groups:
            bank = 0 if on_demand else len(rows) % banks
            start = max(read_end, free[bank])
            if not pre:
                start = max(start, routed)
            known = start >= routed
            if idle and known:
                rows.append((number, SKIPPED, start, start, start, start))
                continue
            seconds = routed_load if known else load
            read_end = start + seconds
            io_busy += seconds
            begin = max(computed, read_end)
            compute += group_toll_s + toll * seconds
            compute_busy += compute
            if idle:
                # Nothing waits for it, and its bank is free as soon as it is known to hold nothing of use.
                free[bank] = max(routed, read_end)
                computed += compute
                rows.append((number, WHOLE, start, read_end, free[bank], free[bank]))
                continue
            computed = free[bank] = begin + compute
            rows.append((number, ROUTED if known else WHOLE, start, read_end, begin, computed))
    columns = list(zip(*rows, strict=True)) or [()] * 6
    return Timeline(
        total_s=computed + after_s,
        io_busy_s=io_busy,
        compute_busy_s=compute_busy,
        layer=np.array(columns[0], np.int64),
        reading=np.array(columns[1], np.uint8),
        read_start_s=np.array(columns[2]),
        read_end_s=np.array(columns[3]),
        compute_start_s=np.array(columns[4]),
        compute_end_s=np.array(columns[5]),
    )
