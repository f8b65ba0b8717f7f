"""Packages changed in place, and edits that died halfway. FORMAT.md sections 3.2 and 3.3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from estream_conformance.builder import Sealed, Section, edit
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, counted, refuse
from estream_conformance.files import entry_of, flipped, patched, with_tail
from estream_conformance.packages import full, smallest
from estream_spec.constants import SUPERBLOCK_OFFSETS, SectionType

UNKNOWN = 99
NAMES = ("first", "second")
ADDED = Section(UNKNOWN, b"added by an edit", id=1)


def old() -> Sealed:
    """A package before its edit."""
    return smallest().seal()


def edited(*twins: int, **superblock: int | bytes) -> Sealed:
    """The same after an edit that writes some of its twins, with fields of them set to something else."""
    return edit(old(), [ADDED], twins=twins or (0, 1), superblock=dict(superblock))


def torn(written: int, of_twin: int) -> Sealed:
    """An edit that died when so many bytes of the first twin that it wrote were written: the old package."""
    before, after = old(), edited(of_twin)
    start = SUPERBLOCK_OFFSETS[of_twin]
    data = after.data[:start] + after.data[start : start + written] + before.data[start + written : start + 128]
    return replace(before, data=data + after.data[start + 128 :])


# Whole edits.
@accepted()
def edited_once() -> Sealed:
    """A section was added in place; the old directory's extent is no longer in use."""
    return edited()


@accepted(base="edited_once")
def edited_twice() -> Sealed:
    """A section was added in place, and dropped in place again; three extents are no longer in use."""
    return edit(edited(), remove=[(UNKNOWN, 1)])


@accepted(base="edited_once")
def edited_without_change() -> Sealed:
    """An edit wrote a new directory and changed nothing else."""
    return edit(old())


@accepted(base="edited_once")
def manifest_replaced_in_place() -> Sealed:
    """The manifest was written once more behind the old one, whose extent is no longer in use."""
    before = old()
    manifest = Section(SectionType.MANIFEST, entry_of(before, SectionType.MANIFEST)["content"])
    return edit(before, [manifest], [(SectionType.MANIFEST, 0)])


@accepted(base="edited_once")
def graph_replaced_in_place() -> Sealed:
    """A graph was replaced by another one behind the manifest."""
    return edit(old(), [Section(SectionType.GRAPH, b"another graph", id=2)], [(SectionType.GRAPH, 2)])


@accepted(base="full")
def records_and_tables_replaced_in_place() -> Sealed:
    """Both tables were written once more, behind all other sections of a package with everything."""
    before = full().seal()
    tables = (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE)
    added = [Section(each, entry_of(before, each)["content"]) for each in tables]
    return edit(before, added, [(each, 0) for each in tables])


@accepted(base="edited_once")
def section_aligned_to_2_mib_added_in_place() -> Sealed:
    """A section that is aligned to 2 MiB was added in place."""
    return edit(old(), [Section(UNKNOWN, b"added by an edit", alignment_shift=21)])


@accepted(base="edited_once")
def edited_from_generation_0() -> Sealed:
    """The package had generation 0 before its edit."""
    made = smallest()
    made.superblock["generation"] = 0
    return edit(made.seal(), [ADDED])


@accepted(base="edited_once")
def edited_to_the_last_generation() -> Sealed:
    """The edit took the last generation there is."""
    made = smallest()
    made.superblock["generation"] = 2**64 - 2
    return edit(made.seal(), [ADDED])


@accepted(base="edited_once")
def free_extents_overwritten() -> Sealed:
    """The bytes of extents that are no longer in use are something else; they mean nothing."""
    sealed = edit(edited(), remove=[(UNKNOWN, 1)])
    for entry in sealed.entries:
        if entry["type"] == SectionType.FREE:
            sealed = patched(sealed, entry["offset"], b"\xee" * entry["stored_length"])
    return sealed


# Edits that died.
@accepted()
def edit_died_before_its_directory() -> Sealed:
    """An edit appended a section and died: bytes behind the package's end."""
    before, after = old(), edited()
    return with_tail(before, after.data[len(before.data) : after.superblock["directory_offset"]])


@accepted()
def edit_died_before_its_superblocks() -> Sealed:
    """An edit appended a section and a directory and died: no superblock says so."""
    before, after = old(), edited()
    return with_tail(before, after.data[len(before.data) :])


for _number, _name in enumerate(NAMES):
    for _written in (32, 56, 64, 112, 127):
        accept(
            f"edit_died_after_{_written}_bytes_of_the_{_name}_twin",
            f"An edit died when {_written} bytes of the {_name} twin were written: the other twin holds.",
            partial(torn, _written, _number),
            base="edit_died_before_its_superblocks",
        )
    accept(
        f"edit_died_after_the_{_name}_twin",
        f"An edit died when the {_name} twin was written: the new package is whole, the other twin is the old one.",
        partial(edited, _number),
        base="edited_once",
    )


@accepted(base="edited_once")
def edit_died_within_its_second_twin() -> Sealed:
    """An edit died when half of the second twin that it wrote was written: the new package holds."""
    after = edited(0)
    start = SUPERBLOCK_OFFSETS[1]
    return patched(after, start, edited().data[start : start + 64])


