"""Whatever happened to a package's bytes, a reader answers with the package or with one of its own errors."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream_loader import open_package
from estream_spec.constants import DATA_START
from estream_spec.errors import EmoeError
from estream_spec.manifest import decode_manifest
from estream_spec.records import RecordTable, decode_directory
from estream_spec.rulebook import RULES
from fixtures.mutations import answer, mutate, structure_of, subject

SLUGS = {"malformed", "invalid", "integrity", "unsupported", "limit"}


PACKAGE = subject()
STRUCTURE = structure_of(PACKAGE)
MEANING = answer(PACKAGE)


@pytest.mark.parametrize("block", range(10))
def test_mutations(block: int) -> None:
    answers = Counter(answer(mutate(PACKAGE, seed, STRUCTURE)) for seed in range(block * 300, block * 300 + 300))
    assert SLUGS - {"limit", "unsupported"} <= answers.keys()


def test_mutations_cover_every_kind_of_refusal() -> None:
    answers = {answer(mutate(PACKAGE, seed, STRUCTURE)) for seed in range(10_000, 11_500)}
    assert answers >= SLUGS


@pytest.mark.parametrize("offset", range(0, len(PACKAGE), len(PACKAGE) // 400))
def test_flipped_byte_is_noticed_or_means_nothing(offset: int) -> None:
    flipped = bytearray(PACKAGE)
    flipped[offset] ^= 0xFF
    found = answer(bytes(flipped))
    in_twin = offset < 128 or 16384 <= offset < 16512
    assert found == MEANING if in_twin else found in SLUGS


def test_flipped_byte_in_the_structure_is_noticed() -> None:
    for part in STRUCTURE[4:]:
        for offset in part[:: max(1, len(part) // 40)]:
            flipped = bytearray(PACKAGE)
            flipped[offset] ^= 1
            assert answer(bytes(flipped)) in SLUGS, offset


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    for decode in (
        lambda: decode_manifest(data),
        lambda: decode_directory(data, offset=0),
        lambda: RecordTable.decode(data, path="table"),
        lambda: open_package(data),
        lambda: open_package(PACKAGE[:DATA_START] + data),
    ):
        with pytest.raises(EmoeError) as caught:
            decode()
        assert caught.value.rule in RULES
