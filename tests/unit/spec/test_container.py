"""Superblocks and directory: which twin is trusted, and every rule of the directory broken once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import crc32c
import pytest

from estream_loader import open_package
from estream_spec.constants import DATA_START, Codec, SectionFlag, SectionType
from estream_spec.errors import EmoeError, IntegrityError, InvalidError, LimitError, MalformedError, UnsupportedError
from estream_spec.limits import MAX_DEVICE_CONFIGURATIONS, MAX_SIGNATURES
from fixtures.packages import Draft, Section, mended, with_superblock

PACKAGE = Draft().seal()
DIRECTORY = 16 + 80 * len(Draft().sections)
"""Bytes of the directory, with which the package ends."""
HUGE = (2**31, 2**32 - 1, 2**42 + 1, 2**63, 2**64 - 1)


def refused(data: bytes, kind: type[EmoeError], rule: str) -> EmoeError:
    with pytest.raises(kind) as caught:
        open_package(data)
    error = caught.value
    assert (type(error), error.rule) == (kind, rule)
    assert error.path is not None
    assert error.offset is not None
    return error


def damaged(data: bytes, *positions: int) -> bytes:
    body = bytearray(data)
    for position in positions:
        body[position] ^= 1
    return bytes(body)


def with_reserved_byte(data: bytes, twin: int) -> bytes:
    """A package with a reserved byte of one superblock set and its checksum mended."""
    body, start = bytearray(data), twin * 16384
    body[start + 123] = 1
    body[start + 124 : start + 128] = crc32c.crc32c(bytes(body[start : start + 124])).to_bytes(4, "little")
    return bytes(body)


class TestTwins:
    @pytest.mark.parametrize("twin", [0, 1])
    @pytest.mark.parametrize("position", [0, 20, 127], ids=["magic", "field", "checksum"])
    def test_one_damaged(self, twin: int, position: int) -> None:
        open_package(damaged(PACKAGE, twin * 16384 + position)).close()

    def test_both_damaged(self) -> None:
        error = refused(damaged(PACKAGE, 20, 16384 + 20), IntegrityError, "EMOE-SUP-002")
        assert (error.path, error.offset) == ("superblock[0]", 0)

    def test_one_without_magic_the_other_damaged(self) -> None:
        error = refused(damaged(PACKAGE, 0, 16384 + 20), IntegrityError, "EMOE-SUP-002")
        assert (error.path, error.offset) == ("superblock[1]", 16384)

    def test_neither_has_the_magic(self) -> None:
        error = refused(damaged(PACKAGE, 0, 16384), MalformedError, "EMOE-SUP-001")
        assert "not an .emoe package" in str(error)
        assert (error.path, error.offset) == ("superblock[0]", 0)

    def test_a_wrong_checksum_comes_before_reserved_bytes(self) -> None:
        reserved = with_reserved_byte(PACKAGE, 0)
        error = refused(with_reserved_byte(reserved, 1), MalformedError, "EMOE-SUP-003")
        assert (error.path, error.offset) == ("superblock[0]", 0)
        error = refused(damaged(reserved, 16384 + 20), IntegrityError, "EMOE-SUP-002")
        assert (error.path, error.offset) == ("superblock[1]", 16384)

    def test_too_short_for_a_superblock(self) -> None:
        assert refused(PACKAGE[:100], MalformedError, "EMOE-SUP-003").offset == 0

    @pytest.mark.parametrize("newer", [0, 1])
    def test_the_newer_one_is_trusted(self, newer: int) -> None:
        with open_package(with_superblock(PACKAGE, newer, generation=2, optional_features=4)) as package:
            assert package.container.superblock.generation == 2
            assert package.container.superblock.optional_features == 4

    def test_the_older_one_serves_where_the_newer_is_damaged(self) -> None:
        data = damaged(with_superblock(PACKAGE, 0, generation=2), 20)
        with open_package(data) as package:
            assert package.container.superblock.generation == 1

    def test_one_generation_but_different(self) -> None:
        error = refused(with_superblock(PACKAGE, 1, optional_features=1), InvalidError, "EMOE-SUP-004")
        assert error.path == "superblock"

    def test_generation_is_no_limit(self) -> None:
        with open_package(with_superblock(PACKAGE, 1, generation=2**64 - 1)) as package:
            assert package.container.superblock.generation == 2**64 - 1


class TestSuperblock:
    @pytest.mark.parametrize(
        ("changes", "kind", "rule", "path"),
        [
            ({"format_major": 1}, UnsupportedError, "EMOE-SUP-005", "format_major"),
            ({"format_major": 65535, "required_features": 1}, UnsupportedError, "EMOE-SUP-005", "format_major"),
            ({"required_features": 1}, UnsupportedError, "EMOE-SUP-006", "required_features"),
            ({"required_features": 1 << 63}, UnsupportedError, "EMOE-SUP-006", "required_features"),
            ({"page_shift": 11}, LimitError, "EMOE-SUP-007", "page_shift"),
            ({"file_length": (1 << 44) + 1}, LimitError, "EMOE-SUP-008", "file_length"),
            ({"directory_length": 16 + 4097 * 80}, LimitError, "EMOE-SUP-009", "directory_length"),
            ({"file_length": 0}, InvalidError, "EMOE-SUP-010", "directory_offset"),
            (
                {"directory_offset": 0, "directory_length": len(PACKAGE)},
                InvalidError,
                "EMOE-SUP-010",
                "directory_offset",
            ),
            ({"directory_length": 0}, InvalidError, "EMOE-SUP-010", "directory_offset"),
            ({"file_length": len(PACKAGE) - 1}, InvalidError, "EMOE-SUP-010", "directory_offset"),
            (
                {"file_length": len(PACKAGE) + 1, "directory_length": DIRECTORY + 1},
                IntegrityError,
                "EMOE-SUP-011",
                "file_length",
            ),
        ],
    )
    def test_refused(self, changes: dict[str, int], kind: type[EmoeError], rule: str, path: str) -> None:
        draft = Draft()
        draft.superblock = changes
        error = refused(draft.seal(), kind, rule)
        assert (error.path, error.offset) == (f"superblock.{path}", 0)

    def test_unknown_features_are_named_by_bit(self) -> None:
        draft = Draft()
        draft.superblock = {"required_features": 1 << 3 | 1 << 40}
        assert "required feature 3, 40" in str(refused(draft.seal(), UnsupportedError, "EMOE-SUP-006"))

    def test_optional_features_and_minor_versions_are_ignored(self) -> None:
        draft = Draft()
        draft.superblock = {"optional_features": 2**64 - 1, "format_minor": 65535}
        open_package(draft.seal(), integrity="full").close()

    @pytest.mark.parametrize("name", ["file_length", "directory_offset", "directory_length"])
    @pytest.mark.parametrize("value", HUGE)
    def test_huge_numbers(self, name: str, value: int) -> None:
        draft = Draft()
        draft.superblock = {name: value}
        with pytest.raises((LimitError, InvalidError, IntegrityError)):
            open_package(draft.seal())

    def test_huge_but_consistent(self) -> None:
        length = 1 << 44
        draft = Draft()
        draft.superblock = {"file_length": length, "directory_offset": length - 96, "directory_length": 96}
        assert "was the download" in str(refused(draft.seal(), IntegrityError, "EMOE-SUP-011").hint)

    def test_directory_of_another_digest(self) -> None:
        error = refused(damaged(PACKAGE, len(PACKAGE) - 80), IntegrityError, "EMOE-DIR-001")
        assert (error.path, error.offset) == ("directory", len(PACKAGE) - DIRECTORY)

    @pytest.mark.parametrize(
        ("position", "value", "kind", "rule", "path"),
        [
            (0, 0, MalformedError, "EMOE-DIR-002", "directory"),
            (12, 81, MalformedError, "EMOE-DIR-002", "directory"),
            (9, 255, LimitError, "EMOE-DIR-003", "directory.count"),
            (8, 10, MalformedError, "EMOE-DIR-004", "directory"),
            (16 + 80 + 72, 1, MalformedError, "EMOE-DIR-005", "directory[1]"),
        ],
        ids=["magic", "entry size", "count above its limit", "other count", "reserved"],
    )
    def test_directory_that_cannot_be_decoded(
        self, position: int, value: int, kind: type[EmoeError], rule: str, path: str
    ) -> None:
        body = bytearray(PACKAGE)
        body[len(PACKAGE) - DIRECTORY + position] = value
        assert refused(mended(bytes(body)), kind, rule).path == path


Change = Callable[[Draft], Any]


def entry(section_type: SectionType, **changes: Any) -> Change:
    return lambda draft: draft.section(section_type).changes.update(changes)


def add(section: Section) -> Change:
    return lambda draft: draft.sections.append(section)


def remove(section_type: SectionType) -> Change:
    return lambda draft: draft.sections.remove(draft.section(section_type))


GRAPH, TOKENIZER, DENSE, MANIFEST = SectionType.GRAPH, SectionType.TOKENIZER, SectionType.DENSE, SectionType.MANIFEST
SAFE = SectionFlag.SAFE_TO_COPY


def many(section_type: SectionType, count: int) -> Change:
    return lambda draft: draft.sections.extend(Section(section_type, b"x", id=number) for number in range(count))


BROKEN: dict[str, tuple[Change, type[EmoeError], str, str]] = {
    "undefined flag": (entry(GRAPH, flags=17), InvalidError, "EMOE-SEC-001", "directory[4].flags"),
    "undefined flag of an unknown type": (
        add(Section(99, b"x", flags=16 | 1)),
        InvalidError,
        "EMOE-SEC-001",
        "directory[11].flags",
    ),
    "flags of another type": (entry(GRAPH, flags=0), InvalidError, "EMOE-SEC-002", "directory[4].flags"),
    "records flag where none belong": (entry(TOKENIZER, flags=8), InvalidError, "EMOE-SEC-002", "directory[9].flags"),
    "signature that counts for the file id": (
        add(Section(SectionType.SIGNATURE, b"x", flags=SAFE)),
        InvalidError,
        "EMOE-SEC-002",
        "directory[11].flags",
    ),
    "critical and unknown": (
        add(Section(99, b"x", flags=1)),
        UnsupportedError,
        "EMOE-SEC-003",
        "directory[11].type",
    ),
    "critical and reserved": (
        add(Section(SectionType.CALIBRATION, b"x", flags=5)),
        UnsupportedError,
        "EMOE-SEC-003",
        "directory[11].type",
    ),
    "unknown codec": (entry(GRAPH, codec=2), UnsupportedError, "EMOE-SEC-004", "directory[4].codec"),
    "records below a page": (
        entry(DENSE, alignment_shift=11),
        InvalidError,
        "EMOE-SEC-005",
        "directory[0].alignment_shift",
    ),
    "below 64 bytes": (entry(GRAPH, alignment_shift=5), InvalidError, "EMOE-SEC-005", "directory[4].alignment_shift"),
    "alignment too large": (
        entry(GRAPH, alignment_shift=22),
        InvalidError,
        "EMOE-SEC-005",
        "directory[4].alignment_shift",
    ),
    "past the end": (entry(GRAPH, offset=1 << 40), InvalidError, "EMOE-SEC-006", "directory[4].offset"),
    "longer than the package": (
        entry(GRAPH, stored_length=1 << 40, length=1 << 40),
        InvalidError,
        "EMOE-SEC-006",
        "directory[4].offset",
    ),
    "empty": (entry(GRAPH, stored_length=0, length=0), InvalidError, "EMOE-SEC-007", "directory[4].stored_length"),
    "two lengths": (entry(GRAPH, length=1), InvalidError, "EMOE-SEC-008", "directory[4].length"),
    "two lengths of an unknown type": (
        add(Section(99, b"x", length=2)),
        InvalidError,
        "EMOE-SEC-008",
        "directory[11].length",
    ),
    "compressed records": (entry(DENSE, codec=Codec.ZSTD), InvalidError, "EMOE-SEC-009", "directory[0].codec"),
    "compressed manifest": (entry(MANIFEST, codec=Codec.ZSTD), InvalidError, "EMOE-SEC-009", "directory[10].codec"),
    "compressed free bytes": (
        add(Section(SectionType.FREE, b"x", codec=Codec.ZSTD)),
        InvalidError,
        "EMOE-SEC-009",
        "directory[11].codec",
    ),
    "compressed to nothing": (
        entry(GRAPH, codec=Codec.ZSTD, length=0),
        LimitError,
        "EMOE-SEC-010",
        "directory[4].length",
    ),
    "ratio": (entry(TOKENIZER, codec=Codec.ZSTD, length=1 << 17), LimitError, "EMOE-SEC-010", "directory[9].length"),
    "hole": (
        entry(GRAPH, offset=DATA_START + (1 << 14) + (1 << 15) + 512),
        InvalidError,
        "EMOE-SEC-012",
        "directory[4].offset",
    ),
    "overlap": (
        entry(SectionType.EXPERTS, offset=DATA_START),
        InvalidError,
        "EMOE-SEC-012",
        "directory[1].offset",
    ),
    "inside the superblocks": (entry(DENSE, offset=16384), InvalidError, "EMOE-SEC-012", "directory[0].offset"),
    "twice": (add(Section(TOKENIZER, b"x")), InvalidError, "EMOE-SEC-013", "directory[11]"),
    "unknown twice": (
        lambda draft: draft.sections.extend([Section(99, b"x"), Section(99, b"y")]),
        InvalidError,
        "EMOE-SEC-013",
        "directory[12]",
    ),
    "no manifest": (remove(MANIFEST), InvalidError, "EMOE-SEC-015", "directory"),
    "no dense table": (remove(SectionType.DENSE_TABLE), InvalidError, "EMOE-SEC-015", "directory"),
    "manifest with an id": (entry(MANIFEST, id=1), InvalidError, "EMOE-SEC-015", "directory"),
    "two manifests": (add(Section(MANIFEST, b"x", id=1)), InvalidError, "EMOE-SEC-016", "directory[11].id"),
    "tokenizer with an id": (entry(TOKENIZER, id=1), InvalidError, "EMOE-SEC-016", "directory[9].id"),
    "too many device configurations": (
        many(SectionType.DEVICE_CONFIGURATION, MAX_DEVICE_CONFIGURATIONS + 1),
        LimitError,
        "EMOE-SEC-017",
        "directory",
    ),
    "too many signatures": (
        many(SectionType.SIGNATURE, MAX_SIGNATURES + 1),
        LimitError,
        "EMOE-SEC-017",
        "directory",
    ),
}


@pytest.mark.parametrize(("change", "kind", "rule", "path"), BROKEN.values(), ids=BROKEN)
def test_rule_of_the_directory(change: Change, kind: type[EmoeError], rule: str, path: str) -> None:
    draft = Draft()
    change(draft)
    data = draft.seal()
    error = refused(data, kind, rule)
    start = len(data) - 16 - 80 * len(draft.sections)
    assert error.path == path
    assert error.offset == (start if path == "directory" else start + 16 + 80 * int(path.split("[")[1].split("]")[0]))


@pytest.mark.parametrize(
    ("section_type", "most"),
    [
        (SectionType.DEVICE_CONFIGURATION, MAX_DEVICE_CONFIGURATIONS),
        (SectionType.SIGNATURE, MAX_SIGNATURES),
    ],
)
def test_as_many_unsigned_sections_as_there_may_be(section_type: SectionType, most: int) -> None:
    draft = Draft()
    many(section_type, most)(draft)
    with open_package(draft.seal()) as package:
        assert sum(each.type == section_type for each in package.container.entries) == most


@pytest.mark.parametrize("field", ["offset", "stored_length", "length"])
@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("codec", Codec)
def test_huge_numbers_in_an_entry(field: str, value: int, codec: Codec) -> None:
    draft = Draft()
    draft.section(GRAPH).changes = {field: value, "codec": codec}
    with pytest.raises((InvalidError, LimitError)):
        open_package(draft.seal())


@pytest.mark.parametrize("field", ["type", "id", "flags", "codec"])
@pytest.mark.parametrize("value", [2**16 - 1, 2**31, 2**32 - 1])
def test_huge_kinds_in_an_entry(field: str, value: int) -> None:
    draft = Draft()
    draft.section(GRAPH).changes = {field: min(value, 2**16 - 1) if field == "codec" else value}
    with pytest.raises((InvalidError, UnsupportedError)):
        open_package(draft.seal())


def test_directory_does_not_follow_the_sections() -> None:
    draft = Draft()
    draft.sections[-1].changes = {"stored_length": 64, "length": 64}
    data = draft.seal()
    error = refused(data, InvalidError, "EMOE-SEC-014")
    assert (error.path, error.offset) == ("superblock.directory_offset", len(data) - DIRECTORY)


def test_unknown_sections_are_skipped() -> None:
    """Whatever they are and however they are stored, as long as they are not critical."""
    draft = Draft()
    draft.sections += [
        Section(99, b"x" * 1000, flags=SAFE, codec=77, length=5),
        Section(99, b"y", id=1, alignment_shift=13),
        Section(SectionType.CALIBRATION, b"z", flags=SectionFlag.UNSIGNED),
        Section(100, b"w" * 64, flags=SectionFlag.RECORDS, alignment_shift=12),
    ]
    open_package(draft.seal(), integrity="full").close()


def test_free_sections_may_be_many() -> None:
    draft = Draft()
    draft.sections += [Section(SectionType.FREE, b"old" * 50), Section(SectionType.FREE, b"older" * 50)]
    open_package(draft.seal(), integrity="full").close()


class TestFileId:
    def test_free_and_unsigned_sections_are_outside(self) -> None:
        draft = Draft()
        with open_package(draft.seal()) as package:
            file_id = package.file_id
        draft.sections += [
            Section(SectionType.FREE, b"old"),
            Section(SectionType.SIGNATURE, b"z"),
            Section(99, b"z", flags=SectionFlag.UNSIGNED),
        ]
        with open_package(draft.seal()) as package:
            assert package.file_id == file_id

    @pytest.mark.parametrize(
        "change",
        [
            lambda draft: draft.change_manifest(name="other"),
            lambda draft: draft.sections.append(Section(99, b"x")),
            lambda draft: draft.change_record(DENSE, 0, lambda record: record.__setitem__(0, record[0] ^ 1)),
            lambda draft: draft.sections.reverse(),
        ],
        ids=["manifest", "unknown section", "weights", "order"],
    )
    def test_everything_else_is_inside(self, change: Change) -> None:
        draft = Draft()
        change(draft)
        with open_package(PACKAGE) as before, open_package(draft.seal()) as after:
            assert before.file_id != after.file_id

    def test_generation_is_outside(self) -> None:
        with open_package(PACKAGE) as before, open_package(with_superblock(PACKAGE, 0, generation=9)) as after:
            assert before.file_id == after.file_id
            assert replace(after.container.superblock, generation=1) == before.container.superblock
