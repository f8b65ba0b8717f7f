"""Graphs for NPUs, put into a package on the command line."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cli.conftest import Pack
from estream_loader import open_package
from estream_loader.progress import Progress
from estream_packer.editing import Changes, edit_package
from estream_packer.htp import tiles
from estream_packer.htp.compiler import Compiled, Tile
from estream_packer.htp.local import LocalCompiler
from estream_packer.htp.proof import Proof
from estream_packer.signing import sign, signature_changes
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.chips import Chip
from estream_spec.constants import SectionFlag
from estream_spec.errors import PackError
from fixtures.made import GRAPH, made_for
from fixtures.npu import FEWEST
from fixtures.packages import Draft, Section
from fixtures.readers import loader_answer, second_answer

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
GEN_3 = "Snapdragon 8 Gen 3 (sm8650, Hexagon v75)"
ELITE = "Snapdragon 8 Elite (sm8750, Hexagon v79)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(Draft().seal())
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler and a proof that take no time, for what is about neither."""

    def compiled(self: LocalCompiler, tiles: Sequence[Tile], chip: Chip, progress: Progress) -> Compiled:
        return made_for(chip.name).compiled

    monkeypatch.setattr(LocalCompiler, "compile", compiled)
    monkeypatch.setattr("estream_packer.htp.targets.prove_binary", lambda *_: [Proof(GRAPH, "attended", 1e-3)])


