"""How a read is shared by lanes: what the reader does and the planner reckons with.

A read is cut into as many equal pieces as there are lanes, so that a group someone waits for comes from all of them,
but into no piece that is too small to be worth a request of its own. Few large pieces also cost the least between
them, which counts where processors are busy computing.
"""

from __future__ import annotations

from typing import Final

from estream_spec.layout import round_up

MIN_PIECE: Final = 1 << 21
"""Bytes, 2 MiB. Storage of phones reaches its rate with requests of 1 to 4 MiB, and where processors are busy smaller
ones cost more than another lane brings."""
_ALIGNMENT: Final = 1 << 16
"""Bytes that pieces are multiples of: direct reads need at most this, and get it where the read itself is aligned."""


def piece_count(length: int, lanes: int) -> int:
    """How many pieces a read of so many bytes is cut into."""
    return max(1, min(lanes, length // MIN_PIECE))


def piece_bytes(length: int, lanes: int) -> int:
    """Bytes of each piece but the last, which may be shorter."""
    return max(round_up(-(-length // piece_count(length, lanes)), _ALIGNMENT), _ALIGNMENT)
