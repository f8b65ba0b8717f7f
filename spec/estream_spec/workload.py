"""What a model asks of a device for one prompt: seconds and bytes of every layer and group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_spec.graph_interface import layer_classes, role_shape
from estream_spec.manifest import GraphRole
from estream_spec.model import ModelDescription
from estream_spec.profile import DeviceProfile
from estream_spec.records import RecordRange
from estream_spec.recurrence import ROUTED, WHOLE, LayerTimes, Timeline, busy_layer
from estream_spec.routing_load import Floats, RoutingLoad

RUNTIME_BYTES: Final = 192 << 20
"""Allowance for the interpreter, its libraries, and buffers that do not grow with the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model as it is stored.

    Attributes:
        model: what it computes.
        record_lengths: bytes of one expert record, padded, for each layer.
        dense_bytes: weights other than experts that stay in memory.
        needed: for each layer, how often the expert predicted at each rank is routed to, by its prefetch router; None
            where the model has none.
    """

    model: ModelDescription
    record_lengths: tuple[int, ...]
    dense_bytes: int
    needed: tuple[tuple[float, ...], ...] | None = None

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Experts of each layer."""
        return self.model.expert_counts

    @property
    def expert_bytes(self) -> int:
        """Bytes of all expert records."""
        return sum(count * length for count, length in zip(self.model.expert_counts, self.record_lengths, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedWork:
    """The work of a prompt, cut into groups of one size.

    Attributes:
        layers: seconds, for the recurrence.
        whole_bytes: int64 `[groups of all layers]`, what the whole group takes.
        routed_bytes: int64, what the records of its routed experts take; 0 for an idle group.
    """

    layers: tuple[LayerTimes, ...]
    whole_bytes: npt.NDArray[np.int64]
    routed_bytes: npt.NDArray[np.int64]

    @property
    def compute_s(self) -> float:
        """Seconds of computing, head and what it loses to reading left out."""
        return sum(layer.before_s + sum(layer.compute_s) for layer in self.layers)

    def bytes_read(self, timeline: Timeline) -> int:
        """What a run of this work read."""
        whole = self.whole_bytes[timeline.reading == WHOLE].sum()
        return int(whole + self.routed_bytes[timeline.reading == ROUTED].sum())


def layer_s(model: ModelDescription, layer: int, profile: DeviceProfile, tokens: int) -> float:
    """Seconds of all but the experts of a layer, at the profile's rate for so many tokens."""
    return layer_operations(model, layer, tokens) / profile.layer_flops(tokens)


def layer_operations(model: ModelDescription, layer: int, tokens: int) -> int:
    """Operations counted for all but the experts of a layer.

    These are the products with all matrices, and attention over half of all pairs of tokens. A rate for them has to pay
    for norms, rotation and softmax too.
    """
    pairs = 0
    if model.layers[layer].attention is not None:
        attention = model.attention(layer)
        pairs = attention.heads * (attention.head_dim + attention.value_width)
    return 2 * tokens * dense_weights(model, layer) + tokens**2 * pairs


def dense_weights(model: ModelDescription, layer: int) -> int:
    """Weights of all matrices of a layer that are not experts', the router's among them."""
    roles = set(layer_classes(model, layer)) - {"expert"}
    return _matrix_weights(model, layer, roles) + model.hidden * model.expert_counts[layer]


def block_weights(model: ModelDescription, layer: int) -> int:
    """Weights of a layer's dense block, which all tokens pass; 0 where it has none."""
    return _matrix_weights(model, layer, {"dense"})


def expert_weights(model: ModelDescription, layer: int) -> int:
    """Weights of one expert of a layer: gate, up and down."""
    return 3 * model.hidden * model.expert_block(layer).intermediate


def head_s(model: ModelDescription, profile: DeviceProfile) -> float:
    """Seconds of the head, which the last token alone passes."""
    return model.hidden * model.vocabulary * profile.head_weight_s.value


def dense_bytes(model: ModelDescription, dense: Sequence[RecordRange]) -> int:
    """Bytes of all dense records that stay in memory; of an embedding that is not the head too, only rows are read.

    Args:
        model: the model.
        dense: ranges of its dense table.
    """
    return sum(each.count * each.record_length for each in (dense if model.tied_head else dense[1:]))


def activation_bytes(model: ModelDescription, tokens: int) -> int:
    """Memory that grows with the prompt: activations, keys and values of the layer at work, in f32.

    A token has six rows of the residual stream's width, such as what enters and leaves experts, and its projections.
    All that is counted three times: what a graph takes, what it gives and what it makes in between are there together.
    """
    heads = max(
        (attention.heads + attention.key_value_heads) * (attention.head_dim + attention.value_width)
        for attention in model.attentions
    )
    widest = 6 * model.hidden + heads
    return 4 * (3 * tokens * widest + model.vocabulary)


def _matrix_weights(model: ModelDescription, layer: int, roles: Collection[GraphRole]) -> int:
    """Weights of the matrices of some of a layer's roles."""
    shapes = [role_shape(role, model, number) for role, number in layer_classes(model, layer).items() if role in roles]
    return sum(matrix.rows * matrix.columns for shape in shapes for matrix in shape.matrices)


def grouped_work(
    workload: Workload, profile: DeviceProfile, tokens: int, loads: Sequence[RoutingLoad], group_size: int, lanes: int
) -> GroupedWork:
    """Cut a prompt's work into groups; a layer's last one may be smaller.

    A group is idle with some probability. As many are made idle as that comes to, evenly over all layers, and each of
    the others gets the work it is expected to have when it has any.

    Args:
        workload: the model as it is stored.
        profile: the device.
        tokens: tokens of the prompt.
        loads: what is expected of the experts of each layer.
        group_size: experts in a group.
        lanes: reads outstanding at a time, one of those the profile has.
    """
    read_s = cache(lambda length: profile.read_s(length, lanes))
    idle = _Idle()
    layers, whole_bytes, routed_bytes = [], [], []
    for layer, (load, record) in enumerate(zip(loads, workload.record_lengths, strict=True)):
        if not load.active.size:
            layers.append(busy_layer(layer_s(workload.model, layer, profile, tokens), (), ()))
            continue
        starts = np.arange(0, load.active.size, group_size)
        whole = np.diff(starts, append=load.active.size) * record
        some: Floats = 1 - np.multiply.reduceat(1 - load.active, starts)
        none = idle.next(1 - some)
        expected = np.add.reduceat(load.active, starts) * record
        routed = np.minimum(np.rint(_given(expected, some)), whole).astype(np.int64)
        busy = _given(np.add.reduceat(_expert_s(workload.model, layer, profile, load), starts), some)
        busy += profile.experts.group_call_s.value
        layers.append(
            LayerTimes(
                before_s=layer_s(workload.model, layer, profile, tokens),
                load_s=[read_s(length) for length in whole.tolist()],
                routed_load_s=[read_s(length) for length in routed.tolist()],
                compute_s=np.where(none, 0.0, busy).tolist(),
                idle=none,
            )
        )
        whole_bytes.append(whole)
        routed_bytes.append(np.where(none, 0, routed))
    return GroupedWork(
        layers=tuple(layers), whole_bytes=np.concatenate(whole_bytes), routed_bytes=np.concatenate(routed_bytes)
    )


class _Idle:
    """Decides one by one which groups are idle, so that at any time as many are as their probabilities sum to."""

    def __init__(self) -> None:
        self._owed = 0.5  # rounds to the nearest number

    def next(self, probabilities: Floats) -> list[bool]:
        decided = []
        for probability in probabilities.tolist():
            self._owed += probability
            decided.append(self._owed >= 1)
            self._owed -= decided[-1]
        return decided


def _given(expected: Floats, probability: Floats) -> Floats:
    """What is expected given that something happens, from what is expected at all; 0 for what cannot happen."""
    return np.divide(expected, probability, out=np.zeros_like(expected), where=probability > 0)


def _expert_s(model: ModelDescription, layer: int, profile: DeviceProfile, load: RoutingLoad) -> Floats:
    """Seconds expected of each expert, f64 `[experts]`."""
    intermediate = model.expert_block(layer).intermediate
    weights = expert_weights(model, layer)
    seconds = cache(lambda tokens: profile.experts.expert_s(weights, intermediate, tokens))
    each: Floats = np.array([seconds(tokens) for tokens in load.tokens.tolist()])
    return load.active * each
