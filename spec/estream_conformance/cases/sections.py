"""Directory entries by themselves: flags, types, codecs, alignment, lengths. FORMAT.md section 4, SEC-001 to 011."""

from __future__ import annotations

import struct
from functools import partial
from hashlib import sha256

from estream_conformance.builder import Draft, Sealed, Section, round_up
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.files import entry_of, hollow
from estream_conformance.packages import full, smallest
from estream_spec.constants import FLAGS, SIGNATURE_MAGIC, SectionFlag, SectionType
from estream_spec.limits import MAX_MANIFEST_LENGTH, MAX_SMALL_SECTION_LENGTH

UNKNOWN = 99
"""A section type that means nothing."""
RESERVED_TYPES = (12, 15)
"""Section types that a later version will give a meaning."""
ONLY_IN_FULL = (SectionType.BINARY, SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE, SectionType.SCHEDULE)
"""Section types that the smallest package does without."""
WITHOUT = (
    SectionType.FREE,
    SectionType.PREFETCH_ROUTER,
    SectionType.DEVICE_CONFIGURATION,
    SectionType.SIGNATURE,
)
"""Section types that neither of them has."""
CRITICAL, SAFE, UNSIGNED, RECORDS = SectionFlag


def altered(section_type: int, **changes: int | bytes) -> Sealed:
    """A package with other values in the entry of one of its sections."""
    draft = full() if section_type in ONLY_IN_FULL else smallest()
    draft.section(section_type).changes |= changes
    return draft.seal()


def added(section_type: int, data: bytes = b"any", **changes: int) -> Draft:
    """A package with one more section, the last one; `changes` are of its entry."""
    draft = smallest()
    entry_id = changes.pop("id", 0)
    draft.sections.append(Section(section_type, data, id=entry_id, changes=dict(changes)))
    return draft


def sealed_with(section_type: int, data: bytes = b"any", **changes: int) -> Sealed:
    """The same, sealed."""
    return added(section_type, data, **changes).seal()


# Flags.
for _bit in (4, 5, 7, 8, 16, 31):
    refuse(
        "EMOE-SEC-001",
        f"flag_{_bit}_of_an_unknown_section",
        f"A section of unknown type has bit {_bit} of its flags set, which is not defined.",
        partial(sealed_with, UNKNOWN, flags=1 << _bit),
        base="unknown_section_without_flags",
    )
for _type in (SectionType.MANIFEST, SectionType.DENSE, SectionType.GRAPH):
    refuse(
        "EMOE-SEC-001",
        f"undefined_flag_of_{_type.name.lower()}",
        "A section has the flags of its type and a bit that is not defined.",
        partial(altered, _type, flags=FLAGS[_type] | 16),
    )
refuse(
    "EMOE-SEC-001",
    "undefined_flag_of_free",
    "An extent no longer in use has a flag that is not defined.",
    partial(sealed_with, SectionType.FREE, flags=1 << 31),
    base="free_extent",
)
refuse(
    "EMOE-SEC-001",
    "undefined_flag_before_critical",
    "An unknown section is critical and has a flag that is not defined: the undefined flag is judged first.",
    partial(sealed_with, UNKNOWN, flags=16 | CRITICAL),
    base="unknown_section_without_flags",
)

for _any_type, _flags in FLAGS.items():
    _kind = SectionType(_any_type)
    _name = _kind.name.lower()
    _own = _kind not in WITHOUT
    for _flag in SectionFlag:
        _wrong = _flags ^ _flag
        refuse(
            "EMOE-SEC-002",
            f"{_name}_{'with' if _wrong & _flag else 'without'}_flag_{(_flag.name or '').lower()}",
            f"The flags of a section of type {_kind.name} are {_wrong:#x}, expected {_flags:#x}.",
            partial(altered if _own else sealed_with, _kind, flags=int(_wrong)),
            base="full" if _kind in ONLY_IN_FULL else "smallest",
        )


