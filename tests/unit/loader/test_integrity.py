"""Proving a package byte by byte, padding, and what is said about valid but odd packages."""

from __future__ import annotations

import pytest

from estream_loader import open_package
from estream_loader.integrity import check_padding, notices, verify, verify_length
from estream_spec.constants import SectionFlag, SectionType
from estream_spec.errors import FormatError, IntegrityError, InvalidError
from estream_spec.manifest import DeviceConfiguration
from estream_spec.messagepack import encode
from fixtures.packages import Draft, Section, with_superblock
from fixtures.sources import CountingSource

PACKAGE = Draft().seal()


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x80]) + data[position + 1 :]


def test_progress_adds_up() -> None:
    draft = Draft()
    draft.sections += [
        Section(SectionType.FREE, b"old"),
        Section(99, b"x" * 5000),
        Section(100, b"y" * 64, flags=SectionFlag.RECORDS, alignment_shift=12),
    ]
    with open_package(draft.seal()) as package:
        steps: list[int] = []
        verify(package, steps.append)
        assert sum(steps) == verify_length(package)


def test_every_kind_of_section_is_proven() -> None:
    draft = Draft()
    draft.sections.append(Section(99, b"x" * 3000, flags=SectionFlag.SAFE_TO_COPY))
    data = draft.seal()
    with open_package(data) as package:
        entries = package.container.entries
    for entry in entries:
        with pytest.raises(IntegrityError) as caught, open_package(flip(data, entry.offset)) as package:
            verify(package)
        error = caught.value
        assert error.rule == ("EMOE-REC-001" if entry.flags & SectionFlag.RECORDS else "EMOE-SEC-018")
        assert error.offset == entry.offset


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"\xc1", "EMOE-MAN-001"),
        (b"\x80", "EMOE-MAN-002"),
        (encode(DeviceConfiguration(name="a", arena_bytes=8191, group_size=1, prefetch_depth=1)), "EMOE-CFG-001"),
    ],
)
def test_configurations_in_sections_of_their_own_are_judged(data: bytes, rule: str) -> None:
    draft = Draft()
    draft.sections.append(Section(SectionType.DEVICE_CONFIGURATION, data, id=3))
    package = draft.seal()
    with pytest.raises(FormatError) as caught:
        open_package(package, integrity="full")
    assert (caught.value.rule, caught.value.offset) == (rule, package.rindex(data, 0, package.rindex(b"EMOEDIR\0")))


def test_bytes_in_free_sections_mean_nothing() -> None:
    draft = Draft()
    draft.sections.append(Section(SectionType.FREE, b"old" * 50))
    data = draft.seal()
    position = data.rindex(b"oldold")
    with open_package(flip(data, position), integrity="full") as package:
        check_padding(package)


@pytest.mark.parametrize("section_type", [SectionType.DENSE, SectionType.EXPERTS])
def test_padding_behind_a_record(section_type: SectionType) -> None:
    draft = Draft()
    draft.change_record(section_type, 2, lambda record: record.__setitem__(-1, 1))
    with open_package(draft.seal()) as package, pytest.raises(InvalidError, match="padding of a record") as caught:
        verify(package)
    dense = section_type == SectionType.DENSE
    place = package.dense.place(2) if dense else package.experts.place(0, 2)
    assert place.path == ("dense[2][0]" if dense else "experts[0][2]")
    error = caught.value
    assert (error.rule, error.path, error.offset) == ("EMOE-REC-003", place.path, place.offset + place.length - 1)


def gaps() -> list[int]:
    """A byte of every kind of padding outside sections."""
    with open_package(PACKAGE) as package:
        entries = package.container.entries
        ends = [entry.end for entry in entries if entry.end % 64]
        return [128, 16383, 16384 + 128, 32767, *ends, package.container.superblock.directory_offset - 1]


@pytest.mark.parametrize("position", gaps())
def test_padding_between_sections(position: int) -> None:
    with open_package(flip(PACKAGE, position), integrity="full") as package, pytest.raises(InvalidError) as caught:
        check_padding(package)
    assert (caught.value.rule, caught.value.offset) == ("EMOE-PAD-001", position)
    assert caught.value.path is not None


def test_chat_template_that_is_not_text() -> None:
    draft = Draft()
    draft.sections.append(Section(SectionType.CHAT_TEMPLATE, b"{{ a }}\xff"))
    data = draft.seal()
    with pytest.raises(InvalidError, match="byte 7 is 0xff, expected UTF-8") as caught:
        open_package(data, integrity="full")
    error = caught.value
    assert (error.rule, error.path) == ("EMOE-SEC-020", "chat_template section 0")
    assert error.offset == data.index(b"{{ a }}")


def test_sound_package_has_no_notices() -> None:
    with open_package(PACKAGE) as package:
        check_padding(package)
        assert notices(package) == []


def test_notices() -> None:
    draft = Draft()
    draft.sections.append(Section(99, b"x"))
    with open_package(draft.seal() + b"abc") as package:
        assert notices(package) == ["section of unknown type 99 is skipped", "3 bytes follow the package's end"]
    with open_package(flip(PACKAGE, 16384 + 30)) as package:
        (notice,) = notices(package)
        assert notice.startswith("superblock[1] is damaged: superblock has checksum")
        assert notice.endswith("[EMOE-SUP-002]")
    with open_package(with_superblock(PACKAGE, 0, generation=5)) as package:
        assert notices(package) == ["superblock[1] is of generation 1, behind 5"]


def test_records_are_read_in_pieces() -> None:
    """Memory does not grow with the largest record."""
    draft = Draft(page_shift=21)
    source = CountingSource(draft.seal())
    with open_package(source) as package:
        place = package.dense.place(0)
        assert place.length == 1 << 21
        verify(package)
        check_padding(package)
    covered = sorted((start, start + length) for start, length in source.reads if place.offset <= start)
    assert covered[0][0] == place.offset
