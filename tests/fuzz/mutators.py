"""Ways to damage an input: bytes, fields of fixed structures, documents, sections, and crosses of two inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Final

from estream_spec import limits
from estream_spec.constants import SectionFlag, SectionType
from estream_spec.errors import EmoeError
from estream_spec.records import (
    DIRECTORY_HEADER,
    RECORD_DIGEST,
    DirectoryEntry,
    RecordRange,
    Superblock,
    decode_directory,
)
from fixtures.mutations import MUTATIONS
from fixtures.packages import Draft, Section
from fuzz import messagepack
from fuzz.inputs import DIRECTORY_AT, directory_of, extents, package_field, table_field
from fuzz.spans import Field

_LENGTHENED: Final = (1, 16, limits.MAX_MANIFEST_LENGTH >> 12, limits.MAX_SMALL_SECTION_LENGTH >> 12, 1 << 31, 1 << 32)
"""Units of 4 KiB."""

Mutator = Callable[[bytes, Random, bytes], bytes]
"""Takes an input, what decides, and another input of the same target."""
FieldOf = Callable[[bytes, Random], Field]

_LIMITS: Final = tuple(value for name, value in vars(limits).items() if name.startswith(("MAX_", "MIN_")))
_BOUNDARIES: Final = (
    *(0, 1, 2, 3, 4, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 4097, 16384, 32767, 32768, 65535),
    *((1 << shift) + step for shift in (31, 32, 42, 44, 63, 64) for step in (-1, 0, 1)),
    *(limit + step for limit in _LIMITS for step in (0, 1)),
)


def set_field(data: bytes, field: Field, random: Random) -> bytes:
    """The data with one field at a boundary, or near what it was."""
    at, width = field
    old = int.from_bytes(data[at : at + width], "little")
    kind = random.randrange(6)
    if kind == 0:
        new = old + random.choice((1, -1, 64, -64, 128, 4096, -4096))
    elif kind == 1:
        new = old ^ 1 << random.randrange(8 * width)
    elif kind == 2:
        new = random.choice((old * 2, old // 2, ~old, old << 8, old >> 8))
    elif kind == 3 and len(data) > width:
        start = random.randrange(len(data) - width)
        new = int.from_bytes(data[start : start + width], "little")
    else:
        new = random.choice((*_BOUNDARIES, len(data), len(data) - 1))
    return data[:at] + (new % (1 << 8 * width)).to_bytes(width, "little")[: max(len(data) - at, 0)] + data[at + width :]


def fields(field_of: FieldOf) -> Mutator:
    """A mutator that sets fields."""
    return lambda data, random, other: set_field(data, field_of(data, random), random)


def some_bytes(data: bytes, random: Random, other: bytes) -> bytes:
    """One of the faults that know no structure, anywhere."""
    body = bytearray(data)
    random.choice(MUTATIONS)(body, random.randrange(len(body) + 1), random)
    return bytes(body)


def cross(data: bytes, random: Random, other: bytes) -> bytes:
    """Some of one input, some of the other, in place or not."""
    if not data or not other:
        return other
    start, stop = sorted((random.randrange(len(data)), random.randrange(len(data) + 1)))
    if random.random() < 0.3:
        return data[:start] + other[random.randrange(len(other)) :]
    if random.random() < 0.3:
        begin = random.randrange(len(other))
        return data[:start] + other[begin : begin + random.randrange(1, 256)] + data[start:]
    return data[:start] + other[start:stop] + data[stop:]


def entries(start: int, size: int) -> Mutator:
    """A mutator that repeats, drops and swaps the structures of a size that fill the data from `start` on."""

    def mutate(data: bytes, random: Random, other: bytes) -> bytes:
        count = (len(data) - start) // size
        if count < 2:
            return cross(data, random, other)
        all_of_them = [data[start + at * size : start + (at + 1) * size] for at in range(count)]
        return data[:start] + b"".join(_shuffled(all_of_them, random)) + data[start + count * size :]

    return mutate


def _shuffled(items: list[bytes], random: Random) -> list[bytes]:
    changed = list(items)
    one, other = random.randrange(len(changed)), random.randrange(len(changed))
    kind = random.randrange(3)
    if kind == 0:
        changed[one], changed[other] = changed[other], changed[one]
    elif kind == 1:
        del changed[one]
    else:
        changed.insert(other, changed[one])
    return changed


def longer_section(data: bytes, random: Random, other: bytes) -> bytes:
    """A container input in which a section is longer, all that stands behind it further on, and the package too."""
    count = (len(data) - DIRECTORY_AT - DIRECTORY_HEADER.size) // DirectoryEntry.SIZE
    if count < 1:
        return cross(data, random, other)
    body, longer = bytearray(data), random.choice(_LENGTHENED) * 4096
    chosen = random.randrange(count)
    places = [DIRECTORY_AT - 8, 24, 48, Superblock.SIZE + 24, Superblock.SIZE + 48]
    for number in range(chosen, count):
        entry = DIRECTORY_AT + DIRECTORY_HEADER.size + number * DirectoryEntry.SIZE
        places += [entry + 24, entry + 32] if number == chosen else [entry + 16]
    for at in places:
        old = int.from_bytes(body[at : at + 8], "little")
        body[at : at + 8] = ((old + longer) % (1 << 64)).to_bytes(8, "little")
    return bytes(body)


def parsed_bytes(data: bytes, random: Random, other: bytes) -> bytes:
    """One of the faults that know no structure, where a package holds more than weights."""
    directory = directory_of(data)
    places = [range(128), range(16384, 16512), directory, directory]
    places += [range(each.start, each.end) for each in extents(data) if not each.flags & SectionFlag.RECORDS]
    body, place = bytearray(data), random.choice(places)
    at = random.choice(place) if place else 0
    random.choice(MUTATIONS)(body, min(at, len(body)), random)
    return bytes(body)


def sections(data: bytes, random: Random, other: bytes) -> bytes:
    """A package with one section changed in a way that fits it, laid out anew with digests that are right."""
    draft, donor = _draft(data), _draft(other)
    if draft is None or donor is None:
        return cross(data, random, other)
    kind = random.randrange(20)
    if kind < 8:
        manifests = [each for each in draft.sections if each.type == SectionType.MANIFEST]
        theirs = [each.data for each in donor.sections if each.type == SectionType.MANIFEST]
        for each in manifests:
            each.data = messagepack.damaged(each.data, random, random.choice(theirs or [b"\xc0"]))
            each.length = len(each.data)
    elif kind < 10:
        _change_table(random.choice(draft.sections), random)
    elif kind < 15:
        _change_record(draft.sections, random)
    else:
        _change_sections(draft, donor, random)
    for each in draft.sections:
        if each.flags is None or not each.flags & SectionFlag.RECORDS:
            each.sha256 = None
    return draft.seal()


def _draft(package: bytes) -> Draft | None:
    """The package taken apart, so far as its directory can be read."""
    directory = directory_of(package)
    try:
        described = decode_directory(package[directory.start : directory.stop], offset=directory.start)
    except EmoeError:
        return None
    draft = copy.copy(_BLANK)
    draft.page_shift, draft.superblock = package[12] if len(package) > 12 else 12, {}
    draft.sections = [
        Section(
            each.type,
            package[each.offset : each.end] if each.end < len(package) else b"",
            id=each.id,
            flags=each.flags,
            codec=each.codec,
            alignment_shift=min(each.alignment_shift, 14),
            length=each.length,
            sha256=each.sha256,
        )
        for each in described
    ]
    return draft


_BLANK: Final = Draft()


def _change_table(section: Section, random: Random) -> None:
    section.data = set_field(section.data, table_field(section.data, 0, random), random)
    if random.random() < 0.2:
        section.data = entries(random.choice((16, 16 + RecordRange.SIZE)), RECORD_DIGEST.size)(
            section.data, random, section.data
        )
        section.length = len(section.data)


def _change_record(sections: list[Section], random: Random) -> None:
    """Put numbers where no weight may have them: NaN, infinity, an 8-bit -128, a multiplier of 0."""
    records = [each for each in sections if each.data and each.type in (SectionType.DENSE, SectionType.EXPERTS)]
    if not records:
        return
    section = random.choice(records)
    at = random.randrange(len(section.data)) & ~3
    new = random.choice(
        (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\xff\xff", b"\x80", b"\0", b"\x10", b"\0\0\x80\xff")
    )
    section.data = (section.data[:at] + new + section.data[at + len(new) :])[: len(section.data)]


def _change_sections(draft: Draft, donor: Draft, random: Random) -> None:
    """Take, give, repeat, drop, swap, compress, empty or rename a section."""
    if not draft.sections or not donor.sections:
        draft.sections = donor.sections
        return
    at, section = random.randrange(len(draft.sections)), random.choice(donor.sections)
    match random.randrange(9):
        case 0:
            draft.sections[at] = section
        case 1:
            draft.sections.insert(at, section)
        case 2:
            draft.sections.insert(at, copy.copy(draft.sections[at]))
        case 3:
            del draft.sections[at]
        case 4:
            draft.sections.append(draft.sections.pop(at))
        case 5:
            draft.sections[at].compress()
        case 6:
            draft.sections[at].data = random.choice((b"", b"\0", b"\xff", bytes(70_000), section.data * 2))
            draft.sections[at].length = len(draft.sections[at].data)
        case 7:
            named = SectionType.GRAPH, SectionType.BINARY
            kind = random.choice((SectionType.DEVICE_CONFIGURATION, SectionType.SIGNATURE, *named, 99))
            draft.sections += [
                Section(kind, section.data[:64] or b"x", id=number) for number in range(random.choice((17, 65)))
            ]
        case _:
            changed = draft.sections[at]
            changed.type, changed.id = random.choice((changed.type, *range(16), 99)), random.choice((0, 1, changed.id))
            changed.flags = random.choice((changed.flags, *range(16)))


PACKAGE_MUTATORS: Final[tuple[Mutator, ...]] = (
    *3 * (fields(package_field),),
    *3 * (sections,),
    *2 * (parsed_bytes,),
    some_bytes,
    cross,
)
