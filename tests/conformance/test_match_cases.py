"""The cases of matching: the text of MATCHING.md, this project's own matcher, and the second one all agree."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from estream_conformance.matching import MatchCase, load_match_cases
from estream_spec.matching import ON_NPU, VERDICTS, decode_facts, match
from fixtures.headers import header
from second_reader.matching import match as second_match

CASES = load_match_cases()
ids = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def first_match(device: dict[str, Any], package: dict[str, Any]) -> dict[str, Any]:
    found = match(decode_facts(json.dumps(device).encode(), "facts"), *header(package))
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "binary": found.binary,
        "arena_bytes": found.arena_bytes,
        "sections": [list(each) for each in found.sections],
    }


@ids
def test_the_matcher_gives_what_must_come_out(case: MatchCase) -> None:
    assert first_match(case.device, case.package) == case.match


@ids
def test_the_second_matcher_gives_what_must_come_out(case: MatchCase) -> None:
    assert second_match(case.device, case.package) == case.match


def test_every_reason_has_cases() -> None:
    assert {case.match["reason"] for case in CASES} == set(VERDICTS)
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.about.endswith(".") for case in CASES)


def test_both_matchers_agree_on_devices_at_random() -> None:
    """Facts and headers drawn from the values of all cases, some of them a little off."""
    draw = random.Random(6)
    devices = [case.device for case in CASES]
    keys = sorted({key for device in devices for key in device})
    reasons = set()
    for _ in range(3000):
        device: dict[str, Any] = {}
        for key in keys:
            value = draw.choice([each for each in devices if key in each])[key]
            if key.endswith("_bytes") and key != "page_bytes" and value is not None:
                value = min(max(value + draw.choice((-1, 0, 0, 1)), 0), (1 << 63) - 1)
            device[key] = value
        package = copy.deepcopy(draw.choice(CASES).package)
        for binary in package["manifest"]["binaries"]:
            if draw.random() < 0.3:
                binary["sdk"] = draw.choice(devices).get("sdk") or "2"
        found = first_match(device, package)
        assert found == second_match(device, package), (device, package)
        reasons.add(found["reason"])
    assert reasons == set(VERDICTS)


@pytest.mark.parametrize("reason", VERDICTS)
def test_a_binary_is_used_where_its_reason_says_so(reason: str) -> None:
    cases = [case for case in CASES if case.match["reason"] == reason]
    assert {case.match["binary"] is not None for case in cases} == {reason in ON_NPU}
