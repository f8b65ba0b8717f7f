"""Record tables: their bytes, and the records that they describe. FORMAT.md section 5."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.packages import draft, smallest, smallest_model
from estream_spec import limits
from estream_spec.constants import SectionType

DENSE, EXPERTS = SectionType.DENSE, SectionType.EXPERTS
DENSE_TABLE, EXPERT_TABLE = SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE
RANGES: Final = 16
"""Where ranges begin in a table."""
DENSE_DIGESTS: Final = RANGES + 3 * 32
"""Where digests begin in the dense table of the smallest package, which has three ranges."""
EXPERT_DIGESTS: Final = RANGES + 32
"""The same in its table of experts."""


def edited(table: int, change: Callable[[bytes], bytes], make: Callable[[], Draft] = smallest) -> Sealed:
    """A package with the bytes of a table changed."""
    made = make()
    made.section(table).change = change
    return made.seal()


def _written(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda table: table[:at] + data + table[at + len(data) :]


def _edited(rule: str, name: str, about: str, table: int, change: Callable[[bytes], bytes]) -> None:
    refuse(rule, name, about, lambda: edited(table, change))


def _number(rule: str, name: str, about: str, at: int, value: int, table: int = DENSE_TABLE) -> None:
    _edited(rule, name, about, table, _written(at, value.to_bytes(4, "little")))


_SHORT = "The table has 15 bytes, too few for its header."
_edited("EMOE-TAB-001", "dense_table_of_15_bytes", _SHORT, DENSE_TABLE, lambda table: table[:15])
_edited("EMOE-TAB-001", "expert_table_of_15_bytes", _SHORT, EXPERT_TABLE, lambda table: table[:15])
_edited("EMOE-TAB-001", "table_of_1_byte", "The table has one byte.", EXPERT_TABLE, lambda table: table[:1])
_MAGIC = "The magic of the table is that of a directory."
_edited("EMOE-TAB-001", "dense_table_of_another_magic", _MAGIC, DENSE_TABLE, _written(0, b"EMOEDIR\0"))
_edited("EMOE-TAB-001", "expert_table_of_another_magic", _MAGIC, EXPERT_TABLE, _written(0, b"EMOEDIR\0"))
_edited("EMOE-TAB-001", "table_magic_without_its_zero", "The magic ends in a space.", DENSE_TABLE, _written(7, b" "))
_edited("EMOE-TAB-001", "table_of_zeros", "The table is all zero.", DENSE_TABLE, lambda table: bytes(len(table)))

_number(
    "EMOE-TAB-002", "range_count_over_the_limit", "There are 1027 ranges, says the table.", 8, limits.MAX_RANGES + 1
)
_number("EMOE-TAB-002", "range_count_of_2_to_the_31", "There are 2^31 ranges, says the table.", 8, 1 << 31)
_number("EMOE-TAB-002", "range_count_of_the_most", "There are 2^32 - 1 ranges, says the table.", 8, (1 << 32) - 1)
_number(
    "EMOE-TAB-002",
    "range_count_whose_bytes_wrap",
    "There are 2^27 + 3 ranges, says the table, whose bytes in 32 bits are those of three.",
    8,
    (1 << 27) + 3,
)
_number("EMOE-TAB-002", "record_count_over_the_limit", "There are 2^17 + 1 records.", 12, limits.MAX_RECORDS + 1)
_number("EMOE-TAB-002", "record_count_of_the_most", "There are 2^32 - 1 records.", 12, (1 << 32) - 1, EXPERT_TABLE)
_number(
    "EMOE-TAB-002",
    "record_count_whose_bytes_wrap",
    "There are 2^29 + 3 records, says the table, whose bytes in 32 bits are those of three.",
    12,
    (1 << 29) + 3,
)
_number("EMOE-TAB-003", "range_count_at_the_limit", "There are 1026 ranges, says the table.", 8, limits.MAX_RANGES)
_number("EMOE-TAB-003", "record_count_at_the_limit", "There are 2^17 records, says the table.", 12, limits.MAX_RECORDS)
_number("EMOE-TAB-003", "range_count_of_one_more", "The table says four ranges and has three.", 8, 4)
_number("EMOE-TAB-003", "range_count_of_one_less", "The table says two ranges and has three.", 8, 2)
_number("EMOE-TAB-003", "range_count_of_0", "The table says that it has no ranges.", 8, 0)
_number("EMOE-TAB-003", "record_count_of_one_more", "The table says four records and has three.", 12, 4)
_number("EMOE-TAB-003", "record_count_of_one_less", "The table says two records and has three.", 12, 2)
_number("EMOE-TAB-003", "record_count_of_0", "The table says that it has no records.", 12, 0, EXPERT_TABLE)
_edited(
    "EMOE-TAB-003", "table_of_a_byte_less", "The table's last byte is missing.", DENSE_TABLE, lambda table: table[:-1]
)
_edited(
    "EMOE-TAB-003", "table_of_a_byte_more", "A byte stands behind the table.", EXPERT_TABLE, lambda table: table + b"\0"
)
_edited("EMOE-TAB-003", "table_of_its_header", "The table is just its header.", EXPERT_TABLE, lambda table: table[:16])
_edited("EMOE-TAB-003", "table_without_a_digest", "The last digest is missing.", DENSE_TABLE, lambda table: table[:-40])
_edited(
    "EMOE-TAB-003",
    "table_with_its_padding",
    "Zeros up to 64 bytes stand behind.",
    DENSE_TABLE,
    lambda table: table + bytes(24),
)


for _byte in range(8):
    _name = f"range_reserved_byte_{24 + _byte}"
    _about = f"Byte {24 + _byte} of a range is reserved, and not zero."
    _table, _at = (DENSE_TABLE, RANGES + 2 * 32) if _byte % 2 else (EXPERT_TABLE, RANGES)
    _edited("EMOE-TAB-004", _name, _about, _table, _written(_at + 24 + _byte, b"\1"))
for _byte in range(4):
    _name = f"digest_reserved_byte_{4 + _byte}"
    _about = f"Byte {4 + _byte} of a record's digest is reserved, and not zero."
    _table, _at = (DENSE_TABLE, DENSE_DIGESTS + 2 * 40) if _byte % 2 else (EXPERT_TABLE, EXPERT_DIGESTS)
    _edited("EMOE-TAB-006", _name, _about, _table, _written(_at + 4 + _byte, b"\x80"))


def _counts(*counts: int) -> Callable[[bytes], bytes]:
    def change(table: bytes) -> bytes:
        for number, count in enumerate(counts):
            table = _written(RANGES + 32 * number + 16, count.to_bytes(4, "little"))(table)
        return table

    return change


COUNTS: Final[list[tuple[str, str, tuple[int, ...]]]] = [
    ("counts_of_one_more", "The ranges' counts add up to one more than there are records.", (1, 1, 2)),
    ("counts_of_one_less", "The ranges' counts add up to one less than there are records.", (1, 1, 0)),
    ("counts_that_wrap", "The ranges' counts add up to 2^32 + 3, which is 3 in 32 bits.", (1 << 31, 1 << 31, 3)),
    ("counts_that_wrap_from_the_most", "Two counts are 1 and 2^32 - 1, 0 in 32 bits.", (1, (1 << 32) - 1, 3)),
    ("counts_of_the_most", "Each count is 2^32 - 1.", ((1 << 32) - 1,) * 3),
    ("counts_of_0", "Each count is 0.", (0, 0, 0)),
]
for _name, _about, _list in COUNTS:
    _edited("EMOE-TAB-005", _name, _about, DENSE_TABLE, _counts(*_list))


# Ranges and the model


def two_layers() -> Draft:
    """Two layers of one shape class, each with two experts."""
    model = smallest_model()
    model["layers"] *= 2
    model["expert_blocks"][0]["experts"] = 2
    return draft(model)


@accepted()
def two_layers_of_two_experts() -> Sealed:
    """Two layers have the same layouts, and two experts each."""
    return two_layers().seal()


def _ranges(name: str, about: str, change: Callable[[Draft], Any]) -> None:
    def build() -> Sealed:
        made = two_layers()
        change(made)
        return made.seal()

    refuse("EMOE-TAB-007", name, about, build, base="two_layers_of_two_experts")


def _one_range(made: Draft) -> None:
    first, second = made.tables[EXPERTS]
    first.payloads += second.payloads
    made.tables[EXPERTS] = [first]


def _one_each(made: Draft) -> None:
    first, second = made.tables[EXPERTS]
    second.payloads.append(first.payloads.pop())


def _empty(made: Draft) -> None:
    first, second = made.tables[EXPERTS]
    second.payloads += first.payloads
    first.payloads = []


def _split(made: Draft) -> None:
    first, _ = made.tables[EXPERTS]
    made.tables[EXPERTS].insert(0, type(first)(first.layout, [first.payloads.pop(0)]))


def _dense_pair(made: Draft) -> None:
    _, first, second, _ = made.tables[DENSE]
    first.payloads += second.payloads
    del made.tables[DENSE][2]


def _empty_dense(made: Draft) -> None:
    made.tables[DENSE][3].payloads.append(made.tables[DENSE][3].payloads[0])


_ranges("layers_in_one_range", "The experts of both layers are one range.", _one_range)
_ranges("layers_of_one_and_three_experts", "The first layer has one expert, the second three.", _one_each)
_ranges("layer_without_records", "The first layer's range has no record, the second one's all four.", _empty)
_ranges("layer_of_two_ranges", "The experts of the first layer are two ranges.", _split)
_ranges(
    "range_of_experts_missing", "The range of the second layer is missing.", lambda made: made.tables[EXPERTS].pop()
)
_ranges(
    "range_of_experts_more", "There is a range more.", lambda made: made.tables[EXPERTS].append(made.tables[EXPERTS][1])
)
_ranges("expert_missing", "The last expert's record is missing.", lambda made: made.tables[EXPERTS][1].payloads.pop())
_ranges("dense_records_in_one_range", "The dense records of both layers are one range.", _dense_pair)
_ranges("dense_range_missing", "A layer has no dense record.", lambda made: made.tables[DENSE].pop(1))
_ranges(
    "dense_range_more",
    "There is a layer's dense record more.",
    lambda made: made.tables[DENSE].insert(1, made.tables[DENSE][1]),
)
_ranges("final_block_twice", "The last dense range has two records.", _empty_dense)


@refused("EMOE-TAB-007")
def tables_exchanged() -> Sealed:
    """The section of either table has the other one's bytes."""
    made = smallest()
    tables = made._made()
    made.section(DENSE_TABLE).data, made.section(EXPERT_TABLE).data = tables[EXPERT_TABLE], tables[DENSE_TABLE]
    return made.seal()


