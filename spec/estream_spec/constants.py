"""Numbers and names that stand in a package. FORMAT.md sections 2 to 5.

Ids are never reused; a new meaning gets a new id.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

MAGIC: Final = bytes.fromhex("89454d4f450d0a1a")
r"""`\x89EMOE\r\n\x1a`: a cleared high bit, a changed line end or a stop at the DOS end-of-file mark damages it."""
FORMAT_MAJOR: Final = 0
FORMAT_MINOR: Final = 12

SUPERBLOCK_OFFSETS: Final = (0, 16384)
"""Where the twins stand, whatever the page size."""
SUPERBLOCK_SLOT: Final = 16384
"""Bytes kept for each twin; what the record does not fill is zero."""
DATA_START: Final = 32768
"""No section begins before this offset."""
DEFAULT_PAGE_SHIFT: Final = 14
"""16 KiB, the largest page in common use on phones."""
MIN_SECTION_ALIGNMENT_SHIFT: Final = 6
"""Sections begin at multiples of 64 bytes at least."""
TENSOR_ALIGNMENT: Final = 128
"""Tensors begin at multiples of this inside a record."""
DIRECTORY_MAGIC: Final = b"EMOEDIR\0"
TABLE_MAGIC: Final = b"EMOETAB\0"
SIGNATURE_MAGIC: Final = b"EMOESIG\0"
PROGRAM_MAGIC: Final = b"EMOEPRG\0"
PREFETCH_MAGIC: Final = b"EMOEPRE\0"
FILE_ID_CONTEXT: Final = b"EMOE file_id\0"
"""What the preimage of a file id starts with."""
CONTENT_ID_CONTEXT: Final = b"EMOE content_id\0"
"""What the preimage of a content id starts with."""
SIGNATURE_CONTEXT: Final = b"EMOE signature\0"
"""What a signed message starts with."""
PREFETCH_CONTEXT: Final = b"EMOE prefetch\0"
"""What the preimage of the model digest starts with that a prefetch router names."""


class SectionType(IntEnum):
    """What a section holds. Types this version reserves but does not define are unknown to its readers."""

    FREE = 0
    """Bytes no longer in use: left behind by an in-place edit."""
    MANIFEST = 1
    DENSE = 2
    """Dense weights: one record per block."""
    DENSE_TABLE = 3
    EXPERTS = 4
    """Expert records."""
    EXPERT_TABLE = 5
    GRAPH = 6
    """One graph; the section id is the one its manifest entry names."""
    TOKENIZER = 7
    """`tokenizer.json` of the Hugging Face tokenizers library."""
    CHAT_TEMPLATE = 8
    """Jinja text, UTF-8."""
    SCHEDULE = 9
    """One program for a phase and a device configuration."""
    BINARY = 10
    """Graphs compiled for one accelerator; the section id is the one its manifest entry names."""
    PREFETCH_ROUTER = 11
    """Predicts the experts of each layer before its attention block is computed."""
    CALIBRATION = 12
    """Reserved: tokens per expert."""
    DEVICE_CONFIGURATION = 13
    """One device configuration, added on a device."""
    SIGNATURE = 14
    """One signature over the file id."""
    ALIAS = 15
    """Reserved: a section that shares another's extent."""


class SectionFlag(IntFlag):
    """How to treat a section, above all one whose type is unknown."""

    CRITICAL = 1
    """A reader that does not know the type refuses the package."""
    SAFE_TO_COPY = 2
    """An editor that does not know the type keeps it."""
    UNSIGNED = 4
    """The section is outside the file id and so outside every signature."""
    RECORDS = 8
    """A table describes the section record by record; its digest is over the records' digests."""


FLAGS: Final[dict[int, SectionFlag]] = {
    SectionType.FREE: SectionFlag(0),
    SectionType.MANIFEST: SectionFlag.CRITICAL,
    SectionType.DENSE: SectionFlag.CRITICAL | SectionFlag.RECORDS,
    SectionType.DENSE_TABLE: SectionFlag.CRITICAL,
    SectionType.EXPERTS: SectionFlag.CRITICAL | SectionFlag.RECORDS,
    SectionType.EXPERT_TABLE: SectionFlag.CRITICAL,
    SectionType.GRAPH: SectionFlag.CRITICAL,
    SectionType.TOKENIZER: SectionFlag.SAFE_TO_COPY,
    SectionType.CHAT_TEMPLATE: SectionFlag.SAFE_TO_COPY,
    SectionType.SCHEDULE: SectionFlag.SAFE_TO_COPY | SectionFlag.UNSIGNED,
    SectionType.BINARY: SectionFlag.SAFE_TO_COPY,
    SectionType.PREFETCH_ROUTER: SectionFlag.SAFE_TO_COPY,
    SectionType.DEVICE_CONFIGURATION: SectionFlag.SAFE_TO_COPY | SectionFlag.UNSIGNED,
    SectionType.SIGNATURE: SectionFlag.SAFE_TO_COPY | SectionFlag.UNSIGNED,
}
"""The flags each section type has; no other combination is valid."""
KNOWN_SECTIONS: Final = frozenset(FLAGS)
"""Section types this version defines."""


class Codec(IntEnum):
    """How a section's bytes are stored."""

    NONE = 0
    ZSTD = 1
    """One zstd frame with its content size in the header."""


class Algorithm(IntEnum):
    """How a signature is made. A reader passes over signatures of any other number."""

    ED25519 = 1
    """RFC 8032, section 5.1."""


REQUIRED_FEATURES: Final[dict[int, str]] = {}
"""Required feature bits this version defines: bit to name. A reader refuses any other bit."""
OPTIONAL_FEATURES: Final[dict[int, str]] = {}
"""Optional feature bits this version defines: bit to name. A reader ignores any other bit."""
