"""Compressed sections: FORMAT.md section 4.5, rules SEC-009, SEC-010, SEC-011 and SEC-019."""

from __future__ import annotations

import zlib
from functools import partial

from estream_conformance.builder import Draft, Sealed, Section
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, counted, refuse
from estream_conformance.files import entry_of
from estream_conformance.frames import (
    COMPRESSED,
    COMPRESSED_SQUARES,
    COMPRESSED_VOCABULARY,
    MAX_BLOCK,
    RESERVED,
    RUN,
    block,
    frame,
    raw,
    run,
    skippable,
    squares,
    vocabulary,
)
from estream_conformance.packages import TOKENIZER, full, smallest
from estream_spec.constants import SectionFlag, SectionType
from estream_spec.limits import MAX_MANIFEST_LENGTH, MAX_SMALL_SECTION_LENGTH

UNKNOWN = 99
SIZE = len(TOKENIZER)
TOKENIZER_CHECKSUM = bytes.fromhex("87665894")
"""The low four bytes of the tokenizer's XXH64."""
BASE = "tokenizer_in_one_raw_block"


def with_tokenizer(stored: bytes, data: bytes = TOKENIZER, **changes: int | bytes) -> Sealed:
    """A package with a compressed tokenizer.

    Args:
        stored: its bytes in the file.
        data: what they are to decode to.
        changes: fields of its entry.
    """
    draft = smallest()
    draft.sections.insert(-1, Section(SectionType.TOKENIZER, data, stored=stored, changes=dict(changes)))
    return draft.seal()


def compressed(draft: Draft, section_type: int, section_id: int = 0) -> Draft:
    """A package with one of its sections as a frame of one raw block."""
    section = draft.section(section_type, section_id)
    section.stored = raw(entry_of(draft.seal(), section_type, section_id)["content"])
    return draft


def is_refused(name: str, about: str, stored: bytes, data: bytes = TOKENIZER) -> None:
    """Register a tokenizer whose frame is at fault."""
    refuse("EMOE-SEC-019", name, about, partial(with_tokenizer, stored, data), "zstd", base=BASE)


def is_accepted(name: str, about: str, stored: bytes, data: bytes = TOKENIZER) -> None:
    """Register a tokenizer whose frame is right."""
    accept(name, about, partial(with_tokenizer, stored, data), "zstd")


# Frames that are right.
is_accepted(BASE, "The tokenizer is a frame of one raw block.", raw(TOKENIZER))
is_accepted("frame_of_one_run", "The tokenizer is a frame of one block that repeats a byte.", run(b" ", 40), b" " * 40)
is_accepted(
    "frame_of_raw_blocks_some_of_them_empty",
    "The frame has raw blocks of 0, 8 and 9 bytes, and an empty one at last.",
    frame(
        block(b"", last=False) + block(TOKENIZER[:8], last=False) + block(TOKENIZER[8:], last=False) + block(b""), SIZE
    ),
)
is_accepted(
    "frame_of_compressed_literals_and_sequences", "A real frame with a checksum.", COMPRESSED_VOCABULARY, vocabulary()
)
is_accepted("frame_of_two_compressed_blocks", "A real frame of more than one block.", COMPRESSED_SQUARES, squares())
for _width in (1, 4, 8):
    is_accepted(
        f"content_size_in_{_width}_bytes",
        f"The frame's header states the content size in {counted(_width, 'byte')}.",
        frame(block(TOKENIZER), SIZE, width=_width),
    )
is_accepted(
    "content_size_in_2_bytes",
    "The frame's header states a content size of 256 in two bytes, which are zero.",
    frame(block(b"x", RUN, size=256), 256, width=2),
    b"x" * 256,
)
is_accepted(
    "frame_with_checksum", "The frame ends with a checksum.", frame(block(TOKENIZER), SIZE, checksum=TOKENIZER_CHECKSUM)
)
for _exponent, _descriptor in {10: 0, 23: 13 << 3}.items():
    is_accepted(
        f"frame_with_window_of_2_to_{_exponent}",
        f"The frame is no single segment: its header states a window of 2^{_exponent} bytes and the content size.",
        frame(block(TOKENIZER), SIZE, window=_descriptor),
    )