@refused("EMOE-SEC-002")
def flags_before_codec() -> Sealed:
    """A section has other flags and another codec than it may: the flags are judged first."""
    return altered(SectionType.GRAPH, flags=0, codec=2)


@refused("EMOE-SEC-002")
def first_entry_before_second() -> Sealed:
    """The first entry has a wrong alignment, the second one undefined flags: entries are judged one by one."""
    draft = smallest()
    draft.section(SectionType.DENSE).changes["flags"] = 0
    draft.section(SectionType.EXPERTS).changes["flags"] = 1 << 31
    return draft.seal()


@refused("EMOE-SEC-005")
def last_check_of_first_entry_before_first_of_second() -> Sealed:
    """The first entry has a wrong alignment, the second one an undefined flag: all of the first is judged before."""
    draft = smallest()
    draft.section(SectionType.DENSE).changes["alignment_shift"] = 22
    draft.section(SectionType.EXPERTS).changes["flags"] = 1 << 31
    return draft.seal()


# Types.
for _any_type in (*RESERVED_TYPES, 16, 256 + SectionType.MANIFEST, 65536 + SectionType.GRAPH, 2**31, 2**32 - 1):
    for _name, _flags in {"critical": CRITICAL, "critical_and_unsigned": CRITICAL | UNSIGNED}.items():
        if _flags == CRITICAL or _any_type == 16:
            refuse(
                "EMOE-SEC-003",
                f"{_name}_section_of_type_{_any_type}",
                f"A section of type {_any_type}, which no reader of this version knows, is critical.",
                partial(sealed_with, _any_type, flags=int(_flags)),
                base=f"skipped_section_of_type_{_any_type}",
            )
    accept(
        f"skipped_section_of_type_{_any_type}",
        f"A section of type {_any_type}, which no reader of this version knows, is to be skipped.",
        partial(sealed_with, _any_type),
    )


@accepted()
def unknown_section_without_flags() -> Sealed:
    """A section of unknown type without flags is skipped."""
    return sealed_with(UNKNOWN)


@accepted()
def unknown_section_that_is_safe_to_copy() -> Sealed:
    """A section of unknown type that editors keep is skipped."""
    return sealed_with(UNKNOWN, flags=SAFE)


@accepted()
def unknown_section_that_is_unsigned() -> Sealed:
    """A section of unknown type that is outside `file_id` is skipped."""
    return sealed_with(UNKNOWN, flags=UNSIGNED | SAFE)


def unknown_records(**changes: int | bytes) -> Sealed:
    """A package with a section of unknown type that is flagged `records`."""
    draft = smallest()
    changes = {"flags": RECORDS, **changes}
    draft.sections.append(Section(UNKNOWN, bytes(4096), alignment_shift=12, changes=changes))
    return draft.seal()


@accepted()
def unknown_section_of_records_with_any_digest() -> Sealed:
    """Nobody can check a section of unknown type that is flagged `records`: its digest is another."""
    return unknown_records(sha256=bytes(32))


@accepted()
def unknown_section_with_id_of_known_one() -> Sealed:
    """A section of unknown type has an id that sections of other types have, too."""
    return sealed_with(UNKNOWN, id=3)


@accepted()
def unknown_section_with_highest_id() -> Sealed:
    """A section of unknown type has the highest id there is."""
    return sealed_with(UNKNOWN, id=2**32 - 1)


@accepted()
def unknown_section_first() -> Sealed:
    """A section of unknown type stands before all others."""
    draft = added(UNKNOWN, b"any")
    draft.sections.insert(0, draft.sections.pop())
    return draft.seal()


@refused("EMOE-SEC-003")
def critical_unknown_section_before_codec() -> Sealed:
    """A critical section of unknown type has an unknown codec and a wrong alignment: the type is judged first."""
    return sealed_with(UNKNOWN, flags=CRITICAL, codec=9, alignment_shift=0)


