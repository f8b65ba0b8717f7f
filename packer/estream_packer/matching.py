"""Matches a package file with a device that a command line names, and lays the answer out."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from estream_loader import open_package
from estream_packer.checkpoint.files import InputFile
from estream_packer.running import facts_here, facts_of_chip, weights_memory
from estream_spec.chips import Chip, chip_named
from estream_spec.constants import DATA_START, KNOWN_SECTIONS, SectionType
from estream_spec.errors import LinkError, PackError
from estream_spec.matching import MAX_FACTS_LENGTH, DeviceFacts, Reason, Verdict, decode_facts, match
from estream_spec.matching_text import advice, explain

HERE: Final = "here"
"""Names this machine."""


class Needed(Struct, frozen=True, kw_only=True):
    """A section that the device needs.

    Attributes:
        type: its type, as a number.
        name: what that is called; empty where it is not known.
        id: its id.
        offset: where it begins.
        bytes: what it takes in the package.
    """

    type: int
    name: str
    id: int
    offset: int
    bytes: int


class Matched(Struct, frozen=True, kw_only=True):
    """What a package is to a device.

    Attributes:
        verdict: `exact`, `usable`, `recompile` or `refuse`.
        reason: why, in a word.
        explanation: why, in a sentence.
        advice: what can be done about it; None where that is nothing.
        binary: id of the section of the binary to use, or None.
        arena_bytes: the arena to expect.
        fetch_bytes: what the device needs: the sections, the superblocks and the directory.
        file_bytes: all that the package has.
        section_count: sections that the package has, free ones left out.
        sections: those that the device needs.
        device: what was known of the device.
    """

    verdict: Verdict
    reason: Reason
    explanation: str
    advice: str | None
    binary: int | None
    arena_bytes: int
    fetch_bytes: int
    file_bytes: int
    section_count: int
    sections: tuple[Needed, ...]
    device: DeviceFacts


def find_device(name: str, sdk: str | None = None, memory_bytes: int | None = None) -> DeviceFacts:
    """Facts of a device.

    Args:
        name: `here`, the name of a chip, or a JSON file of facts.
        sdk: the SDK build that counts instead; empty for none.
        memory_bytes: memory for everything that counts instead.

    Raises:
        LinkError: there is no such device, or this machine does not tell how much memory it has.
        PackError: the file cannot be read.
        MalformedError: the file has no facts.
    """
    if name == HERE:
        facts = facts_here(memory_bytes=memory_bytes)
    elif (chip := _chip(name)) is not None:
        facts = facts_of_chip(chip, memory_bytes=memory_bytes)
    else:
        facts = _facts_from(name)
        if memory_bytes is not None:
            facts = replace(facts, memory_bytes=weights_memory(memory_bytes))
    return facts if sdk is None else replace(facts, sdk=sdk)


def match_package(path: Path, device: DeviceFacts) -> Matched:
    """Match a package with a device; only superblocks, directory and manifest are read.

    Raises:
        EmoeError: the package is refused, or there is none.
    """
    with open_package(path) as package:
        container, manifest = package.container, package.manifest
    found = match(device, container, manifest)
    help_ = advice(found, str(path))
    if found.reason == "no-sdk":
        help_ = f"{help_}; --sdk names the build on another device"
    by_name = {(entry.type, entry.id): entry for entry in container.entries if entry.type != SectionType.FREE}
    sections = tuple(
        Needed(
            type=entry.type,
            name=SectionType(entry.type).name if entry.type in KNOWN_SECTIONS else "",
            id=entry.id,
            offset=entry.offset,
            bytes=entry.stored_length,
        )
        for entry in map(by_name.__getitem__, found.sections)
    )
    around = DATA_START + container.superblock.directory_length if sections else 0
    return Matched(
        verdict=found.verdict,
        reason=found.reason,
        explanation=explain(found),
        advice=help_,
        binary=found.binary,
        arena_bytes=found.arena_bytes,
        fetch_bytes=around + sum(each.bytes for each in sections),
        file_bytes=container.superblock.file_length,
        section_count=len(by_name),
        sections=sections,
        device=device,
    )


def _facts_from(name: str) -> DeviceFacts:
    try:
        with InputFile(Path(name)) as file:
            data = bytearray(min(file.length, MAX_FACTS_LENGTH + 1))
            file.read_into(memoryview(data), 0)
    except PackError as error:
        raise PackError(f"device facts cannot be read: {error.message}", path=name) from None
    return decode_facts(data, name)


def _chip(name: str) -> Chip | None:
    """The chip of a name; None where it is a file's.

    Raises:
        LinkError: it is neither.
    """
    try:
        return chip_named(name.lower().removeprefix("htp:"))
    except LinkError as error:
        if name.endswith(".json") or Path(name).exists():
            return None
        other = f"a device is also {HERE!r} or a JSON file of facts"
        raise LinkError(error.message, hint=f"{error.hint}; {other}" if error.hint else other) from None
