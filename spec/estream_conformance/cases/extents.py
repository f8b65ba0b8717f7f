"""Where sections lie and which there are: FORMAT.md sections 4.3 and 4.6, rules SEC-012 to SEC-017."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from estream_conformance.builder import Draft, Sealed, Section, superblock_bytes
from estream_conformance.case import accepted, refused
from estream_conformance.changes import refuse
from estream_conformance.files import entry_of, with_both_twins_written, with_directory
from estream_conformance.packages import full, smallest
from estream_spec.constants import SectionType

UNKNOWN = 99
ONE = (
    SectionType.MANIFEST,
    SectionType.DENSE,
    SectionType.DENSE_TABLE,
    SectionType.EXPERTS,
    SectionType.EXPERT_TABLE,
)
"""Types of which there is one section."""


def with_sections(*sections: Section) -> Draft:
    """A package with more sections, the last ones."""
    draft = smallest()
    draft.sections += sections
    return draft


def without_entry(index: int) -> Callable[[bytes], bytes]:
    """The change that takes an entry out of the directory."""

    def change(directory: bytes) -> bytes:
        count = int.from_bytes(directory[8:12], "little") - 1
        start = 16 + index % (count + 1) * 80
        return directory[:8] + count.to_bytes(4, "little") + directory[12:start] + directory[start + 80 :]

    return change


def last_entry_again(directory: bytes) -> bytes:
    """The directory with its last entry twice."""
    count = int.from_bytes(directory[8:12], "little") + 1
    return directory[:8] + count.to_bytes(4, "little") + directory[12:] + directory[-80:]


def last_entries_swapped(directory: bytes) -> bytes:
    """The directory with its last two entries in the other order."""
    return directory[:-160] + directory[-80:] + directory[-160:-80]


def without(section_type: int) -> Draft:
    """A package without a section."""
    draft = smallest()
    draft.sections = [each for each in draft.sections if each.type != section_type]
    return draft


def with_id(draft: Draft, section_type: int, section_id: int) -> Sealed:
    """A package whose section of a type has another id."""
    draft.section(section_type).id = section_id
    return draft.seal()


def doubled(draft: Draft, section_type: int) -> Sealed:
    """A package with a second section of a type, which has the id 1 and is zeros."""
    shift = draft.section(section_type).alignment_shift
    draft.sections.append(Section(section_type, bytes(4096), id=1, alignment_shift=shift))
    return draft.seal()


def hole_before(section_type: int, shift: int, said: int) -> Sealed:
    """A package in which a section is aligned to `2^shift` bytes, though its entry says less."""
    draft = smallest()
    section = draft.section(section_type)
    section.alignment_shift = shift
    section.changes["alignment_shift"] = said
    return draft.seal()


def moved(section_type: int, by: int) -> Sealed:
    """A package that says a section begins elsewhere."""
    draft = smallest()
    draft.section(section_type).changes["offset"] = entry_of(draft.seal(), section_type)["offset"] + by
    return draft.seal()


@refused("EMOE-SEC-012")
def first_section_begins_2_mib_late() -> Sealed:
    """The first section begins at 2 MiB, its entry asks for the next multiple of a page."""
    return hole_before(SectionType.DENSE, 21, 12)


@refused("EMOE-SEC-012")
def first_section_begins_a_page_late() -> Sealed:
    """Zeros that no section has stand before the first one."""
    draft = smallest()
    draft.sections.insert(0, Section(SectionType.FREE, bytes(4096)))
    return with_directory(draft, without_entry(0))


@refused("EMOE-SEC-012")
def manifest_begins_late() -> Sealed:
    """The manifest is aligned to 4096 bytes, its entry asks for 64: a hole is before it."""
    return hole_before(SectionType.MANIFEST, 12, 6)


@refused("EMOE-SEC-012")
def manifest_begins_64_bytes_late() -> Sealed:
    """The manifest begins 64 bytes behind where it must, and so say its entry and its digest."""
    draft = smallest()
    data = draft.seal()
    entry = entry_of(data, SectionType.MANIFEST)
    section = draft.section(SectionType.MANIFEST)
    section.stored = bytes(64) + entry["content"]
    section.changes = {
        **{name: entry[name] for name in ("codec", "length", "stored_length", "sha256")},
        "offset": entry["offset"] + 64,
    }
    return draft.seal()


for _by in (1, 64, -64, -1, -4096):
    refuse(
        "EMOE-SEC-012",
        f"graph_said_to_begin_{abs(_by)}_bytes_{'late' if _by > 0 else 'early'}",
        "A graph is said to begin elsewhere than it does.",
        partial(moved, SectionType.GRAPH, _by),
    )


@refused("EMOE-SEC-012")
def alignment_said_to_be_more_than_it_is() -> Sealed:
    """A section begins where the one before it ends, but its entry asks for a multiple of 2 MiB."""
    draft = smallest()
    draft.section(SectionType.MANIFEST).changes["alignment_shift"] = 21
    return draft.seal()


@refused("EMOE-SEC-012")
def section_offset_in_the_superblocks() -> Sealed:
    """The first section begins in the second superblock's slot."""
    return moved(SectionType.DENSE, -16384)