# Codecs.
for _codec in (2, 3, 256, 257, 65535):
    refuse(
        "EMOE-SEC-004",
        f"codec_{_codec}_of_a_graph",
        f"A graph is stored with codec {_codec}.",
        partial(altered, SectionType.GRAPH, codec=_codec),
    )
    accept(
        f"codec_{_codec}_of_an_unknown_section",
        f"A section of unknown type is stored with codec {_codec}, by which any length may become any other.",
        partial(sealed_with, UNKNOWN, codec=_codec, length=2**64 - _codec),
    )
for _type in (SectionType.MANIFEST, SectionType.DENSE, SectionType.EXPERT_TABLE):
    refuse(
        "EMOE-SEC-004",
        f"codec_2_of_{_type.name.lower()}",
        "A section that every reader needs is stored with an unknown codec.",
        partial(altered, _type, codec=2),
    )
refuse(
    "EMOE-SEC-004",
    "codec_2_of_free",
    "An extent no longer in use is said to be stored with an unknown codec.",
    partial(sealed_with, SectionType.FREE, codec=2),
    base="free_extent",
)
accept(
    "unknown_section_with_length_0_by_an_unknown_codec",
    "A section of unknown type and codec decodes to nothing.",
    partial(sealed_with, UNKNOWN, codec=2, length=0),
)
accept(
    "unknown_section_of_records_with_an_unknown_codec",
    "A section of unknown type is flagged `records` and stored with a codec that this version does not know.",
    partial(unknown_records, codec=2),
)


# Alignment.
def aligned(section_type: int, shift: int) -> Sealed:
    """A package in which a section is aligned to `2^shift`, as its entry says."""
    draft = smallest()
    draft.section(section_type).alignment_shift = shift
    return draft.seal()


for _shift in (0, 5, 22, 31, 32, 38, 63, 64, 70, 128, 255):
    refuse(
        "EMOE-SEC-005",
        f"alignment_shift_{_shift}",
        f"A graph is said to be aligned to 2^{_shift} bytes.",
        partial(altered, SectionType.GRAPH, alignment_shift=_shift),
    )
for _any_type in (SectionType.FREE, UNKNOWN):
    for _shift in (5, 22):
        refuse(
            "EMOE-SEC-005",
            f"alignment_shift_{_shift}_of_{'free' if _any_type == SectionType.FREE else 'an_unknown_section'}",
            f"A section that readers do not look into is said to be aligned to 2^{_shift} bytes.",
            partial(sealed_with, _any_type, alignment_shift=_shift),
        )
for _type in (SectionType.DENSE, SectionType.EXPERTS):
    for _shift in (6, 11, 22):
        refuse(
            "EMOE-SEC-005",
            f"alignment_shift_{_shift}_of_{_type.name.lower()}",
            f"Records in pages of 2^12 bytes are said to be aligned to 2^{_shift} bytes.",
            partial(altered, _type, alignment_shift=_shift),
        )
refuse(
    "EMOE-SEC-005",
    "alignment_shift_11_of_unknown_records",
    "A section of unknown type that is flagged `records` is aligned to less than a page.",
    partial(unknown_records, alignment_shift=11),
    base="unknown_section_of_records_with_any_digest",
)
for _shift in (7, 12, 21):
    accept(
        f"manifest_aligned_to_2_to_{_shift}",
        f"The manifest is aligned to 2^{_shift} bytes.",
        partial(aligned, SectionType.MANIFEST, _shift),
    )
for _shift in (13, 21):
    accept(
        f"records_aligned_to_2_to_{_shift}",
        f"The first section, records in pages of 2^12 bytes, is aligned to 2^{_shift} bytes.",
        partial(aligned, SectionType.DENSE, _shift),
    )


