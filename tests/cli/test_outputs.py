"""Files that verbs write replace files like them, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.conftest import Built, Pack, Ran, Run
from estream_spec.constants import SUPERBLOCK_OFFSETS

PLAN = ("--profile", "ufs-4.1", "--memory", "1G", "--prompt", "16")
VERBS: dict[str, tuple[str, ...]] = {
    "trace": ("trace", "PACKAGE", "--tokens", "5", "-o"),
    "probe": ("probe", "PACKAGE", "-o"),
    "inspect": ("inspect", "PACKAGE", "--html"),
    "plan": ("plan", "PACKAGE", *PLAN, "--svg"),
}


@pytest.fixture
def package(built: Built, tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(built().read_bytes())
    return path


@pytest.fixture(params=VERBS)
def write(request: pytest.FixtureRequest, package: Path, pack: Pack, run: Run) -> Run:
    """`write(output)`: a verb writes its file there."""
    verb = VERBS[request.param]
    arguments = [str(package) if each == "PACKAGE" else each for each in verb]
    program = run if verb[0] in ("trace", "probe") else pack
    return lambda output: program(*arguments, output)


def refused(found: Ran, message: str, output: Path) -> None:
    assert (found.code, found.out) == (1, "")
    assert f"error: {message}, which is never replaced (at {output})\n" in found.err
    assert "hint: give another name" in found.err
    assert not list(output.parent.glob(".*"))


def test_a_package_is_not_replaced(write: Run, package: Path) -> None:
    before = package.read_bytes()
    refused(write(package), "there is a package of that name", package)
    assert package.read_bytes() == before


def test_nor_is_one_whose_first_superblock_is_damaged(write: Run, package: Path) -> None:
    other = package.with_name("other.emoe")
    data = bytearray(package.read_bytes())
    data[SUPERBLOCK_OFFSETS[0]] ^= 1
    other.write_bytes(data)
    refused(write(other), "there is a package of that name", other)
    assert other.read_bytes() == data


def test_nor_are_pipes_devices_and_links(write: Run, package: Path) -> None:
    pipe, link = package.with_name("pipe"), package.with_name("link")
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    for output in (pipe, link):
        refused(write(output), "there is something of that name that is no regular file", output)
    assert pipe.is_fifo()
    assert link.is_char_device()


def test_a_page_is_not_written_over_the_run_it_draws(pack: Pack, run: Run, package: Path) -> None:
    trace = package.with_name("run.json")
    assert run("trace", package, "--tokens", "5", "-o", trace).code == 0
    before = trace.read_bytes()
    os.link(trace, trace.with_name("again.json"))
    for name in ("run.json", "again.json"):
        found = pack("inspect", package, "--html", trace.with_name(name), "--trace", trace)
        assert (found.code, found.out) == (2, "")
        assert "--html and --trace are the same file" in found.err
    assert trace.read_bytes() == before