@pytest.fixture
def fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tile of each role alone."""
    for role, tokens in FEWEST.items():
        monkeypatch.setitem(tiles.TOKENS, role, tokens)


def identity(path: Path) -> tuple[bytes, bytes]:
    with open_package(path) as package:
        return package.file_id, package.manifest.content_id


def chips(path: Path) -> list[int]:
    with open_package(path) as package:
        return [binary.soc_model for binary in package.manifest.binaries]


def test_compiled_and_proven(package: Path, pack: Pack, fewest: None) -> None:
    """The real compiler and the real simulator; whatever reads the package accepts it."""
    old_file, old_content = identity(package)
    status, out, err = pack("compile", package, "--target", "htp:8-gen-3")
    assert (status, err) == (0, "")
    with open_package(package) as opened:
        [binary] = opened.manifest.binaries
        length = len(opened.binary(binary))
    made, proven = out.splitlines()
    assert made == f"compiled for {GEN_3}: 5 graphs, {length:,} bytes"
    made_by = rf"  onnxruntime-qnn [\d.]+, SDK {re.escape(installed_sdk())}"
    assert re.fullmatch(rf"{made_by}; in the simulator off by at most [1-9]\.\de-03", proven)
    file_id, content_id = identity(package)
    assert file_id != old_file
    assert content_id == old_content
    assert loader_answer(package) == second_answer(package)
    assert loader_answer(package)[0] == "accepted"
    assert pack("validate", package).out == "valid structure; weights are not read\n"


def test_several_targets(package: Path, pack: Pack, quick: None) -> None:
    status, out, err = pack("compile", package, "--target", "htp:sm8650", "--target", "htp:v79")
    assert (status, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()[::2]] == [
        f"compiled for {GEN_3}",
        f"compiled for {ELITE}",
    ]
    assert chips(package) == [57, 69]


def test_several_calls_come_to_the_same_as_one(package: Path, pack: Pack, quick: None) -> None:
    other = package.with_name("other.emoe")
    other.write_bytes(package.read_bytes())
    assert pack("compile", package, "--target", "htp:sm8650", "--target", "htp:sm8750").code == 0
    for target in ("htp:sm8650", "htp:sm8750"):
        assert pack("compile", other, "--target", target).code == 0
    with open_package(package) as one, open_package(other) as two:
        assert one.manifest == two.manifest


def test_a_chip_under_two_names_is_compiled_for_once(package: Path, pack: Pack, quick: None) -> None:
    found = pack("compile", package, "--target", "htp:sm8650", "--target", "htp:V75", "--target", "htp:soc57")
    assert found.out.count("compiled for") == 1
    assert chips(package) == [57]


def test_taking_out(package: Path, pack: Pack, quick: None) -> None:
    pack("compile", package, "--target", "htp:sm8650", "--target", "htp:sm8750")
    status, out, err = pack("compile", package, "--target", "htp:v75", "--remove")
    assert (status, out, err) == (0, f"removed the binary for {GEN_3}\n", "")
    assert chips(package) == [69]
    before = package.read_bytes()
    status, out, err = pack("compile", package, "--target", "htp:v75", "--remove")
    assert (status, out) == (1, "")
    assert f"error: no binary for {GEN_3} (at {package})\n" in err
    assert f"hint: there are binaries for {ELITE}\n" in err
    assert package.read_bytes() == before
    status, _, err = pack("compile", package, "--target", "htp:v79", "--remove", "--compiler", "aihub")
    assert status == 2
    assert "--remove needs no --compiler" in err
    assert pack("compile", package, "--target", "htp:v79", "--remove").code == 0
    assert chips(package) == []


@pytest.mark.parametrize("arguments", [(), ("--remove",)])
def test_signatures_are_taken_out_and_that_is_told(
    package: Path, pack: Pack, quick: None, arguments: tuple[str, ...]
) -> None:
    pack("compile", package, "--target", "htp:sm8650")
    edit_package(package, lambda opened: signature_changes(opened, sign(opened.file_id, KEY, 3)))
    file_id, content_id = identity(package)
    target = "htp:sm8650" if arguments else "htp:sm8750"
    status, _, err = pack("compile", package, "--target", target, *arguments)
    told = "with security counter 3 taken out, sign again with --counter 3 or more"
    assert status == 0
    assert re.fullmatch(rf"notice: signature by [0-9a-f]{{64}} {told}\n", err)
    assert identity(package)[0] != file_id
    assert identity(package)[1] == content_id
    with open_package(package) as opened:
        assert opened.signatures() == []


def test_signatures_stay_where_nothing_changes(package: Path, pack: Pack, quick: None) -> None:
    pack("compile", package, "--target", "htp:sm8650")
    edit_package(package, lambda opened: signature_changes(opened, sign(opened.file_id, KEY, 3)))
    before = package.read_bytes()
    status, out, err = pack("compile", package, "--target", "htp:sm8650")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"already in it, nothing changes in {package}"
    assert package.read_bytes() == before


def test_unknown_sections_that_are_dropped_are_told(package: Path, pack: Pack, quick: None) -> None:
    draft = Draft()
    draft.sections.append(Section(99, b"kept", id=1, flags=SectionFlag.SAFE_TO_COPY))
    draft.sections.append(Section(99, b"dropped", id=2, flags=0))
    package.write_bytes(draft.seal())
    status, _, err = pack("compile", package, "--target", "htp:sm8650")
    assert (status, err) == (
        0,
        "notice: section of unknown type 99 and id 2 taken out, it is not flagged as safe to copy\n",
    )
    with open_package(package) as opened:
        assert [entry.id for entry in opened.container.entries if entry.type == 99] == [1]


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("sm8650", "target is 'sm8650', expected htp and a chip, such as htp:sm8650", "did you mean htp:sm8650?"),
        ("htp", "target is 'htp', expected htp and a chip, such as htp:sm8650", None),
        ("cpu:x", "target is 'cpu:x', expected htp and a chip, such as htp:sm8650", None),
        ("htp:", "target is 'htp:', expected htp and a chip, such as htp:sm8650", None),
        (
            "htp:foo",
            "unknown chip 'foo'",
            "known are sm8450, sm8550, sm8650, sm8750, sm8850, x1e80100; others by number",
        ),
        ("htp:soc60-v68", "chip 'soc60-v68' cannot be compiled for, expected Hexagon v69 or later", None),
    ],
)
def test_targets_that_are_none(package: Path, pack: Pack, target: str, message: str, hint: str | None) -> None:
    before = package.read_bytes()
    status, out, err = pack("compile", package, "--target", "htp:sm8650", "--target", target)
    assert (status, out) == (1, "")
    assert f"error: {message}" in err
    assert (f"hint: {hint}" in err) if hint else ("hint" not in err)
    assert package.read_bytes() == before


def test_a_target_is_needed(package: Path, pack: Pack) -> None:
    status, _, err = pack("compile", package)
    assert status == 2
    assert "--target" in err


def test_a_graph_that_is_off_leaves_the_package_alone(
    package: Path, pack: Pack, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = package.read_bytes()

    def off(*_: object) -> None:
        raise PackError("output 'y' is off", path="graph expert_0 for sm8650")

    monkeypatch.setattr("estream_packer.htp.targets.prove_binary", off)
    status, out, err = pack("compile", package, "--target", "htp:sm8650")
    assert (status, out) == (1, "")
    assert err == "estream-pack: error: output 'y' is off (at graph expert_0 for sm8650)\n"
    assert package.read_bytes() == before


def test_what_is_no_package(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" * 9999)
    for name, said in ((path, "EMOE-SUP-001"), (tmp_path / "absent", "no such file"), (tmp_path, "is a directory")):
        status, out, err = pack("compile", name, "--target", "htp:sm8650")
        assert (status, out) == (1, "")
        assert said in err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compiled(
    package: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def compiled(*_: object) -> Compiled:
        raise AssertionError("compiled in vain")

    monkeypatch.setattr(LocalCompiler, "compile", compiled)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        status, out, err = pack("compile", package, "--target", "htp:sm8650")
    assert (status, out) == (1, "")
    assert f"error: package cannot be edited: permission denied (at {package})\n" in err
    assert "hint: edit a copy in a folder you own\n" in err

    def decide(opened: object) -> Changes:
        status, out, err = pack("compile", package, "--target", "htp:sm8650")
        assert (status, out) == (1, "")
        assert "error: another edit of the package is at work" in err
        assert "hint: try again when it is done" in err
        return Changes()

    edit_package(package, decide)


MISSING = """
import sys
class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("onnxruntime_qnn", "qai_hub"):
            raise ModuleNotFoundError(name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "onnxruntime_qnn" else found(name, package)
sys.meta_path.insert(0, Missing)
from estream_packer.cli import main
main()
"""
"""`estream-pack` where neither onnxruntime-qnn nor AI Hub's client is installed."""


def bare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", MISSING, *map(str, arguments)], capture_output=True, text=True, env=environment
    )


