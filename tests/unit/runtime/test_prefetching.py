"""What is worth reading ahead, and whether all of it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estream_runtime.judge import AGAIN, BLOCK, ROUNDS, Judge
from estream_runtime.prefetching import Pace, worthwhile
from estream_spec.decode_model import LEAST_GAIN

COMPARISON = 2 * ROUNDS * BLOCK
CHANCES = st.lists(st.integers(0, 100).map(lambda each: each / 100), max_size=12)
SECONDS = st.integers(1, 1000).map(lambda each: each / 64)


def compare(judge: Judge, with_it: float, without: float) -> list[bool]:
    """A comparison in which tokens take so long with and without reading ahead; how each token was decoded."""
    ways = []
    for _ in range(COMPARISON):
        ways.append(judge.on)
        judge.took(with_it if judge.on else without)
    return ways


class TestJudge:
    def test_blocks_alternate_until_there_are_enough_of_each(self) -> None:
        judge = Judge()
        assert judge.verdict == "on, not compared yet"
        ways = compare(judge, 1, 1)
        assert ways == ([True] * BLOCK + [False] * BLOCK) * ROUNDS
        assert judge.gain == 0

    @pytest.mark.parametrize(
        ("with_it", "on", "words"),
        [
            (0.5, True, "on: it saves 50% of a token's time"),
            (1 - 2 * LEAST_GAIN, True, "on: it saves 2% of a token's time"),
            (1 - LEAST_GAIN / 3, False, "off: it saves 0% of a token's time on this device"),
            (1.25, False, "off: it costs 25% of a token's time on this device"),
        ],
    )
    def test_the_faster_way_is_kept_and_put_to_the_test_again(self, with_it: float, on: bool, words: str) -> None:
        judge = Judge()
        compare(judge, with_it, 1)
        for _ in range(AGAIN):
            assert (judge.on, judge.verdict) == (on, words)
            judge.took(99)
        ways = compare(judge, 1 if on else 0.1, 0.1 if on else 1)
        assert ways == ([True] * BLOCK + [False] * BLOCK) * ROUNDS
        assert judge.on is not on

    def test_neither_the_first_token_of_a_block_nor_an_odd_one_counts(self) -> None:
        judge = Judge()
        for number in range(COMPARISON):
            usual = 0.8 if judge.on else 1
            judge.took(1000 if number % BLOCK == 0 or number in {1, 6} else usual)
        assert judge.gain == pytest.approx(0.2)
        assert judge.on


class TestPace:
    def test_nothing_is_known_at_first(self) -> None:
        pace = Pace()
        pace.read(0, 0)
        assert (pace.record_s, pace.before_need(3)) == (None, 0)

    def test_means_follow_what_is_measured_slowly(self) -> None:
        pace = Pace()
        pace.read(4, 8)
        pace.elapsed(1, 5)
        assert (pace.record_s, pace.before_need(1), pace.before_need(0)) == (2, 5, 0)
        pace.read(1, 12)
        pace.elapsed(1, 15)
        assert pace.record_s == pytest.approx(3)
        assert pace.before_need(1) == pytest.approx(6)
        for _ in range(200):
            pace.read(2, 2)
        assert pace.record_s == pytest.approx(1)


class TestWorthwhile:
    @pytest.mark.parametrize(
        ("needed", "before_need_s", "expected"),
        [
            ([], 9, 0),
            ([1, 1, 1], 0, 0),
            ([1, 1, 1], 0.1, 1),  # what is sure to be needed gains by any time there is
            ([1, 1, 1, 1], 2.5, 3),
            ([0.01] * 5, 3, 3),  # one that is done before the need costs nothing
            ([0.49], 0.5, 0),
            ([0.51], 0.5, 1),
            ([0.51, 0.51], 1.5, 2),
            ([0.9, 0.1, 0.9], 1.5, 1),  # none is left out: what follows is less likely
            ([0], 3, 0),
        ],
    )
    def test_records_that_take_a_second(self, needed: list[float], before_need_s: float, expected: int) -> None:
        assert worthwhile(needed, before_need_s, 1) == expected

    @given(needed=CHANCES, before_need_s=SECONDS, record_s=SECONDS, more=st.integers(1, 8))
    def test_more_time_or_faster_reads_never_mean_fewer(
        self, needed: list[float], before_need_s: float, record_s: float, more: int
    ) -> None:
        count = worthwhile(needed, before_need_s, record_s)
        assert 0 <= count <= len(needed)
        assert (count - 1) * record_s < before_need_s
        assert worthwhile(needed, before_need_s * more, record_s) >= count
        assert worthwhile(needed, before_need_s, record_s / more) >= count
        assert worthwhile(needed[:-1], before_need_s, record_s) == min(count, max(len(needed) - 1, 0))
