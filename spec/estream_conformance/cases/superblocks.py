"""What is in a superblock, and what it says of the file. FORMAT.md section 3.1, rules SUP-005 to SUP-011."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Sealed
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.packages import draft, smallest, smallest_model
from estream_spec.constants import DATA_START
from estream_spec.limits import MAX_FILE_LENGTH, MAX_SECTIONS

MAX_DIRECTORY_LENGTH = 16 + 80 * MAX_SECTIONS


def saying(**superblock: int) -> Sealed:
    """A package both of whose twins say something else than what is right."""
    made = smallest()
    made.superblock |= superblock
    return made.seal()


def paged(page_shift: int) -> Sealed:
    """The smallest package in pages of another size."""
    return draft(smallest_model(), page_shift=page_shift).seal()


for _major in (1, 256, 65535):
    refuse(
        "EMOE-SUP-005",
        f"format_major_{_major}",
        f"The format has the major version {_major}.",
        partial(saying, format_major=_major),
    )


@accepted()
def format_minor_65535() -> Sealed:
    """The minor version is as high as can be; it decides nothing."""
    return saying(format_minor=65535)


@accepted()
def format_minor_0() -> Sealed:
    """The minor version is 0; it decides nothing."""
    return saying(format_minor=0)


@refused("EMOE-SUP-005")
def format_major_1_before_required_feature() -> Sealed:
    """Another major version and a required feature: the version is judged first."""
    return saying(format_major=1, required_features=1)


for _bit in (0, 1, 31, 32, 63):
    refuse(
        "EMOE-SUP-006",
        f"required_feature_{_bit}",
        f"Bit {_bit} of the required features is set, which no reader of this version knows.",
        partial(saying, required_features=1 << _bit),
        base=f"optional_feature_{_bit}",
    )
    accept(
        f"optional_feature_{_bit}",
        f"Bit {_bit} of the optional features is set, which readers ignore.",
        partial(saying, optional_features=1 << _bit),
    )


@accepted()
def optional_features_all() -> Sealed:
    """All bits of the optional features are set."""
    return saying(optional_features=2**64 - 1)


@refused("EMOE-SUP-006", base="optional_features_all")
def required_features_all() -> Sealed:
    """All bits of the required features are set."""
    return saying(required_features=2**64 - 1)


@refused("EMOE-SUP-006")
def required_feature_before_page_shift() -> Sealed:
    """A required feature and a page that is too small: the feature is judged first."""
    return saying(required_features=2, page_shift=11)


for _shift in (0, 11, 22, 32, 63, 64, 76, 255):
    refuse(
        "EMOE-SUP-007",
        f"page_shift_{_shift}",
        f"A page has 2^{_shift} bytes, expected 2^12 to 2^21.",
        partial(saying, page_shift=_shift),
    )
for _shift in (13, 14, 16, 21):
    accept(f"page_shift_{_shift}", f"A page has 2^{_shift} bytes.", partial(paged, _shift))


@refused("EMOE-SUP-007")
def page_shift_before_file_length() -> Sealed:
    """Too large a page and too long a file: the page is judged first."""
    return saying(page_shift=22, file_length=2**64 - 1)


for _name, _length in {
    "2_to_44_and_1": MAX_FILE_LENGTH + 1,
    "2_to_63": 1 << 63,
    "2_to_64_less_1": 2**64 - 1,
}.items():
    refuse(
        "EMOE-SUP-008",
        f"file_length_{_name}",
        f"The package says that it has {_length} bytes, more than any may have; its directory ends there.",
        partial(
            saying,
            file_length=_length,
            directory_offset=_length - 96,
            directory_length=96,
        ),
    )


@refused("EMOE-SUP-011")
def file_length_2_to_44_of_a_short_file() -> Sealed:
    """The package says that it has 2^44 bytes, as many as a package may have, but they are not there."""
    return saying(file_length=MAX_FILE_LENGTH, directory_offset=MAX_FILE_LENGTH - 96, directory_length=96)


@refused("EMOE-SUP-008")
def file_length_before_directory_length() -> Sealed:
    """The file and the directory are too long: the file is judged first."""
    return saying(file_length=MAX_FILE_LENGTH + 1, directory_length=MAX_DIRECTORY_LENGTH + 1)


for _name, _length in {
    "limit_and_1": MAX_DIRECTORY_LENGTH + 1,
    "limit_and_80": MAX_DIRECTORY_LENGTH + 80,
    "2_to_32": 1 << 32,
    "2_to_63": 1 << 63,
    "2_to_64_less_1": 2**64 - 1,
}.items():
    refuse(
        "EMOE-SUP-009",
        f"directory_length_{_name}",
        f"The directory is said to have {_length} bytes, more than {MAX_DIRECTORY_LENGTH}.",
        partial(saying, directory_length=_length),
    )


@refused("EMOE-SUP-010")
def directory_length_at_limit_before_the_file() -> Sealed:
    """The directory has the most bytes that it may have, but then it does not end where the package does."""
    return saying(directory_length=MAX_DIRECTORY_LENGTH)


@refused("EMOE-SUP-009")
def directory_length_before_directory_offset() -> Sealed:
    """A directory that is too long and begins at 0: its length is judged first."""
    return saying(directory_length=MAX_DIRECTORY_LENGTH + 1, directory_offset=0)


def directory_at(offset: int) -> Sealed:
    """A package that says its directory begins at an offset and ends where the package does."""
    return saying(directory_offset=offset, directory_length=smallest().seal().superblock["file_length"] - offset)


for _offset in (0, 16384, DATA_START - 1):
    refuse(
        "EMOE-SUP-010",
        f"directory_offset_{_offset}",
        f"The directory begins at {_offset}, where the superblocks are, and ends the package.",
        partial(directory_at, _offset),
    )


@refused("EMOE-DIR-001")
def directory_offset_32768() -> Sealed:
    """The directory begins at 32768, where it may, and ends the package; its digest is that of another extent."""
    return directory_at(DATA_START)


def directory_shifted(offset: int, length: int) -> Sealed:
    """A package whose directory is said to begin and end elsewhere."""
    right = smallest().seal().superblock
    return saying(
        directory_offset=(right["directory_offset"] + offset) % 2**64,
        directory_length=(right["directory_length"] + length) % 2**64,
    )


for _name, _about, _by in (
    ("directory_ends_1_byte_before_the_package", "The directory ends one byte before the package does.", (0, -1)),
    ("directory_ends_1_byte_behind_the_package", "The directory ends one byte behind the package's end.", (0, 1)),
    ("directory_begins_64_bytes_early", "Directory and length are right, but it is said to begin earlier.", (-64, 0)),
    ("directory_begins_64_bytes_late", "Directory and length are right, but it is said to begin later.", (64, 0)),
    ("directory_offset_2_to_63_more", "The directory begins 2^63 bytes too late.", (1 << 63, 0)),
    ("directory_offset_2_to_32_more", "The directory begins 2^32 bytes too late.", (1 << 32, 0)),
):
    refuse("EMOE-SUP-010", _name, _about, partial(directory_shifted, *_by))


@refused("EMOE-SUP-010")
def directory_end_wraps_64_bits() -> Sealed:
    """Offset and length of the directory add up to the package's length only where the sum loses its carry."""
    length = smallest().seal().superblock["file_length"]
    return saying(directory_length=MAX_DIRECTORY_LENGTH, directory_offset=2**64 + length - MAX_DIRECTORY_LENGTH)