# Bases and lengths


def _changed(
    rule: str, name: str, about: str, records: int, changes: dict[int, dict[str, int]], *, base: str = "smallest"
) -> None:
    def build() -> Sealed:
        made = two_layers() if base == "two_layers_of_two_experts" else smallest()
        for number, values in changes.items():
            made.tables[records][number].changes.update(values)
        return made.seal()

    refuse(rule, name, about, build, base=base)


TOP: Final = 1 << 64
_changed("EMOE-TAB-009", "first_base_of_a_page", "The first range begins a page late.", EXPERTS, {0: {"base": 4096}})
_changed(
    "EMOE-TAB-009", "first_base_of_a_page_before", "The first base is 2^64 - 4096.", EXPERTS, {0: {"base": TOP - 4096}}
)
_changed("EMOE-TAB-009", "first_base_of_1", "The first range begins a byte late.", EXPERTS, {0: {"base": 1}})
_changed(
    "EMOE-TAB-009", "first_base_of_2_to_the_32", "The first base is 2^32, 0 in 32 bits.", DENSE, {0: {"base": 1 << 32}}
)
_changed("EMOE-TAB-009", "base_a_page_late", "The second range begins a page late.", DENSE, {1: {"base": 8192}})
_changed("EMOE-TAB-009", "base_a_page_early", "The second range begins a page early.", DENSE, {1: {"base": 0}})
_changed("EMOE-TAB-009", "base_a_byte_early", "The last range begins a byte early.", DENSE, {2: {"base": 8191}})
_changed("EMOE-TAB-009", "base_of_2_to_the_63", "A base is 2^63.", DENSE, {2: {"base": 1 << 63}})
_changed("EMOE-TAB-009", "base_of_the_most", "A base is 2^64 - 1.", DENSE, {2: {"base": TOP - 1}})
_changed(
    "EMOE-TAB-009",
    "bases_exchanged",
    "Two ranges have each other's base.",
    DENSE,
    {1: {"base": 8192}, 2: {"base": 4096}},
)
_changed("EMOE-TAB-010", "record_length_of_0", "A record has no bytes.", EXPERTS, {0: {"record_length": 0}})
_changed("EMOE-TAB-010", "record_length_of_1", "A record has one byte.", EXPERTS, {0: {"record_length": 1}})
_changed(
    "EMOE-TAB-010", "record_length_of_its_payload", "Padding is not counted.", EXPERTS, {0: {"record_length": 260}}
)
_changed(
    "EMOE-TAB-010", "record_length_of_a_byte_less", "The record length is 4095.", EXPERTS, {0: {"record_length": 4095}}
)
_changed(
    "EMOE-TAB-010", "record_length_of_two_pages", "A record has a page more.", EXPERTS, {0: {"record_length": 8192}}
)
_changed(
    "EMOE-TAB-010",
    "record_length_at_the_limit",
    "A record is as long as it may be.",
    EXPERTS,
    {0: {"record_length": limits.MAX_RECORD_LENGTH}},
)
_changed(
    "EMOE-TAB-008",
    "record_length_over_the_limit",
    "A record is a page longer than it may be.",
    EXPERTS,
    {0: {"record_length": limits.MAX_RECORD_LENGTH + 4096}},
)
_changed(
    "EMOE-TAB-008", "record_length_of_2_to_the_31", "The record length is 2^31.", DENSE, {1: {"record_length": 1 << 31}}
)
_changed(
    "EMOE-TAB-008",
    "record_length_of_2_to_the_32_and_a_page",
    "A record has 2^32 + 4096 bytes, a page in 32 bits.",
    EXPERTS,
    {0: {"record_length": (1 << 32) + 4096}},
)
_changed(
    "EMOE-TAB-008",
    "record_length_of_2_to_the_63",
    "The record length is 2^63, twice which is 0 in 64 bits.",
    EXPERTS,
    {0: {"record_length": 1 << 63}},
)
_changed(
    "EMOE-TAB-008",
    "record_length_of_the_most",
    "The record length is 2^64 - 1.",
    EXPERTS,
    {0: {"record_length": TOP - 1}},
)
_changed(
    "EMOE-TAB-010",
    "record_length_of_half_a_page",
    "The records of the first layer are half a page, and those of the second begin where these end.",
    EXPERTS,
    {0: {"record_length": 2048}, 1: {"base": 4096}},
    base="two_layers_of_two_experts",
)
_changed(
    "EMOE-TAB-009",
    "base_and_length_wrong",
    "A range has a wrong base, and the one behind it a length over the limit: they are judged one by one.",
    DENSE,
    {1: {"base": 0}, 2: {"record_length": TOP - 1}},
)
_changed(
    "EMOE-TAB-008",
    "base_wrong_and_length_over_the_limit",
    "A range has a wrong base and a length over the limit: the limit is judged first.",
    DENSE,
    {1: {"base": 0, "record_length": TOP - 1}},
)
_changed(
    "EMOE-TAB-009",
    "base_and_length_of_one_range_wrong",
    "Base and record length of one range are wrong; the base comes first.",
    DENSE,
    {1: {"base": 0, "record_length": 8192}},
)

