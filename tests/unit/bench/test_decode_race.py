"""A race of programs that only say how fast they decode."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench import decode_race
from bench.bounded import Finished
from bench.decode_race import CONFIGURED, WARM, Entrant
from bench.peer_programs import UnavailableError
from bench.race import OURS

GIB = 1 << 30


def entrant(setting: str, name: str, rate: float, model: Path, readahead: int | None = None) -> Entrant:
    """A program that prints its figure."""
    return Entrant(
        setting=setting,
        name=name,
        release=f"{name} 1.0",
        how="as it is",
        model=model,
        command=["echo", json.dumps(rate)],
        rate=float,
        readahead=readahead,
    )


@pytest.fixture
def raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Result]:
    """`raced(rate)`: what comes of a race in which ours decodes so many tokens a second in little memory."""
    model = tmp_path / "model"
    model.touch()
    set_to: list[int | None] = []

    def llama(prompt: int, tokens: int, readaheads: Sequence[int | None]) -> list[Entrant]:
        assert (prompt, tokens, [*readaheads]) == (64, 8, [None, 64])
        little = entrant(CONFIGURED, "llama.cpp", 0.5, model)
        return [entrant(WARM, "llama.cpp", 40, model), little, entrant(f"{CONFIGURED}, 64", "llama.cpp", 2, model, 64)]

    def gone(*arguments: Any) -> list[Entrant]:
        raise UnavailableError("ik_llama.cpp: cmake is not installed")

    def bounded(command: list[str], limit: int | None) -> Finished:
        return Finished(command[1], 1.0, 1.0, GIB, None if limit is None else limit)

    class Changed:
        def __init__(self, model: Path, kib: int | None):
            set_to.append(kib)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    def race(rate: float) -> Result:
        own = [entrant(CONFIGURED, OURS, rate, model), entrant(WARM, OURS, 36, model)]
        monkeypatch.setattr(decode_race, "ours", lambda *arguments: own)
        set_to.clear()
        options = ["--tokens", "8", "--rounds", "2", "--readahead", "64", "--json", "found.json"]
        result = CliRunner().invoke(decode_race.main, options, catch_exceptions=False)
        assert set_to == [None, None, None, None, 64] * 2
        return result

    monkeypatch.setattr(decode_race, "llama", llama)
    monkeypatch.setattr(decode_race, "ik", gone)
    monkeypatch.setattr(decode_race, "run_bounded", bounded)
    monkeypatch.setattr(decode_race, "empty_page_cache", lambda model: None)
    monkeypatch.setattr(decode_race, "changed", Changed)
    monkeypatch.setattr(decode_race, "can_change", lambda model: True)
    monkeypatch.chdir(tmp_path)
    return race


def test_all_targets_are_met(raced: Callable[[float], Result]) -> None:
    result = raced(4)
    assert result.exit_code == 0
    assert result.output.startswith("left out: ik_llama.cpp: cmake is not installed\n")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    compared = {(row[0], row[1]): (row[2], row[5], row[6]) for row in rows}
    assert compared == {
        (WARM, OURS): ("36.00", "", ""),
        (WARM, "llama.cpp"): ("40.00", "", "0.90"),
        (CONFIGURED, OURS): ("4.00", "1024", ""),
        (CONFIGURED, "llama.cpp"): ("0.50", "1024", "8.00"),
        (f"{CONFIGURED}, 64", "llama.cpp"): ("2.00", "1024", "2.00"),
    }
    assert result.output.count("\nmet: ") == 3
    assert [each["ratio"] for each in json.loads(Path("found.json").read_text())["targets"]] == [8, 2, 0.9]


def test_a_target_is_missed(raced: Callable[[float], Result]) -> None:
    result = raced(3.9)
    assert result.exit_code == 1
    assert result.output.count("\nMISSED: ") == 1
    assert "MISSED: little memory, llama.cpp as the machine is configured: 7.80 times, at least 8\n" in result.output
