from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.conftest import GOOD_JSON, bad, good
from estream_conformance.judgement import Reason, first_difference, judge
from estream_conformance.process import Answer

RIGHT = "refused as invalid by EMOE-SEC-012"
LINE = GOOD_JSON


@pytest.mark.parametrize(
    "output",
    [
        '{"class":"invalid","rule":"EMOE-SEC-012"}',
        '{"class":"invalid"}',
        ' {\n "message": "é", "rule": "EMOE-SEC-012", "class": "invalid"\n} \n\n',
    ],
)
def test_a_right_refusal(output: str) -> None:
    found = judge(bad(), Answer(1, output.encode()))
    assert (found.reason, found.expected) == (None, RIGHT)


@pytest.mark.parametrize("line_feed", ["", "\n"])
def test_a_right_acceptance(line_feed: str) -> None:
    assert judge(good(), Answer(0, f"{LINE}{line_feed}".encode())).reason is None


@pytest.mark.parametrize("output", [b"", b"{}", b"\xff", b'{"a":0}'])
def test_without_accept_only_the_status_of_accepted_files_counts(output: bytes) -> None:
    assert judge(good(), Answer(0, output), with_json=False).reason is None
    assert judge(good(), Answer(1, output), with_json=False).reason is Reason.NO_VERDICT
    assert judge(bad(), Answer(0, output), with_json=False).reason is Reason.ACCEPTED


@pytest.mark.parametrize(
    ("answer", "reason", "found"),
    [
        (Answer(None, seconds=10.04), Reason.TIMEOUT, "no answer in 10.0 s"),
        (Answer(None, b"x" * 70, flooded=True), Reason.FLOOD, "more than 70 bytes on standard output"),
        (Answer(-11), Reason.CRASH, "ended by SIGSEGV"),
        (Answer(-63), Reason.CRASH, "ended by signal 63"),
        (Answer(2, LINE.encode()), Reason.CRASH, "exit status 2, which is no answer"),
        (Answer(139), Reason.CRASH, "exit status 139, which is no answer"),
    ],
)
def test_no_answer(answer: Answer, reason: Reason, found: str) -> None:
    for vector in (good(), bad()):
        judgement = judge(vector, answer)
        assert (judgement.reason, judgement.found) == (reason, found)
        assert judgement.expected == ("accepted" if vector.rule is None else RIGHT)


def test_accepted_though_bad() -> None:
    judgement = judge(bad(), Answer(0, LINE.encode()))
    assert (judgement.reason, judgement.expected, judgement.found) == (Reason.ACCEPTED, RIGHT, "accepted")


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (b'{"class":"limit","rule":"EMOE-SEC-010"}', "refused as limit by EMOE-SEC-010"),
        (b'{"class":"limit"}', "refused as limit"),
    ],
)
def test_refused_though_good(output: bytes, found: str) -> None:
    judgement = judge(good(), Answer(1, output))
    assert (judgement.reason, judgement.expected, judgement.found) == (Reason.REFUSED, "accepted", found)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (b"", "exit status 1, and standard output that is empty"),
        (b"no", "exit status 1, and standard output that is not JSON at character 0: no"),
        (b"[1]", "exit status 1, and JSON without a class: [1]"),
    ],
)
def test_no_verdict_about_a_good_file(output: bytes, found: str) -> None:
    judgement = judge(good(), Answer(1, output))
    assert (judgement.reason, judgement.expected, judgement.found) == (Reason.NO_VERDICT, "accepted", found)