# Sections of records


def _resized(name: str, about: str, records: int, change: Callable[[bytes], bytes]) -> None:
    def build() -> Sealed:
        made = smallest()
        made.section(records).change = change
        return made.seal()

    refuse("EMOE-TAB-011", name, about, build)


_resized("experts_of_a_page_more", "A page stands behind the last expert.", EXPERTS, lambda data: data + bytes(4096))
_resized("experts_of_a_byte_more", "A byte stands behind the last expert.", EXPERTS, lambda data: data + b"\0")
_resized("experts_of_a_byte_less", "The last expert's last byte is missing.", EXPERTS, lambda data: data[:-1])
_resized("experts_of_their_payload", "The last expert's padding is missing.", EXPERTS, lambda data: data[:260])
_resized("dense_of_a_page_more", "A page stands behind the last dense record.", DENSE, lambda data: data + bytes(4096))
_resized("dense_of_a_page_less", "The last dense record is missing.", DENSE, lambda data: data[:-4096])


def _digest(name: str, about: str, records: int, digest: Callable[[Sealed], bytes]) -> None:
    def build() -> Sealed:
        made = smallest()
        made.section(records).changes["sha256"] = digest(smallest().seal())
        return made.seal()

    refuse("EMOE-TAB-012", name, about, build)


