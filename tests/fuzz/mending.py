"""Make digests and checksums of damaged inputs right again, so that what they guard is judged too."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Final

import crc32c
import msgspec
import zstandard

from estream_loader.records import RecordSection
from estream_spec.constants import SectionType
from estream_spec.errors import EmoeError
from estream_spec.limits import MAX_COMPRESSION_RATIO
from estream_spec.manifest import Manifest, content_id, decode_manifest
from estream_spec.messagepack import encode
from estream_spec.prefetch_router import PrefetchRouter
from estream_spec.records import RECORD_DIGEST, TABLE_HEADER, DirectoryEntry, RecordRange, RecordTable, Superblock
from fixtures.packages import mended
from fuzz.inputs import DIRECTORY_AT, TABLES_HEAD, Extent, extents

_CONTENT_ID: Final = b"\xaacontent_id\xc4\x20"
"""How a manifest's content id is introduced."""


def mend_container(data: bytes) -> bytes:
    """The directory's digest in both superblocks, and their checksums."""
    digest, body = sha256(data[DIRECTORY_AT:]).digest(), bytearray(data)
    for at in (0, Superblock.SIZE):
        head = data[at : at + 64] + digest + data[at + 96 : at + 124]
        body[at : at + Superblock.SIZE] = head + struct.pack("<I", crc32c.crc32c(head))
    return bytes(body[: len(data)])


def mend_manifest(data: bytes) -> bytes:
    """The canonical encoding of what the document says, if it says anything."""
    return _canonical(data, Manifest)


def mend_prefetch_router(data: bytes) -> bytes:
    """The same of what stands behind a prefetch router's magic."""
    return _canonical(data, PrefetchRouter)


def _canonical(data: bytes, kind: type[msgspec.Struct]) -> bytes:
    try:
        return encode(msgspec.msgpack.decode(data, type=kind))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return data


def mend_tables(data: bytes) -> bytes:
    """The section digest in both entries."""
    if len(data) < TABLES_HEAD.size:
        return data
    dense, experts, model, length = TABLES_HEAD.unpack_from(data)
    tables = data[TABLES_HEAD.size :]
    entries = [
        entry[:40] + _digest_of_digests(table) + entry[72:]
        for entry, table in ((dense, tables[:length]), (experts, tables[length:]))
    ]
    return TABLES_HEAD.pack(*entries, model, length) + tables


def _digest_of_digests(table: bytes) -> bytes:
    """What a section's digest must be for what its table says."""
    if len(table) < TABLE_HEADER.size:
        return sha256(b"").digest()
    ranges = TABLE_HEADER.unpack_from(table)[1]
    digests = memoryview(table)[TABLE_HEADER.size + ranges * RecordRange.SIZE :]
    whole = digests[: len(digests) // RECORD_DIGEST.size * RECORD_DIGEST.size]
    return sha256(b"".join(pair[1] for pair in RECORD_DIGEST.iter_unpack(whole))).digest()


def mend_package(data: bytes) -> bytes:
    """Checksums and digests of records, the content id, section digests, the directory's digest, and checksums."""
    body = bytearray(data)
    by_type = {each.type: each for each in extents(data)}
    try:
        manifest = _mend_manifest(body, by_type)
    except (EmoeError, KeyError):
        manifest = None
    for table_type in (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE):
        records, table = by_type.get(table_type - 1), by_type.get(table_type)
        if records and table:
            if manifest is not None:
                _mend_table(body, records, table, manifest)
            digest = _digest_of_digests(bytes(body[table.start : table.end]))
            body[records.at + 40 : records.at + 72] = digest
    return mended(bytes(body))


def _mend_manifest(body: bytearray, by_type: dict[int, Extent]) -> Manifest:
    """Set the content id; the manifest as it is then."""
    place = by_type[SectionType.MANIFEST]
    manifest = decode_manifest(bytes(body[place.start : place.end]))
    tables = [by_type[each] for each in (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE)]
    dense, experts = (RecordTable.decode(bytes(body[each.start : each.end]), path="table") for each in tables)
    if max(each.layout for table in (dense, experts) for each in table.ranges) >= len(manifest.layouts):
        return manifest
    places = [by_type.get(each) for each in (SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE)]
    documents = tuple(b"" if each is None else _decoded(bytes(body[each.start : each.end])) for each in places)
    found = content_id(manifest.model, manifest.layouts, dense, experts, documents)
    at = body.find(_CONTENT_ID, place.start, place.end)
    if at >= 0:
        body[at + len(_CONTENT_ID) : at + len(_CONTENT_ID) + 32] = found
    return manifest


def _decoded(stored: bytes) -> bytes:
    """What a section holds, or its stored bytes where that cannot be told."""
    try:
        if zstandard.get_frame_parameters(stored).content_size > MAX_COMPRESSION_RATIO * len(stored):
            return stored
        return zstandard.ZstdDecompressor().decompress(stored)
    except zstandard.ZstdError:
        return stored


def _mend_table(body: bytearray, records: Extent, table: Extent, manifest: Manifest) -> None:
    """Set what the table says of each record to what the record is."""
    try:
        decoded = RecordTable.decode(bytes(body[table.start : table.end]), path="table")
        entry = DirectoryEntry.decode(bytes(body[records.at : records.at + DirectoryEntry.SIZE]), path="entry")
        places = list(RecordSection(entry, decoded, manifest.layouts, "").places())
    except (EmoeError, IndexError):
        return
    at = table.start + TABLE_HEADER.size + len(decoded.ranges) * RecordRange.SIZE
    for number, place in enumerate(places):
        record = bytes(body[place.offset : place.offset + min(place.length, len(body))])
        digest = sha256(record[: place.layout.payload_length]).digest()
        RECORD_DIGEST.pack_into(body, at + number * RECORD_DIGEST.size, crc32c.crc32c(record), digest)
