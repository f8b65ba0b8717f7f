"""Two readers that share no code agree on damaged packages. `tests/bench/readers.py` asks them many more."""

from fixtures.readers import compare


def test_two_readers_say_the_same_of_damaged_packages() -> None:
    differing = [(seed, one[:2], other[:2]) for seed, one, other in compare(0, 600) if one != other]
    assert differing == []