is_accepted(
    "dictionary_id_0",
    "The frame's header names dictionary 0, which means none.",
    frame(block(TOKENIZER), SIZE, dictionary=b"\0"),
)
is_accepted(
    "unused_bit_of_frame_header_set",
    "The bit of the frame's header that decoders ignore is set.",
    frame(block(TOKENIZER), SIZE, descriptor=1 << 4),
)

# Content sizes.
is_refused(
    "no_content_size",
    "The frame's header states no content size.",
    frame(block(TOKENIZER), None, window=0),
)
for _name, _stated in {"1_more": SIZE + 1, "1_less": SIZE - 1, "0": 0}.items():
    is_refused(
        f"content_size_{_name}",
        f"The frame's header states {_stated} bytes; it decodes to {SIZE}, as the directory says.",
        frame(block(TOKENIZER), _stated),
    )
for _name, _stated in {
    "2_to_32_more": SIZE + 2**32,
    "2_to_63": 2**63,
    "2_to_64_less_1": 2**64 - 1,
    "2_to_64_less_2": 2**64 - 2,
}.items():
    is_refused(
        f"content_size_{_name}",
        f"The frame's header states {_stated} bytes; it decodes to {SIZE}, as the directory says.",
        frame(block(TOKENIZER), _stated, width=8),
    )


@refused("EMOE-SEC-019", "zstd", base=BASE)
def length_of_compressed_section_1_more() -> Sealed:
    """Header and content agree, but the directory says a byte more."""
    return with_tokenizer(raw(TOKENIZER), length=SIZE + 1)


@refused("EMOE-SEC-019", "zstd", base=BASE)
def length_of_compressed_section_1_less() -> Sealed:
    """Header and content agree, but the directory says a byte less."""
    return with_tokenizer(raw(TOKENIZER), length=SIZE - 1)


is_refused(
    "content_1_byte_short",
    "Header and directory say a byte more than the frame decodes to.",
    frame(block(TOKENIZER[:-1]), SIZE),
)
is_refused(
    "content_1_byte_long",
    "Header and directory say a byte less than the frame decodes to.",
    frame(block(TOKENIZER + b" "), SIZE),
)
is_refused(
    "frame_of_17_bytes_with_a_run_of_131072",
    "Header and directory say 17 bytes, the frame's only block repeats a byte 131072 times.",
    frame(block(b" ", RUN, size=MAX_BLOCK), SIZE),
)
is_refused(
    "frame_of_17_bytes_with_runs_of_128_mib",
    "Header and directory say 17 bytes, the frame's 1024 blocks repeat a byte 131072 times each.",
    frame(block(b" ", RUN, size=MAX_BLOCK, last=False) * 1023 + block(b" ", RUN, size=MAX_BLOCK), SIZE),
)
is_refused(
    "frame_of_2000_bytes_that_decodes_to_17",
    "Header and directory say 2000 bytes, the frame decodes to 17.",
    frame(block(TOKENIZER), 2000),
    TOKENIZER.ljust(2000),
)
is_refused(
    "frame_without_content",
    "Header and directory say 17 bytes, the frame's only block is empty.",
    frame(block(b""), SIZE),
)

# What stands around and inside of a frame.
for _name, _tail in {
    "a_byte": b"\0",
    "a_frame": raw(TOKENIZER),
    "an_empty_frame": frame(block(b""), 0, width=1),
    "a_skippable_frame": skippable(b"any"),
    "an_empty_skippable_frame": skippable(b""),
    "4096_zeros": bytes(4096),
    "4_bytes_of_magic": raw(b"")[:4],
}.items():
    is_refused(
        f"{_name}_behind_the_frame", "Something follows the frame inside of the section.", raw(TOKENIZER) + _tail
    )
