"""Facts of devices, builds of SDKs, and what is said of a match. What comes out is in the suite's cases."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from estream_conformance.matching import load_match_cases
from estream_spec.errors import MalformedError
from estream_spec.matching import UNBOUNDED, VERDICTS, DeviceFacts, Match, decode_facts, match, sdk_numbers
from estream_spec.matching_text import advice, explain
from fixtures.headers import header

FACTS: dict[str, Any] = {"page_bytes": 4096, "memory_bytes": 1 << 30}
SDK = "2.51.0.260929181845"
CASES = {case.name: case for case in load_match_cases()}


def found(name: str) -> Match:
    """What comes out of a case."""
    case = CASES[name]
    return match(decode_facts(msgspec.json.encode(case.device), "facts"), *header(case.package))


def test_facts_survive_json() -> None:
    facts = DeviceFacts(
        page_bytes=16384,
        memory_bytes=3 << 30,
        soc_model=57,
        architecture=75,
        sdk=SDK,
        npu_buffer_bytes=1 << 31,
        npu_session_bytes=3200 << 20,
        configuration="phone",
    )
    assert decode_facts(msgspec.json.encode(facts), "facts") == facts


def test_what_is_left_out_is_not_known() -> None:
    facts = decode_facts(msgspec.json.encode(FACTS), "facts")
    assert (facts.soc_model, facts.architecture, facts.sdk, facts.configuration) == (0, 0, "", "")
    assert (facts.npu_buffer_bytes, facts.npu_session_bytes) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_bytes": 0}, "expected `int` >= 1 - at `$.page_bytes`"),
        ({"page_bytes": 5000}, "page_bytes is 5000, expected a power of two"),
        ({"page_bytes": (1 << 30) + 1}, "expected `int` <= 1073741824 - at `$.page_bytes`"),
        ({"page_bytes": 4096.5}, "expected `int`, got `float` - at `$.page_bytes`"),
        ({"memory_bytes": -1}, "expected `int` >= 0 - at `$.memory_bytes`"),
        ({"memory_bytes": UNBOUNDED + 1}, "$.memory_bytes"),
        ({"soc_model": 1 << 32}, "$.soc_model"),
        ({"architecture": "v75"}, "expected `int`, got `str` - at `$.architecture`"),
        ({"architecture": 1 << 16}, "$.architecture"),
        ({"sdk": "v2.51"}, "$.sdk"),
        ({"sdk": "2..51"}, "$.sdk"),
        ({"sdk": "2.51."}, "$.sdk"),
        ({"sdk": "2.51\n"}, "$.sdk"),
        ({"sdk": "\n"}, "$.sdk"),
        ({"sdk": "1" * 19}, "$.sdk"),
        ({"sdk": "1.2.3.4.5.6.7.8.9"}, "$.sdk"),
        ({"npu_buffer_bytes": -1}, "$.npu_buffer_bytes"),
        ({"npu_session_bytes": "much"}, "$.npu_session_bytes"),
        ({"configuration": "x" * 129}, "$.configuration"),
        ({"soc": 57}, "object contains unknown field `soc`"),
    ],
)
def test_wrong_facts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedError, match=re.escape(message)) as error:
        decode_facts(msgspec.json.encode(FACTS | changes), "phone.json")
    assert str(error.value).startswith("not device facts: ")
    assert str(error.value).endswith(" (at phone.json)")


@pytest.mark.parametrize("key", FACTS)
def test_what_must_be_said(key: str) -> None:
    facts = {other: value for other, value in FACTS.items() if other != key}
    with pytest.raises(MalformedError, match=f"object missing required field `{key}`"):
        decode_facts(msgspec.json.encode(facts), "phone.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"sdk": "\xff"}'])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="device facts"):
        decode_facts(data, "phone.json")


def test_facts_of_any_length_are_not_read() -> None:
    with pytest.raises(MalformedError, match="device facts have more than 64 KiB"):
        decode_facts(msgspec.json.encode(FACTS) + b" " * (1 << 16), "phone.json")


def test_builds_are_in_the_order_of_their_numbers() -> None:
    builds = ["0", "0.0.1", "2", "2.9", "2.9.0.1", "2.51", "2.51.0.260929181845", "2.51.1", "2.100", "10", "10.0.1"]
    numbers = [sdk_numbers(each) for each in builds]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(("one", "other"), [("2.51", "2.51.0.0"), ("02.051", "2.51"), ("0", "0.0.0")])
def test_builds_that_are_the_same(one: str, other: str) -> None:
    assert sdk_numbers(one) == sdk_numbers(other)


@pytest.mark.parametrize(
    ("name", "binary", "device"),
    [
        ("same_sdk", "section 0 is for Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK 2.51.0.260929181845", SDK),
        ("newer_device_sdk", "Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK 2.51.0.260929181845", "SDK 2.52.0.0"),
        ("older_device_sdk", "Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK 2.51.0.260929181845", "SDK 2.50.9.2"),
        ("other_chip", "Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK 2.51", "chip 60 (soc60-v75, Hexagon v75), SDK"),
        (
            "other_architecture",
            "section 1 is for Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK 2.51",
            "Snapdragon 8 Gen 2 (sm8550, Hexagon v73), SDK 2.51",
        ),
    ],
)
def test_both_sides_are_named(name: str, binary: str, device: str) -> None:
    ours, _, theirs = explain(found(name)).partition("; the device is ")
    assert binary in ours
    assert device in theirs


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("larger_page", "pages of 16384 bytes, expected a multiple of the device's, which have 65536"),
        ("memory_for_less_than_one_expert", "memory of 163839 bytes leaves 32767 bytes for the arena"),
        ("memory_for_less_than_one_expert", "beside 131072 bytes of dense weights, expected 32768 for one expert"),
        ("memory_less_than_dense_weights", "leaves 0 bytes for the arena"),
        ("buffer_for_less", "the NPU leaves 32767 bytes for the arena"),
        ("no_npu", "no NPU is known on the device; the portable graphs run on its CPU"),
        ("no_fp16", "Hexagon v68), SDK 2.51.0.260929181845, and fp16 begins with Hexagon v69; the portable graphs"),
        ("no_sdk", "the device is Snapdragon 8 Gen 3 (sm8650, Hexagon v75), no SDK; the portable graphs run"),
        ("no_binary", "no binary for any NPU; the device is Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK 2.51"),
    ],
)
def test_numbers_and_facts_are_told(name: str, text: str) -> None:
    assert text in explain(found(name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_binary", "compile for it: estream-pack compile 'a b.emoe' --target htp:sm8650"),
        ("other_chip", "compile for it: estream-pack compile 'a b.emoe' --target htp:soc60-v75"),
        ("other_architecture", "compile for it: estream-pack compile 'a b.emoe' --target htp:sm8550"),
        (
            "older_build",
            "give the device SDK 2.51.0.260929181845 or later, or compile with its own: estream-pack compile",
        ),
        ("larger_page", "build it with page_shift = 16 in the recipe"),
        ("no_memory", "give it more memory, or build it with fewer bits"),
        ("no_sdk", "the vendor's library comes with pip install 'estream-pack[npu]'"),
    ],
)
def test_what_can_be_done(name: str, text: str) -> None:
    assert (advice(found(name), "a b.emoe") or "").startswith(text)


@pytest.mark.parametrize("reason", VERDICTS)
def test_where_the_npu_idles_for_want_of_something_it_is_told(reason: str) -> None:
    helpless = {"same-sdk", "older-sdk", "no-npu", "no-fp16", "npu-memory"}
    [name, *_] = [case.name for case in CASES.values() if case.match["reason"] == reason]
    assert (advice(found(name), "a.emoe") is None) == (reason in helpless)


@pytest.mark.parametrize("unknown", ["soc_model", "architecture"])
def test_facts_as_people_read_them(unknown: str) -> None:
    facts = DeviceFacts(**FACTS, soc_model=57, architecture=75, sdk=SDK)
    assert str(facts) == f"Snapdragon 8 Gen 3 (sm8650, Hexagon v75), SDK {SDK}"
    assert str(msgspec.structs.replace(facts, **{unknown: 0}, sdk="")) == "one without a known NPU, no SDK"