def _stored(sealed: Sealed, section_type: int) -> bytes:
    entry = next(each for each in sealed.entries if each["type"] == section_type)
    return sealed.data[entry["offset"] :][: entry["stored_length"]]


def _flipped(sealed: Sealed) -> bytes:
    entry = next(each for each in sealed.entries if each["type"] == DENSE)
    return bytes([entry["sha256"][0] ^ 1]) + bytes(entry["sha256"][1:])


_digest("digest_of_dense_with_a_bit_flipped", "A bit of the digest over digests is wrong.", DENSE, _flipped)
_digest("digest_of_experts_zero", "The digest over digests is zero.", EXPERTS, lambda _: bytes(32))
_digest(
    "digest_of_experts_over_their_bytes",
    "The digest is over the section's bytes, as for other sections.",
    EXPERTS,
    lambda sealed: sha256(_stored(sealed, EXPERTS)).digest(),
)
_digest(
    "digest_of_experts_over_their_table",
    "The digest is over the table's entries with their checksums.",
    EXPERTS,
    lambda sealed: sha256(_stored(sealed, EXPERT_TABLE)[EXPERT_DIGESTS:]).digest(),
)


@refused("EMOE-TAB-012", base="two_layers_of_two_experts")
def digest_of_experts_in_another_order() -> Sealed:
    """The digest is over the records' digests in another order."""
    made = two_layers()
    digests = [sha256(each).digest() for one in made.tables[EXPERTS] for each in one.payloads]
    made.section(EXPERTS).changes["sha256"] = sha256(b"".join(reversed(digests))).digest()
    return made.seal()