for _number, _name in enumerate(NAMES):
    refuse(
        "EMOE-DIR-001",
        f"{_name}_twin_durable_before_its_directory",
        f"The {_name} twin was written, but the directory that it names is zeros: the old package is no way out.",
        partial(
            lambda number: patched(
                after := edited(number),
                after.superblock["directory_offset"],
                bytes(after.superblock["directory_length"]),
            ),
            _number,
        ),
        base=f"edit_died_after_the_{_name}_twin",
    )
    refuse(
        "EMOE-SUP-011",
        f"{_name}_twin_durable_before_the_end_of_the_file",
        f"The {_name} twin was written, but the file still ends where the old package did.",
        partial(lambda number: edited(number).data[: old().superblock["file_length"]], _number),
        base=f"edit_died_after_the_{_name}_twin",
    )
    refuse(
        "EMOE-SEC-018",
        f"{_name}_twin_durable_before_its_section",
        f"The {_name} twin and the directory were written, but the section that was added is zeros.",
        partial(
            lambda number: patched(
                after := edited(number), entry_of(after, UNKNOWN, 1)["offset"], bytes(len(ADDED.data or b""))
            ),
            _number,
        ),
        base=f"edit_died_after_the_{_name}_twin",
    )


@refused("EMOE-DIR-001", base="edited_once")
def old_directory_digest_in_new_twins() -> Sealed:
    """Both twins have the new directory's place, and the digest of the old one."""
    return edited(directory_sha256=old().superblock["directory_sha256"])


# Twins that point to one directory or another.
def pointing_back(number: int) -> Sealed:
    """The package before its edit, one twin of which has a higher generation, with the edit's bytes behind it."""
    made = smallest()
    made.twins[number]["generation"] = 3
    sealed = made.seal()
    return with_tail(sealed, edited().data[len(sealed.data) :])


for _number, _name in enumerate(NAMES):
    accept(
        f"later_{_name}_twin_points_to_the_old_directory",
        f"The {_name} twin has the higher generation and says all that the other one said before an edit.",
        partial(pointing_back, _number),
        base="edit_died_before_its_superblocks",
    )
    accept(
        f"{_name}_twin_with_a_lower_generation_and_a_new_directory",
        f"The {_name} twin names a new directory that is whole, but its generation is lower: the old package holds.",
        partial(lambda number: replace(old(), data=edited(number, generation=0).data), _number),
        base="edit_died_before_its_superblocks",
    )
    refuse(
        "EMOE-SUP-004",
        f"{_name}_twin_written_with_the_old_generation",
        f"The {_name} twin names a new directory, but its generation is that of the old one.",
        partial(edited, _number, generation=1),
        base=f"edit_died_after_the_{_name}_twin",
    )


@accepted(base="edited_once")
def generation_skipped() -> Sealed:
    """The edit took generation 1000 and died after its first twin."""
    return edited(1, generation=1000)


# Extents that an edit left.
def forgetting(section_type: int, section_id: int) -> Sealed:
    """An edit that drops a section's entry without a `FREE` one for its extent."""
    before = old()
    gone = entry_of(before, section_type, section_id)
    kept = [each for each in before.entries if each is not gone]
    replaced = Section(section_type, gone["content"], id=section_id)
    return edit(replace(before, entries=kept), [replaced])


@refused("EMOE-SEC-012", base="manifest_replaced_in_place")
def extent_of_replaced_manifest_forgotten() -> Sealed:
    """The manifest was replaced in place, and no entry is `FREE` for the old one."""
    return forgetting(SectionType.MANIFEST, 0)


@refused("EMOE-SEC-012", base="graph_replaced_in_place")
def extent_of_replaced_graph_forgotten() -> Sealed:
    """A graph was replaced in place, and no entry is `FREE` for the old one."""
    return forgetting(SectionType.GRAPH, 2)


@refused("EMOE-SEC-013", base="manifest_replaced_in_place")
def replaced_manifest_not_retired() -> Sealed:
    """The manifest was written once more, and the old one's entry is still there."""
    before = old()
    return edit(before, [Section(SectionType.MANIFEST, entry_of(before, SectionType.MANIFEST)["content"])])


@refused("EMOE-SEC-015", base="edited_once")
def manifest_retired_and_not_replaced() -> Sealed:
    """The manifest's extent is no longer in use, and there is no other one."""
    return edit(old(), remove=[(SectionType.MANIFEST, 0)])


@refused("EMOE-GRA-004", base="graph_replaced_in_place")
def graph_retired_and_not_replaced() -> Sealed:
    """A graph's extent is no longer in use, and the manifest still names it."""
    return edit(old(), remove=[(SectionType.GRAPH, 2)])


@refused("EMOE-PAD-001", "padding", base="edited_once")
def padding_behind_the_old_directory_not_zero() -> Sealed:
    """The byte behind the old directory's extent is not zero."""
    after = edited()
    return flipped(after, old().superblock["file_length"])


# Bytes behind the end.
TAILS = {
    "1_zero": bytes(1),
    "1_mib_of_zeros": bytes(1 << 20),
    "a_magic": bytes.fromhex("89454d4f450d0a1a"),
    "a_zip_directory": b"PK\5\6" + bytes(18),
    "a_gguf_header": b"GGUF\3\0\0\0" + bytes(16),
    "an_elf_header": b"\x7fELF\2\1\1" + bytes(57),
    "a_line": b"any text\n",
}
for _name, _tail in TAILS.items():
    accept(
        f"{_name}_behind_the_end",
        f"The file goes on for {counted(len(_tail), 'byte')} behind the package's end.",
        partial(lambda tail: with_tail(old(), tail), _tail),
    )


@accepted()
def whole_package_behind_the_end() -> Sealed:
    """Another package, whole, with a higher generation, follows this one."""
    made = smallest()
    made.superblock |= {"generation": 9, "optional_features": 1}
    return with_tail(old(), made.seal().data)
