from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.table import Table

from estream_loader.console import console, run_command
from estream_spec.errors import LinkError

PROGRAM = "from estream_packer.cli import main; main()"


def ended(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    @click.command()
    def command() -> None:
        raise error

    code = run_command(command, "program", [])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (LinkError("no such thing", path="a\nb\x1b[0m"), 1, "program: error: no such thing (at a\\nb\\x1b[0m)\n"),
        (MemoryError(), 1, "program: error: out of memory\nprogram: hint: give it more, or less to do at a time\n"),
        (KeyboardInterrupt(), 130, "program: error: interrupted\n"),
        (OSError(28, "No space left on device", "x"), 1, "program: error: no space left on device (at x)\n"),
    ],
)
def test_how_a_command_ends(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, printed = ended(error, capsys)
    assert (found, printed.lstrip()) == (code, text)  # after ^C comes a new line


def test_too_many_threads_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ended(RuntimeError("can't start new thread"), capsys)
    assert code == 1
    assert text.startswith("program: error: no more threads can be started\n")


def test_a_fault_in_the_program_is_not_hidden() -> None:
    @click.command()
    def command() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command(command, "program", [])


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """A program whose output nobody takes does its work · exit 0, no traceback."""
    target = tmp_path / "sample"
    found = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" sample "$2" {closed}', sys.executable, PROGRAM, str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, "Traceback" in found.stderr) == (0, False)
    assert (target / "model.safetensors").stat().st_size > 12_000_000


def test_no_verb_shows_the_help_and_is_a_usage_error() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("Usage: ")
    assert "error" not in found.stderr


def test_no_cell_is_broken_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = Table()
    table.add_row("a name of more than twenty columns", "and another one")
    console().print(table)
    assert "a name of more than twenty columns" in capsys.readouterr().out
