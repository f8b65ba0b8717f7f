"""Rows of any number covered by graphs that take fixed numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence


def cover(count: int, tiles: Sequence[int], call_rows: float) -> list[int]:
    """The tiles that take the least time for some rows.

    As many as are full, the largest first, and one for what is left: from which size on it is that one is what there is
    to choose. It is the smallest that holds what is left, so that fewer rows are wasted than it has more than the next
    smaller tile.

    Args:
        count: rows, at least 1.
        tiles: rows of the tiles there are, rising. Where one is no multiple of the one before, others might take less
            time than those that are found.
        call_rows: rows that are computed in the time that a call takes.

    Returns:
        The tiles, the largest first; together they have at least `count` rows.
    """
    full, left, found = list[int](), count, list[list[int]]()
    for tile in reversed(tiles):
        times, left = divmod(left, tile)
        full += [tile] * times
        if not left:
            found.append(full)
            break
        found.append([*full, next(each for each in tiles if each >= left)])
    return min(found, key=lambda taken: call_rows * len(taken) + sum(taken))
