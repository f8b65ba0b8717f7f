"""Superblocks: which twin is trusted, and what is in it. FORMAT.md section 3."""

from __future__ import annotations

from estream_conformance.builder import Sealed
from estream_conformance.case import accepted, refused
from estream_conformance.packages import smallest
from estream_spec.constants import SUPERBLOCK_OFFSETS


@refused("EMOE-SUP-001")
def magic_of_both_twins_without_high_bit() -> bytes:
    """The first byte of both twins has lost its high bit, as on a channel of seven bits."""
    data = bytearray(smallest().seal().data)
    for offset in SUPERBLOCK_OFFSETS:
        data[offset] &= 0x7F
    return bytes(data)


@refused("EMOE-SUP-005")
def format_major_1() -> Sealed:
    """The format has another major version."""
    draft = smallest()
    draft.superblock["format_major"] = 1
    return draft.seal()


@accepted()
def format_minor_65535() -> Sealed:
    """The minor version is as high as can be; it decides nothing."""
    draft = smallest()
    draft.superblock["format_minor"] = 65535
    return draft.seal()
