"""CRC-32C, the Castagnoli checksum of RFC 3720 section 12.1 and appendix B.4."""

from __future__ import annotations

import re
import sys
from array import array
from typing import Final

POLYNOMIAL: Final = 0x82F63B78
"""Bit 31 stands for x**0, bit 0 for x**31; x**32 is left out."""
ZEROS: Final = re.compile(rb"\0{512,}")
"""Runs from this length on are cheaper to skip than to read."""


def crc32c(data: bytes) -> int:
    """The checksum of the data, 32 bits."""
    state, at = 0xFFFFFFFF, 0
    for zeros in ZEROS.finditer(data):
        state = _skip_zeros(_feed(state, data[at : zeros.start()]), zeros.end() - zeros.start())
        at = zeros.end()
    return _feed(state, data[at:]) ^ 0xFFFFFFFF


def _feed(state: int, data: bytes) -> int:
    """The state after the data, four bytes a step."""
    end = len(data) & ~3
    words = array("I", data[:end])
    if sys.byteorder == "big":
        words.byteswap()
    low, high = LOW_HALF, HIGH_HALF
    for word in words:
        state ^= word
        state = low[state & 0xFFFF] ^ high[state >> 16]
    for byte in data[end:]:
        state = BYTE_1[(state ^ byte) & 0xFF] ^ state >> 8
    return state


def _skip_zeros(state: int, count: int) -> int:
    """The state after so many zero bytes: its product with x**(8 * count)."""
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            state = _product(state, POWERS[bit])
    return state


def _product(left: int, right: int) -> int:
    """Two polynomials multiplied modulo the CRC's."""
    result = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            result ^= right
        right = right >> 1 ^ POLYNOMIAL * (right & 1)
    return result


def _after_zero(states: list[int]) -> list[int]:
    """Each state after one more zero byte."""
    return [BYTE_1[state & 0xFF] ^ state >> 8 for state in states]


def _pairs(low: list[int], high: list[int]) -> array[int]:
    """One table for two bytes out of a table for each."""
    return array("I", [first ^ second for second in high for first in low])


def _powers() -> list[int]:
    powers = [1 << 23]  # x**8
    while len(powers) < 64:
        powers.append(_product(powers[-1], powers[-1]))
    return powers


BYTE_1: Final = [_product(byte, 1 << 23) for byte in range(256)]
"""What is left of a byte once it has been shifted out of the state, BYTE_2 to BYTE_4 of one with zeros behind it."""
BYTE_2: Final = _after_zero(BYTE_1)
BYTE_3: Final = _after_zero(BYTE_2)
BYTE_4: Final = _after_zero(BYTE_3)
LOW_HALF: Final = _pairs(BYTE_4, BYTE_3)
HIGH_HALF: Final = _pairs(BYTE_2, BYTE_1)
POWERS: Final = _powers()
"""x**(8 * 2**n) for each n."""