@refused("EMOE-SEC-005")
def alignment_before_offset() -> Sealed:
    """A section is aligned to too little and begins behind the end of the package: alignment is judged first."""
    return altered(SectionType.GRAPH, alignment_shift=0, offset=2**64 - 1)


# Extents that do not fit the package.
FILE_LENGTH = smallest().seal().superblock["file_length"]
GRAPH = entry_of(smallest().seal(), SectionType.GRAPH)
for _name, _number in {
    "end_and_1": FILE_LENGTH + 1,
    "2_to_32_too_high": GRAPH["offset"] + 2**32,
    "2_to_63": 1 << 63,
    "2_to_63_too_high": GRAPH["offset"] + 2**63,
    "2_to_64_less_64": 2**64 - 64,
}.items():
    refuse(
        "EMOE-SEC-006",
        f"section_offset_{_name}",
        f"A section is said to begin at {_number}, the package has {FILE_LENGTH} bytes.",
        partial(altered, SectionType.GRAPH, offset=_number),
    )
for _name, _number in {
    "end_and_1": FILE_LENGTH + 1,
    "2_to_32_too_much": GRAPH["length"] + 2**32,
    "2_to_63": 1 << 63,
    "2_to_64_less_1": 2**64 - 1,
    "back_to_0": 2**64 - GRAPH["offset"],
    "back_to_its_own_offset": 2**64 - 64,
}.items():
    refuse(
        "EMOE-SEC-006",
        f"section_length_{_name}",
        f"A section is said to have {_number} bytes, the package has {FILE_LENGTH}.",
        partial(altered, SectionType.GRAPH, stored_length=_number, length=_number),
    )
refuse(
    "EMOE-SEC-006",
    "free_extent_longer_than_the_package",
    "An extent no longer in use is longer than the package.",
    partial(sealed_with, SectionType.FREE, stored_length=FILE_LENGTH + 1000, length=FILE_LENGTH + 1000),
    base="free_extent",
)
refuse(
    "EMOE-SEC-012",
    "section_offset_at_the_end",
    "A section is said to begin where the package ends, which is not where it must.",
    partial(altered, SectionType.GRAPH, offset=FILE_LENGTH),
)
refuse(
    "EMOE-SEC-012",
    "section_as_long_as_the_package",
    "A section is said to be as long as the package, so the next one does not begin where it must.",
    partial(altered, SectionType.GRAPH, stored_length=FILE_LENGTH, length=FILE_LENGTH),
)
refuse(
    "EMOE-SEC-006",
    "offset_before_stored_length_0",
    "A section has no bytes and begins behind the end of the package: the extent is judged first.",
    partial(altered, SectionType.GRAPH, offset=FILE_LENGTH + 1, stored_length=0, length=0),
)

# Empty sections, and lengths against what is stored.
for _name, _any_type in {"free": SectionType.FREE, "unknown": UNKNOWN}.items():
    refuse(
        "EMOE-SEC-007",
        f"{_name}_section_of_0_bytes",
        "A section that readers do not look into has no bytes.",
        partial(sealed_with, _any_type, b""),
    )


@refused("EMOE-SEC-007")
def graph_of_0_bytes() -> Sealed:
    """A graph has no bytes."""
    draft = smallest()
    draft.section(SectionType.GRAPH).data = b""
    return draft.seal()


@refused("EMOE-SEC-007", base="full")
def chat_template_of_0_bytes() -> Sealed:
    """An empty chat template is a section of no bytes; it should have been left out."""
    draft = full()
    draft.section(SectionType.CHAT_TEMPLATE).data = b""
    return draft.seal()


@refused("EMOE-SEC-007", "zstd")
def compressed_section_of_0_stored_bytes() -> Sealed:
    """A compressed section has no stored bytes."""
    return sealed_with(UNKNOWN, b"", codec=1, length=1)


@accepted()
def sections_of_1_byte() -> Sealed:
    """Graphs have one byte each."""
    draft = smallest()
    for section in draft.sections:
        if section.type == SectionType.GRAPH:
            section.data = b"g"
    return draft.seal()


