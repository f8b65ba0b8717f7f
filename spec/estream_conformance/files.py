"""Changes to the bytes of a sealed package, and to where it stands in its file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from estream_conformance.builder import ENTRY, Draft, Sealed, Section, Values
from estream_conformance.case import Made
from estream_conformance.image import Image
from estream_spec.constants import DATA_START, SUPERBLOCK_OFFSETS, SectionType


def patched(sealed: Sealed, offset: int, data: bytes) -> Sealed:
    """Other bytes at an offset; nothing is mended."""
    return replace(sealed, data=sealed.data[:offset] + data + sealed.data[offset + len(data) :])


def flipped(sealed: Sealed, offset: int, mask: int = 1) -> Sealed:
    """Bits of one byte turned over; nothing is mended."""
    return patched(sealed, offset, bytes([sealed.data[offset] ^ mask]))


def with_tail(sealed: Sealed, tail: bytes) -> Sealed:
    """Bytes behind the package's end, which are none of its own."""
    return replace(sealed, data=sealed.data + tail)


def offsets_of(layout: dict[str, str]) -> dict[str, int]:
    """Where a structure's fields begin."""
    offsets, end = {}, 0
    for name, kind in layout.items():
        offsets[name] = end
        end += struct.calcsize(f"<{kind}")
    return offsets


def entry_of(sealed: Sealed, section_type: int, section_id: int = 0) -> Values:
    """The directory entry of a section."""
    return next(each for each in sealed.entries if (each["type"], each["id"]) == (section_type, section_id))


def entry_offset(sealed: Sealed, index: int) -> int:
    """Where a directory entry begins; -1 is the last one."""
    size = sum(struct.calcsize(f"<{kind}") for kind in ENTRY.values())
    return int(sealed.superblock["directory_offset"]) + 16 + index % len(sealed.entries) * size


def with_directory(draft: Draft, change: Callable[[bytes], bytes]) -> Sealed:
    """The directory's bytes changed before their digest is taken."""
    draft.change_directory = change
    return draft.seal()


def put_at(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    """The change that sets bytes at an offset; a negative one counts from the end."""

    def change(whole: bytes) -> bytes:
        start = offset % len(whole)
        return whole[:start] + data + whole[start + len(data) :]

    return change


def with_both_twins_written(sealed: Sealed, superblock: bytes) -> Sealed:
    """Both twins replaced by 128 bytes as they are."""
    for offset in SUPERBLOCK_OFFSETS:
        sealed = patched(sealed, offset, superblock)
    return sealed


def hollow(draft: Draft, room: int, section_type: int = SectionType.FREE, **changes: int) -> Made:
    """A package whose first section is longer than memory has to be: zeros, which no reader reads.

    Args:
        draft: the package; it gets the section.
        room: bytes up to the next section, a multiple of the largest alignment of those that follow.
        section_type: of the first section.
        changes: fields of its entry; `length` and `stored_length` are `room` without.
    """
    whole = draft.seal()
    extent = {"offset": DATA_START, "stored_length": room, "length": room, "sha256": bytes(32), **changes}
    for section, entry in zip(draft.sections, whole.entries, strict=True):
        section.changes["offset"] = entry["offset"] + room
    draft.sections.insert(0, Section(section_type, b"", id=7, changes=extent))
    end = whole.superblock["directory_offset"] + room
    own_entry = 80
    file_length = whole.superblock["file_length"] + room + own_entry
    draft.superblock |= {"directory_offset": end, "file_length": file_length}
    sealed = draft.seal()
    head, rest = sealed.data[:DATA_START], sealed.data[DATA_START:]
    return Made(package=sealed, image=Image.of((0, head), (DATA_START + room, rest)))