@refused("EMOE-SUP-010")
def directory_end_wraps_32_bits() -> Sealed:
    """Offset and length of the directory add up to the package's length only in 32 bits."""
    length = smallest().seal().superblock["file_length"]
    return saying(directory_length=MAX_DIRECTORY_LENGTH, directory_offset=2**32 + length - MAX_DIRECTORY_LENGTH)


@refused("EMOE-SUP-010")
def directory_end_before_missing_bytes() -> bytes:
    """The directory does not end the package, and the file is cut short: the directory is judged first."""
    return directory_shifted(0, 1).data[:-100]


@refused("EMOE-SUP-011")
def file_1_byte_short() -> bytes:
    """The last byte of the directory is missing."""
    return smallest().seal().data[:-1]


@refused("EMOE-SUP-011")
def file_without_directory() -> bytes:
    """The file ends where the directory should begin."""
    sealed = smallest().seal()
    return sealed.data[: sealed.superblock["directory_offset"]]


@refused("EMOE-SUP-011")
def file_length_1_more() -> Sealed:
    """The package says that it has a byte more than there is, and its directory with it."""
    right = smallest().seal().superblock
    return saying(file_length=right["file_length"] + 1, directory_length=right["directory_length"] + 1)


@refused("EMOE-SUP-011")
def file_length_2_to_32_more() -> Sealed:
    """The package says that it has 4 GiB more than there are: right only in 32 bits."""
    right = smallest().seal().superblock
    return saying(
        file_length=right["file_length"] + 2**32,
        directory_offset=right["directory_offset"] + 2**32,
    )


for _length in (128, 16384, 16391, 16511, 16512, 32767, DATA_START):
    refuse(
        "EMOE-SUP-011",
        f"file_cut_to_{_length}_bytes",
        f"Only the first {_length} bytes of the file are there; the first twin is whole.",
        partial(lambda length: smallest().seal().data[:length], _length),
    )


@refused("EMOE-SUP-011")
def missing_bytes_before_directory_digest() -> bytes:
    """The file is cut short and the directory's digest is another: the length is judged first."""
    made = smallest()
    made.superblock["directory_sha256"] = bytes(32)
    return made.seal().data[:-1]


@accepted()
def generation_0() -> Sealed:
    """The generation is 0."""
    return saying(generation=0)


@accepted()
def generation_2_to_64_less_1() -> Sealed:
    """The generation is as high as can be."""
    return saying(generation=2**64 - 1)
