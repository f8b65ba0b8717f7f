"""The second reader's Zstandard against the library's: what it unpacks, what it refuses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import zstandard

from second_reader.xxh64 import xxh64
from second_reader.zstd import LooseEndError, ZstdError, content_size, decompress

MAGIC = bytes.fromhex("28b52ffd")
LIMIT = 1 << 20
SOURCE = random.Random(8878)
WORDS = [SOURCE.randbytes(SOURCE.randrange(2, 9)).hex().encode() for _ in range(300)]
CONTENTS = {
    "empty": b"",
    "one byte": b"a",
    "tiny": b"abcabcabd",
    "text": b" ".join(SOURCE.choices(WORDS, k=3000)),
    "skewed": bytes(int(SOURCE.expovariate(0.05)) & 0xFF for _ in range(9000)),
    "300 KB of text": b" ".join(SOURCE.choices(WORDS, k=40_000))[:300_000],
    "300 KB at random": SOURCE.randbytes(300_000),
    "300 KB of three bytes": b"abc" * 100_000,
    "300 KB of four symbols": bytes(SOURCE.choices(range(4), k=300_000)),
}


def _library(frame: bytes) -> bytes | None:
    """What the library unpacks, held to one frame that states its size; None where it refuses."""
    try:
        stated = zstandard.frame_content_size(frame)
        if not frame.startswith(MAGIC) or not 0 <= stated <= LIMIT:
            return None
        if stated > 0:
            return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        # In one step it would return nothing and not read on.
        stream = zstandard.ZstdDecompressor().decompressobj()
        content = stream.decompress(frame)
    except zstandard.ZstdError:
        return None
    return content if stream.eof and not stream.unused_data else None


def _second(frame: bytes) -> bytes | None:
    try:
        return decompress(frame, LIMIT)
    except LooseEndError:
        raise
    except ZstdError:
        return None


def _raw(content: bytes, *, kind: int = 0, last: bool = True) -> bytes:
    """A block: raw, or run of its first byte."""
    head = int(last) | kind << 1 | len(content) << 3
    return head.to_bytes(3, "little") + (content[:1] if kind == 1 else content)


def _frame(blocks: bytes, size: int, *, window: int = 0) -> bytes:
    return MAGIC + b"\xc0" + bytes([window]) + size.to_bytes(8, "little") + blocks


def _huffman(table: bytes, stream: bytes) -> bytes:
    """Three literals in one stream."""
    return (2 | 3 << 4 | len(table + stream) << 14).to_bytes(3, "little") + table + stream


def _compressed(literals: bytes, sequences: bytes) -> bytes:
    body = literals + sequences
    return (1 | 2 << 1 | len(body) << 3).to_bytes(3, "little") + body


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
@pytest.mark.parametrize("level", [1, 3, 19])
@pytest.mark.parametrize("name", CONTENTS)
def test_what_the_library_packs(name: str, level: int, checksum: bool) -> None:
    content = CONTENTS[name]
    frame = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(content)
    assert content_size(frame) == len(content)
    assert decompress(frame, len(content)) == content


def test_blocks_that_build_on_those_before() -> None:
    """Small blocks of like content reuse tables and recent offsets."""
    packer = zstandard.ZstdCompressor(level=3).compressobj(size=len(CONTENTS["text"]))
    parts = [CONTENTS["text"][at : at + 3000] for at in range(0, len(CONTENTS["text"]), 3000)]
    frame = b"".join(packer.compress(part) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for part in parts)
    assert decompress(frame + packer.flush(), LIMIT) == CONTENTS["text"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
    ],
)
def test_checksum_of_the_content(content: bytes, expected: int) -> None:
    assert xxh64(content) == expected


def test_every_frame_descriptor() -> None:
    """Each of the 256 values, with the fields it announces."""
    accepted = 0
    for descriptor in range(256):
        single, size_flag = descriptor & 0x20, descriptor >> 6
        size_length = (1 if single else 0, 2, 4, 8)[size_flag]
        size = 300 - (256 if size_length == 2 else 0) if size_length != 1 else 200
        content = bytes(200 if size_length == 1 else 300)
        fields = (b"" if single else b"\0") + bytes((0, 1, 2, 4)[descriptor & 3])
        checksum = xxh64(content).to_bytes(8, "little")[:4] if descriptor & 4 else b""
        head = MAGIC + bytes([descriptor]) + fields + size.to_bytes(size_length + 2, "little")[:size_length]
        frame = head + _raw(content) + checksum
        assert _second(frame) == _library(frame), f"descriptor {descriptor:#x}"
        accepted += _second(frame) is not None
    assert accepted == 112


@pytest.mark.parametrize("window", range(0, 256, 7))
def test_every_size_of_window(window: int) -> None:
    frame = _frame(_raw(b"content"), 7, window=window)
    assert _second(frame) == _library(frame)


def test_size_that_is_not_stated() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"content")
    assert content_size(frame) is None
    with pytest.raises(ZstdError, match="does not state its content size"):
        decompress(frame, LIMIT)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "data ends early"),
        (bytes.fromhex("502a4d18 04000000 00000000"), "no Zstandard frame"),
        (MAGIC + bytes.fromhex("c1 00 07 0700000000000000") + _raw(b"content"), "needs a dictionary"),
        (MAGIC + bytes.fromhex("c8 00 0700000000000000") + _raw(b"content"), "reserved bit of the frame"),
        (_frame(_raw(b"content"), 7) + b"\0", "bytes behind the frame"),
        (_frame(_raw(b"content"), 7) * 2, "bytes behind the frame"),
        (_frame(_raw(b""), 0) + b"\0", "bytes behind the frame"),
        (_frame(_raw(b"content"), 7)[:-1], "data ends early"),
        (_frame(_raw(b"content"), 6), "longer than stated"),
        (_frame(_raw(b"c" * 2000, kind=1), 1999), "longer than stated"),
        (_frame(_raw(b"content"), 8), "shorter than stated"),
        (_frame(_raw(b"content", last=False), 7), "data ends early"),
        (_frame(_raw(b"content", kind=3), 7), "reserved type"),
        (_frame(_raw(b"content"), LIMIT + 1), "exceeds the limit"),
        (_frame(_raw(b"content"), 2**64 - 2), "exceeds the limit"),
        (_frame(_compressed(b"\x08a", b"\0\0"), 1), "bytes behind the sequences"),
        (_frame(_compressed(b"\x09a", b"\1\1\0"), 1), "reserved bits of the sequences"),
        (_frame(_compressed(b"\x08a", b"\1\xfc\1"), 4), "repeat a table that is not there"),
        (_frame(_compressed(b"\x08a", b"\1\x54\x24\0\0\1"), 4), "literal lengths is out of range"),
        (_frame(_compressed(b"\x08a", b"\1\x54\1\1\0\0"), 4), "without its final bit"),
        (_frame(_compressed(b"\x08a", b"\1\x54\1\2\0\7"), 4), "begins before the content"),
        (_frame(_compressed(b"\x13\x40\0\1", b"\0"), 1), "Huffman table that is not there"),
        (_frame(_compressed(b"\x05\x7da", b"\0"), 2000), "too many literals"),
        (_frame(_compressed(b"\x0c\x41" + b"a" * 1044, b"\0"), 1044), "block is too large"),
        (_frame(_compressed(_huffman(b"\x80\x00", b"\x0a"), b"\0"), 3), "too large or empty"),
        (_frame(_compressed(_huffman(b"\x81\x13", b"\x0a"), b"\0"), 3), "is not full"),
        (_frame(_compressed(_huffman(b"\x80\x20", b"\x0a"), b"\0"), 3), "without two longest codes"),
        (_frame(_compressed(_huffman(b"\x80\xd0", b"\x0a"), b"\0"), 3), "code is too long"),
    ],
)
def test_frame_at_fault(frame: bytes, message: str) -> None:
    with pytest.raises(ZstdError, match=message):
        decompress(frame, LIMIT)
    assert _library(frame) is None


def test_smallest_sequence() -> None:
    """One literal, then a match of three bytes one byte back: the frame that the faults above are made of."""
    frame = _frame(_compressed(b"\x08a", b"\1\x54\1\0\0\1"), 4)
    assert _second(frame) == _library(frame) == b"aaaa"


def test_smallest_huffman_stream() -> None:
    """Two symbols of one bit each, then the bits of three of them."""
    frame = _frame(_compressed(_huffman(b"\x80\x10", b"\x0a"), b"\0"), 3)
    assert _second(frame) == _library(frame) == b"\0\1\0"


def test_huffman_codes_of_twelve_bits() -> None:
    """One more than the RFC allows, and the library reads them."""
    frame = _frame(_compressed(_huffman(bytes.fromhex("8b cba987654321"), b"\x0f"), b"\0"), 3)
    assert _second(frame) == _library(frame) == bytes(3)


@pytest.mark.parametrize("stream", [b"\x04", b"\x1a", b"\x0a\0"], ids=["bit missing", "bit left", "no final bit"])
def test_huffman_stream_with_a_loose_end(stream: bytes) -> None:
    frame = _frame(_compressed(_huffman(b"\x80\x10", stream), b"\0"), 3)
    with pytest.raises(LooseEndError, match="Huffman stream"):
        decompress(frame, LIMIT)
    assert _library(frame) is None


@pytest.mark.parametrize("kind", [0, 1], ids=["raw", "run"])
def test_plain_block_beyond_the_window(kind: int) -> None:
    """The library takes them, so the second reader does."""
    frame = _frame(_raw(b"c" * 200_000, kind=kind), 200_000)
    assert _second(frame) == _library(frame) == b"c" * 200_000


def test_compressed_block_beyond_the_window() -> None:
    """One literal and a match of 1027 bytes, in a window of 1024. The library takes it where it has room."""
    with pytest.raises(ZstdError, match="block's content is too large"):
        decompress(_frame(_compressed(b"\x08a", b"\1\x54\1\0\x2e\0\4"), 1028), LIMIT)


def test_wrong_checksum() -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b"content"))
    frame[-1] ^= 1
    with pytest.raises(ZstdError, match="checksum differs"):
        decompress(bytes(frame), LIMIT)


def _flip(frame: bytearray, at: int, source: random.Random) -> None:
    frame[at] ^= 1 << source.randrange(8)


def _replace(frame: bytearray, at: int, source: random.Random) -> None:
    frame[at] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))


def _drop(frame: bytearray, at: int, source: random.Random) -> None:
    del frame[at]


def _insert(frame: bytearray, at: int, source: random.Random) -> None:
    frame.insert(at, source.randrange(256))


DAMAGE: list[Callable[[bytearray, int, random.Random], None]] = [_flip, _flip, _flip, _replace, _drop, _insert]


def _damaged(frame: bytes, source: random.Random) -> bytes:
    """The frame with a fault or two, in half of the cases near its front where the tables are."""
    damaged = bytearray(frame)
    for _ in range(source.choice((1, 1, 2))):
        at = source.randrange(min(len(damaged), source.choice((30, 200, len(damaged)))))
        source.choice(DAMAGE)(damaged, at, source)
    return bytes(damaged)


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
@pytest.mark.parametrize("name", ["empty", "one byte", "tiny", "text", "skewed"])
def test_damaged_frames(name: str, checksum: bool) -> None:
    """Both readers refuse, or both unpack the same."""
    source = random.Random(name)
    content = CONTENTS[name][:6000]
    frame = zstandard.ZstdCompressor(level=source.choice((1, 3, 19)), write_checksum=checksum).compress(content)
    outcomes: Counter[str] = Counter()
    for number in range(60):
        damaged = _damaged(frame, source)
        try:
            answer = _second(damaged)
        except LooseEndError:
            outcomes["loose end"] += 1
            continue
        assert answer == _library(damaged), f"mutation {number}: {damaged.hex()}"
        outcomes["unpacked" if answer is not None else "refused"] += 1
    assert outcomes["refused"] > 0
    assert outcomes["loose end"] < 30