is_refused(
    "skippable_frame_before_the_frame", "A skippable frame stands before it.", skippable(b"any") + raw(TOKENIZER)
)
is_refused("skippable_frame_alone", "The section is a skippable frame.", skippable(TOKENIZER))
is_refused(
    "content_in_two_frames", "Half of the content each is in two frames.", raw(TOKENIZER[:8]) + raw(TOKENIZER[8:])
)
is_refused("plain_bytes_with_codec_zstd", "The section is said to be compressed, but is not.", TOKENIZER)
is_refused("zlib_stream_with_codec_zstd", "The section is compressed in another way.", zlib.compress(TOKENIZER, 0))
is_refused("frame_of_version_0_7", "The frame has the magic of an old version.", b"\x27" + raw(TOKENIZER)[1:])
is_refused("frame_without_magic", "The frame begins behind where its magic should be.", raw(TOKENIZER)[4:])
is_refused(
    "reserved_bit_of_frame_header_set",
    "The frame's header has its reserved bit set.",
    frame(block(TOKENIZER), SIZE, descriptor=8),
)
is_refused(
    "block_of_reserved_type",
    "The frame's only block has the type that is reserved.",
    frame(block(TOKENIZER, RESERVED), SIZE),
)
is_refused("compressed_block_of_0_bytes", "A compressed block has no bytes.", frame(block(b"", COMPRESSED), SIZE))
is_refused("compressed_block_of_garbage", "A compressed block is not one.", frame(block(TOKENIZER, COMPRESSED), SIZE))
is_refused("no_last_block", "No block says that it is the last one.", frame(block(TOKENIZER, last=False), SIZE))
is_refused(
    "block_behind_the_last_one",
    "A block follows the one that says it is the last.",
    frame(block(TOKENIZER[:8]) + block(TOKENIZER[8:]), SIZE),
)
for _dictionary in (b"\1", b"\xff\xff", b"\xff\xff\xff\x7f"):
    is_refused(
        f"dictionary_id_of_{len(_dictionary)}_bytes",
        f"The frame's header names a dictionary in {counted(len(_dictionary), 'byte')}, though no block needs it.",
        frame(block(TOKENIZER), SIZE, dictionary=_dictionary),
    )
for _mask in (1, 1 << 31):
    _wrong = int.from_bytes(TOKENIZER_CHECKSUM, "little") ^ _mask
    is_refused(
        f"frame_checksum_wrong_in_bit_{_mask.bit_length() - 1}",
        "The checksum at the end of the frame is not that of its content.",
        frame(block(TOKENIZER), SIZE, checksum=_wrong.to_bytes(4, "little")),
    )
for _cut in (1, 3, 4, 5, 8, 9, 12, 13, 28):
    is_refused(f"frame_cut_to_{_cut}_bytes", f"The frame ends behind {counted(_cut, 'byte')}.", raw(TOKENIZER)[:_cut])
for _cut in (1, 4):
    is_refused(
        f"frame_checksum_{_cut}_bytes_short",
        f"The frame's checksum is cut by {counted(_cut, 'byte')}.",
        frame(block(TOKENIZER), SIZE, checksum=TOKENIZER_CHECKSUM)[:-_cut],
    )
for _cut in (5, 100, 280):
    is_refused(
        f"compressed_block_cut_by_{_cut}_bytes",
        f"The last {_cut} bytes of a real frame are missing.",
        COMPRESSED_VOCABULARY[:-_cut],
        vocabulary(),
    )
for _at in (20, 60, 150, 250, 284):
    is_refused(
        f"bit_of_compressed_block_flipped_at_{_at}",
        "One bit of a real frame is turned over and the section's digest is mended; the frame's checksum tells.",
        COMPRESSED_VOCABULARY[:_at] + bytes([COMPRESSED_VOCABULARY[_at] ^ 1]) + COMPRESSED_VOCABULARY[_at + 1 :],
        vocabulary(),
    )

# Ratios.
RATIO_256 = frame(block(b"x", RUN, size=256 * 11), 256 * 11, width=2)
assert len(RATIO_256) == 11
is_accepted("compression_ratio_256", "Eleven bytes decode to 256 times as many.", RATIO_256, b"x" * (256 * 11))


def ratio(length: int) -> Sealed:
    """A package with a tokenizer that is stored in eleven bytes."""
    return with_tokenizer(frame(block(b"x", RUN, size=length), length, width=2), b"x" * length)


for _length in (256 * 11 + 1, 257 * 11):
    refuse(
        "EMOE-SEC-010",
        f"compressed_11_bytes_of_{_length}",
        f"Eleven bytes decode to {_length}, more than 256 times as many.",
        partial(ratio, _length),
        "zstd",
        base="compression_ratio_256",
    )