@refused("EMOE-SEC-012")
def section_offset_0() -> Sealed:
    """The first section begins at 0."""
    return moved(SectionType.DENSE, -32768)


@refused("EMOE-SEC-012")
def two_graphs_over_one_extent() -> Sealed:
    """The last entry describes a graph's bytes once more."""
    draft = smallest()
    entry = entry_of(draft.seal(), SectionType.GRAPH)
    same = {name: entry[name] for name in ("offset", "stored_length", "length", "sha256")}
    draft.sections.append(Section(UNKNOWN, b"", changes=same))
    return draft.seal()


@refused("EMOE-SEC-012")
def section_inside_another_one() -> Sealed:
    """An entry describes the second half of the section before it."""
    draft = smallest()
    outer = Section(UNKNOWN, bytes(128))
    draft.sections.append(outer)
    offset = entry_of(draft.seal(), UNKNOWN)["offset"] + 64
    inner = {"offset": offset, "stored_length": 64, "length": 64}
    draft.sections.append(Section(UNKNOWN, b"", id=1, changes=inner))
    return draft.seal()


@refused("EMOE-SEC-012")
def sections_overlap_by_64_bytes() -> Sealed:
    """A section begins 64 bytes before the one before it ends."""
    draft = with_sections(Section(UNKNOWN, bytes(128)))
    offset = entry_of(draft.seal(), UNKNOWN)["offset"] + 64
    draft.sections.append(Section(UNKNOWN, bytes(64), id=1, changes={"offset": offset, "stored_length": 128}))
    draft.sections[-1].changes["length"] = 128
    return draft.seal()


@refused("EMOE-SEC-012")
def entries_out_of_order() -> Sealed:
    """The last two entries are swapped: their sections are right, but not in the order of offsets."""
    return with_directory(smallest(), last_entries_swapped)


@refused("EMOE-SEC-012")
def entry_left_out() -> Sealed:
    """The bytes of a section that was dropped are left in the middle of the package, without a `FREE` entry."""
    draft = smallest()
    draft.sections.insert(3, Section(UNKNOWN, b"any"))
    return with_directory(draft, without_entry(3))


@accepted()
def sections_in_another_order() -> Sealed:
    """The manifest comes first and the records last; any order is as good."""
    draft = smallest()
    draft.sections.reverse()
    return draft.seal()


@refused("EMOE-SEC-012")
def offset_before_duplicate() -> Sealed:
    """The last entry is the one before it once more: it lies over it, and has its type and id."""
    return with_directory(smallest(), last_entry_again)


