"""Bytes that must be zero: FORMAT.md sections 1.3, 3.1 and 4.6, rule PAD-001."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Sealed, Section
from estream_conformance.case import accepted, refused
from estream_conformance.changes import refuse
from estream_conformance.files import entry_of, flipped, patched, with_tail
from estream_conformance.packages import full, smallest
from estream_spec.constants import DATA_START, SUPERBLOCK_SLOT, SectionType


def _end(sealed: Sealed, section_type: int) -> int:
    """Where a section ends."""
    entry = entry_of(sealed, section_type)
    return int(entry["offset"] + entry["stored_length"])


for _offset in (128, 4096, 16383, 16512, 32767):
    refuse(
        "EMOE-PAD-001",
        f"byte_{_offset}_of_the_slots_not_zero",
        f"Byte {_offset} of the file, in the slot of a superblock and behind it, is not zero.",
        partial(lambda offset: flipped(smallest().seal(), offset), _offset),
        "padding",
    )


@refused("EMOE-PAD-001", "padding", base="first_twin_is_zeros")
def slot_of_damaged_first_twin_not_zero() -> Sealed:
    """The first twin is gone, and a byte behind where it should be is not zero."""
    return flipped(patched(smallest().seal(), 0, bytes(128)), 128)


@refused("EMOE-PAD-001", "padding", base="second_twin_is_zeros")
def slot_of_damaged_second_twin_not_zero() -> Sealed:
    """The second twin is gone, and the last byte of its slot is not zero."""
    return flipped(patched(smallest().seal(), SUPERBLOCK_SLOT, bytes(128)), DATA_START - 1)


@refused("EMOE-PAD-001", "padding")
def first_byte_behind_a_section_not_zero() -> Sealed:
    """The first byte of the padding behind a graph is not zero."""
    sealed = smallest().seal()
    return flipped(sealed, _end(sealed, SectionType.GRAPH))


@refused("EMOE-PAD-001", "padding")
def last_byte_before_a_section_not_zero() -> Sealed:
    """The last byte of the padding before the manifest is not zero."""
    draft = smallest()
    draft.section(SectionType.MANIFEST).before = b"\1"
    return draft.seal()


@refused("EMOE-PAD-001", "padding")
def last_byte_before_the_directory_not_zero() -> Sealed:
    """The last byte of the padding between the last section and the directory is not zero."""
    draft = smallest()
    draft.gap = b"\x80"
    return draft.seal()


@refused("EMOE-PAD-001", "padding")
def first_byte_behind_the_last_section_not_zero() -> Sealed:
    """The first byte of the padding between the last section and the directory is not zero."""
    sealed = smallest().seal()
    return flipped(sealed, _end(sealed, SectionType.MANIFEST))


def aligned_to_2_mib(before: bytes) -> Sealed:
    """A package with nearly 2 MiB of padding before its last section."""
    draft = smallest()
    draft.sections.append(Section(99, b"any", alignment_shift=21, before=before))
    return draft.seal()


@accepted()
def padding_of_2_mib() -> Sealed:
    """There are nearly 2 MiB of zeros before the last section."""
    return aligned_to_2_mib(b"")


for _name, _back in {"first": None, "middle": 1 << 20, "last": 1}.items():
    refuse(
        "EMOE-PAD-001",
        f"{_name}_byte_of_2_mib_of_padding_not_zero",
        f"One byte of nearly 2 MiB of padding is not zero, the {_name} one.",
        partial(
            lambda back: (
                flipped(sealed := aligned_to_2_mib(b""), _end(sealed, SectionType.MANIFEST))
                if back is None
                else aligned_to_2_mib(b"\1" + bytes(back - 1))
            ),
            _back,
        ),
        "padding",
        base="padding_of_2_mib",
    )


@refused("EMOE-PAD-001", "padding")
def padding_before_the_first_section_not_zero() -> Sealed:
    """The first section is aligned to 2 MiB, and the byte at 32768, before it, is not zero."""
    draft = smallest()
    draft.section(SectionType.DENSE).alignment_shift = 21
    return flipped(draft.seal(), DATA_START)


@accepted()
def bytes_of_unknown_and_free_sections_are_no_padding() -> Sealed:
    """Sections whose bytes are all ones stand between others, padded with zeros."""
    draft = smallest()
    draft.sections.insert(4, Section(0, b"\xff" * 63))
    draft.sections.insert(6, Section(99, b"\xff" * 65))
    return draft.seal()


@accepted()
def bytes_behind_the_end_are_no_padding() -> Sealed:
    """Bytes that are not zero follow the package."""
    return with_tail(smallest().seal(), b"\xff" * 77)


@refused("EMOE-IDN-001", "padding", "records")
def content_id_before_padding() -> Sealed:
    """The `content_id` is another, and a byte of padding is not zero: padding is judged last."""
    draft = smallest()
    draft.manifest["content_id"] = bytes(32)
    return flipped(draft.seal(), 128)


@refused("EMOE-SEC-018", "padding")
def digest_before_padding() -> Sealed:
    """A graph has another digest, and a byte of padding is not zero: padding is judged last."""
    draft = smallest()
    draft.section(SectionType.GRAPH).changes["sha256"] = bytes(32)
    return flipped(draft.seal(), 128)


@refused("EMOE-PAD-001", "padding", base="full")
def padding_of_a_large_package_not_zero() -> Sealed:
    """The last byte of padding before the tokenizer is not zero, in a package with everything."""
    draft = full()
    draft.section(SectionType.TOKENIZER).before = b"\1"
    return draft.seal()