for _name, _length in {"0": 0, "2_to_32": 2**32, "2_to_63": 2**63, "2_to_64_less_1": 2**64 - 1}.items():
    refuse(
        "EMOE-SEC-010",
        f"compressed_length_{_name}",
        f"A compressed section is said to have {_length} bytes.",
        partial(with_tokenizer, raw(TOKENIZER), TOKENIZER, length=_length),
        "zstd",
        base=BASE,
    )


@refused("EMOE-SEC-010", "zstd", base=BASE)
def compressed_nothing() -> Sealed:
    """A frame of nothing is a section of length 0, which should have been left out."""
    return with_tokenizer(frame(block(b""), 0), b"")


def with_unknown(stored: bytes, length: int, flags: int = 0) -> Sealed:
    """A package with a compressed section of unknown type."""
    draft = smallest()
    changes = {"length": length, "flags": flags}
    draft.sections.append(Section(UNKNOWN, b"", stored=stored, changes=dict(changes), alignment_shift=12))
    return draft.seal()


@accepted("zstd")
def unknown_section_of_no_frame() -> Sealed:
    """A section of unknown type is said to be compressed, but is no frame: only its digest is checked."""
    return with_unknown(b"no frame", 8 * 256)


@refused("EMOE-SEC-010", "zstd", base="unknown_section_of_no_frame")
def unknown_section_of_more_than_256_times_as_much() -> Sealed:
    """A section of unknown type is said to decode to a byte more than 256 times its stored bytes."""
    return with_unknown(b"no frame", 8 * 256 + 1)


@refused("EMOE-SEC-010", "zstd", base="unknown_section_of_no_frame")
def unknown_section_compressed_to_length_0() -> Sealed:
    """A section of unknown type is said to decode to nothing."""
    return with_unknown(b"no frame", 0)


@accepted("zstd")
def unknown_section_of_16_mib_decodes_to_4_gib() -> Sealed:
    """A section of unknown type is said to decode to 2^32 bytes, 256 times as many as are stored."""
    return with_unknown(bytes(1 << 24), 1 << 32)


