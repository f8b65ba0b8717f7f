"""What the tests of `estream-pack`'s verbs share: a way to run one, and packages built from the tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from estream_loader.console import run_command
from estream_packer.build import build
from estream_packer.cli import PROGRAM, group
from estream_packer.recipe import BuildOptions
from estream_spec.weights import Encoding
from fixtures.olmoe import CheckpointFactory, VariantName

Pack = Callable[..., tuple[int, str, str]]
Built = Callable[..., Path]


@pytest.fixture
def pack(capfd: pytest.CaptureFixture[str]) -> Pack:
    """`pack(*arguments)`: exit status, standard output and standard error of `estream-pack`."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = run_command(group, PROGRAM, [str(argument) for argument in arguments])
        return status, *capfd.readouterr()

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