for _name, _number in {
    "1_more": 8,
    "1_less": 6,
    "0": 0,
    "2_to_64_less_1": 2**64 - 1,
    "2_to_32_more": 7 + 2**32,
}.items():
    assert GRAPH["stored_length"] == 7
    refuse(
        "EMOE-SEC-008",
        f"length_of_a_plain_graph_{_name}",
        f"A graph is stored in 7 bytes without a codec, and said to have {_number}.",
        partial(altered, SectionType.GRAPH, length=_number),
    )
for _type in (SectionType.MANIFEST, SectionType.DENSE, SectionType.EXPERT_TABLE):
    refuse(
        "EMOE-SEC-008",
        f"length_of_{_type.name.lower()}_1",
        "A section that is stored without a codec has another length than stored length.",
        partial(altered, _type, length=1),
    )
for _name, _any_type in {"free": SectionType.FREE, "unknown": UNKNOWN}.items():
    refuse(
        "EMOE-SEC-008",
        f"length_of_{_name}_section_another",
        "A section that readers do not look into is stored without a codec and has another length.",
        partial(sealed_with, _any_type, length=4),
    )

# Limits of lengths.


def zeros(section_type: int, length: int) -> Sealed:
    """A package in which a section is zeros."""
    draft = smallest()
    draft.section(section_type).data = bytes(length)
    return draft.seal()


def beyond_limit(section_type: int, most: int) -> Made:
    """A package that begins with a section a byte longer than its type may be."""
    changes = {"flags": int(FLAGS[section_type]), "stored_length": most + 1, "length": most + 1}
    return hollow(smallest(), most + 4096, section_type, **changes)


def stored_beyond_limit(section_type: int, most: int) -> Made:
    """A package that begins with a section that is short once decoded, and stored in a byte more than `most`."""
    changes = {"flags": int(FLAGS[section_type]), "codec": 1, "stored_length": most + 1, "length": 120}
    return hollow(smallest(), round_up(most + 1, 4096), section_type, **changes)


refuse(
    "EMOE-SEC-011",
    "manifest_a_byte_longer_than_it_may_be",
    "The manifest has a byte more than it may.",
    partial(zeros, SectionType.MANIFEST, MAX_MANIFEST_LENGTH + 1),
)
refuse(
    "EMOE-MAN-001",
    "manifest_of_the_greatest_length_of_zeros",
    "The manifest has as many bytes as it may, but they are zeros: many values and not one.",
    partial(zeros, SectionType.MANIFEST, MAX_MANIFEST_LENGTH),
)
for _name, _type, _most, _base in (
    ("tokenizer", SectionType.TOKENIZER, MAX_SMALL_SECTION_LENGTH, "free_extent_longer_than_sections_may_be"),
    ("schedule", SectionType.SCHEDULE, MAX_SMALL_SECTION_LENGTH, "free_extent_longer_than_sections_may_be"),
    ("binary", SectionType.BINARY, MAX_SMALL_SECTION_LENGTH, "free_extent_longer_than_sections_may_be"),
    ("device_configuration", SectionType.DEVICE_CONFIGURATION, MAX_MANIFEST_LENGTH, "smallest"),
    ("signature", SectionType.SIGNATURE, MAX_MANIFEST_LENGTH, "signature_of_another_algorithm_as_long_as_it_may_be"),
):
    refuse(
        "EMOE-SEC-011",
        f"{_name}_a_byte_longer_than_it_may_be",
        f"A section of type {_type.name} has a byte more than it may.",
        partial(beyond_limit, _type, _most),
        base=_base,
    )