# One of each type and id.
@refused("EMOE-SEC-013")
def two_graphs_with_one_id() -> Sealed:
    """Two graphs have the id 0."""
    return with_sections(Section(SectionType.GRAPH, b"any", id=0)).seal()


@refused("EMOE-SEC-013", base="unknown_sections_with_two_ids")
def two_unknown_sections_with_one_id() -> Sealed:
    """Two sections of one unknown type have one id."""
    return with_sections(Section(UNKNOWN, b"any", id=7), Section(UNKNOWN, b"any", id=7)).seal()


@accepted()
def unknown_sections_with_two_ids() -> Sealed:
    """Two sections of one unknown type have two ids, and another type has one of them, too."""
    return with_sections(
        Section(UNKNOWN, b"any", id=7), Section(UNKNOWN, b"any", id=8), Section(UNKNOWN + 1, b"any", id=7)
    ).seal()


@accepted()
def sections_whose_types_and_ids_are_swapped() -> Sealed:
    """One section has type 99 and id 100, another one type 100 and id 99."""
    return with_sections(Section(99, b"any", id=100), Section(100, b"any", id=99)).seal()


@refused("EMOE-SEC-013")
def two_manifests() -> Sealed:
    """There are two manifests with id 0, and they are equal."""
    draft = smallest()
    data = entry_of(draft.seal(), SectionType.MANIFEST)["content"]
    draft.sections.append(Section(SectionType.MANIFEST, data))
    return draft.seal()


@refused("EMOE-SEC-013", base="full")
def two_tokenizers() -> Sealed:
    """There are two tokenizers with id 0."""
    draft = full()
    draft.sections.append(Section(SectionType.TOKENIZER, b"{}"))
    return draft.seal()


@refused("EMOE-SEC-013")
def two_device_configurations_with_one_id() -> Sealed:
    """Two device configurations have one id."""
    configuration = b"\x84\xa4name\xa1n\xabarena_bytes\xcd\x10\x00\xaagroup_size\1\xaeprefetch_depth\0"
    return with_sections(*(Section(SectionType.DEVICE_CONFIGURATION, configuration, id=3) for _ in range(2))).seal()


@refused("EMOE-SEC-013")
def duplicate_before_directory_offset() -> Sealed:
    """Two graphs have one id, and the directory begins late: entries are judged first."""
    draft = with_sections(Section(SectionType.GRAPH, b"any", id=0))
    draft.gap = bytes(192)
    return draft.seal()


# Where the directory begins.
@refused("EMOE-SEC-014")
def directory_64_bytes_behind_the_last_section() -> Sealed:
    """There are 64 bytes too many between the last section and the directory."""
    draft = smallest()
    sealed = draft.seal()
    last = sealed.entries[-1]
    draft.gap = bytes(sealed.superblock["directory_offset"] + 64 - last["offset"] - last["stored_length"])
    return draft.seal()


@refused("EMOE-SEC-014")
def directory_follows_at_once() -> Sealed:
    """The directory begins where the last section ends, which is no multiple of 64."""
    sealed = smallest().seal()
    end, start = (
        sealed.entries[-1]["offset"] + sealed.entries[-1]["stored_length"],
        sealed.superblock["directory_offset"],
    )
    assert end < start
    length = sealed.superblock["file_length"] - start + end
    superblock = superblock_bytes({**sealed.superblock, "directory_offset": end, "file_length": length})
    return with_both_twins_written(replace(sealed, data=sealed.data[:end] + sealed.data[start:]), superblock)


@refused("EMOE-SEC-014")
def last_section_reaches_into_the_directory() -> Sealed:
    """An extent no longer in use, the last one, is said to end a byte behind where the directory begins."""
    draft = with_sections(Section(SectionType.FREE, bytes(64)))
    draft.sections[-1].changes = {"stored_length": 65, "length": 65}
    return draft.seal()


@accepted()
def last_section_ends_where_the_directory_begins() -> Sealed:
    """The last section ends at a multiple of 64, and the directory follows at once."""
    return with_sections(Section(UNKNOWN, bytes(64))).seal()


