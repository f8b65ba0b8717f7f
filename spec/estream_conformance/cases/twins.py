"""Which twin is trusted, and packages that have none. FORMAT.md section 3.2, rules SUP-001 to SUP-004."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

from estream_conformance.builder import SUPERBLOCK, Sealed, Values, superblock_bytes
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, counted, refuse
from estream_conformance.files import flipped, offsets_of, patched, with_both_twins_written
from estream_conformance.packages import smallest
from estream_spec.constants import MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SLOT

FIELDS = {**offsets_of(SUPERBLOCK), "checksum": 124}
RESERVED = (13, 14, 15, 96, 103, 104, 111, 112, 119, 120, 123)
"""Reserved bytes at the ends of the words in which a reader may look at them."""
NAMES = ("first", "second")


def with_twins(first: Values, second: Values) -> Sealed:
    """A package whose twins differ from what is right, each in its own way."""
    made = smallest()
    made.twins = (first, second)
    return made.seal()


def reserved_set(offset: int) -> Values:
    """A superblock's field that makes one reserved byte 1."""
    name, start = ("reserved", 13) if offset < 16 else ("reserved_too", 96)
    return {name: bytes(offset - start) + b"\1"}


def written(data: bytes) -> bytes:
    """The smallest package with both twins replaced by the same bytes."""
    return with_both_twins_written(smallest().seal(), data).data


@refused("EMOE-SUP-001")
def magic_of_both_twins_without_high_bit() -> bytes:
    """The first byte of both twins has lost its high bit, as on a channel of seven bits."""
    return written(superblock_bytes({**smallest().seal().superblock, "magic": b"\x09" + MAGIC[1:]}))


@refused("EMOE-SUP-001")
def line_ends_of_both_magics_changed() -> bytes:
    """The carriage return in both magics is gone, as after a transfer as text."""
    return written(superblock_bytes({**smallest().seal().superblock, "magic": MAGIC.replace(b"\r\n", b"\n") + b"\0"}))


@refused("EMOE-SUP-001")
def last_byte_of_both_magics_wrong() -> bytes:
    """Only the last byte of both magics is another."""
    return written(superblock_bytes({**smallest().seal().superblock, "magic": MAGIC[:7] + b"\x1b"}))


@refused("EMOE-SUP-001")
def package_begins_at_byte_1_of_its_file() -> bytes:
    """The package begins one byte late, and no offset is given."""
    return b"\0" + smallest().seal().data


@refused("EMOE-SUP-001")
def twins_4096_bytes_apart() -> bytes:
    """The twins stand at 4096 and 8192, as if a page were a slot."""
    sealed = smallest().seal()
    twin = sealed.data[:128]
    data = patched(with_both_twins_written(sealed, bytes(128)), 4096, twin)
    return patched(data, 8192, twin).data


for _name, _data in {
    "file_of_0_bytes": b"",
    "file_of_1_byte": MAGIC[:1],
    "file_of_7_bytes": MAGIC[:7],
    "file_of_128_zeros": bytes(128),
    "file_of_32768_zeros": bytes(32768),
    "file_is_a_zip_archive": b"PK\5\6" + bytes(18),
    "file_is_text": b"EMOE\n" * 100,
}.items():
    refuse(
        "EMOE-SUP-001",
        _name,
        f"The file has {counted(len(_data), 'byte')}, and neither slot begins with the magic.",
        partial(bytes, _data),
    )


@refused("EMOE-SUP-001")
def file_of_16391_bytes_without_first_magic() -> bytes:
    """The first twin has no magic, and of the second one's only seven bytes are there."""
    return flipped(smallest().seal(), 0).data[: SUPERBLOCK_SLOT + 7]


for _name, _offset in FIELDS.items():
    if _name != "magic":
        refuse(
            "EMOE-SUP-002",
            f"bit_of_{_name}_in_both_twins_flipped",
            f"One bit of `{_name}` is turned over in both twins, the checksums are not mended.",
            partial(lambda offset: flipped(flipped(smallest().seal(), offset), SUPERBLOCK_SLOT + offset).data, _offset),
            base=f"bit_of_{_name}_in_first_twin_flipped",
        )
    for _number, _start in enumerate(SUPERBLOCK_OFFSETS):
        accept(
            f"bit_of_{_name}_in_{NAMES[_number]}_twin_flipped",
            f"One bit of `{_name}` is turned over in the {NAMES[_number]} twin; the other one is intact.",
            partial(lambda offset: flipped(smallest().seal(), offset), _start + _offset),
        )
for _offset in RESERVED:
    refuse(
        "EMOE-SUP-003",
        f"reserved_byte_{_offset}_of_both_twins_set",
        f"Byte {_offset}, which is reserved, is 1 in both twins; the checksums are right.",
        partial(with_twins, reserved_set(_offset), reserved_set(_offset)),
    )


