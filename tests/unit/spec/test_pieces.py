"""How reads are shared by lanes."""

from __future__ import annotations

import pytest

from estream_spec.pieces import piece_bytes, piece_count

MIB = 1 << 20


@pytest.mark.parametrize(
    ("length", "lanes", "count", "each"),
    [
        (16 * MIB, 1, 1, 16 * MIB),
        (16 * MIB, 4, 4, 4 * MIB),
        (4 * MIB, 4, 2, 2 * MIB),
        (3 * MIB, 8, 1, 3 * MIB),
        (4096, 8, 1, 1 << 16),
        (0, 2, 1, 1 << 16),
        (5 * MIB, 2, 2, 5 * MIB // 2),
        (10 * MIB + 4096, 3, 3, 54 << 16),
    ],
)
def test_each_lane_gets_a_piece_of_two_mebibytes_or_more(length: int, lanes: int, count: int, each: int) -> None:
    assert piece_count(length, lanes) == count
    assert piece_bytes(length, lanes) == each
    assert -(-length // each) <= count
