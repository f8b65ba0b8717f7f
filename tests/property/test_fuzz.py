"""A short, seeded search: whatever bytes a reader is given, it answers with a value or with one of its own errors."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from estream_spec.errors import InvalidError
from fuzz.engine import Fuzzer, Watchdog, execute
from fuzz.spans import document
from fuzz.targets import TARGETS, Target

COUNT = 3000


def search(folder: Path) -> Fuzzer:
    fuzzer = Fuzzer("1", folder)
    fuzzer.run(lambda number: number < COUNT)
    return fuzzer


def test_a_search_finds_refusals_of_every_kind_and_nothing_else(tmp_path: Path) -> None:
    report = search(tmp_path).report
    assert report.faults == []
    assert list(tmp_path.iterdir()) == []
    assert report.executions > COUNT
    assert all(tally.answers["value"] for tally in report.tallies.values())
    answers = set().union(*(tally.answers for tally in report.tallies.values()))
    assert answers >= {"malformed", "invalid", "integrity", "unsupported", "limit", "untrusted"}
    assert len(set().union(*(tally.rules for tally in report.tallies.values()))) > 50


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_a_search_begins_with_has_its_digests_right(target: Target) -> None:
    assert execute(target, target.seeds()[0], Watchdog())[1:] == ("value", "value", None)
    for data in target.seeds()[:4]:
        assert execute(target, data, Watchdog())[3] is None
        assert target.mend(data) == data


def test_a_search_reports_what_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: bytes) -> None:
        if data.startswith(b"ab"):
            raise InvalidError("refused", path="a[3]")
        if data.startswith(b"a"):
            raise KeyError(data)

    def append(data: bytes, random: object, other: bytes) -> bytes:
        return data[:1] + b"c"

    broken = Target("broken", 1.0, run, lambda: [b"b", b"ab"], (append,), bytes)
    monkeypatch.setattr("fuzz.engine.TARGETS", (broken,))
    fuzzer = Fuzzer("7", tmp_path)
    report = fuzzer.run(lambda number: number < 30)
    found = tmp_path / f"broken-{sha256(b'ac').hexdigest()[:12]}.input"
    assert found.read_bytes() == b"ac"
    assert report.faults[0].startswith(f"{found} (seed 7): KeyError at test_fuzz.py:")
    assert report.tallies["broken"].distinct >= {"value", "invalid None a[]"}
    assert execute(broken, b"ac", Watchdog())[1] == "fault"


def test_a_run_that_does_not_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: bytes) -> None:
        while data:
            pass

    monkeypatch.setattr("fuzz.engine.HANG_SECONDS", 0.1)
    endless = Target("endless", 1.0, run, list, (), bytes)
    with Watchdog() as watchdog:
        assert execute(endless, b"", watchdog)[3] is None
        assert (execute(endless, b"a", watchdog)[3] or "").startswith("Hang at ")


def test_the_values_of_a_document_are_found() -> None:
    data = b"\x82\xa1a\x92\x01\xcd\x01\x00\xa1b\xc4\x02xy"
    places = [(each.start, each.end, each.parent, each.number) for each in document(data)]
    assert places == [
        (0, 14, -1, 0),
        (1, 3, 0, 0),
        (3, 8, 0, 1),
        (4, 5, 2, 0),
        (5, 8, 2, 1),
        (8, 10, 0, 2),
        (10, 14, 0, 3),
    ]
    assert [data[each.start : each.end] for each in document(data[:6])][-1] == b"\xcd"
