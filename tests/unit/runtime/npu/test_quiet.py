"""Standard output while the SDK's libraries are at work, which print to it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from estream_runtime.npu.qnn import quiet

SCRIPT = """
import ctypes, os, sys
from estream_runtime.npu.qnn import quiet
{before}
numbers = sorted(os.listdir("/proc/self/fd"))
for _ in range(3):
    with quiet():
        ctypes.CDLL(None).puts(b"from a library")
        os.write(1, b"from a library")
assert sorted(os.listdir("/proc/self/fd")) == numbers
sys.stderr.write("fine")
"""


def run(before: str) -> tuple[int, str, str]:
    script = SCRIPT.format(before=before)
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout, ran.stderr


def test_what_libraries_print_is_dropped_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")  # noqa: T201
    os.write(1, b"as well\n")
    with quiet():
        ctypes.CDLL(None).puts(b"from a library")
        os.write(1, b"from a library\n")
    print("after")  # noqa: T201
    assert sorted(capfd.readouterr().out.splitlines()) == ["after", "as well", "before"]


def test_output_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="raised"), quiet():
        raise ValueError("raised")
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"


@pytest.mark.parametrize(
    "before",
    [
        "os.close(1)",
        "os.close(0); os.close(1)",
        "sys.stdout = None",
        "sys.stdout = None; os.close(1)",
        "sys.stdout.close()",
        "sys.stdout.write('lost'); os.close(1)",
    ],
)
def test_output_that_is_closed_stays_so(before: str) -> None:
    code, out, err = run(before)
    assert out == ""
    assert err.startswith("fine"), err
    assert code in (0, 120)  # the second where Python could not write at its end what was left


def test_a_file_that_took_the_place_of_output_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = f"os.close(1); assert os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY) == 1"
    assert run(before)[2] == "fine"
    assert path.read_bytes() == b""
