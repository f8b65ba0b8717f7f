"""Stored bytes of a section and what they decode to: FORMAT.md section 4.5."""

from __future__ import annotations

from typing import Final

from second_reader.container import ZSTD, Entry
from second_reader.rules import RefusedError, require
from second_reader.source import Source
from second_reader.zstd import ZstdError, content_size, decompress

MAX_FRAME_HEADER: Final = 18


def check_digest(source: Source, entry: Entry) -> None:
    """EMOE-SEC-018."""
    require(source.sha256(entry.offset, entry.end) == entry.sha256, "SEC-018")


def content(source: Source, entry: Entry) -> bytes:
    """The decoded bytes of a section of known type, by EMOE-SEC-018 and EMOE-SEC-019."""
    check_digest(source, entry)
    if entry.codec != ZSTD:
        return source.slice(entry.offset, entry.end)
    try:
        # Stored bytes have no limit but the file's, so the header is looked at before all of them are held.
        head = source.slice(entry.offset, min(entry.end, entry.offset + MAX_FRAME_HEADER))
        require(content_size(head) == entry.length, "SEC-019")
        decoded = decompress(source.slice(entry.offset, entry.end), entry.length)
    except ZstdError as error:
        raise RefusedError("SEC-019") from error
    require(len(decoded) == entry.length, "SEC-019")
    return decoded
