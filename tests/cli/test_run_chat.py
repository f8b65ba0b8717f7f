"""`estream-run chat`, as a user sees it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Run
from estream_loader import open_package
from estream_runtime import Session
from estream_runtime.conversation import Conversation
from fixtures.chats import CONTEXT, chat_package
from fixtures.packed import PackageFactory

Say = Callable[[bytes], None]
PROMPT = b"> "


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that can chat: read only."""
    return chat_package(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """`say(lines)`: what comes from standard input, which is no terminal."""
    return lambda lines: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))


def test_each_line_is_a_turn(run: Run, say: Say, package: Path) -> None:
    with open_package(package) as opened, Session(opened) as session:
        conversation = Conversation(session, "s")
        expected = [conversation.answer(line, max_new_tokens=4).text for line in ("hi", "sö")]
    say("hi\n\n  \nsö".encode())
    found = run("chat", package, "--system", "s", "--max-new-tokens", "4")
    assert (found.code, found.out) == (0, "".join(f"{text}\n" for text in expected))
    assert set(found.err.splitlines()) == {"(the answer was cut off; --max-new-tokens allows longer ones)"}


def test_each_answer_is_a_line_of_json(run: Run, say: Say, package: Path) -> None:
    say(b"hi\r\n/new\nhi\n")
    found = run("chat", package, "--max-new-tokens", "4", "--temperature", "0.8", "--seed", "3", "--json")
    assert (found.code, found.err) == (0, "")
    first, second = map(json.loads, found.out.splitlines())
    assert first["token_ids"] == second["token_ids"]
    assert (len(first["token_ids"]), first["ended"]) == (4, "length")
    assert first["stats"]["package_bytes"] == package.stat().st_size
    assert first["stats"]["prompt_tokens"] == second["stats"]["prompt_tokens"]


def test_a_turn_that_is_refused_ends_no_conversation(run: Run, say: Say, package: Path) -> None:
    say(b"hi\n" + b"x" * CONTEXT + b"\na\xff\nhi\n")
    found = run("chat", package, "--max-new-tokens", "2", "--json")
    answered, long, broken, again = map(json.loads, found.out.splitlines())
    assert (found.code, found.err) == (1, "")
    assert f"tokens, the context holds {CONTEXT}" in long["error"]
    assert "begin anew" in long["hint"]
    assert broken["error"].startswith("text is not valid UTF-8")
    assert again["stats"]["prompt_tokens"] > answered["stats"]["prompt_tokens"]
    say(b"x" * CONTEXT + b"\n")
    found = run("chat", package)
    error, hint = found.err.splitlines()
    assert (found.code, found.out) == (1, "")
    assert error.startswith("estream-run: error: the conversation has ")
    assert hint == "estream-run: hint: say it in fewer words, or begin anew"


def test_a_full_context_is_told(run: Run, say: Say, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_runtime.sampling.Sampler.choose", lambda *_: 98)
    say(b"hi\n")
    found = run("chat", package)
    assert found.code == 0
    assert found.out == "a" * (len(found.out) - 1) + "\n"
    assert found.err == "(the context is full; /new begins anew)\n"


def test_no_input_is_no_conversation(run: Run, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nothing in (io.TextIOWrapper(io.BytesIO()), None):
        monkeypatch.setattr("sys.stdin", nothing)
        assert run("chat", package) == (0, "", "")


def test_a_package_that_cannot_chat(run: Run, say: Say, packed: PackageFactory) -> None:
    say(b"hi\n")
    found = run("chat", packed())
    error, hint = found.err.splitlines()
    assert (found.code, found.out) == (1, "")
    assert error.startswith("estream-run: error: the package has no chat template (at ")
    assert "estream-run generate" in hint


def test_a_package_without_a_tokenizer(run: Run, say: Say, tmp_path: Path) -> None:
    say(b"hi\n")
    found = run("chat", chat_package(tmp_path, tokenizer=False))
    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("estream-run: error: the package has no tokenizer (at ")


class Terminal:
    """The program at a terminal."""

    def __init__(self, *arguments: str | Path):
        self._host, guest = pty.openpty()
        line = [sys.executable, "-c", "from estream_runtime.cli import main; main()", *map(str, arguments)]
        self.process = subprocess.Popen(
            line, stdin=guest, stdout=guest, stderr=guest, start_new_session=True, env={**os.environ, "TERM": "dumb"}
        )
        os.close(guest)

    def await_text(self, text: bytes) -> bytes:
        """Read until the text was written."""
        seen = b""
        while not seen.endswith(text):
            seen += os.read(self._host, 1)
        return seen

    def type(self, keys: bytes) -> None:
        os.write(self._host, keys)

    def end(self) -> tuple[int, bytes]:
        """The exit code, and what was written until then."""
        seen = b""
        try:
            while piece := os.read(self._host, 4096):
                seen += piece
        except OSError:  # how the end of a terminal shows
            pass
        os.close(self._host)
        return self.process.wait(), seen


def test_at_a_terminal_a_conversation_ends_with_control_d(package: Path) -> None:
    terminal = Terminal("chat", package, "--max-new-tokens", "3")
    terminal.await_text(PROMPT)
    terminal.type(b"hi\n")
    assert b"cut off" in terminal.await_text(PROMPT)
    terminal.type(b"x" * CONTEXT + b"\n")
    assert b"the context holds" in terminal.await_text(PROMPT)
    terminal.type(b"\x04")
    assert terminal.end()[0] == 0
