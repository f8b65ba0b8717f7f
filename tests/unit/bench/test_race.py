"""A race of programs that only say how long they took."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench import race
from bench.peer_programs import UnavailableError


def entrant(name: str, found: Any, model: Path) -> race.Entrant:
    """A program that prints its figures; warm, for which no cgroup is needed."""
    return race.Entrant(name, f"{name} 1.0", "as it is", model, lambda tokens: ["echo", json.dumps(found)], warm=True)


@pytest.fixture
def raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    model = tmp_path / "model"
    model.touch()

    def gone() -> list[race.Entrant]:
        raise UnavailableError("ik_llama.cpp: cmake is not installed")

    monkeypatch.setattr(race, "ours", lambda arena_bytes, backend: entrant(race.OURS, {"prompt_s": 1.5}, model))
    monkeypatch.setattr(race, "llama", lambda: [entrant("llama.cpp", [{"avg_ns": 6e9}], model)])
    monkeypatch.setattr(race, "ik", gone)
    monkeypatch.setattr(race, "readahead", lambda model: "128 KiB")
    monkeypatch.chdir(tmp_path)
    options = ["--tokens", "8", "--tokens", "4", "--rounds", "2", "--json", "found.json", "--picture", "found.svg"]
    return CliRunner().invoke(race.main, options, catch_exceptions=False)


def test_a_program_that_cannot_be_had_is_left_out_and_named(raced: Result) -> None:
    assert raced.exit_code == 0
    assert raced.output.startswith("left out: ik_llama.cpp: cmake is not installed\n")


def test_programs_take_turns_and_ours_is_compared_with_each(raced: Result) -> None:
    runs = json.loads(Path("found.json").read_text())["runs"]
    turns = [(each["tokens"], each["name"], each["seconds"]) for each in runs]
    both = [(tokens, *found) for tokens in (8, 8, 4, 4) for found in ((race.OURS, 1.5), ("llama.cpp", 6.0))]
    assert turns == both
    rows = [line.split("│")[1:-1] for line in raced.output.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in (*row[:3], row[-1])] for row in rows] == [
        ["4 tokens", race.OURS, "1.50", ""],
        ["4 tokens", "llama.cpp", "6.00", "0.25"],
        ["8 tokens", race.OURS, "1.50", ""],
        ["8 tokens", "llama.cpp", "6.00", "0.25"],
    ]


@pytest.mark.usefixtures("raced")
def test_the_picture_has_a_bar_for_each() -> None:
    assert Path("found.svg").read_text().count('class="bar"') == 2


def test_what_was_measured_under_which_conditions_is_said(raced: Result) -> None:
    assert "readahead: 128 KiB" in raced.output
    assert "llama.cpp: llama.cpp 1.0; as it is" in raced.output
