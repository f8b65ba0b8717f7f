"""Building the programs compared with, where no network and no compiler is needed."""

from pathlib import Path

import pytest

from bench.peer_programs import LLAMA, UnavailableError, bench_program


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder programs are found in, empty; the sources of llama.cpp are there already."""
    monkeypatch.chdir(tmp_path)
    (LLAMA.folder / "sources").mkdir(parents=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    return tools


@pytest.mark.usefixtures("tools")
def test_what_was_built_is_not_built_again() -> None:
    program = LLAMA.folder / "build" / "bin" / "llama-bench"
    program.parent.mkdir(parents=True)
    program.touch()
    assert bench_program(LLAMA) == program.resolve()


@pytest.mark.usefixtures("tools")
def test_a_missing_tool_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"^llama\.cpp: cmake is not installed$"):
        bench_program(LLAMA)


def test_a_build_that_fails_says_where_its_output_is(tools: Path) -> None:
    cmake = tools / "cmake"
    cmake.write_text("#!/bin/sh\necho no compiler\nexit 3\n")
    cmake.chmod(0o755)
    log = LLAMA.folder / "log.txt"
    with pytest.raises(UnavailableError, match=rf"^llama\.cpp: cmake .* ended with 3, see {log}$"):
        bench_program(LLAMA)
    assert log.read_text() == "no compiler\n"
