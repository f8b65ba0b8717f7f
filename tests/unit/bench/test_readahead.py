"""Changing what the kernel reads ahead, in a file that stands for the setting."""

import os
import signal
from pathlib import Path

import pytest

from bench import readahead


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "read_ahead_kb"
    path.write_text("8192\n")
    monkeypatch.setattr(readahead, "_setting", lambda file: path)
    return path


def test_it_is_put_back(setting: Path) -> None:
    with readahead.changed(setting, 128):
        assert readahead.readahead(setting) == "128 KiB"
    assert readahead.readahead(setting) == "8192 KiB"


def test_it_is_left_alone(setting: Path) -> None:
    setting.chmod(0o444)
    with readahead.changed(setting, None):
        assert readahead.readahead(setting) == "8192 KiB"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_is_put_back_when_the_process_is_told_to_end(number: signal.Signals, setting: Path) -> None:
    before = signal.getsignal(number)

    def told_to_end() -> None:
        with readahead.changed(setting, 128):
            os.kill(os.getpid(), number)
            signal.pause()

    with pytest.raises(SystemExit) as ended:
        told_to_end()
    assert ended.value.code == 128 + number
    assert readahead.readahead(setting) == "8192 KiB"
    assert signal.getsignal(number) is before
