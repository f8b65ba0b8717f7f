"""Packages in the making: right as they come, and every byte of them can be made wrong.

`Draft` holds a package as plain values: the manifest as dictionaries, records as payloads, sections with what their
directory entries shall say. A case changes some and calls `seal`, which lays the package out and mends every digest
and checksum that the case has not set itself. Nothing is judged here, and nothing is shared with what packs and reads
models but constants and limits: whatever both write alike was understood twice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import crc32c

from estream_conformance.messagepack import encode
from estream_spec.constants import (
    CONTENT_ID_CONTEXT,
    DATA_START,
    DIRECTORY_MAGIC,
    FILE_ID_CONTEXT,
    FLAGS,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MAGIC,
    SUPERBLOCK_OFFSETS,
    TABLE_MAGIC,
    SectionFlag,
    SectionType,
)

Values = dict[str, Any]

SUPERBLOCK: Final = {
    "magic": "8s",
    "format_major": "H",
    "format_minor": "H",
    "page_shift": "B",
    "reserved": "3s",
    "generation": "Q",
    "file_length": "Q",
    "required_features": "Q",
    "optional_features": "Q",
    "directory_offset": "Q",
    "directory_length": "Q",
    "directory_sha256": "32s",
    "reserved_too": "28s",
}
ENTRY: Final = {
    "type": "I",
    "id": "I",
    "flags": "I",
    "codec": "H",
    "alignment_shift": "B",
    "reserved": "B",
    "offset": "Q",
    "stored_length": "Q",
    "length": "Q",
    "sha256": "32s",
    "reserved_too": "8s",
}
RANGE: Final = {"base": "Q", "record_length": "Q", "count": "I", "layout": "I", "reserved": "8s"}
DIGEST: Final = {"checksum": "I", "reserved": "4s", "sha256": "32s"}


def pack(layout: dict[str, str], values: Values) -> bytes:
    """A structure's bytes; fields left out are zero."""
    return b"".join(
        struct.pack(f"<{kind}", values.get(name, b"" if kind.endswith("s") else 0)) for name, kind in layout.items()
    )