# Which fault comes first


def _two_tables(
    rule: str, name: str, about: str, dense: Callable[[bytes], bytes], experts: Callable[[bytes], bytes]
) -> None:
    def build() -> Sealed:
        made = smallest()
        made.section(DENSE_TABLE).change, made.section(EXPERT_TABLE).change = dense, experts
        return made.seal()

    refuse(rule, name, about, build)


_two_tables(
    "EMOE-TAB-006",
    "dense_digest_reserved_and_expert_table_magic",
    "The last thing checked of the dense table is wrong, and the first of the other one.",
    _written(DENSE_DIGESTS + 4, b"\1"),
    _written(0, b"\0"),
)
_two_tables(
    "EMOE-TAB-001",
    "dense_base_and_expert_table_magic",
    "A dense base is wrong, and the other table no table: both are read before bases are judged.",
    _written(RANGES, b"\1"),
    _written(0, b"\0"),
)
_two_tables(
    "EMOE-LAY-002",
    "dense_base_and_expert_layout",
    "A dense base is wrong, and the experts' layout undefined: layouts are judged before bases.",
    _written(RANGES, b"\1"),
    _written(RANGES + 20, b"\xff"),
)
_two_tables(
    "EMOE-TAB-004",
    "range_reserved_and_counts_wrong",
    "A reserved byte of a range is not zero and the counts do not add up.",
    lambda table: _counts(2)(_written(RANGES + 24, b"\1")(table)),
    lambda table: table,
)
_two_tables(
    "EMOE-TAB-005",
    "counts_wrong_and_digest_reserved",
    "The counts do not add up and a reserved byte of a digest is not zero.",
    lambda table: _counts(2)(_written(DENSE_DIGESTS + 4, b"\1")(table)),
    lambda table: table,
)


@refused("EMOE-TAB-012")
def digest_of_dense_and_base_of_experts_wrong() -> Sealed:
    """The digest over the dense records' digests is wrong, and a base of experts: the dense ones come first."""
    made = smallest()
    made.section(DENSE).changes["sha256"] = bytes(32)
    made.tables[EXPERTS][0].changes["base"] = 4096
    return made.seal()


# Pages


def _paged(shift: int) -> Callable[[], Sealed]:
    return lambda: draft(smallest_model(), page_shift=shift).seal()


accept("pages_of_8_kib", "Pages have 8 KiB.", _paged(13))
accept("pages_of_16_kib", "Pages have 16 KiB.", _paged(14))
accept("pages_of_64_kib", "Pages have 64 KiB.", _paged(16))


@refused("EMOE-TAB-010", base="pages_of_16_kib")
def record_length_of_4_kib_with_larger_pages() -> Sealed:
    """The record of the expert has 4 KiB, and pages have 16 KiB."""
    made = draft(smallest_model(), page_shift=14)
    made.tables[EXPERTS][0].changes["record_length"] = 4096
    return made.seal()


def _zeroed(vocabulary: int, intermediate: int) -> Callable[[], Sealed]:
    """A package with zeros for weights, for a final block and experts of some length."""

    def build() -> Sealed:
        model = {**smallest_model(), "vocabulary": vocabulary}
        model["expert_blocks"][0]["intermediate"] = intermediate
        made = draft(model)
        for ranges in made.tables.values():
            for one in ranges:
                one.payloads = [bytearray(len(each)) for each in one.payloads]
        return made.seal()

    return build


accept("record_of_exactly_a_page", "The final block fills its page to the last byte.", _zeroed(992, 1))
accept("record_of_a_page_and_4_bytes", "The final block is 4 bytes longer than a page.", _zeroed(993, 1))
accept("record_of_exactly_three_pages", "An expert fills three pages to the last byte.", _zeroed(1, 1024))