@accepted()
def reserved_byte_of_first_twin_set() -> Sealed:
    """A reserved byte of the first twin is 1 and its checksum is right; it is not intact, the second one is."""
    return with_twins(reserved_set(13), {})


@accepted()
def reserved_byte_of_second_twin_set() -> Sealed:
    """A reserved byte of the second twin is 1 and its checksum is right; it is not intact, the first one is."""
    return with_twins({}, reserved_set(123))


@accepted()
def reserved_byte_of_a_later_twin_set() -> Sealed:
    """The second twin has a higher generation, but is not intact: a reserved byte is 1, its checksum is right."""
    sealed = smallest().seal()
    later = superblock_bytes({**sealed.superblock, "generation": 2, **reserved_set(96)})
    return patched(sealed, SUPERBLOCK_SLOT, later)


@refused("EMOE-SUP-003")
def reserved_byte_of_first_twin_set_beside_zeros() -> bytes:
    """The first twin has a reserved byte set, the second one is gone: no checksum is wrong."""
    return patched(with_twins(reserved_set(15), {}), SUPERBLOCK_SLOT, bytes(128)).data


@refused("EMOE-SUP-002")
def checksum_wrong_and_reserved_byte_set() -> bytes:
    """In both twins the checksum is wrong and a reserved byte is set: the checksum is judged first."""
    return with_twins({**reserved_set(13), "checksum": 0}, {**reserved_set(13), "checksum": 0}).data


@refused("EMOE-SUP-002")
def checksum_of_first_twin_wrong_beside_reserved_byte() -> bytes:
    """The first twin has a wrong checksum, the second one a reserved byte set: the checksum is judged first."""
    return with_twins({"checksum": 0}, reserved_set(13)).data


@refused("EMOE-SUP-002")
def checksum_of_second_twin_wrong_beside_reserved_byte() -> bytes:
    """The first twin has a reserved byte set, the second one a wrong checksum: the checksum is judged first."""
    return with_twins(reserved_set(13), {"checksum": 0}).data


@refused("EMOE-SUP-002")
def checksum_of_first_twin_wrong_beside_zeros() -> bytes:
    """The first twin has a wrong checksum, the second one is gone."""
    return patched(with_twins({"checksum": 0}, {}), SUPERBLOCK_SLOT, bytes(128)).data


@refused("EMOE-SUP-002")
def checksum_of_second_twin_wrong_beside_zeros() -> bytes:
    """The first twin is gone, the second one has a wrong checksum."""
    return patched(with_twins({}, {"checksum": 0}), 0, bytes(128)).data


@refused("EMOE-SUP-002")
def checksum_of_first_twin_wrong_in_128_bytes() -> bytes:
    """The file ends behind the first twin, whose checksum is wrong."""
    return with_twins({"checksum": 0}, {}).data[:128]


@refused("EMOE-SUP-002")
def checksum_of_first_twin_wrong_beside_a_short_one() -> bytes:
    """The first twin has a wrong checksum, of the second one a byte is missing."""
    return with_twins({"checksum": 0}, {}).data[: SUPERBLOCK_SLOT + 127]


@refused("EMOE-SUP-002")
def checksum_of_both_twins_over_zero_polynomial() -> bytes:
    """Both checksums are those of another polynomial, that of zip files."""
    body = smallest().seal().data[:124]
    return written(body + zlib.crc32(body).to_bytes(4, "little"))


@refused("EMOE-SUP-002")
def checksum_of_both_twins_big_endian() -> bytes:
    """Both checksums are right, but their bytes stand the other way round."""
    twin = smallest().seal().data[:128]
    return written(twin[:124] + twin[:123:-1])


for _length in (8, 16, 127):
    refuse(
        "EMOE-SUP-003",
        f"file_of_{_length}_bytes_with_magic",
        f"Only the first {_length} bytes of the file are there: the magic, but no whole twin.",
        partial(lambda length: smallest().seal().data[:length], _length),
    )
    refuse(
        "EMOE-SUP-003",
        f"file_of_{SUPERBLOCK_SLOT + _length}_bytes_without_first_magic",
        f"The first twin has no magic, of the second one only the first {_length} bytes are there.",
        partial(lambda length: flipped(smallest().seal(), 0).data[: SUPERBLOCK_SLOT + length], _length),
    )


@refused("EMOE-SUP-011")
def file_of_16512_bytes_without_first_magic() -> bytes:
    """The first twin has no magic, the second one is whole and the last thing in the file."""
    return flipped(smallest().seal(), 0).data[: SUPERBLOCK_SLOT + 128]


def _differing(first: Values, second: Values) -> Callable[[], Sealed]:
    return partial(with_twins, first, second)