def round_up(length: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `length`."""
    return -(-length // alignment) * alignment


@dataclass
class Range:
    """Records of one length.

    Attributes:
        layout: index of the layout.
        payloads: of its records.
        padding: bytes to put behind a payload instead of zeros, by record.
        changes: fields of the range in its table to set to something else than what is right.
        digests: the same for the digest entries, by record.
    """

    layout: int
    payloads: list[bytearray]
    padding: dict[int, bytes] = field(default_factory=dict)
    changes: Values = field(default_factory=dict)
    digests: dict[int, Values] = field(default_factory=dict)


@dataclass
class Section:
    """A section.

    Attributes:
        data: what it holds; None for what `seal` makes: records, tables, manifest.
        stored: its bytes in the file where they are others, as with a codec.
        changes: fields of its directory entry to set to something else than what is right.
        change: what is done to the data that `seal` made.
        before: bytes for the end of the padding before it, instead of zeros.
    """

    type: int
    data: bytes | None = None
    id: int = 0
    alignment_shift: int = 6
    stored: bytes | None = None
    changes: Values = field(default_factory=dict)
    change: Callable[[bytes], bytes] = bytes
    before: bytes = b""


@dataclass(frozen=True)
class Sealed:
    """A package's bytes, and where everything is.

    Attributes:
        data: the bytes.
        superblock: fields of the twin to trust.
        entries: the directory, each entry with `content`, its decoded bytes.
        draft: what was sealed.
        records: by table, by range: offset, length, checksum, digest, layout and payload of each record.
    """

    data: bytes
    superblock: Values
    entries: list[Values]
    draft: Draft
    records: dict[int, list[list[Values]]]

    @property
    def file_id(self) -> bytes:
        """FORMAT.md section 9.1."""
        signed = [each for each in self.entries if each["type"] != SectionType.FREE]
        signed = [each for each in signed if not each["flags"] & SectionFlag.UNSIGNED]
        head = struct.pack(
            "<HBBQ",
            self.superblock["format_major"],
            self.superblock["page_shift"],
            0,
            self.superblock["required_features"],
        )
        ordered = sorted(signed, key=lambda each: (each["type"], each["id"]))
        return sha256(FILE_ID_CONTEXT + head + b"".join(pack(ENTRY, each) for each in ordered)).digest()


class Draft:
    """A package in the making.

    Attributes:
        manifest: the manifest as values; `content_id` is filled in by `seal` where it is None.
        tables: ranges of both tables, by the type of the section that holds their records.
        sections: in the order in which they will lie.
        superblock: fields of both twins to set to something else than what is right.
        twins: the same for either twin alone.
        directory: the same for the directory's header.
        change_directory: what is done to the directory's bytes before their digest is taken.
        gap: bytes for the end of the padding before the directory, instead of zeros.
    """

    def __init__(self, manifest: Values, tables: dict[int, list[Range]], sections: list[Section], page_shift: int = 12):
        self.manifest, self.tables, self.sections, self.page_shift = manifest, tables, sections, page_shift
        self.superblock: Values = {}
        self.twins: tuple[Values, Values] = ({}, {})
        self.directory: Values = {}
        self.change_directory: Callable[[bytes], bytes] = bytes
        self.gap = b""

    def section(self, section_type: int, section_id: int = 0) -> Section:
        """A section by type and id."""
        return next(each for each in self.sections if (each.type, each.id) == (section_type, section_id))

    def model(self) -> Values:
        """The model description."""
        described: Values = self.manifest["model"]
        return described

    def seal(self) -> Sealed:
        """Lay the package out and encode it."""
        body, entries = bytearray(DATA_START), []
        made = self._made()
        for section in self.sections:
            data = section.change(made[section.type] if section.data is None else section.data)
            stored = data if section.stored is None else section.stored
            start = round_up(len(body), 1 << section.alignment_shift)
            body += section.before.rjust(start - len(body), b"\0")
            entries.append(_entry(section, start, data, stored, self._digest_of(section.type, stored)))
            body += stored
        return self.close(body, entries)

    def close(self, body: bytearray, entries: list[Values]) -> Sealed:
        """Append the directory and fill in the superblocks."""
        body += self.gap.rjust(round_up(len(body), 64) - len(body), b"\0")
        head = {"magic": DIRECTORY_MAGIC, "count": len(entries), "entry_size": 80, **self.directory}
        directory = pack({"magic": "8s", "count": "I", "entry_size": "I"}, head)
        directory = self.change_directory(directory + b"".join(pack(ENTRY, each) for each in entries))
        superblock = {
            "magic": MAGIC,
            "format_major": FORMAT_MAJOR,
            "format_minor": FORMAT_MINOR,
            "page_shift": self.page_shift,
            "generation": 1,
            "file_length": len(body) + len(directory),
            "required_features": 0,
            "optional_features": 0,
            "directory_offset": len(body),
            "directory_length": len(directory),
            "directory_sha256": sha256(directory).digest(),
            **self.superblock,
        }
        body += directory
        for offset, twin in zip(SUPERBLOCK_OFFSETS, self.twins, strict=True):
            body[offset : offset + 128] = superblock_bytes({**superblock, **twin})
        trusted = max(({**superblock, **twin} for twin in self.twins), key=lambda each: int(each["generation"]))
        return Sealed(bytes(body), trusted, entries, self, self._places(entries))

    def _made(self) -> dict[int, bytes]:
        """What stands in the sections that follow from the draft: records, tables, manifest."""
        made: dict[int, bytes] = {}
        for records, ranges in self.tables.items():
            made[records] = b"".join(each for one in ranges for each in self._padded(one))
            made[records + 1] = self._table(ranges)
        manifest = dict(self.manifest)
        if manifest.get("content_id", b"") is None:
            manifest["content_id"] = self.content_id()
        made[SectionType.MANIFEST] = encode(manifest)
        return made

    def _record_length(self, one: Range) -> int:
        return round_up(len(one.payloads[0]), 1 << self.page_shift) if one.payloads else 0

    def _padded(self, one: Range) -> list[bytes]:
        length = self._record_length(one)
        return [
            bytes(payload) + one.padding.get(number, b"").ljust(length - len(payload), b"\0")
            for number, payload in enumerate(one.payloads)
        ]

    def _range_values(self, ranges: list[Range]) -> list[Values]:
        base, values = 0, []
        for one in ranges:
            length = self._record_length(one)
            right = {"base": base, "record_length": length, "count": len(one.payloads), "layout": one.layout}
            values.append({**right, **one.changes})
            base += length * len(one.payloads)
        return values

    def _digest_values(self, ranges: list[Range]) -> list[Values]:
        return [
            {
                "checksum": crc32c.crc32c(padded),
                "sha256": sha256(payload).digest(),
                **one.digests.get(number, {}),
            }
            for one in ranges
            for number, (payload, padded) in enumerate(zip(one.payloads, self._padded(one), strict=True))
        ]

    def _table(self, ranges: list[Range]) -> bytes:
        digests = self._digest_values(ranges)
        head = struct.pack("<8sII", TABLE_MAGIC, len(ranges), len(digests))
        described = b"".join(pack(RANGE, each) for each in self._range_values(ranges))
        return head + described + b"".join(pack(DIGEST, each) for each in digests)

    def _digest_of(self, section_type: int, stored: bytes) -> bytes:
        if section_type in self.tables:
            return sha256(b"".join(each["sha256"] for each in self._digest_values(self.tables[section_type]))).digest()
        return sha256(stored).digest()

    def content_id(self) -> bytes:
        """FORMAT.md section 9.2."""
        preimage = CONTENT_ID_CONTEXT + sha256(encode(self.manifest["model"])).digest()
        for ranges in self.tables.values():
            layouts = [self.manifest["layouts"][one.layout] for one in ranges if one.payloads]
            payloads = b"".join(sha256(payload).digest() for one in ranges for payload in one.payloads)
            preimage += sha256(encode(layouts)).digest() + sha256(payloads).digest()
        for document in (SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE):
            data = next((each.data for each in self.sections if each.type == document), b"")
            preimage += sha256(data or b"").digest()
        return sha256(preimage).digest()

    def _places(self, entries: Sequence[Values]) -> dict[int, list[list[Values]]]:
        """Where the records are, as the tables say."""
        places: dict[int, list[list[Values]]] = {}
        for records, ranges in self.tables.items():
            start = next((each["offset"] for each in entries if each["type"] == records), 0)
            digests = iter(self._digest_values(ranges))
            places[records] = [
                [
                    {
                        "offset": start + values["base"] + number * values["record_length"],
                        "length": values["record_length"],
                        "layout": values["layout"],
                        "payload": payload,
                        **next(digests),
                    }
                    for number, payload in enumerate(one.payloads)
                ]
                for one, values in zip(ranges, self._range_values(ranges), strict=True)
            ]
        return places


def superblock_bytes(values: Values) -> bytes:
    """A superblock's 128 bytes; the checksum is right unless `values` has one."""
    body = pack(SUPERBLOCK, values)
    return body + struct.pack("<I", values.get("checksum", crc32c.crc32c(body)))


def _entry(section: Section, start: int, data: bytes, stored: bytes, digest: bytes) -> Values:
    """The directory entry of a section that begins at `start`."""
    return {
        "type": section.type,
        "id": section.id,
        "flags": int(FLAGS.get(section.type, 0)),
        "codec": 0 if section.stored is None else 1,
        "alignment_shift": section.alignment_shift,
        "offset": start,
        "stored_length": len(stored),
        "length": len(data),
        "sha256": digest,
        "content": data,
        **section.changes,
    }


def _free(offset: int, length: int, alignment_shift: int) -> Values:
    """The entry of an extent that is no longer in use."""
    section = Section(SectionType.FREE, alignment_shift=alignment_shift)
    return {**_entry(section, offset, b"", b"", bytes(32)), "stored_length": length, "length": length}


def edit(
    sealed: Sealed,
    add: Sequence[Section] = (),
    remove: Sequence[tuple[int, int]] = (),
    *,
    twins: tuple[int, ...] = (0, 1),
    superblock: Values | None = None,
) -> Sealed:
    """Change a package in place, as FORMAT.md section 3.3 says.

    Args:
        sealed: the package.
        add: sections to append.
        remove: types and ids of sections to retire.
        twins: which superblocks are written; the other one stays as it was.
        superblock: fields of them to set to something else than what is right.
    """
    draft, old = sealed.draft, sealed.superblock
    entries = [
        _free(each["offset"], each["stored_length"], each["alignment_shift"])
        if (each["type"], each["id"]) in remove
        else each
        for each in sealed.entries
    ]
    entries.append(_free(old["directory_offset"], old["directory_length"], 6))
    appended = Draft(draft.manifest, draft.tables, list(add), draft.page_shift)
    appended.superblock = {"generation": old["generation"] + 1, **(superblock or {})}
    body = bytearray(sealed.data[: old["file_length"]])
    for section in add:
        assert section.data is not None, "an edit adds sections as they are stored"
        assert section.stored is None, "an edit adds sections as they are stored"
        start = round_up(len(body), 1 << section.alignment_shift)
        body += bytes(start - len(body))
        entries.append(_entry(section, start, section.data, section.data, sha256(section.data).digest()))
        body += section.data
    kept = {number: sealed.data[offset : offset + 128] for number, offset in enumerate(SUPERBLOCK_OFFSETS)}
    closed = appended.close(body, entries)
    data = bytearray(closed.data)
    for number, offset in enumerate(SUPERBLOCK_OFFSETS):
        if number not in twins:
            data[offset : offset + 128] = kept[number]
    return Sealed(bytes(data), closed.superblock, entries, draft, sealed.records)
