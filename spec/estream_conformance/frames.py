"""zstd frames written by hand, right or wrong. RFC 8878, section 3.1.1.

What compresses is the same everywhere and for all time only if no compressor is asked: blocks here are raw or runs.
"""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = bytes.fromhex("28b52ffd")
SKIPPABLE: Final = bytes.fromhex("502a4d18")
RAW, RUN, COMPRESSED, RESERVED = range(4)
"""Types of blocks."""
MAX_BLOCK: Final = 1 << 17
"""Bytes that a block may decode to."""
SIZE_FLAGS: Final = {0: 0, 1: 0, 2: 1, 4: 2, 8: 3}
"""What the header says of a content size of so many bytes."""


def block(data: bytes, kind: int = RAW, *, size: int | None = None, last: bool = True) -> bytes:
    """A block.

    Args:
        data: what stands behind its header: all bytes, or the one that is repeated.
        kind: its type.
        size: what its header says; None for the length of `data`.
        last: whether the header says that it is the last one.
    """
    head = (len(data) if size is None else size) << 3 | kind << 1 | last
    return head.to_bytes(3, "little") + data


def frame(
    blocks: bytes,
    size: int | None,
    *,
    width: int = 4,
    window: int | None = None,
    dictionary: bytes = b"",
    checksum: bytes = b"",
    descriptor: int = 0,
) -> bytes:
    """A frame.

    Args:
        blocks: its blocks.
        size: the content size that its header states; None for none.
        width: bytes of the content size: 1, 2, 4 or 8.
        window: the window descriptor; None makes the frame a single segment.
        dictionary: the dictionary id's bytes: none, 1, 2 or 4.
        checksum: the content checksum's bytes: none or 4.
        descriptor: more bits of the frame header's first byte.
    """
    stated = b""
    if size is not None:
        stated = (size - 256 if width == 2 else size).to_bytes(width, "little")
    bits = SIZE_FLAGS[len(stated)] << 6 | (window is None) << 5 | bool(checksum) << 2
    bits |= {0: 0, 1: 1, 2: 2, 4: 3}[len(dictionary)] | descriptor
    head = MAGIC + bytes([bits]) + (b"" if window is None else bytes([window]))
    return head + dictionary + stated + blocks + checksum


def raw(data: bytes) -> bytes:
    """A frame of one raw block."""
    return frame(block(data), len(data))


def run(byte: bytes, length: int) -> bytes:
    """A frame of one byte over and over."""
    whole, rest = divmod(length, MAX_BLOCK)
    blocks = block(byte, RUN, size=MAX_BLOCK, last=False) * whole + block(byte, RUN, size=rest)
    return frame(blocks, length)


def skippable(data: bytes) -> bytes:
    """A skippable frame, which has no content."""
    return SKIPPABLE + struct.pack("<I", len(data)) + data


def vocabulary() -> bytes:
    """The content of `COMPRESSED_VOCABULARY`."""
    pairs = ",".join(f'"token{number}":{number**2 % 997}' for number in range(60))
    return f'{{"version":"1.0","model":{{"vocab":{{{pairs}}}}}}}'.encode()


def squares() -> bytes:
    """The content of `COMPRESSED_SQUARES`, more than a block can hold."""
    return "".join(f"{number**2 % 1000}," for number in range(36000)).encode()


COMPRESSED_VOCABULARY: Final = bytes.fromhex(
    "28b52ffd645102a5080056d43019804ba10dfadeb2da3405454246549e8456766f960dca51d44731002600260033deac7b47d68b"
    "47ef995fbb792b5faad7f3ce415e49200c140b15081850bc07080205420f1580e99b501428242018da10979454c3036d349ecf68"
    "b67994ab5caf788ede2cd33b72a0f93db35fbbac3caab2e71d995726457bde1b7a2d29dfb28d97f0f0758d21b957aa6c6f62d53b"
    "8cf462e60dfbb5b479cbf9129a028bc542b2de24a4770cf38b56f35ed16b76be65335e92c1d728f7ce89bd6228f5a60cbdc3c60f"
    "4fa811103981b1f6cade01a017b4709022b13ec4b29ac4cf01473d4de29fc983375cf16a50064e2b6595a58123b4c646ebe023f1"
    "7f308e87a90a3dc974b9152f43c52ffaabd853dc107b309ea40a83e12b72"
)
"""A compressed block with Huffman-coded literals and FSE-coded sequences, and a content checksum."""
COMPRESSED_SQUARES: Final = bytes.fromhex(
    "28b52ffda0e01a0200741400c6603b09c03bc46c76adab13073600370038006c77cb7ceeb5c6e80fe0636b2dda8366f2263cd3ec"
    "316b756c07d0d1b286ec15f3c426623e77732dc7e00038d6eabdb36c62e6be8e83ab3b560c8076cf7cd98b46cf0062ad3d3e1375"
    "0f598b634d6b78afce23bbbfb6c6a0ea6ad9cbef502bd008334257901d28df4b6379005e61b6c49fda832d9b1ead6984676a77d4"
    "b708ed50859b427b697e1b652ad9836bd5580fe27b799e7eef8c21513b7885188cdea13363537b1d24436a3aa3740a9de2129fa5"
    "92105be156f87d4b4a5e93e42479c449c272a1dce01bffc40ab3cf9cd967b46fdaa36eb6226637b50f4bbd5780ffa84165722222"
    "4992a47d03a0221119bb1b1280f640bbfbffffff1981f87f97f065e2adc55fc623e5f89ae8b82cdde47053661bcb07c631e2433d"
    "1e787e5c21261af91450f154183935372e26715c490df9c281425e8247ab72fc1397437a0cedfc988787479c3c063e27a2de093a"
    "ed60239c9513612422de23079eec157fca7d2297fcc62b745c60bf2ffe1566b0f1f0c47f259224180172bec61d22bd918ce0a638"
    "5dcc0e367fd446e47818217700a1786edf1b3f0de16e10ea78ff28abd9bba3dba8b637c7c0854873d82da4ae95c42db3d984270e"
    "f1895b2952dde76dfb160d91a09edf444c543b8a9e09a73fcb1de471ae985a463fc4caa1de227fdc271028a3d50a9f828b517d43"
    "35c490eb2a55dc01cfe2bda03a1738a27e3ee1b26f2f95234d89c447ef5e2320b35bfc4ba24482e6c7c11ffd33f4caff403a31a9"
    "b5d8107101ed85459011547a04511dc4f2125a227730ac362bd9f071de91bde85678fb1c24c6c3821cee005c281022ca50271087"
    "af6972496770eb5c072a46898c7e71fb1e4b19e17e4417f3764f553bc21cce46083705a488d8f20440ab45000008310100dcda03"
    "21"
)
"""Two compressed blocks, the second of which goes on with what stands in the first one."""