for _name, _field, _value in (
    ("minor_version", "format_minor", 8),
    ("major_version", "format_major", 1),
    ("page_shift", "page_shift", 13),
    ("file_length", "file_length", 2**64 - 1),
    ("optional_features", "optional_features", 1),
    ("required_features", "required_features", 1),
    ("directory", "directory_sha256", bytes(32)),
):
    for _number in range(2):
        _twins: list[Values] = [{}, {}]
        _twins[_number] = {_field: _value}
        refuse(
            "EMOE-SUP-004",
            f"{NAMES[_number]}_twin_of_equal_generation_with_another_{_name}",
            f"The twins are intact and of one generation, but the {NAMES[_number]} has another `{_field}`.",
            _differing(*_twins),
        )


@refused("EMOE-SUP-004")
def twins_of_highest_generation_differ() -> Sealed:
    """Both twins have the highest generation there is, but differ."""
    last = 2**64 - 1
    return with_twins({"generation": last}, {"generation": last, "format_minor": 8})


@refused("EMOE-SUP-004")
def twins_of_generation_0_differ() -> Sealed:
    """Both twins have generation 0, but differ."""
    return with_twins({"generation": 0}, {"generation": 0, "format_minor": 8})


for _name, _low, _high in (
    ("0_and_1", 0, 1),
    ("1_and_2", 1, 2),
    ("255_and_256", 255, 256),
    ("2_to_32_less_1_and_2_to_32", 2**32 - 1, 2**32),
    ("2_to_63_less_1_and_2_to_63", 2**63 - 1, 2**63),
    ("0_and_2_to_64_less_1", 0, 2**64 - 1),
):
    for _number in range(2):
        _twins = [{"generation": _low, "format_minor": 1, "directory_sha256": bytes(32)}] * 2
        _twins[_number] = {"generation": _high}
        accept(
            f"generations_{_name}_trust_the_{NAMES[_number]}_twin",
            f"The {NAMES[_number]} twin has generation {_high}, the other one {_low} and no directory of its digest.",
            _differing(*_twins),
        )

_RIGHT = smallest().seal().superblock
for _name, _rule, _fault in (
    ("major_version", "EMOE-SUP-005", {"format_major": 1}),
    ("required_feature", "EMOE-SUP-006", {"required_features": 1}),
    ("page_shift", "EMOE-SUP-007", {"page_shift": 22}),
    (
        "file_length",
        "EMOE-SUP-011",
        {"file_length": _RIGHT["file_length"] + 64, "directory_offset": _RIGHT["directory_offset"] + 64},
    ),
    ("directory_digest", "EMOE-DIR-001", {"directory_sha256": bytes(32)}),
):
    for _number in range(2):
        _twins = [{}, {}]
        _twins[_number] = {"generation": 2, **_fault}
        refuse(
            _rule,
            f"{_name}_at_fault_in_the_later_{NAMES[_number]}_twin",
            f"The {NAMES[_number]} twin has the higher generation and a fault; the other one is sound, but no way out.",
            _differing(*_twins),
            base=f"{_name}_at_fault_in_the_earlier_{NAMES[_number]}_twin",
        )
        _twins[_number] = {"generation": 0, **_fault}
        accept(
            f"{_name}_at_fault_in_the_earlier_{NAMES[_number]}_twin",
            f"The {NAMES[_number]} twin has the lower generation and a fault, which does not matter.",
            _differing(*_twins),
        )


@accepted()
def first_twin_is_zeros() -> Sealed:
    """All bytes of the first twin are zero."""
    return patched(smallest().seal(), 0, bytes(128))


@accepted()
def second_twin_is_zeros() -> Sealed:
    """All bytes of the second twin are zero."""
    return patched(smallest().seal(), SUPERBLOCK_SLOT, bytes(128))


@accepted()
def first_twin_is_garbage() -> Sealed:
    """The first twin is 128 bytes of something else."""
    return patched(smallest().seal(), 0, bytes(range(100, 228)))


@accepted()
def second_twin_is_garbage() -> Sealed:
    """The second twin is 128 bytes of something else."""
    return patched(smallest().seal(), SUPERBLOCK_SLOT, bytes(range(100, 228)))


@refused("EMOE-PAD-001", "padding", base="first_twin_is_zeros")
def whole_first_slot_is_garbage() -> bytes:
    """The first twin and all of its slot behind it are something else; what is behind a twin must be zero."""
    return patched(smallest().seal(), 0, b"\xff" * SUPERBLOCK_SLOT).data


@accepted()
def twins_of_different_generations_with_one_directory() -> Sealed:
    """The second twin is one generation later and otherwise equal."""
    return with_twins({}, {"generation": 2})