@pytest.mark.parametrize(
    ("output", "reason", "found"),
    [
        (b'{"class":"invalid","rule":"EMOE-SEC-006"}', Reason.RULE, "refused as invalid by EMOE-SEC-006"),
        (b'{"class":"invalid","rule":null}', Reason.RULE, "refused as invalid by null"),
        (b'{"class":"invalid","rule":["EMOE-SEC-012"]}', Reason.RULE, 'refused as invalid by ["EMOE-SEC-012"]'),
        (b'{"class":"invalid","rule":"\\u001b[2J"}', Reason.RULE, r"refused as invalid by \x1b[2J"),
        (b'{"class":"limit","rule":"EMOE-SEC-012"}', Reason.CLASS, "refused as limit by EMOE-SEC-012"),
        (b'{"class":"Invalid"}', Reason.CLASS, "refused as Invalid"),
        (b" \n", Reason.NO_VERDICT, "exit status 1, and standard output that is empty"),
        (b'{"rule":"EMOE-SEC-012"}', Reason.NO_VERDICT, 'JSON without a class: {"rule": "EMOE-SEC-012"}'),
        (b'{"class":7}', Reason.NO_VERDICT, 'JSON without a class: {"class": 7}'),
        (b'"invalid"', Reason.NO_VERDICT, 'JSON without a class: "invalid"'),
        (b'{"class":"invalid"}{}', Reason.NO_VERDICT, "is not JSON at character 19"),
        (b"refused", Reason.NO_VERDICT, "is not JSON at character 0: refused"),
        (b'{"class":"\xff"}', Reason.NO_VERDICT, r'is not UTF-8 at byte 10: {"class":"\xff"}'),
        (b"\xef\xbb\xbf{}", Reason.NO_VERDICT, "is not JSON at character 0"),
        (b'{"class":"invalid","at":NaN}', Reason.NO_VERDICT, "has NaN, which JSON has not"),
        (b'{"class":"invalid","at":1' + b"0" * 5000 + b"}", Reason.NO_VERDICT, "has an integer of thousands of digits"),
        (b"[" * 100_000, Reason.NO_VERDICT, "is nested too deep: [[["),
    ],
)
def test_a_wrong_refusal(output: bytes, reason: Reason, found: str) -> None:
    judgement = judge(bad(), Answer(1, output))
    assert (judgement.reason, judgement.expected) == (reason, RIGHT)
    assert found in judgement.found
    assert len(judgement.found) < 200


@pytest.mark.parametrize(
    ("output", "reason", "expected", "found"),
    [
        ("", Reason.NO_JSON, "one JSON object", "standard output that is empty"),
        ("yes", Reason.NO_JSON, "one JSON object", "standard output that is not JSON at character 0: yes"),
        ("{}", Reason.CONTENT, "a: [1, {", "a: nothing"),
        ("[]", Reason.CONTENT, "the whole: {", "the whole: []"),
        ('{"a":[1,{"b":"e"}]}', Reason.CONTENT, 'a[1].b: "é"', 'a[1].b: "e"'),
        ('{"a":[1.0,{"b":"é"}]}', Reason.CONTENT, "a[0]: 1", "a[0]: 1.0"),
        ('{"a":[true,{"b":"é"}]}', Reason.CONTENT, "a[0]: 1", "a[0]: true"),
        ('{"a":[1,{"b":"é"},3]}', Reason.CONTENT, "a: 2 items", "a: 3 items"),
        ('{"a":[1,{"b":"é"}],"more":null}', Reason.CONTENT, "more: nothing", "more: null"),
        ('{"a":[1, {"b":"é"}]}', Reason.SPELLING, "at byte 8: ", 'equal as JSON, but at byte 8: {"a":[1, {"b"'),
        ('{"a":[1,{"b":"\\u00e9"}]}', Reason.SPELLING, "at byte 14: ", "equal as JSON, but at byte 14: "),
        (f"{LINE}\n\n", Reason.SPELLING, "at byte 20: the end", r"equal as JSON, but at byte 20: "),
        (f"{LINE}\r\n", Reason.SPELLING, "at byte 20: the end", r"\r"),
    ],
)
def test_a_wrong_acceptance(output: str, reason: Reason, expected: str, found: str) -> None:
    judgement = judge(good(), Answer(0, output.encode()))
    assert judgement.reason is reason
    assert judgement.expected.startswith(expected)
    assert found in judgement.found


def test_the_first_difference_is_told() -> None:
    expected = {"a": [{"x": 1}, {"x": 2, "y": 3}], "b": 4}
    found: dict[str, Any] = json.loads(json.dumps(expected))
    assert first_difference(expected, found) is None
    found["b"] = 5
    assert first_difference(expected, found) == ("b", "4", "5")
    found["a"][1]["y"] = None
    assert first_difference(expected, found) == ("a[1].y", "3", "null")
    found["a"].pop()
    assert first_difference(expected, found) == ("a", "2 items", "1 items")
    found["a"][0]["x"] = "1" * 1000
    place, _, value = first_difference(expected, found) or ("", "", "")
    assert (place, len(value)) == ("a[0].x", 100)
    assert value.startswith('"111')


def test_reasons_have_names_of_their_own() -> None:
    assert len({reason.slug for reason in Reason}) == len(Reason) == len({reason.text for reason in Reason})
