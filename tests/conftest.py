"""What tests of several folders share: tiny checkpoints, written once a session, and their reference vectors."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from estream_packer import assemble
from estream_packer import build as build_module
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_packer.writer import PackedRecord
from fixtures.compiled import compile_package
from fixtures.families import write_checkpoint as write_family
from fixtures.olmoe import CheckpointFactory, VariantName, write_checkpoint
from fixtures.packed import FamilyFactory, PackageFactory
from fixtures.reference import Reference, ReferenceLoader, reference_path


@pytest.fixture(scope="session")
def olmoe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """`olmoe_checkpoint(variant, shards=1)`: folder of a tiny OLMoE checkpoint, shared by all tests of the session."""
    root = tmp_path_factory.mktemp("olmoe")

    def write(variant: VariantName = "base", shards: int = 1) -> Path:
        folder = root / f"{variant}-{shards}"
        return folder if folder.exists() else write_checkpoint(folder, variant, shards)

    return write


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, olmoe_checkpoint: CheckpointFactory) -> PackageFactory:
    """`packed(variant, options=None)`: a package of a tiny OLMoE checkpoint, shared by all tests of the session."""
    root = tmp_path_factory.mktemp("packed")
    made: dict[tuple[VariantName, BuildOptions], Path] = {}

    def pack(variant: VariantName = "base", options: BuildOptions | None = None) -> Path:
        key = variant, options or BuildOptions()
        if key not in made:
            made[key] = root / f"{len(made)}-{variant}.emoe"
            build(olmoe_checkpoint(variant), made[key], key[1])
        return made[key]

    return pack


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each record that is made."""
    calls: list[int] = []
    make = assemble.assemble

    def counted(*arguments: Any) -> PackedRecord:
        calls.append(1)
        return make(*arguments)

    monkeypatch.setattr(build_module, "assemble", counted)
    return calls


@pytest.fixture(scope="session")
def packed_family(tmp_path_factory: pytest.TempPathFactory) -> FamilyFactory:
    """`packed_family(name, options=None)`: a package of one of `fixtures.families`, shared by all: read only."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def pack(name: str, options: BuildOptions | None = None) -> Path:
        folder = root / f"{name}-{len(list(root.iterdir()))}"
        build(write_family(folder / "checkpoint", name), folder / "model.emoe", options)
        return folder / "model.emoe"

    return pack


@pytest.fixture(scope="session")
def reference() -> ReferenceLoader:
    """`reference(variant)`: what Hugging Face transformers computes for that checkpoint."""
    loaded: dict[VariantName, Reference] = {}

    def load(variant: VariantName = "base") -> Reference:
        if variant not in loaded:
            loaded[variant] = Reference.load(reference_path(variant))
        return loaded[variant]

    return load


@pytest.fixture(scope="session")
def compiled_package(tmp_path_factory: pytest.TempPathFactory, packed: PackageFactory) -> Path:
    """A package of the checkpoint `base` with a binary of few tiles for sm8650, shared by all tests: read only.

    Its activations are f32, so that its portable graphs mean what those for the accelerator do.
    """
    path = tmp_path_factory.mktemp("compiled") / "compiled.emoe"
    shutil.copy(packed("base", BuildOptions(activations="f32")), path)
    compile_package(path)
    return path


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test does, its threads end with it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before
