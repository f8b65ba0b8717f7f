"""Rows covered by tiles."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estream_runtime.npu.tiling import cover

Tiles = list[int]

rising = st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True).map(sorted)
multiples = st.tuples(st.integers(1, 40), st.lists(st.integers(2, 5), max_size=3)).map(
    lambda drawn: list(accumulate(drawn[1], lambda tile, times: tile * times, initial=drawn[0]))
)
counts = st.integers(1, 2000)
calls = st.integers(0, 5000)


def cost(taken: Tiles, call_rows: int) -> int:
    return call_rows * len(taken) + sum(taken)


@given(counts, rising, calls)
def test_all_rows_are_covered_and_few_are_wasted(count: int, tiles: Tiles, call_rows: int) -> None:
    taken = cover(count, tiles, call_rows)
    assert set(taken) <= set(tiles)
    assert taken == sorted(taken, reverse=True)
    smaller = [tile for tile in tiles if tile < taken[-1]]
    wasted = sum(taken) - count
    assert 0 <= wasted < taken[-1] - max(smaller, default=0)


@given(counts, multiples, calls)
def test_nothing_takes_less_time(count: int, tiles: Tiles, call_rows: int) -> None:
    least = [0]
    for rows in range(1, count + 1):
        least.append(min(call_rows + tile + least[max(rows - tile, 0)] for tile in tiles))
    assert cost(cover(count, tiles, call_rows), call_rows) == least[count]


@given(counts, multiples, calls)
def test_more_rows_never_take_less_time(count: int, tiles: Tiles, call_rows: int) -> None:
    fewer, more = (cover(each, tiles, call_rows) for each in (count, count + 1))
    assert cost(fewer, call_rows) <= cost(more, call_rows)


@given(counts, rising, calls)
def test_equal_questions_have_equal_answers(count: int, tiles: Tiles, call_rows: int) -> None:
    assert cover(count, tiles, call_rows) == cover(count, tuple(tiles), float(call_rows))


@pytest.mark.parametrize(
    ("count", "dear", "cheap"),
    [
        (1, [32], [32]),
        (33, [64], [64]),
        (65, [128], [64, 32]),
        (128, [128], [128]),
        (129, [256], [128, 32]),
        (300, [256, 64], [256, 64]),
        (320, [256, 64], [256, 64]),
    ],
)
def test_calls_that_cost_much_are_few(count: int, dear: Tiles, cheap: Tiles) -> None:
    assert cover(count, (32, 64, 128, 256), 1e6) == dear
    assert cover(count, (32, 64, 128, 256), 1) == cheap


@pytest.mark.parametrize(("tile", "count"), [(1, 100_000), (7, 100_000)])
def test_tiles_far_apart_are_no_burden(tile: int, count: int) -> None:
    assert cover(count, (tile, 1 << 20), 1e9) == [1 << 20]
    assert sum(cover(count, (tile, 1 << 20), 0)) == -(-count // tile) * tile
