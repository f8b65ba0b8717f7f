"""The replay of routing traces: what a hit is, and that the optimum is one."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from bench.retention import Foresight, Stream, Trace, drawn, faults, global_hits, hits, policies

EXPERTS = 5


def random_stream(seed: int, tokens: int) -> Stream:
    generator = np.random.default_rng(seed)
    return [tuple(sorted(generator.choice(EXPERTS, 2, replace=False).tolist())) for _ in range(tokens)]


def best(stream: Stream, prompt: int, keep: int) -> int:
    """The most hits that any choice of what to keep can have."""

    @cache
    def most(token: int, kept: frozenset[int]) -> int:
        if token == len(stream):
            return 0
        held = kept.union(stream[token])
        choices = combinations(sorted(held), min(keep, len(held)))
        return len(kept.intersection(stream[token])) + max(most(token + 1, frozenset(each)) for each in choices)

    return max(most(prompt, frozenset(each)) for each in combinations(range(EXPERTS), keep))


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_the_optimum_is_what_trying_everything_finds(keep: int) -> None:
    for seed in range(5):
        stream = random_stream(seed, 14)
        assert hits(stream, 2, EXPERTS, keep, Foresight) == best(stream, 2, keep)


@pytest.mark.parametrize("name", policies())
def test_no_policy_beats_the_optimum_and_keeping_all_never_misses(name: str) -> None:
    stream, made = random_stream(0, 60), policies()
    for keep in (1, 2, 3, 4):
        assert hits(stream, 10, EXPERTS, keep, made[name]) <= hits(stream, 10, EXPERTS, keep, made["optimum"])
    assert hits(stream, 10, EXPERTS, EXPERTS, made[name]) == 100


def test_without_a_seed_a_layer_begins_with_nothing() -> None:
    stream: Stream = [(0, 1), (0, 1), (0, 1)]
    assert hits(stream, 1, EXPERTS, 2, policies()["lru"]) == 4
    assert hits(stream, 1, EXPERTS, 2, policies()["lru"], seeded=False) == 2


def test_one_cache_for_all_layers_hits_nothing_while_the_other_layers_fill_it() -> None:
    window: list[Stream] = [[(0, 1)] * 8, [(2, 3)] * 8]
    assert global_hits(window, 2, 2) == 0
    assert global_hits(window, 2, 4) == 24


def test_drawn_traces_are_as_skewed_as_they_are_to_be() -> None:
    like = Trace([[random_stream(0, 4000)]], EXPERTS, 1)
    for skew, low, high in ((0, 1.0, 1.2), (2, 5.0, 15.0)):
        counts = np.sort(np.bincount(np.ravel(drawn(like, skew).streams[0]), minlength=EXPERTS))
        assert low <= counts[-1] / counts[0] <= high


def test_a_default_that_does_not_beat_lru_is_a_fault_above_the_working_set_of_a_token_only() -> None:
    real = [(2, -0.1, 0.01), (3, 0.0, 0.01), (4, 0.1, 0.01)]
    assert [fault.split(" at ")[1] for fault in faults(2, real, [(3, 0.02, 0.01)])] == ["3 records a layer"]
    assert [fault.split(" at ")[1] for fault in faults(2, real[2:], [(3, -0.04, 0.01)])] == ["3 records a layer"]