for _name, _type, _most, _base in (
    ("tokenizer", SectionType.TOKENIZER, MAX_SMALL_SECTION_LENGTH, "free_extent_longer_than_sections_may_be"),
    ("schedule", SectionType.SCHEDULE, MAX_SMALL_SECTION_LENGTH, "free_extent_longer_than_sections_may_be"),
    ("binary", SectionType.BINARY, MAX_SMALL_SECTION_LENGTH, "free_extent_longer_than_sections_may_be"),
    ("chat_template", SectionType.CHAT_TEMPLATE, MAX_MANIFEST_LENGTH, "smallest"),
    ("device_configuration", SectionType.DEVICE_CONFIGURATION, MAX_MANIFEST_LENGTH, "smallest"),
    ("signature", SectionType.SIGNATURE, MAX_MANIFEST_LENGTH, "smallest"),
):
    refuse(
        "EMOE-SEC-011",
        f"{_name}_of_120_bytes_stored_in_more_than_it_may_be",
        f"A section of type {_type.name} is compressed, and its few bytes are stored in more than it may have.",
        partial(stored_beyond_limit, _type, _most),
        "zstd",
        base=_base,
    )
refuse(
    "EMOE-SEC-011",
    "signature_of_120_bytes_stored_in_a_tib",
    "A signature is compressed, and its few bytes are stored in a TiB.",
    partial(stored_beyond_limit, SectionType.SIGNATURE, (1 << 40) - 1),
    "large",
    "zstd",
)


@accepted()
def signature_of_another_algorithm_as_long_as_it_may_be() -> Sealed:
    """A signature of an algorithm that nobody knows has as many bytes as it may."""
    draft = smallest()
    signature = SIGNATURE_MAGIC + struct.pack("<I", 2) + bytes(MAX_MANIFEST_LENGTH - 12)
    draft.sections.append(Section(SectionType.SIGNATURE, signature))
    return draft.seal()


@accepted()
def free_extent_longer_than_sections_may_be() -> Made:
    """An extent no longer in use is longer than any section that is read whole; nobody reads it."""
    return hollow(smallest(), MAX_SMALL_SECTION_LENGTH + 4096)


@accepted()
def unknown_records_longer_than_sections_may_be() -> Made:
    """A section of unknown type that is flagged `records` is longer than any that is read whole; nobody reads it."""
    flags = {"flags": RECORDS, "alignment_shift": 12}
    return hollow(smallest(), MAX_SMALL_SECTION_LENGTH + 4096, UNKNOWN, **flags)


# FREE extents.
@accepted()
def free_extent() -> Sealed:
    """An extent no longer in use holds bytes, which mean nothing, and its digest is right by accident."""
    return sealed_with(SectionType.FREE)


@accepted()
def free_extents_with_any_id_and_digest() -> Sealed:
    """Two extents no longer in use have one id, and digests that are not theirs."""
    draft = smallest()
    for _ in range(2):
        extent = Section(SectionType.FREE, b"\xff" * 100, id=2**32 - 1, changes={"sha256": b"\xee" * 32})
        draft.sections.insert(1, extent)
    return draft.seal()


@accepted()
def free_extent_first_and_aligned_to_2_mib() -> Sealed:
    """The first section is an extent no longer in use, aligned to 2 MiB."""
    draft = smallest()
    draft.sections.insert(0, Section(SectionType.FREE, b"any", alignment_shift=21))
    return draft.seal()


# Digests.
for _kind in (
    SectionType.MANIFEST,
    SectionType.DENSE_TABLE,
    SectionType.EXPERT_TABLE,
    SectionType.GRAPH,
    SectionType.TOKENIZER,
    SectionType.CHAT_TEMPLATE,
    SectionType.SCHEDULE,
    SectionType.BINARY,
):
    refuse(
        "EMOE-SEC-018",
        f"wrong_digest_of_{_kind.name.lower()}",
        "The digest of a section that is read whole is another.",
        partial(altered, _kind, sha256=sha256(b"another").digest()),
        base="full" if _kind in ONLY_IN_FULL else "smallest",
    )
