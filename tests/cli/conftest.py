"""What tests of verbs share: a way to run one, and packages built from the tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from estream_loader.console import run_command
from estream_packer import cli as packer
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime import cli as runtime
from estream_spec.weights import Encoding
from fixtures.olmoe import CheckpointFactory, VariantName


class Ran(NamedTuple):
    """What a verb left behind."""

    code: int
    out: str
    err: str


Pack = Callable[..., Ran]
Run = Callable[..., Ran]
Built = Callable[..., Path]


@pytest.fixture
def pack(capfd: pytest.CaptureFixture[str]) -> Pack:
    """`pack(*arguments)`: exit status, standard output and standard error of `estream-pack`."""
    return _program(packer.group, packer.PROGRAM, capfd)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)`: the same of `estream-run`."""
    return _program(runtime.group, runtime.PROGRAM, capfd)


def _program(group: click.Group, name: str, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> Ran:
        code = run_command(group, name, [str(each) for each in arguments])
        return Ran(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, olmoe_checkpoint: CheckpointFactory) -> Built:
    """`built(variant, experts="w4g32")`: a package, built once a session and only to be read."""
    folder = tmp_path_factory.mktemp("packages")

    def make(variant: VariantName = "base", experts: Encoding = "w4g32", page_shift: int = 12) -> Path:
        path = folder / f"{variant}-{experts}-{page_shift}.emoe"
        if not path.exists():
            build(olmoe_checkpoint(variant), path, BuildOptions(experts=experts, page_shift=page_shift, jobs=1))
        return path

    return make
