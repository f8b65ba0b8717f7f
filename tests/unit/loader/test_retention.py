"""Which records the policies give up first."""

from __future__ import annotations

import random
from typing import Final

import pytest

from estream_loader.retention import AgeingFrequency
from fixtures.retentions import CHOSEN, RETENTIONS, LeastRecent, LeastStale

EXPERTS: Final = 6


def test_the_one_that_is_used_is_among_those_that_are_compared() -> None:
    assert RETENTIONS[CHOSEN] is AgeingFrequency


@pytest.mark.parametrize("name", RETENTIONS)
def test_what_is_held_is_ranked_whole_and_nothing_else(name: str) -> None:
    policy, drawn = RETENTIONS[name](EXPERTS), random.Random(0)
    policy.seed([drawn.randrange(9) for _ in range(EXPERTS)])
    for _ in range(50):
        routed = drawn.sample(range(EXPERTS), 2)
        policy.note(routed)
        held = set(drawn.sample(range(EXPERTS), 3)).union(routed)
        assert sorted(policy.order(held)) == sorted(held)


@pytest.mark.parametrize("name", RETENTIONS)
def test_the_order_is_the_same_whatever_order_the_held_come_in(name: str) -> None:
    policy = RETENTIONS[name](EXPERTS)
    policy.seed([2, 2, 0, 0, 1, 1])
    policy.note([1, 4])
    assert policy.order([5, 4, 3, 2, 1, 0]) == policy.order(iter(range(EXPERTS)))


@pytest.mark.parametrize("name", RETENTIONS)
def test_before_anything_is_known_the_higher_id_goes_first(name: str) -> None:
    assert RETENTIONS[name](4).order([2, 0, 3, 1]) == [3, 2, 1, 0]


@pytest.mark.parametrize("name", RETENTIONS)
def test_what_the_prompt_chose_least_goes_first(name: str) -> None:
    policy = RETENTIONS[name](4)
    policy.seed([3, 0, 7, 3])
    assert policy.order(range(4)) == [1, 3, 0, 2]


@pytest.mark.parametrize("name", RETENTIONS)
def test_a_prompt_of_nothing_is_no_fault(name: str) -> None:
    policy = RETENTIONS[name](3)
    policy.seed([0, 0, 0])
    policy.note([2])
    assert policy.order(range(3))[-1] == 2


def test_lru_drops_what_was_not_routed_to_for_longest() -> None:
    policy = LeastRecent(EXPERTS)
    policy.seed([9, 0, 0, 0, 0, 0])
    for routed in ([1, 2], [3, 4], [1, 5]):
        policy.note(routed)
    assert policy.order(range(EXPERTS)) == [0, 2, 4, 3, 5, 1]


def test_lfu_keeps_what_is_routed_to_often_over_what_was_last() -> None:
    policy = AgeingFrequency(EXPERTS)
    for routed in ([0, 1], [0, 2], [0, 3], [4, 5]):
        policy.note(routed)
    assert policy.order(range(EXPERTS))[-1] == 0
    assert LeastRecent(EXPERTS).order(range(EXPERTS))[-1] == 0


def test_lfu_forgets_an_old_favourite() -> None:
    policy = AgeingFrequency(EXPERTS, memory=2)
    for _ in range(20):
        policy.note([0])
    for _ in range(20):
        policy.note([1])
    assert policy.order([0, 1]) == [0, 1]


def test_lfu_counts_a_prompt_as_its_tokens_would_have_counted() -> None:
    noted, seeded = AgeingFrequency(2, memory=5), AgeingFrequency(2, memory=5)
    for _ in range(12):
        noted.note([0])
    seeded.seed([12, 0])
    # A routing fades to 0.9 with the next. What is left of 12 ones is outweighed by n others when 1 - 0.9 ** n is more
    # than (1 - 0.9 ** 12) * 0.9 ** n: from 6 on.
    for policy in (noted, seeded):
        after = []
        for _ in range(6):
            policy.note([1])
            after.append(policy.order([0, 1]))
        assert after == [[1, 0]] * 5 + [[0, 1]]


def test_lfu_never_runs_out_of_numbers() -> None:
    policy = AgeingFrequency(2, memory=1)
    for _ in range(5000):
        policy.note([0, 1])
        policy.note([1])
    assert policy.order([0, 1]) == [0, 1]
    policy.note([0])
    policy.note([0])
    assert policy.order([0, 1]) == [1, 0]


def test_least_stale_drops_what_the_latest_token_did_not_use_in_the_order_it_came() -> None:
    policy = LeastStale(EXPERTS)
    policy.note([0, 1])
    assert policy.order([0, 1]) == [1, 0]
    policy.note([2])
    policy.order([0, 1, 2])
    policy.note([0])
    policy.order([0, 1, 2])
    policy.note([3])
    # Used again, expert 0 came no later for that, unlike in LRU.
    assert policy.order([0, 1, 2, 3]) == [1, 0, 2, 3]


def test_least_stale_takes_what_comes_back_for_new() -> None:
    policy = LeastStale(EXPERTS)
    for routed, held in (([0], [0]), ([1], [0, 1]), ([2], [1, 2]), ([0], [0, 1, 2]), ([3], [0, 1, 2, 3])):
        policy.note(routed)
        order = policy.order(held)
    assert order == [1, 2, 0, 3]
