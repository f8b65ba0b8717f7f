"""The simulation of APEX: its published figures, and what is said where they are not met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import apex_simulation as apex
from estream_spec.decode_model import TokenTime


def tokens() -> dict[str, TokenTime]:
    return {way.name: apex.token_of(apex.SHAPES[apex.PAPER], way) for way in apex.WAYS}


def test_published_latencies_are_met_but_for_the_one_misfit() -> None:
    words = [word for word, _ in apex.verdicts(tokens())]
    assert words == ["ok", "misfit", "ok", "ok", "ok"]


def test_a_figure_that_is_missed_without_a_reason_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = tuple(replace(way, reason="") for way in apex.WAYS)
    monkeypatch.setattr(apex, "WAYS", ways)
    assert [word for word, _ in apex.verdicts(tokens())] == ["ok", "FAIL", "ok", "ok", "ok"]
    slower = tokens() | {"APEX exact": replace(tokens()["no prefetch"], time_s=1.0)}
    assert {word for word, _ in apex.verdicts(slower)} == {"FAIL"}


def test_link_carries_what_the_paper_says() -> None:
    """48 mJ of the link become 56: 9.3 experts a layer and not 8."""
    found = tokens()
    assert found["APEX exact"].read_bytes / found["no prefetch"].read_bytes == pytest.approx(56 / 48, rel=0.03)


def test_both_regimes_are_drawn() -> None:
    plans = list(apex.flash_plans())
    drawn = apex.picture(tokens(), plans)
    assert "Granite-3.1-3B over a link of 256 GB/s" in drawn
    assert "qwen3-30b-a3b, 4 bits, from ufs-4.1 flash, 4 GiB of memory" in drawn