def test_without_onnxruntime_qnn(package: Path, pack: Pack, quick: None) -> None:
    """One message says what to install; taking out, and all that reads the package, needs nothing of it."""
    before = package.read_bytes()
    for arguments in ((), ("--compiler", "aihub")):
        found = bare("compile", package, "--target", "htp:sm8650", *arguments)
        assert (found.returncode, found.stdout) == (1, "")
        assert found.stderr == (
            "estream-pack: error: compiling and proving graphs needs onnxruntime-qnn, which is not installed\n"
            "estream-pack: hint: pip install 'estream-pack[npu]'\n"
        )
        assert package.read_bytes() == before
    pack("compile", package, "--target", "htp:sm8650")
    assert bare("verify", package).returncode == 0
    found = bare("verify", "--graphs", package)
    assert (found.returncode, found.stdout) == (1, "refused: link\n")
    assert "compiling and proving graphs needs onnxruntime-qnn, which is not installed" in found.stderr
    assert bare("compile", package, "--target", "htp:sm8650", "--remove").returncode == 0
    assert chips(package) == []
    assert bare("verify", "--graphs", package).returncode == 0


def test_an_interrupt_ends_all_of_it_at_once(package: Path, tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of a terminal: one message, no package touched, no process and no file left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = package.read_bytes()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    program = "from estream_packer.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "compile", str(package), "--target", "htp:sm8650"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        while not list(temporary.glob("estream-compile-*")):
            time.sleep(0.01)
            assert process.poll() is None
        time.sleep(0.5)  # the compiler's process has begun
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "estream-pack: error: interrupted"
    assert package.read_bytes() == before
    assert not list(temporary.glob("estream-compile-*"))
