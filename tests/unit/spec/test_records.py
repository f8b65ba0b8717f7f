"""Fixed-size records: bytes to values and back, and what is refused while parsing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estream_spec.constants import MAGIC
from estream_spec.errors import EmoeError, IntegrityError, LimitError, MalformedError
from estream_spec.limits import MAX_RANGES, MAX_RECORDS, MAX_SECTIONS
from estream_spec.records import (
    DIRECTORY_HEADER,
    TABLE_HEADER,
    DirectoryEntry,
    RecordRange,
    RecordTable,
    Signature,
    Structure,
    Superblock,
    decode_directory,
    encode_directory,
)

SUPERBLOCK = Superblock(MAGIC, 0, 9, 14, 7, 1 << 40, 1, 2, 1 << 39, 96, bytes(range(32)))
ENTRY = DirectoryEntry(6, 3, 1, 1, 6, 32768, 100, 250, bytes(range(32)))
SIGNATURE = Signature(b"EMOESIG\0", 1, 5, bytes(range(32)), bytes(range(64)))
RANGE = RecordRange(base=4096, record_length=8192, count=2, layout=1)
TABLE = RecordTable(
    ranges=(replace(RANGE, base=0, count=1), RANGE), checksums=(1, 2, 3), digests=(b"a" * 32, b"b" * 32, b"c" * 32)
)


RECORDS = [SUPERBLOCK, ENTRY, RANGE, SIGNATURE]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_survives_encoding(record: Structure) -> None:
    data = record.encode()
    assert len(data) == record.SIZE
    assert type(record).decode(data, path="record") == record
    assert type(record).decode(memoryview(data + b"more"), path="record") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_short_record_is_malformed(record: Structure) -> None:
    data = record.encode()
    for length in range(record.SIZE):
        with pytest.raises(MalformedError) as caught:
            type(record).decode(data[:length], path="record", offset=64)
        assert (caught.value.path, caught.value.offset) == ("record", 64)
        assert caught.value.rule == ("EMOE-SUP-001" if record is SUPERBLOCK and length < 8 else record.RULE)


def test_each_record_has_its_rule() -> None:
    rules = [record.RULE for record in RECORDS]
    assert rules == ["EMOE-SUP-003", "EMOE-DIR-005", "EMOE-TAB-004", "EMOE-SIG-001"]


def test_superblock_stands_as_the_format_says() -> None:
    data = SUPERBLOCK.encode()
    assert data[:8] == MAGIC
    assert data[8:13] == bytes([0, 0, 9, 0, 14])
    assert data[16:24] == (7).to_bytes(8, "little")
    assert data[64:96] == bytes(range(32))


@pytest.mark.parametrize("position", [13, 15, 96, 123])
def test_superblock_reserved_bytes_are_zero(position: int) -> None:
    import crc32c

    data = bytearray(SUPERBLOCK.encode())
    data[position] = 1
    data[124:] = crc32c.crc32c(bytes(data[:124])).to_bytes(4, "little")
    with pytest.raises(MalformedError, match=r"reserved byte [0-9]+ is 0x.., expected 0 .*\[EMOE-SUP-003\]"):
        Superblock.decode(bytes(data), path="superblock")


def test_superblock_bit_flip_is_noticed_anywhere() -> None:
    for bit in range(Superblock.SIZE * 8):
        data = bytearray(SUPERBLOCK.encode())
        data[bit // 8] ^= 1 << bit % 8
        kind, rule = (MalformedError, "SUP-001") if bit < 64 else (IntegrityError, "SUP-002")
        with pytest.raises(kind, match=rf"\[EMOE-{rule}\]"):
            Superblock.decode(bytes(data), path="superblock")


@pytest.mark.parametrize(
    ("damage", "shown"),
    [(b"\x89EMOE\n\x1a\n", "\\x89EMOE\\n\\x1a\\n"), (b"\x09EMOE\r\n\x1a", "\\tEMOE"), (b"GGUF\x03\0\0\0", "GGUF")],
    ids=["text mode", "seven bits", "another format"],
)
def test_foreign_magic_is_shown(damage: bytes, shown: str) -> None:
    with pytest.raises(MalformedError) as caught:
        Superblock.decode(damage + SUPERBLOCK.encode()[8:], path="superblock[0]", offset=0)
    assert shown in str(caught.value)
    assert str(caught.value).endswith("(at offset 0x0, superblock[0]) [EMOE-SUP-001]")


def test_directory_survives_encoding() -> None:
    entries = (ENTRY, replace(ENTRY, id=4))
    assert decode_directory(encode_directory(entries), offset=0) == entries
    assert decode_directory(encode_directory(()), offset=0) == ()


@pytest.mark.parametrize(
    ("data", "kind", "rule"),
    [
        (b"", MalformedError, "EMOE-DIR-002"),
        (encode_directory((ENTRY,))[:15], MalformedError, "EMOE-DIR-002"),
        (b"X" + encode_directory((ENTRY,))[1:], MalformedError, "EMOE-DIR-002"),
        (DIRECTORY_HEADER.pack(b"EMOEDIR\0", 0, 81), MalformedError, "EMOE-DIR-002"),
        (encode_directory((ENTRY,))[:-1], MalformedError, "EMOE-DIR-004"),
        (encode_directory((ENTRY,)) + b"\0", MalformedError, "EMOE-DIR-004"),
        (DIRECTORY_HEADER.pack(b"EMOEDIR\0", 2, 80) + ENTRY.encode(), MalformedError, "EMOE-DIR-004"),
        (DIRECTORY_HEADER.pack(b"EMOEDIR\0", MAX_SECTIONS, 80), MalformedError, "EMOE-DIR-004"),
        (DIRECTORY_HEADER.pack(b"EMOEDIR\0", MAX_SECTIONS + 1, 80), LimitError, "EMOE-DIR-003"),
        (DIRECTORY_HEADER.pack(b"EMOEDIR\0", 2**32 - 1, 80), LimitError, "EMOE-DIR-003"),
        (encode_directory((ENTRY,))[:-1] + b"\1", MalformedError, "EMOE-DIR-005"),
    ],
    ids=["empty", "short", "magic", "entry size", "cut", "longer", "count", "at limit", "above", "huge", "reserved"],
)
def test_directory_refused(data: bytes, kind: type[EmoeError], rule: str) -> None:
    with pytest.raises(kind) as caught:
        decode_directory(data, offset=4096)
    assert caught.value.rule == rule
    assert caught.value.offset is not None
    assert caught.value.offset >= 4096
    assert caught.value.path is not None
    assert caught.value.path.startswith("directory")


def test_directory_entry_is_named_by_index_and_offset() -> None:
    data = bytearray(encode_directory((ENTRY, ENTRY)))
    data[-1] = 1
    with pytest.raises(MalformedError) as caught:
        decode_directory(bytes(data), offset=1000)
    error = caught.value
    assert (error.rule, error.path, error.offset) == ("EMOE-DIR-005", "directory[1]", 1000 + 16 + 80)


def test_table_survives_encoding() -> None:
    decoded = RecordTable.decode(TABLE.encode(), path="table")
    assert decoded == TABLE
    assert decoded.first == (0, 1)


def header(ranges: int, records: int) -> bytes:
    return TABLE_HEADER.pack(b"EMOETAB\0", ranges, records)


@pytest.mark.parametrize(
    ("data", "kind", "rule"),
    [
        (b"", MalformedError, "EMOE-TAB-001"),
        (TABLE.encode()[:15], MalformedError, "EMOE-TAB-001"),
        (b"X" + TABLE.encode()[1:], MalformedError, "EMOE-TAB-001"),
        (TABLE.encode()[:-1], MalformedError, "EMOE-TAB-003"),
        (TABLE.encode() + b"\0", MalformedError, "EMOE-TAB-003"),
        (header(2, 2) + TABLE.encode()[16:-40], MalformedError, "EMOE-TAB-005"),
        (header(1, MAX_RECORDS), MalformedError, "EMOE-TAB-003"),
        (header(1, MAX_RECORDS + 1), LimitError, "EMOE-TAB-002"),
        (header(MAX_RANGES, 1), MalformedError, "EMOE-TAB-003"),
        (header(MAX_RANGES + 1, 1), LimitError, "EMOE-TAB-002"),
        (header(2**32 - 1, 2**32 - 1), LimitError, "EMOE-TAB-002"),
        (TABLE.encode()[:47] + b"\1" + TABLE.encode()[48:], MalformedError, "EMOE-TAB-004"),
        (TABLE.encode()[:84] + b"\1" + TABLE.encode()[85:], MalformedError, "EMOE-TAB-006"),
    ],
    ids=[
        "empty",
        "short",
        "magic",
        "cut",
        "longer",
        "counts disagree",
        "records at limit",
        "records above",
        "ranges at limit",
        "ranges above",
        "huge",
        "reserved in range",
        "reserved in digest",
    ],
)
def test_table_refused(data: bytes, kind: type[EmoeError], rule: str) -> None:
    with pytest.raises(kind) as caught:
        RecordTable.decode(data, path="expert_table")
    assert caught.value.rule == rule
    assert caught.value.path is not None
    assert caught.value.path.startswith("expert_table")


@pytest.mark.parametrize("count", [2**31, 2**32 - 1])
def test_record_count_of_a_range_is_not_trusted(count: int) -> None:
    ranges = (TABLE.ranges[0], replace(RANGE, count=count))
    data: Any = RecordTable(ranges=ranges, checksums=TABLE.checksums, digests=TABLE.digests).encode()
    with pytest.raises(MalformedError, match=r"the header says 3.*\[EMOE-TAB-005\]"):
        RecordTable.decode(data, path="expert_table")
