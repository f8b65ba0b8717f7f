"""Adds device configurations and their programs to a package where it is used, and takes them away again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from typing import Final

from msgspec.structs import replace

from estream_loader import Package
from estream_packer.editing import Changes, NewSection
from estream_packer.schedules import programs_for
from estream_spec.constants import SectionType
from estream_spec.decode_planner import DecodePlan
from estream_spec.errors import InvalidError, PackError
from estream_spec.limits import MAX_DEVICE_CONFIGURATIONS, MAX_EXPERTS, MAX_SCHEDULES
from estream_spec.manifest import DeviceConfiguration, decode_device_configuration
from estream_spec.messagepack import encode
from estream_spec.planner import PromptPlan
from estream_spec.records import DirectoryEntry
from estream_spec.rules import banks_length, check_device_configuration
from estream_spec.schedule import Phase, Program

MAX_ID: Final = (1 << 32) - 1


def local_configurations(package: Package) -> dict[DirectoryEntry, DeviceConfiguration]:
    """The device configurations that were added to a package, by their entry, the default last.

    Raises:
        FormatError: one of them is at fault.
    """
    entries = [entry for entry in package.container.entries if entry.type == SectionType.DEVICE_CONFIGURATION]
    entries.sort(key=lambda entry: entry.id, reverse=True)
    added = package.device_configurations[: len(entries)]
    return dict(reversed(list(zip(entries, added, strict=True))))


def configure_changes(package: Package, choices: Sequence[DeviceConfiguration]) -> Changes:
    """What an edit does that makes a device the default: it replaces all that was added for one of that name.

    Each configuration comes with its programs, unless the package has them. Nothing is done where the default is just
    that already.

    Args:
        package: the package as it is.
        choices: the device's configurations, at least one, in the order in which they are to be listed.

    Raises:
        FormatError: the arena has no room for the banks, or the package is at fault.
        LinkError: there are too many groups for one program.
        PackError: there is no room for more.
    """
    name = choices[0].name
    encoded = [_proven(package, choice, choices[:number]) for number, choice in enumerate(choices)]
    own, others = _by_name(package, name)
    highest = max((entry.id for entry in others), default=-1)
    latest_first = sorted(own, key=lambda entry: entry.id, reverse=True)
    if [own[entry] for entry in latest_first] == list(choices) and min(entry.id for entry in own) > highest:
        return Changes()
    if fault := _no_room(len(others), highest, len(choices)):
        raise PackError(fault, path=package.source.name, hint="remove one first, with --remove")
    added = [
        NewSection(type=SectionType.DEVICE_CONFIGURATION, id=highest + number, data=data)
        for number, data in enumerate(reversed(encoded), 1)  # the latest is listed first
    ]
    stale = _stale_programs(package, own.values(), [*choices, *others.values()])
    return Changes(add=(*added, *_programs(package, choices, stale)), remove=[*own, *stale])


def _no_room(others: int, highest: int, more: int) -> str | None:
    """Which limit is in the way of so many more; `highest` is the last id of the others."""
    if others + more > MAX_DEVICE_CONFIGURATIONS:
        counts = f"{others} other local device configurations, {more} would be added"
        return f"package has {counts}: the limit is {MAX_DEVICE_CONFIGURATIONS}"
    if highest + more > MAX_ID:
        return f"last local device configuration has id {highest}, {more} would be added: the last id is {MAX_ID}"
    return None


def planned_configurations(
    name: str, plans: Sequence[PromptPlan], decoding: DecodePlan | None = None
) -> list[DeviceConfiguration]:
    """The device configurations that the planner chose, shortest prompts first, each where the next one is another.

    That for a single token is how the package is decoded. Where experts stay in memory there is none: they are there.

    Args:
        name: the device.
        plans: a plan for each length.
        decoding: how to decode after the longest prompt.
    """
    found = list[DeviceConfiguration]()
    if decoding is not None and decoding.slots and all(plan.choice.mode != "resident" for plan in plans):
        found.append(decode_configuration(name, decoding, max(plan.choice.arena_bytes for plan in plans)))
        plans = [plan for plan in plans if plan.tokens > 1]
    for plan in sorted(plans, key=lambda plan: plan.tokens):
        choice = DeviceConfiguration(
            name=name,
            arena_bytes=plan.choice.arena_bytes,
            group_size=plan.choice.group_size,
            prefetch_depth=plan.choice.prefetch_depth,
            lanes=plan.choice.lanes,
            policy=plan.choice.policy,
            prompt_tokens=plan.tokens,
        )
        if found and replace(found[-1], prompt_tokens=choice.prompt_tokens) == choice:
            found.pop()
        found.append(choice)
    return found


def decode_configuration(name: str, plan: DecodePlan, arena_bytes: int) -> DeviceConfiguration:
    """The device configuration for single tokens: banks of one record, as many as the arena holds.

    Args:
        name: the device.
        plan: how to decode.
        arena_bytes: the arena that prompts take: what is there anyway is not left empty.
    """
    record = plan.arena_bytes // plan.slots
    slots = max(plan.slots, arena_bytes // record)
    return DeviceConfiguration(
        name=name,
        arena_bytes=slots * record,
        group_size=1,
        prefetch_depth=min(slots - 1, MAX_EXPERTS),
        lanes=plan.lanes,
        policy="post-routing",
        prompt_tokens=1,
    )


def _proven(package: Package, choice: DeviceConfiguration, earlier: Sequence[DeviceConfiguration]) -> bytes:
    """The bytes of a device configuration that every reader accepts.

    Raises:
        FormatError: it breaks a rule.
        PackError: its name is not text.
    """
    path, experts = "device configuration", package.experts.table
    try:
        data = encode(choice)
    except UnicodeEncodeError:
        raise PackError(f"name {choice.name!r} is not text", hint="give another name") from None
    decode_device_configuration(data, path)
    try:
        check_device_configuration(choice, earlier, experts, path)
    except InvalidError as fault:
        if fault.rule == "EMOE-CFG-001":
            fault.hint = f"give --arena at least {banks_length(choice, experts)}, or fewer or smaller groups"
        raise
    return data


def unconfigure_changes(package: Package, name: str) -> Changes:
    """What an edit does that takes away all that was added for one device, and programs that were for it alone.

    Raises:
        FormatError: the package is at fault.
        PackError: none of that name was added.
    """
    own, others = _by_name(package, name)
    if not own:
        names = ", ".join(dict.fromkeys(repr(choice.name) for choice in others.values()))
        hint = f"there are {names}" if others else "none was ever added"
        message = f"no local device configuration {name!r}"
        if any(choice.name == name for choice in package.manifest.device_configurations):
            message = f"device configuration {name!r} belongs to the package and cannot be removed"
        raise PackError(message, path=package.source.name, hint=hint)
    return Changes(remove=[*own, *_stale_programs(package, own.values(), others.values())])


def _stale_programs(
    package: Package, gone: Collection[DeviceConfiguration], local: Collection[DeviceConfiguration]
) -> list[DirectoryEntry]:
    """Programs for configurations that go and for none that stays, here or in the manifest."""
    kept = [*local, *package.manifest.device_configurations]
    return [
        entry
        for entry, program in package.schedules.items()
        if any(map(program.matches, gone)) and not any(map(program.matches, kept))
    ]


def _programs(
    package: Package, choices: Iterable[DeviceConfiguration], stale: Collection[DirectoryEntry]
) -> Iterator[NewSection]:
    """The programs to add for configurations, where the package has none.

    Raises:
        LinkError: there are too many groups for one program.
        PackError: there is no room for another one.
    """
    added = list[Program]()
    for choice in choices:
        for program in programs_for(package.expert_shape, choice, predicts=package.prefetch_router is not None):
            if package.program(choice, Phase(program.phase)) is None and program not in added:
                added.append(program)
    kept = {entry.id for entry in package.schedules if entry not in stale}
    if len(kept) + len(added) > MAX_SCHEDULES:
        message = f"package has {len(kept)} schedules, the limit is {MAX_SCHEDULES}"
        raise PackError(message, path=package.source.name, hint="remove configurations with --remove")
    free = (number for number in count() if number not in kept)
    for program, number in zip(added, free, strict=False):
        yield NewSection(type=SectionType.SCHEDULE, id=number, data=program.encode())


def _by_name(
    package: Package, name: str
) -> tuple[dict[DirectoryEntry, DeviceConfiguration], dict[DirectoryEntry, DeviceConfiguration]]:
    """The local configurations of that name, and the others."""
    local = local_configurations(package)
    own = {entry: choice for entry, choice in local.items() if choice.name == name}
    return own, {entry: choice for entry, choice in local.items() if entry not in own}
