"""The directory as bytes: digest, header, length, reserved bytes. FORMAT.md sections 4.1 and 4.2, rules DIR."""

from __future__ import annotations

import struct
from functools import partial
from hashlib import sha256

from estream_conformance.builder import ENTRY, Draft, Sealed, Section
from estream_conformance.case import accepted, refused
from estream_conformance.changes import counted, refuse
from estream_conformance.files import entry_offset, flipped, offsets_of, put_at, with_directory
from estream_conformance.packages import full, smallest
from estream_spec.constants import DATA_START, DIRECTORY_MAGIC, MAGIC, TABLE_MAGIC, SectionType
from estream_spec.limits import MAX_SECTIONS

UNKNOWN = 99
"""A section type that means nothing."""
AT = {"reserved": 15, "reserved_too": 72}
"""Where an entry has reserved bytes."""


def saying(**header: int | bytes) -> Sealed:
    """A package whose directory header says something else than what is right; its digest is mended."""
    draft = smallest()
    draft.directory |= header
    return draft.seal()


def directory_of(data: bytes) -> Sealed:
    """A package with other bytes for its directory."""
    return with_directory(smallest(), lambda _: data)


def with_entries(count: int) -> Draft:
    """A package with small sections of unknown types until its directory has so many entries."""
    draft = smallest()
    more = range(count - len(draft.sections))
    draft.sections += [Section(UNKNOWN, b"%d" % number, id=number) for number in more]
    return draft


for _name, _offset in {"magic": 0, "count": 8, "entry_size": 12, "first_entry": 16}.items():
    refuse(
        "EMOE-DIR-001",
        f"bit_of_directory_{_name}_flipped",
        f"One bit of the directory's {_name.replace('_', ' ')} is turned over, its digest is not mended.",
        partial(
            lambda offset: flipped(sealed := smallest().seal(), sealed.superblock["directory_offset"] + offset),
            _offset,
        ),
    )
for _name, _offset in offsets_of(ENTRY).items():
    refuse(
        "EMOE-DIR-001",
        f"bit_of_{_name}_in_last_entry_flipped",
        f"One bit of `{_name}` in the last directory entry is turned over, the directory's digest is not mended.",
        partial(lambda offset: flipped(sealed := smallest().seal(), entry_offset(sealed, -1) + offset), _offset),
    )


@refused("EMOE-DIR-001")
def last_byte_of_directory_flipped() -> Sealed:
    """The last byte of the package, a reserved one, is not what the directory's digest says."""
    sealed = smallest().seal()
    return flipped(sealed, len(sealed.data) - 1)


@refused("EMOE-DIR-001")
def directory_digest_of_its_entries_alone() -> Sealed:
    """The directory's digest leaves the header out."""
    draft = smallest()
    sealed = draft.seal()
    draft.superblock["directory_sha256"] = sha256(sealed.data[entry_offset(sealed, 0) :]).digest()
    return draft.seal()


@refused("EMOE-DIR-001")
def directory_digest_before_its_magic() -> Sealed:
    """The directory has neither the right digest nor the magic: the digest is judged first."""
    return flipped(sealed := saying(magic=MAGIC), len(sealed.data) - 1)


for _length in (0, 8, 12, 15):
    refuse(
        "EMOE-DIR-002",
        f"directory_of_{_length}_bytes",
        f"The directory has {_length} bytes, less than its header.",
        partial(directory_of, (DIRECTORY_MAGIC + struct.pack("<II", 0, 80))[:_length]),
    )
for _name, _magic in {
    "a_table": TABLE_MAGIC,
    "a_superblock": MAGIC,
    "zeros": bytes(8),
    "7_bytes": DIRECTORY_MAGIC[:7] + b"\1",
    "8_bytes_with_another_first": b"e" + DIRECTORY_MAGIC[1:],
}.items():
    refuse(
        "EMOE-DIR-002",
        f"directory_magic_of_{_name}",
        f"The directory begins with {_magic.hex()}, its digest is right.",
        partial(saying, magic=_magic),
    )
for _size in (0, 1, 72, 79, 81, 88, 336, 65616, 2**31, 2**32 - 1):
    refuse(
        "EMOE-DIR-002",
        f"entry_size_{_size}",
        f"The directory says that its entries have {counted(_size, 'byte')}, expected 80.",
        partial(saying, entry_size=_size),
    )


@refused("EMOE-DIR-002")
def entries_of_88_bytes() -> Sealed:
    """The directory says that its entries have 88 bytes, and so they do."""

    def change(directory: bytes) -> bytes:
        entries = [directory[at : at + 80] + bytes(8) for at in range(16, len(directory), 80)]
        return directory[:12] + struct.pack("<I", 88) + b"".join(entries)

    return with_directory(smallest(), change)


@refused("EMOE-DIR-002")
def entry_size_before_count() -> Sealed:
    """Another entry size and too many entries: the size is judged first."""
    return saying(entry_size=0, count=2**32 - 1)


for _count in (MAX_SECTIONS + 1, 1 << 28, (1 << 28) + 7, 2**31, 2**32 - 1):
    refuse(
        "EMOE-DIR-003",
        f"directory_count_{_count}",
        f"The directory says that it has {_count} entries, more than {MAX_SECTIONS}.",
        partial(saying, count=_count),
        base="smallest",
    )


