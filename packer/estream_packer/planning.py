"""Plans for a package or a named shape: finds the model and the device, asks the planner, lays the answer out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import Struct

from estream_loader import Package, open_package
from estream_packer.checkpoint.files import InputFile
from estream_packer.plan import plan_package
from estream_packer.recipe import BuildOptions
from estream_spec.constants import MAGIC
from estream_spec.decode_planner import DecodePlan, plan_decoding
from estream_spec.energy import EnergySpent, prompt_energy
from estream_spec.errors import PackError
from estream_spec.model import ModelDescription
from estream_spec.planner import Prediction, PromptPlan, available_arena, configure, usable_memory
from estream_spec.prefetch_router import PrefetchRouter
from estream_spec.profile import MAX_PROFILE_LENGTH, Described, DeviceProfile, decode_profile
from estream_spec.profiles import shipped_profile, shipped_profiles
from estream_spec.records import RecordRange
from estream_spec.shapes import SHAPES
from estream_spec.sizes import bytes_text
from estream_spec.workload import Workload, dense_bytes

if TYPE_CHECKING:
    from rich.table import Table

FIGURES: Final = {
    "read_rates": "reading",
    "read_start_s": "reading",
    "experts.group_call_s": "computing of experts",
    "experts.weight_s": "computing of experts",
    "experts.flops": "computing of experts",
    "experts.row_tile": "computing of experts",
    "experts.flops_share": "computing of experts",
    "layer_flops": "computing of all else in a layer",
    "head_weight_s": "computing of the head",
    "read_toll_s": "what reading takes from computing",
    "read_group_toll_s": "what reading takes from computing",
    "memory_bytes": "memory",
    "energy.read_byte": "energy",
    "energy.memory_byte": "energy",
    "energy.integer_product": "energy",
    "energy.float_product": "energy",
    "energy.idle": "energy",
}
"""Fields of a profile that hold figures, and what people call them."""

UNLIKE: Final = 2
"""Times the rows of an expert from which on another one is computed at a rate of its own."""


class Planned(Struct, frozen=True, kw_only=True):
    """Plans for several prompt lengths.

    Attributes:
        model: the package's name for it, or the shape's.
        profile: the device profile's name.
        estimated: figures of the profile that nobody measured or published.
        asked_bytes: the memory cap that was asked for.
        memory_bytes: the one that counts: what the device has of it.
        predicted: whether the package brings a prefetch router, whose measured worth then counts.
        dense_bytes: weights other than experts that stay in memory.
        expert_bytes: bytes of all experts.
        rows: rows of gate and up that the model's experts have, each number once.
        measured_rows: those of the experts that computing was measured with; none where it was not measured.
        plans: one for each length, in the order given.
        energies: what each prompt takes as planned; None where the profile does not say.
        decoding: how a token after each prompt is decoded, with all memory that the cap leaves.
    """

    model: str
    profile: str
    estimated: tuple[str, ...]
    asked_bytes: int
    memory_bytes: int
    predicted: bool
    dense_bytes: int
    expert_bytes: int
    rows: tuple[int, ...]
    measured_rows: tuple[float, ...]
    plans: tuple[PromptPlan, ...]
    energies: tuple[EnergySpent | None, ...]
    decoding: tuple[DecodePlan, ...]


def find_workload(name: str) -> tuple[str, Workload]:
    """A model as it is stored, and what to call it.

    Args:
        name: a package's path or the name of a shape, which is then stored as `build` does by default.

    Raises:
        PackError: neither a file nor a shape has that name.
        EmoeError: the package is refused.
    """
    path = Path(name)
    if path.exists():
        with open_package(path) as package:
            return package.manifest.name, package_workload(package)
    if name not in SHAPES:
        hint = f"shapes are {', '.join(SHAPES)}"
        raise PackError("no such package, and no shape of that name", path=name, hint=hint)
    plan = plan_package(SHAPES[name], BuildOptions())
    return name, _workload(SHAPES[name], plan.dense, plan.experts)


def package_workload(package: Package) -> Workload:
    """The model of a package as it is stored."""
    found = _workload(package.manifest.model, package.dense.table.ranges, package.experts.table.ranges)
    return replace(found, needed=None if package.prefetch_router is None else _needed(package.prefetch_router, found))


def find_profile(name: str) -> DeviceProfile:
    """A profile that comes with this program, or one from a file.

    Raises:
        PackError: there is neither, or the file is no regular one, or a package.
        MalformedError: the file is no profile.
    """
    if name in shipped_profiles():
        return shipped_profile(name)
    try:
        with InputFile(Path(name)) as file:
            data = bytearray(min(file.length, MAX_PROFILE_LENGTH + 1))
            file.read_into(memoryview(data), 0)
    except PackError as error:
        hint = f"give a file, or one of {', '.join(shipped_profiles())}"
        raise PackError(f"profile cannot be read: {error.message}", path=name, hint=hint) from None
    if data.startswith(MAGIC):
        hint = "`estream-run probe` measures a device with a package"
        raise PackError("is a package, expected a device profile", path=name, hint=hint)
    return decode_profile(data, name)


def plan_prompts(
    name: str, profile: DeviceProfile, memory_bytes: int, prompts: Sequence[int], *, one_arena: bool = False
) -> Planned:
    """Plan each prompt length.

    Args:
        name: as for `find_workload`.
        profile: the device.
        memory_bytes: most memory for everything.
        prompts: tokens of each prompt.
        one_arena: plan for prompts of all these lengths in one process, whose arena is never resized: what fits beside
            the longest prompt is the cap for all.

    Raises:
        PackError: a prompt is longer than the model's context.
        LinkError: the model cannot run in so little memory on this device.
    """
    model, workload = find_workload(name)
    longest = workload.model.context_length
    if max(prompts) > longest:
        raise PackError(f"a prompt of {max(prompts)} tokens, expected at most the model's {longest}", path="--prompt")
    caps = dict.fromkeys(prompts, memory_bytes)
    if one_arena:
        arena_cap = configure(workload, profile, memory_bytes, max(prompts)).arena_cap
        caps = {tokens: arena_cap - available_arena(workload, profile, 0, tokens) for tokens in prompts}
    flops = profile.experts.flops
    rows = (workload.model.expert_block(layer).intermediate for layer in workload.model.expert_layers)
    plans = [configure(workload, profile, cap, tokens) for tokens, cap in caps.items()]
    return Planned(
        model=model,
        profile=profile.name,
        estimated=tuple(_estimated(profile)),
        asked_bytes=memory_bytes,
        memory_bytes=usable_memory(profile, memory_bytes),
        predicted=workload.needed is not None,
        dense_bytes=workload.dense_bytes,
        expert_bytes=workload.expert_bytes,
        rows=tuple(dict.fromkeys(rows)),
        measured_rows=flops.at if flops.basis == "measured" else (),
        plans=tuple(plans),
        energies=tuple(prompt_energy(workload, profile, plan.choice, plan.tokens) for plan in plans),
        decoding=tuple(plan_decoding(workload, profile, memory_bytes, tokens) for tokens in prompts),
    )


def notices(planned: Planned) -> Iterator[str]:
    """What to know before trusting plans."""
    if planned.estimated:
        words = dict.fromkeys(FIGURES[name] for name in planned.estimated)
        yield f"estimated figures of {planned.profile}: {', '.join(words)}"
    if planned.measured_rows and not _alike(planned.rows, planned.measured_rows):
        both = planned.measured_rows, planned.rows
        measured, rows = (" and ".join(f"{each:.0f}" for each in found) for found in both)
        told = f"{planned.profile} has computing measured with experts of {measured} rows, this model's have {rows}"
        yield f"{told}: probe with a package of its shape, which `synth` writes"
    if planned.memory_bytes < planned.asked_bytes:
        yield f"{planned.profile} has {bytes_text(planned.memory_bytes)} of memory, which counts and not --memory"


def plan_tables(planned: Planned) -> Iterator[Table]:
    """The choices, one row per prompt length; then the frontier of each. They fit a terminal of 80 columns."""
    headings = ("prompt", "policy", "arena", "group", "depth", "lanes", "time", "bubble", "I/O floor")
    choices = plain_table(headings)
    for plan in planned.plans:
        choice = plan.choice
        cells = (*_sizes(choice), str(choice.lanes), *_costs(choice), seconds_text(choice.io_floor_s))
        choices.add_row(f"{plan.tokens:,}", choice.policy, *cells)
    yield choices
    for plan in planned.plans:
        table = plain_table(("policy", "arena", "group", "depth", "time", "bubble", ""))
        table.title = f"arena against time, a prompt of {plan.tokens:,}"
        for each in _ways(plan):
            remark = "chosen" if each == plan.choice else "above the cap" if each.arena_bytes > plan.arena_cap else ""
            table.add_row(each.policy, *_sizes(each), *_costs(each), remark)
        yield table


def _alike(rows: Sequence[int], measured: Sequence[float]) -> bool:
    """Whether what was measured says something of a model: rates hold for experts of about that size."""
    return min(measured) <= UNLIKE * min(rows) and max(rows) <= UNLIKE * max(measured)


def _ways(plan: PromptPlan) -> list[Prediction]:
    """The frontier with what was chosen, which another plan of its arena may be as fast as, by arena."""
    added = () if plan.choice in plan.frontier else (plan.choice,)
    return sorted((*plan.frontier, *added), key=lambda each: each.arena_bytes)


def seconds_text(seconds: float) -> str:
    """A time as people read it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def plain_table(headings: Sequence[str]) -> Table:
    """A plain table; all but words is set to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in {"policy", "prefetch", ""} else "right")
    return table


def _sizes(each: Prediction) -> tuple[str, str, str]:
    return bytes_text(each.arena_bytes), str(each.group_size), str(each.prefetch_depth)


def _costs(each: Prediction) -> tuple[str, str]:
    return seconds_text(each.time_s), f"{each.bubble:.1%}"


def _workload(model: ModelDescription, dense: Sequence[RecordRange], experts: Sequence[RecordRange]) -> Workload:
    """From the ranges of both tables."""
    return Workload(
        model=model,
        record_lengths=tuple(each.record_length for each in experts),
        dense_bytes=dense_bytes(model, dense),
    )


def _needed(router: PrefetchRouter, workload: Workload) -> tuple[tuple[float, ...], ...]:
    """How often the expert predicted at each rank is routed to, for each layer; empty where it has none."""
    by_layer = {each.layer: tuple(np.frombuffer(each.needed, "<f4").tolist()) for each in router.layers}
    return tuple(by_layer.get(layer, ()) for layer in range(len(workload.model.layers)))


def _estimated(profile: DeviceProfile) -> Iterator[str]:
    """Names of the fields that hold an estimated figure."""
    fields = msgspec.structs.asdict(profile)
    for part in ("experts", "energy"):
        figures_of = fields[part]
        if figures_of is not None:
            fields |= {f"{part}.{name}": value for name, value in msgspec.structs.asdict(figures_of).items()}
    for name, value in fields.items():
        figures = value if isinstance(value, tuple) else (value,)
        if any(isinstance(figure, Described) and figure.basis == "estimated" for figure in figures):
            yield name
