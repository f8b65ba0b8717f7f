"""Rows of any number covered by graphs that take fixed numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence


def cover(count: int, tiles: Sequence[int], call_rows: float) -> list[int]:
    """The tiles that take the least time for some rows.

    A tile that would be more than half empty is not taken where a smaller one holds what is left, so that fewer rows
    are wasted than there are, or than the smallest tile has.

    Args:
        count: rows, at least 1.
        tiles: rows of the tiles there are, rising; each is at most twice the one before.
        call_rows: rows that are computed in the time that a call takes.

    Returns:
        The tiles, the largest first; together they have at least `count` rows.
    """
    taken = []
    left = count
    while left > tiles[-1]:
        taken.append(tiles[-1])
        left -= tiles[-1]
    return [*taken, *_rest(left, tiles, call_rows)]


def _rest(left: int, tiles: Sequence[int], call_rows: float) -> list[int]:
    """The tiles for what the largest one holds: the one that does, or a smaller one and others for what it leaves."""
    whole = next(tile for tile in tiles if tile >= left)
    smaller = [tile for tile in tiles if tile < left]
    if not smaller:
        return [whole]
    split = [smaller[-1], *_rest(left - smaller[-1], tiles, call_rows)]
    return min([whole], split, key=lambda each: call_rows * len(each) + sum(each))