@refused("EMOE-DIR-003")
def directory_count_whose_bytes_wrap_32_bits() -> Sealed:
    """So many entries are said to be there that their bytes are the right number in 32 bits."""
    return saying(count=len(smallest().sections) + (1 << 28))


@accepted(committed=False)
def sections_4096() -> Sealed:
    """The directory has as many entries as it may."""
    return with_entries(MAX_SECTIONS).seal()


@refused("EMOE-SUP-009", base="sections_4096", committed=False)
def sections_4097() -> Sealed:
    """The directory has one entry more than it may, which its length tells."""
    return with_entries(MAX_SECTIONS + 1).seal()


@refused("EMOE-DIR-003", base="sections_4096", committed=False)
def sections_4096_and_count_4097() -> Sealed:
    """The directory has as many entries as it may, and says that there is one more."""
    draft = with_entries(MAX_SECTIONS)
    draft.directory["count"] = MAX_SECTIONS + 1
    return draft.seal()


@refused("EMOE-DIR-004")
def directory_count_4096_of_few() -> Sealed:
    """The directory says that it has as many entries as it may, but is shorter."""
    return saying(count=MAX_SECTIONS)


for _by in (-1, 1):
    refuse(
        "EMOE-DIR-004",
        f"directory_count_{abs(_by)}_{'more' if _by > 0 else 'less'}",
        "The directory's count is off by one.",
        partial(saying, count=len(smallest().sections) + _by),
    )


@refused("EMOE-DIR-004")
def directory_count_0_of_some() -> Sealed:
    """The directory says that it has no entry, but is longer than its header."""
    return saying(count=0)


@refused("EMOE-DIR-004")
def directory_with_a_byte_more() -> Sealed:
    """A byte follows the last entry and belongs to the directory."""
    return with_directory(smallest(), lambda directory: directory + b"\0")


@refused("EMOE-DIR-004")
def directory_with_an_entry_of_zeros_more() -> Sealed:
    """The directory is one entry longer than its count says."""
    return with_directory(smallest(), lambda directory: directory + bytes(80))


@refused("EMOE-DIR-004")
def directory_with_a_byte_less() -> Sealed:
    """The last byte of the last entry is missing."""
    return with_directory(smallest(), lambda directory: directory[:-1])


@refused("EMOE-DIR-004")
def directory_header_alone() -> Sealed:
    """The directory ends behind its header, which counts one entry."""
    return directory_of(DIRECTORY_MAGIC + struct.pack("<II", 1, 80))


@refused("EMOE-SEC-014")
def directory_without_entries() -> Sealed:
    """The directory is whole and has no entry, and sections that nothing describes stand before it."""
    return directory_of(DIRECTORY_MAGIC + struct.pack("<II", 0, 80))


@refused("EMOE-SEC-015")
def package_without_sections() -> Sealed:
    """The directory is whole and has no entry, and follows the superblocks."""
    draft = smallest()
    draft.sections = []
    assert draft.seal().superblock["directory_offset"] == DATA_START
    return draft.seal()


for _place, _index in {"first": 0, "last": -1}.items():
    for _byte in (15, 72, 75, 76, 79):
        _at = 16 + _byte if _index == 0 else _byte - 80
        refuse(
            "EMOE-DIR-005",
            f"reserved_byte_{_byte}_of_{_place}_entry_set",
            f"Byte {_byte} of the {_place} directory entry, which is reserved, is 1; the digest is right.",
            partial(lambda at: with_directory(smallest(), put_at(at, b"\1")), _at),
        )


def reserved_in_section(section_type: int) -> Sealed:
    """A package with one more section, whose entry has a reserved byte set."""
    draft = smallest()
    draft.sections.append(Section(section_type, b"any", id=5, changes={"reserved": 128}))
    return draft.seal()


refuse(
    "EMOE-DIR-005",
    "reserved_byte_of_a_free_entry_set",
    "A reserved byte is set in the entry of an extent no longer in use.",
    partial(reserved_in_section, SectionType.FREE),
)
refuse(
    "EMOE-DIR-005",
    "reserved_byte_of_an_unknown_entry_set",
    "A reserved byte is set in the entry of a section of unknown type.",
    partial(reserved_in_section, UNKNOWN),
)


@refused("EMOE-DIR-005", base="full")
def reserved_byte_of_last_entry_before_flags_of_first() -> Sealed:
    """The first entry has undefined flags, the last one a reserved byte set: all entries are decoded first."""
    draft = full()
    draft.sections[0].changes["flags"] = 1 << 31
    draft.sections[-1].changes["reserved"] = 1
    return draft.seal()


@refused("EMOE-DIR-004")
def length_of_directory_before_reserved_bytes() -> Sealed:
    """A reserved byte is set in the last entry, and a byte follows it: the length is judged first."""
    return with_directory(smallest(), lambda directory: directory[:-1] + b"\1\0")


@accepted()
def directory_at_an_odd_multiple_of_64() -> Sealed:
    """The directory begins at a multiple of 64 and of nothing higher."""
    draft = smallest()
    if draft.seal().superblock["directory_offset"] % 128 == 0:
        draft.sections.append(Section(UNKNOWN, b"any"))
    sealed = draft.seal()
    assert sealed.superblock["directory_offset"] % 128 == 64
    return sealed
