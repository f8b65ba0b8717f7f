"""The second reader's CRC-32C: the vectors of RFC 3720 and the library's answers."""

from __future__ import annotations

import random

import crc32c as library
import pytest

from second_reader.crc32c import crc32c

READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (READ_COMMAND, 0xD9963A56),
    ],
    ids=["empty", "check", "zeros", "ones", "ascending", "descending", "read command"],
)
def test_known_checksums(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 63, 1000, 4096, 65537])
def test_any_length(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert crc32c(data) == library.crc32c(data)


@pytest.mark.parametrize("zeros", [511, 512, 513, 4096, 16384 - 5, 300_000])
def test_runs_of_zeros_wherever_they_lie(zeros: int) -> None:
    run = bytes(zeros)
    for data in (run, b"head!" + run, run + b"tail", b"x" + run + b"yz" + run + b"\1"):
        assert crc32c(data) == library.crc32c(data)


def test_every_single_bit_counts() -> None:
    data = bytes(range(64)) + bytes(600)
    flipped = [
        data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(0, 664, 13) for bit in range(8)
    ]
    assert [crc32c(other) for other in flipped] == [library.crc32c(other) for other in flipped]
    assert crc32c(data) not in [crc32c(other) for other in flipped]
