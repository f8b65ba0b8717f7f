"""Limits: arithmetic on legal values stays within 64 bits, and a package at a limit is taken, one above refused."""

from __future__ import annotations

import pytest

from estream_loader import open_package
from estream_spec import limits
from estream_spec.constants import SectionType
from estream_spec.errors import InvalidError, LimitError, MalformedError
from estream_spec.manifest import Source
from estream_spec.records import DirectoryEntry
from fixtures.packages import Draft, Section


def test_sums_and_products_of_legal_values_fit_64_bits() -> None:
    assert limits.MAX_FILE_LENGTH * 2 < 2**63
    assert limits.MAX_DIMENSION * limits.MAX_DIMENSION * 4 < 2**63
    assert limits.MAX_RECORD_LENGTH * limits.MAX_RECORDS < 2**63
    assert limits.MAX_SECTIONS * DirectoryEntry.SIZE < 1 << 20


def test_sections_at_the_limit() -> None:
    draft = Draft()
    extra = limits.MAX_SECTIONS - len(draft.sections)
    draft.sections += [Section(1000, b"x", id=number) for number in range(extra)]
    with open_package(draft.seal()) as package:
        assert len(package.container.entries) == limits.MAX_SECTIONS
    draft.sections.append(Section(1001, b"x"))
    with pytest.raises(LimitError, match=r"directory of \d+ bytes.*\[EMOE-SUP-009\]"):
        open_package(draft.seal())


def test_text_at_the_limit() -> None:
    draft = Draft()
    draft.change_manifest(name="n" * limits.MAX_NAME)
    open_package(draft.seal()).close()
    draft.change_manifest(name="n" * (limits.MAX_NAME + 1))
    with pytest.raises(InvalidError, match=r"length <= 128.*\[EMOE-MAN-002\]"):
        open_package(draft.seal())


def test_sources_at_the_limit() -> None:
    draft = Draft()
    sources = tuple(Source(name=f"s{n}", length=1, sha256=bytes(32)) for n in range(limits.MAX_SOURCES + 1))
    provenance = draft.manifest.provenance
    draft.change_manifest(provenance=type(provenance)(writer="t", sources=sources[:-1]))
    open_package(draft.seal()).close()
    draft.change_manifest(provenance=type(provenance)(writer="t", sources=sources))
    with pytest.raises(InvalidError, match=r"length <= 4096.*\[EMOE-MAN-002\]"):
        open_package(draft.seal())


@pytest.mark.parametrize("shift", [limits.MIN_PAGE_SHIFT, limits.MAX_PAGE_SHIFT])
def test_page_sizes_at_the_limits(shift: int) -> None:
    with open_package(Draft(page_shift=shift).seal(), integrity="full") as package:
        assert package.container.page_size == 1 << shift
        assert all(place.offset % (1 << shift) == 0 for place in package.experts.places())


@pytest.mark.parametrize("shift", [0, limits.MIN_PAGE_SHIFT - 1, limits.MAX_PAGE_SHIFT + 1, 255])
def test_page_sizes_beyond_the_limits(shift: int) -> None:
    draft = Draft()
    draft.superblock = {"page_shift": shift}
    with pytest.raises(LimitError) as caught:
        open_package(draft.seal())
    assert (caught.value.rule, caught.value.path) == ("EMOE-SUP-007", "superblock.page_shift")


def test_manifest_longer_than_its_limit() -> None:
    """At the limit it is looked at, above it is not: its length in the directory says enough."""
    draft = Draft()
    draft.section(SectionType.MANIFEST).data = bytes(limits.MAX_MANIFEST_LENGTH)
    with pytest.raises(MalformedError, match=r"\[EMOE-MAN-001\]"):
        open_package(draft.seal())
    draft.section(SectionType.MANIFEST).data += b"\0"
    with pytest.raises(LimitError, match=r"section of 1048577 bytes.*\[EMOE-SEC-011\]"):
        open_package(draft.seal())


def test_small_section_longer_than_its_limit() -> None:
    draft = Draft()
    section = draft.section(SectionType.TOKENIZER)
    section.compress()
    section.length = limits.MAX_SMALL_SECTION_LENGTH + 1
    section.data = bytes(1 << 21)
    with pytest.raises(LimitError, match=r"section of 67108865 bytes.*\[EMOE-SEC-011\]"):
        open_package(draft.seal())
