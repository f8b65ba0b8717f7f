"""XXH64 with seed 0, the checksum at the end of a Zstandard frame (the XXH64 chapter of the xxHash specification)."""

from __future__ import annotations

from struct import iter_unpack, unpack_from
from typing import Final

PRIME_1: Final = 0x9E3779B185EBCA87
PRIME_2: Final = 0xC2B2AE3D27D4EB4F
PRIME_3: Final = 0x165667B19E3779F9
PRIME_4: Final = 0x85EBCA77C2B2AE63
PRIME_5: Final = 0x27D4EB2F165667C5
MASK: Final = (1 << 64) - 1
STRIPE: Final = 32


def xxh64(data: bytes) -> int:
    """The hash of the data, 64 bits."""
    stripes = len(data) // STRIPE * STRIPE
    value = _accumulate(data[:stripes]) if stripes else PRIME_5
    return _avalanche(_absorb_tail(value + len(data) & MASK, data[stripes:]))


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & MASK


def _round(lane: int, word: int) -> int:
    return _rotate(lane + word * PRIME_2 & MASK, 31) * PRIME_1 & MASK


def _accumulate(stripes: bytes) -> int:
    """Four lanes over whole stripes, merged."""
    a, b, c, d = (PRIME_1 + PRIME_2) & MASK, PRIME_2, 0, -PRIME_1 & MASK
    for first, second, third, fourth in iter_unpack("<4Q", stripes):
        a, b, c, d = _round(a, first), _round(b, second), _round(c, third), _round(d, fourth)
    value = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18) & MASK
    for lane in (a, b, c, d):
        value = (value ^ _round(0, lane)) * PRIME_1 + PRIME_4 & MASK
    return value


def _absorb_tail(value: int, tail: bytes) -> int:
    """What is left behind the stripes: words of eight bytes, then one of four, then single bytes."""
    at = 0
    while at + 8 <= len(tail):
        value = _rotate(value ^ _round(0, unpack_from("<Q", tail, at)[0]), 27) * PRIME_1 + PRIME_4 & MASK
        at += 8
    if at + 4 <= len(tail):
        value = _rotate(value ^ unpack_from("<I", tail, at)[0] * PRIME_1 & MASK, 23) * PRIME_2 + PRIME_3 & MASK
        at += 4
    for byte in tail[at:]:
        value = _rotate(value ^ byte * PRIME_5 & MASK, 11) * PRIME_1 & MASK
    return value


def _avalanche(value: int) -> int:
    value = (value ^ value >> 33) * PRIME_2 & MASK
    value = (value ^ value >> 29) * PRIME_3 & MASK
    return value ^ value >> 32
