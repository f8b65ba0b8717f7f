"""`estream-run` on the simulated NPU, as a user sees it, and everything else where its library is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Run
from cli.test_run import command_line
from estream_loader import open_package
from estream_runtime import Session
from fixtures.packed import PackageFactory

PROMPT = "the sea"
OPTIONS = ["--prompt", PROMPT, "--max-new-tokens", "2"]

WITHOUT_LIBRARY = """
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(cls, name, *about):
    return None if name.partition(".")[0] == "onnxruntime_qnn" else found(name, *about)
PathFinder.find_spec = classmethod(find_spec)

from estream_loader.console import run_command
from estream_packer import cli as packer
from estream_runtime import cli as runtime
groups = {packer.PROGRAM: packer.group, runtime.PROGRAM: runtime.group}
for line in sys.stdin:
    program, *arguments = line.split()
    sys.stderr.write(f"{run_command(groups[program], program, arguments)} {line}")
    sys.stderr.flush()
"""


@pytest.fixture(scope="module")
def text(compiled_package: Path) -> str:
    """What the package makes of the prompt."""
    with open_package(compiled_package) as package, Session(package, "htp") as session:
        return package.tokenizer.decode(list(session.generate(package.tokenizer.encode(PROMPT).ids, 2)))


def test_standard_output_has_the_text_and_nothing_else(compiled_package: Path, text: str) -> None:
    """To the end of the process: the vendor's libraries print to it as they like."""
    command = command_line("generate", compiled_package, *OPTIONS, "--backend", "htp")
    found = subprocess.run(
        command, capture_output=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))}, check=False
    )
    assert (found.returncode, found.stdout.decode()) == (0, f"{text}\n")
    first, second, third = found.stderr.decode().splitlines()
    assert first.startswith(f"{len(PROMPT) - 2} tokens in, 2 out; ")
    assert second.startswith("htp (sm8650, simulated), arena ")
    assert second.endswith("% of rows computed for none")
    assert third.startswith("decoding: ")


def test_the_chip_may_be_named(run: Run, compiled_package: Path, text: str) -> None:
    found = run("generate", compiled_package, *OPTIONS, "--backend", "htp:sm8650", "--integrity", "full", "--json")
    assert (found.code, found.err) == (0, "")
    result = json.loads(found.out)
    stats = result["stats"]
    assert (result["text"], stats["backend"], stats["notice"]) == (text, "htp", None)
    assert 0 < stats["padded_rows"] < stats["tile_rows"]


@pytest.mark.parametrize(
    ("backend", "message", "hint"),
    [
        ("htp:nonsense", "unknown chip 'nonsense'", "known are sm8450, sm8550, sm8650"),
        ("htp:", "unknown chip ''", "known are sm8450, sm8550, sm8650"),
        ("htp:sm8750", "the device is Snapdragon 8 Elite (sm8750, Hexagon v79)", "--target htp:sm8750"),
    ],
)
def test_what_cannot_run_is_refused(backend: str, message: str, hint: str, run: Run, compiled_package: Path) -> None:
    found = run("generate", compiled_package, *OPTIONS, "--backend", backend)
    assert (found.code, found.out) == (1, "")
    error, told = found.err.splitlines()
    assert error.startswith("estream-run: error: ")
    assert message in error
    assert hint in told


@pytest.mark.parametrize("backend", ["npu", "htpsm8650", "portable:sm8650"])
def test_what_is_no_backend_is_a_wrong_use(backend: str, run: Run, compiled_package: Path) -> None:
    found = run("generate", compiled_package, *OPTIONS, "--backend", backend)
    assert (found.code, found.out) == (2, "")
    assert f"{backend!r} is not one of 'native', 'portable', 'reference', 'htp'" in found.err


def test_a_package_without_binaries_is_refused(run: Run, packed: PackageFactory) -> None:
    found = run("generate", packed(), *OPTIONS, "--backend", "htp")
    assert (found.code, found.out) == (1, "")
    error, hint = found.err.splitlines()
    assert error.startswith("estream-run: error: the package has no binary for any NPU")
    assert f"estream-pack compile {packed()} --target htp:sm8650" in hint


def test_without_the_vendor_s_library_all_else_works(compiled_package: Path) -> None:
    options = "--prompt sea --max-new-tokens 1"
    lines = [
        f"estream-run generate {compiled_package} {options}",
        f"estream-run generate {compiled_package} {options} --backend portable",
        f"estream-run generate {compiled_package} {options} --backend reference",
        f"estream-run generate {compiled_package} {options} --backend htp",
        f"estream-run generate {compiled_package} {options} --backend htp:sm8650",
        f"estream-pack inspect {compiled_package}",
        f"estream-pack validate {compiled_package}",
        f"estream-pack verify {compiled_package}",
        f"estream-pack match {compiled_package} --device sm8650",
    ]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY],
        input="\n".join(lines) + "\n",
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    told = ran.stderr.splitlines()
    assert ran.returncode == 0, ran.stderr
    for line in lines:
        assert f"{int('--backend htp' in line)} {line}" in told, ran.stderr
    errors = [each for each in told if "error" in each or "hint" in each]
    assert (
        errors
        == [
            "estream-run: error: backend htp needs onnxruntime-qnn, which is not installed",
            "estream-run: hint: pip install 'estream-pack[npu]'",
        ]
        * 2
    )
