"""A section's bytes against its directory entry: digest, codec, padding. FORMAT.md sections 4.5 and 9."""

from __future__ import annotations

import zstandard

from estream_spec.constants import KNOWN_SECTIONS, SectionType
from estream_spec.records import DirectoryEntry
from estream_spec.rulebook import refusal


def section_path(entry: DirectoryEntry) -> str:
    """What messages call a section."""
    known = entry.type in KNOWN_SECTIONS
    return f"{SectionType(entry.type).name.lower() if known else f'type {entry.type}'} section {entry.id}"


def check_digest(entry: DirectoryEntry, digest: bytes) -> None:
    """Compare the SHA-256 of a section's stored bytes with the directory's.

    Raises:
        IntegrityError: it is another.
    """
    if digest != entry.sha256:
        message = f"section has digest {digest.hex()}, the directory says {entry.sha256.hex()}"
        raise refusal("EMOE-SEC-018", message, path=section_path(entry), offset=entry.offset)


def decompress(stored: bytes, entry: DirectoryEntry) -> bytes:
    """What a section stored as one zstd frame holds.

    Raises:
        IntegrityError: the stored bytes do not decode to the stated length.
    """
    path = section_path(entry)
    try:
        if zstandard.get_frame_parameters(stored).content_size != entry.length:
            message = f"compressed section does not say that it holds {entry.length} bytes"
            raise refusal("EMOE-SEC-019", message, path=path, offset=entry.offset)
        # In one step, into memory of the stated size: a stream would also unpack what goes beyond it.
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        message = f"section is not one zstd frame of {entry.length} bytes: {error}"
        raise refusal("EMOE-SEC-019", message, path=path, offset=entry.offset) from None


def check_zero(data: bytes, rule: str, what: str, path: str, offset: int) -> None:
    """Prove that padding is zero.

    Args:
        data: its bytes.
        rule: what is broken where it is not.
        what: what messages call it.
        path: where it is.
        offset: of its first byte.

    Raises:
        InvalidError: a byte that is not zero.
    """
    if rest := data.lstrip(b"\0"):
        at = offset + len(data) - len(rest)
        raise refusal(rule, f"{what} holds {rest[0]:#04x}, expected 0", path=path, offset=at)
