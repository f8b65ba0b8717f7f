"""Measures a device with a package: a device profile in which every figure is measured.

Figures of computing hold for experts like this package's on this backend; those of reading hold for the storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from estream_loader.package import Package
from estream_loader.progress import Progress
from estream_runtime import probe_computing, probe_reading
from estream_runtime.host_memory import usable_memory
from estream_runtime.probe_computing import Held, LayerClock, LayerTime
from estream_runtime.session import Session
from estream_spec.errors import LinkError
from estream_spec.graph_interface import layer_classes
from estream_spec.model import ModelDescription
from estream_spec.profile import Count, Curve, DeviceProfile, Duration, ExpertTimes, ReadRate, ShareCurve
from estream_spec.profile_fit import fit_experts, monotone
from estream_spec.workload import RUNTIME_BYTES, activation_bytes, dense_bytes, expert_weights, layer_operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured.

    Attributes:
        profile: the figures.
        computing: what computed, in words: backend, threads, expert graph.
        layers: how long a layer took, by prompt length.
        spread: how far the middle half of the measurements of one prompt is apart, as a share of their median; the
            median over prompts.
    """

    profile: DeviceProfile
    computing: str
    layers: tuple[LayerTime, ...]
    spread: float


def probe(package: Package, name: str, threads: int | None, progress: Progress) -> Probe:
    """Measure this device with a package, for a minute or so, longer where reading is slow.

    Args:
        package: an open package, in a file on the storage that is to be measured.
        name: what the profile is called.
        threads: threads for computing; None takes all processors this process may use.
        progress: told of each measurement.

    Raises:
        LinkError: reads of the package do not bypass the page cache, or its model cannot run or be measured here.
        FormatError: the package turns out to be faulty.
    """
    memory_bytes, memory_source = usable_memory()
    model = package.manifest.model
    lengths = probe_computing.prompt_lengths(model)
    other = dense_bytes(model, package.dense.table.ranges) + activation_bytes(model, max(lengths))
    held = Held.of(package.expert_shape, memory_bytes, RUNTIME_BYTES + other)
    probe_reading.require_direct(package)
    progress.begin("reading", probe_reading.measurements())
    rates = probe_reading.read_rates(package, memory_bytes, progress)
    start_s = probe_reading.read_start_s(package)
    with Session(
        package,
        arena_bytes=held.arena_bytes,
        group_size=held.group_size,
        prefetch_depth=held.banks - 1,
        threads=threads,
        policy="post-routing",
    ) as session:
        computing = _computing(session)
        clock = LayerClock(session, held)
        progress.begin("computing", probe_computing.measurements(lengths))
        layers, spread = probe_computing.layer_times(clock, lengths, progress)
        call_s = probe_computing.group_call_s(clock, progress)
        group_s, toll_s = probe_computing.toll(clock, call_s, progress)
    longer = "what layers take longer while experts are read and proven"
    head_source = f"median of one row; {computing}"
    profile = DeviceProfile(
        name=name,
        about=f"measured by estream-run probe with {package.manifest.name}; {computing}",
        read_rates=_read_rates(rates),
        read_start_s=_seconds(start_s, "median of reads of one page past the page cache, one at a time"),
        experts=_experts(layers, call_s, model, computing),
        layer_flops=_layer_flops(layers, model, computing),
        head_weight_s=_seconds(median(each.head_s for each in layers) / (model.hidden * model.vocabulary), head_source),
        read_toll_s=_seconds(toll_s, f"{longer}, by bytes; {computing}"),
        read_group_toll_s=_seconds(group_s, f"{longer} one by one and not in large groups; {computing}"),
        memory_bytes=Count(value=memory_bytes, basis="measured", source=memory_source),
    )
    return Probe(profile=profile, computing=computing, layers=tuple(layers), spread=spread)


def _computing(session: Session) -> str:
    """What computes, in words."""
    manifest, backend = session.package.manifest, session.backend
    layer = manifest.model.expert_layers[0]
    shape_class = layer_classes(manifest.model, layer)["expert"]
    [activations] = {
        graph.activations for graph in manifest.graphs if (graph.role, graph.shape_class) == ("expert", shape_class)
    }
    layout = session.package.experts.place(layer).layout
    encodings = ", ".join(sorted({each.encoding for each in layout.matrices})) or "f32"
    name = f"{backend.name} ({backend.detail})" if backend.detail else backend.name
    return f"backend {name}, {session.threads} threads, experts stored as {encodings}, {activations} activations"


def _read_rates(rates: Mapping[int, Mapping[int, float]]) -> tuple[ReadRate, ...]:
    source = f"expert records past the page cache (O_DIRECT), medians of {probe_reading.ROUNDS}"
    return tuple(
        ReadRate(lanes=lanes, at=tuple(found), values=tuple(found.values()), basis="measured", source=source)
        for lanes, found in rates.items()
    )


def _experts(layers: Sequence[LayerTime], call_s: float, model: ModelDescription, computing: str) -> ExpertTimes:
    """Experts by the tokens that those with any have in the mean, without what their groups take, `call_s` each.

    Raises:
        LinkError: none of those that were in the arena had any.
    """
    busy = [each for each in layers if each.active]
    if not busy:
        hint = "run it where there is more memory, so that more experts are in the arena"
        raise LinkError("no prompt had a token for the experts in the arena, nothing is known of their time", hint=hint)
    layer = model.expert_layers[0]
    fit = fit_experts(
        [each.rows / each.active for each in busy],
        [each.alone_s(call_s) / each.active for each in busy],
        expert_weights(model, layer),
    )
    how = f"medians over the experts of the first layer that has any, in the arena already; {computing}"
    return ExpertTimes(
        group_call_s=_seconds(
            call_s, f"to await, use and release a group that is there, beyond its experts' own calls; {how}"
        ),
        weight_s=_seconds(
            fit.weight_s, f"what no tokens would take by a straight line through few: to expand, pack, call; {how}"
        ),
        flops=Curve(
            at=(model.expert_block(layer).intermediate,),
            values=(fit.flops,),
            basis="measured",
            source=f"the best rate by tokens of what tokens take beyond that; {how}",
        ),
        row_tile=Count(value=1, basis="measured", source="what whole tiles take is in flops_share"),
        flops_share=ShareCurve(at=fit.at, values=fit.shares, basis="measured", source=f"of the best rate; {how}"),
    )


def _layer_flops(layers: Sequence[LayerTime], model: ModelDescription, computing: str) -> Curve:
    seconds = monotone([each.other_s for each in layers]).tolist()
    return Curve(
        at=tuple(each.tokens for each in layers),
        values=tuple(
            layer_operations(model, model.expert_layers[0], each.tokens) / took
            for each, took in zip(layers, seconds, strict=True)
        ),
        basis="measured",
        source=f"all but the experts of the first layer that has any, medians; {computing}",
    )


def _seconds(value: float, source: str) -> Duration:
    return Duration(value=value, basis="measured", source=source)