@refused("EMOE-SEC-014")
def last_entry_left_out() -> Sealed:
    """The bytes of a section that was dropped are left before the directory, without a `FREE` entry."""
    draft = with_sections(Section(UNKNOWN, b"any"))
    return with_directory(draft, without_entry(-1))


@refused("EMOE-SEC-014")
def directory_offset_before_missing_sections() -> Sealed:
    """The directory begins late and no manifest is there: the offset is judged first."""
    draft = smallest()
    draft.sections = [each for each in draft.sections if each.type != SectionType.MANIFEST]
    draft.gap = bytes(192)
    return draft.seal()


# Which sections there are.
for _type in ONE:
    refuse(
        "EMOE-SEC-015",
        f"no_{_type.name.lower()}",
        f"There is no {_type.name} section.",
        partial(lambda section_type: without(section_type).seal(), _type),
    )
    refuse(
        "EMOE-SEC-015",
        f"only_{_type.name.lower()}_has_id_1",
        f"The only {_type.name} section has the id 1.",
        partial(lambda section_type: with_id(smallest(), section_type, 1), _type),
    )
    refuse(
        "EMOE-SEC-016",
        f"second_{_type.name.lower()}_has_id_1",
        f"Beside the {_type.name} section with id 0 there is one with id 1.",
        partial(lambda section_type: doubled(smallest(), section_type), _type),
    )


@refused("EMOE-SEC-015")
def dense_records_twice_and_no_experts() -> Sealed:
    """There are two sections of dense records, with ids 0 and 1, and none of experts: what is missing comes first."""
    draft = without(SectionType.EXPERTS)
    draft.sections.append(Section(SectionType.DENSE, bytes(4096), id=1, alignment_shift=12))
    return draft.seal()


for _type in (SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE):
    for _id in (1, 2**31, 2**32 - 1):
        refuse(
            "EMOE-SEC-016",
            f"{_type.name.lower()}_has_id_{_id}",
            f"The only {_type.name} section has the id {_id}.",
            partial(lambda section_type, number: with_id(full(), section_type, number), _type, _id),
            base="full",
        )
    refuse(
        "EMOE-SEC-016",
        f"second_{_type.name.lower()}_has_another_id",
        f"Beside the {_type.name} section with id 0 there is one with id 1.",
        partial(lambda section_type: doubled(full(), section_type), _type),
        base="full",
    )


@accepted()
def package_without_documents() -> Sealed:
    """There are all sections that must be, in another order, and neither a tokenizer nor a chat template."""
    draft = smallest()
    draft.sections.append(draft.sections.pop(0))
    return draft.seal()


def with_many(device_configurations: int, signatures: int) -> Sealed:
    """A package with many unsigned sections, which are no more than zeros."""
    return with_sections(
        *(Section(SectionType.DEVICE_CONFIGURATION, b"any", id=number) for number in range(device_configurations)),
        *(Section(SectionType.SIGNATURE, b"any", id=number) for number in range(signatures)),
    ).seal()


@refused("EMOE-SEC-017")
def device_configurations_65() -> Sealed:
    """There are 65 sections with a device configuration; that they are none is judged later."""
    return with_many(65, 0)


@refused("EMOE-SEC-017")
def signatures_17() -> Sealed:
    """There are 17 signatures; that they are none is judged later."""
    return with_many(0, 17)


@refused("EMOE-SEC-017")
def device_configurations_65_and_signatures_17() -> Sealed:
    """There are too many of both."""
    return with_many(65, 17)


@refused("EMOE-SEC-016", base="full")
def ids_before_counts() -> Sealed:
    """The tokenizer has the id 1 and there are 17 signatures: ids are judged first."""
    draft = full()
    draft.section(SectionType.TOKENIZER).id = 1
    draft.sections += [Section(SectionType.SIGNATURE, b"any", id=number) for number in range(17)]
    return draft.seal()
