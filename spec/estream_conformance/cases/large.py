"""Packages of many gigabytes: every offset in them is past what 31 or 32 bits hold."""

from __future__ import annotations

from functools import partial

from estream_conformance.case import Made
from estream_conformance.changes import accept, refuse
from estream_conformance.files import hollow
from estream_conformance.packages import full, smallest
from estream_conformance.signing import asking, sign, with_signatures
from estream_spec.constants import SectionFlag, SectionType

UNKNOWN = 99
ROOMS = {"2_gib": 1 << 31, "4_gib": 1 << 32, "6_gib": 3 << 31, "1_tib": 1 << 40}


def unknown_records(room: int) -> Made:
    """The smallest package behind records of unknown type."""
    return hollow(smallest(), room, UNKNOWN, flags=int(SectionFlag.RECORDS), alignment_shift=12)


def short_by(room: int, length: int) -> Made:
    """The smallest package behind an extent that is said to be shorter or longer than it is."""
    return hollow(smallest(), room, length=length, stored_length=length)


def damaged(room: int, change: str) -> Made:
    """The smallest package behind a hole, with a fault far behind it."""
    made = smallest()
    if change == "checksum":
        made.tables[SectionType.EXPERTS][0].digests[0] = {"checksum": 0}
    if change == "padding":
        made.section(SectionType.MANIFEST).before = b"\1"
    if change == "digest":
        made.section(SectionType.GRAPH).changes["sha256"] = bytes(32)
    return hollow(made, room)


def cut(room: int) -> Made:
    """The smallest package behind a hole, without its last byte."""
    made = hollow(smallest(), room)
    assert made.image is not None
    return Made(image=made.image.patched(made.image.length - 1, {}))


def signed(room: int) -> Made:
    """The smallest package behind a hole, signed."""
    unsigned = hollow(smallest(), room).package
    assert unsigned is not None
    values = sign(1, unsigned.file_id)
    made = smallest()
    with_signatures(made, values)
    whole = hollow(made, room)
    assert whole.package is not None
    asked = asking(whole.package, 1, signatures=(values,))
    return Made(whole.package, whole.image, asked.signatures, arguments=asked.arguments)


for _name, _room in ROOMS.items():
    accept(
        f"free_extent_of_{_name}",
        f"All sections stand behind an extent of {_room} bytes that is no longer in use.",
        partial(lambda room: hollow(smallest(), room), _room),
        "large",
    )
accept(
    "free_extent_of_4_gib_before_everything",
    "All sections of a package with everything stand behind an extent of 4 GiB that is no longer in use.",
    lambda: hollow(full(), 1 << 32),
    "large",
    base="full",
    committed=False,
)
accept(
    "unknown_records_of_4_gib",
    "All sections stand behind records of unknown type; their bytes are checked by nobody.",
    partial(unknown_records, 1 << 32),
    "large",
)
accept(
    "signed_behind_4_gib",
    "All sections stand behind an extent of 4 GiB, and the key that is asked for has signed.",
    partial(signed, 1 << 32),
    "large",
    "signature",
)
for _name, _room, _length in (
    ("2_gib_less_a_page", 1 << 31, (1 << 31) - 4096),
    ("2_gib_and_1", 1 << 31, (1 << 31) + 1),
    ("4_gib_less_a_page", 1 << 32, (1 << 32) - 4096),
    ("4096_of_4_gib_and_4096", (1 << 32) + 4096, 4096),
):
    refuse(
        "EMOE-SEC-012",
        f"free_extent_said_to_be_of_{_name}",
        f"The first section is said to have {_length} bytes, the next one begins {_room} bytes behind its start.",
        partial(short_by, _room, _length),
        "large",
        base="free_extent_of_2_gib" if _room == 1 << 31 else "free_extent_of_4_gib",
    )
for _rule, _change, _about, _features in (
    ("EMOE-REC-001", "checksum", "an expert's record has another checksum", ("records",)),
    ("EMOE-PAD-001", "padding", "a byte of padding is not zero", ("padding",)),
    ("EMOE-SEC-018", "digest", "a graph has another digest", ()),
):
    refuse(
        _rule,
        f"wrong_{_change}_behind_4_gib",
        f"All sections stand behind an extent of 4 GiB, and {_about}.",
        partial(damaged, 1 << 32, _change),
        "large",
        *_features,
        base="free_extent_of_4_gib",
    )
refuse(
    "EMOE-SUP-011",
    "file_of_4_gib_1_byte_short",
    "The last byte of a package of more than 4 GiB is missing.",
    partial(cut, 1 << 32),
    "large",
    base="free_extent_of_4_gib",
)
