"""Adds device configurations and their programs to a package where it is used, and takes them away again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Final

from estream_loader import Package
from estream_packer.editing import Changes, NewSection
from estream_packer.schedules import program_for
from estream_spec.constants import SectionType
from estream_spec.errors import InvalidError, PackError
from estream_spec.limits import MAX_DEVICE_CONFIGURATIONS, MAX_SCHEDULES
from estream_spec.manifest import DeviceConfiguration, decode_device_configuration
from estream_spec.messagepack import encode
from estream_spec.records import DirectoryEntry
from estream_spec.rules import banks_length, check_device_configuration
from estream_spec.schedule import Phase

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


def configure_changes(package: Package, choice: DeviceConfiguration) -> Changes:
    """What an edit does that makes a device configuration the default: it replaces an added one of that name.

    The configuration comes with a program, unless the package has one for it. Nothing is done where the default is that
    very one already.

    Raises:
        FormatError: the arena has no room for the banks, or the package is at fault.
        LinkError: there are too many groups for one program.
        PackError: there is no room for another one.
    """
    path = "device configuration"
    try:
        data = encode(choice)
    except UnicodeEncodeError:
        raise PackError(f"name {choice.name!r} is not text", hint="give another name") from None
    decode_device_configuration(data, path)
    experts = package.experts.table
    try:
        check_device_configuration(choice, experts, path)
    except InvalidError as fault:
        fault.hint = f"give --arena at least {banks_length(choice, experts)}, or fewer or smaller groups"
        raise
    own, others = _by_name(package, choice.name)
    highest = max((entry.id for entry in others), default=-1)
    if list(own.values()) == [choice] and min(entry.id for entry in own) > highest:
        return Changes()
    if len(others) >= MAX_DEVICE_CONFIGURATIONS or highest == MAX_ID:
        message = f"package has {len(others)} local device configurations, the last with id {highest}"
        limits = f"the limits are {MAX_DEVICE_CONFIGURATIONS} and {MAX_ID}"
        raise PackError(f"{message}: {limits}", path=package.source.name, hint="remove one first, with --remove")
    added = NewSection(type=SectionType.DEVICE_CONFIGURATION, id=highest + 1, data=data)
    stale = _stale_programs(package, own.values(), [choice, *others.values()])
    return Changes(add=(added, *_program(package, choice, stale)), remove=[*own, *stale])


def unconfigure_changes(package: Package, name: str) -> Changes:
    """What an edit does that takes an added device configuration away, and programs that were for it alone.

    Raises:
        FormatError: the package is at fault.
        PackError: none of that name was added.
    """
    own, others = _by_name(package, name)
    if not own:
        names = ", ".join(repr(choice.name) for choice in others.values())
        hint = f"there are {names}" if others else "none was ever added; those in the manifest stay"
        raise PackError(f"no local device configuration {name!r}", path=package.source.name, hint=hint)
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


def _program(package: Package, choice: DeviceConfiguration, stale: Collection[DirectoryEntry]) -> Iterator[NewSection]:
    """The program to add for a configuration, where the package has none.

    Raises:
        LinkError: there are too many groups for one program.
        PackError: there is no room for another one.
    """
    if package.program(choice, Phase.PREFILL) is not None:
        return
    kept = {entry.id for entry in package.schedules if entry not in stale}
    if len(kept) >= MAX_SCHEDULES:
        message = f"package has {len(kept)} schedules, the limit is {MAX_SCHEDULES}"
        raise PackError(message, path=package.source.name, hint="remove configurations with --remove")
    program = program_for(package.expert_shape, choice)
    free = next(number for number in count() if number not in kept)
    yield NewSection(type=SectionType.SCHEDULE, id=free, data=program.encode())


def _by_name(
    package: Package, name: str
) -> tuple[dict[DirectoryEntry, DeviceConfiguration], dict[DirectoryEntry, DeviceConfiguration]]:
    """The local configurations of that name, and the others."""
    local = local_configurations(package)
    own = {entry: choice for entry, choice in local.items() if choice.name == name}
    return own, {entry: choice for entry, choice in local.items() if entry not in own}