@refused("EMOE-SEC-011", "zstd", base=BASE)
def compressed_tokenizer_a_byte_longer_than_it_may_be() -> Sealed:
    """A tokenizer decodes to a byte more than a section may have; its frame is right, and its empty blocks many."""
    length = MAX_SMALL_SECTION_LENGTH + 1
    empty = block(b"", last=False) * (1 << 19)
    blocks = block(b" ", RUN, size=MAX_BLOCK, last=False) * (length // MAX_BLOCK) + empty + block(b" ")
    return with_tokenizer(frame(blocks, length), TOKENIZER, length=length)


@refused("EMOE-SEC-010", "zstd", base=BASE)
def ratio_before_limit() -> Sealed:
    """A tokenizer is said to decode to too many times its bytes, and to too many: the ratio is judged first."""
    return with_tokenizer(raw(TOKENIZER), length=MAX_SMALL_SECTION_LENGTH + 1)


# Which sections may be compressed.
@refused("EMOE-SEC-009", "zstd")
def compressed_manifest() -> Sealed:
    """The manifest is compressed, into a frame that is right."""
    return compressed(smallest(), SectionType.MANIFEST).seal()


@refused("EMOE-SEC-009", "zstd")
def compressed_manifest_longer_than_it_may_be() -> Sealed:
    """The manifest is compressed and said to be too long: the codec is judged first."""
    draft = smallest()
    stored = run(b"\xc0", MAX_MANIFEST_LENGTH + 1).ljust(MAX_MANIFEST_LENGTH // 256 + 1, b"\0")
    draft.sections[-1] = Section(SectionType.MANIFEST, b"", stored=stored, changes={"length": MAX_MANIFEST_LENGTH + 1})
    return draft.seal()


for _type in (SectionType.DENSE, SectionType.EXPERTS):
    refuse(
        "EMOE-SEC-009",
        f"compressed_{_type.name.lower()}",
        "A section of records is said to be compressed.",
        partial(lambda section_type: compressed(smallest(), section_type).seal(), _type),
        "zstd",
    )


@refused("EMOE-SEC-009", "zstd", base="free_extent")
def compressed_free_extent() -> Sealed:
    """An extent no longer in use is said to be compressed."""
    draft = smallest()
    draft.sections.append(Section(SectionType.FREE, TOKENIZER, stored=raw(TOKENIZER)))
    return draft.seal()


@refused("EMOE-SEC-009", "zstd", base="unknown_section_of_records_with_any_digest")
def compressed_unknown_records() -> Sealed:
    """A section of unknown type is flagged `records` and compressed."""
    return with_unknown(bytes(4096), 4096, SectionFlag.RECORDS)


@refused("EMOE-SEC-009", "zstd")
def compressed_records_of_length_0() -> Sealed:
    """A section of records is said to be compressed and to decode to nothing: the codec is judged first."""
    draft = smallest()
    draft.section(SectionType.DENSE).changes |= {"codec": 1, "length": 0}
    return draft.seal()


def cut_short(draft: Draft, section_type: int) -> Sealed:
    """A package with a section that is a frame whose last byte is missing."""
    section = compressed(draft, section_type).section(section_type)
    section.stored = (section.stored or b"")[:-1]
    return draft.seal()


for _type in (SectionType.GRAPH, SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE):
    accept(
        f"{_type.name.lower()}_in_a_frame",
        f"A section of type {_type.name} is compressed.",
        partial(lambda section_type: compressed(smallest(), section_type).seal(), _type),
        "zstd",
    )
    refuse(
        "EMOE-SEC-019",
        f"{_type.name.lower()}_in_a_frame_cut_short",
        f"A section of type {_type.name} is compressed, and the last byte of its frame is missing.",
        partial(lambda section_type: cut_short(smallest(), section_type), _type),
        "zstd",
        base=f"{_type.name.lower()}_in_a_frame",
    )


@refused("EMOE-SEC-019", "zstd", base="all_that_may_be_compressed")
def binary_in_a_frame_cut_short() -> Sealed:
    """A binary is compressed, and the last byte of its frame is missing."""
    return cut_short(full(), SectionType.BINARY)


@accepted("zstd", base="full")
def all_that_may_be_compressed() -> Sealed:
    """All sections but the manifest and the records are compressed; `content_id` is over what they decode to."""
    draft = full()
    for section in draft.sections:
        if section.type not in (SectionType.MANIFEST, SectionType.DENSE, SectionType.EXPERTS):
            compressed(draft, section.type, section.id)
    return draft.seal()


# Order.
@refused("EMOE-SEC-018", "zstd", base=BASE)
def digest_before_frame() -> Sealed:
    """A compressed section has another digest and is no frame: the digest is judged first."""
    return with_tokenizer(b"no frame", sha256=bytes(32), length=SIZE)


@refused("EMOE-SEC-018", "zstd", base=BASE)
def digest_over_decoded_bytes() -> Sealed:
    """The digest of a compressed section is that of what it decodes to."""
    plain = smallest()
    plain.sections.insert(-1, Section(SectionType.TOKENIZER, TOKENIZER))
    return with_tokenizer(raw(TOKENIZER), sha256=entry_of(plain.seal(), SectionType.TOKENIZER)["sha256"])


@refused("EMOE-SEC-019", "zstd", base="full")
def frame_of_tokenizer_before_chat_template() -> Sealed:
    """The tokenizer is no frame, the chat template no UTF-8: all sections are decoded before."""
    draft = full()
    draft.section(SectionType.TOKENIZER).stored = raw(TOKENIZER)[:-1]
    draft.section(SectionType.CHAT_TEMPLATE).data = b"\xff"
    return draft.seal()


@refused("EMOE-IDN-001", "zstd", "records", base=BASE)
def content_id_over_stored_bytes() -> Sealed:
    """The manifest's `content_id` is over the tokenizer as it is stored."""
    draft = smallest()
    draft.sections.insert(-1, Section(SectionType.TOKENIZER, raw(TOKENIZER)))
    draft.manifest["content_id"] = draft.content_id()
    draft.sections[-2] = Section(SectionType.TOKENIZER, TOKENIZER, stored=raw(TOKENIZER))
    return draft.seal()
