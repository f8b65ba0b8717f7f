"""Prefetch routers on their way into packages: taken in as they are, for just the checkpoint they were trained for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from estream_loader import Package, open_package
from estream_packer.build import build
from estream_packer.configuring import configure_changes
from estream_packer.editing import edit_package
from estream_packer.recipe import BuildOptions, CalibrationTable
from estream_spec.constants import SectionType
from estream_spec.errors import EmoeError, FormatError, PackError
from estream_spec.limits import MAX_PREFETCH_ROUTER_LENGTH
from estream_spec.manifest import DeviceConfiguration
from estream_spec.prefetch_router import PrefetchRouter, encode_prefetch_router
from estream_spec.schedule import Phase, Policy
from fixtures.families import write_checkpoint as write_family
from fixtures.olmoe import CheckpointFactory
from fixtures.packed import FamilyFactory, PackageFactory
from fixtures.prefetching import prefetch_router_for


def router_for(path: Path) -> PrefetchRouter:
    """A prefetch router for a package."""
    with open_package(path) as package:
        return prefetch_router_for(package)


@pytest.fixture
def router(packed: PackageFactory) -> PrefetchRouter:
    return router_for(packed("base"))


@pytest.fixture
def file(tmp_path: Path, router: PrefetchRouter) -> Path:
    path = tmp_path / "router.prefetch"
    path.write_bytes(encode_prefetch_router(router))
    return path


def test_it_is_packed_as_it_is(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, packed: PackageFactory, router: PrefetchRouter, file: Path
) -> None:
    output = tmp_path / "model.emoe"
    build(olmoe_checkpoint("base"), output, BuildOptions(prefetch=str(file)))
    with open_package(output, integrity="full") as package, open_package(packed("base")) as without:
        assert package.prefetch_router == router
        entry = package.container.section(SectionType.PREFETCH_ROUTER)
        assert package.read_section(entry) == file.read_bytes()
        assert package.manifest == without.manifest
        assert decoding(package) == [Policy.PRE_ROUTING]
        assert decoding(without) == [Policy.POST_ROUTING]
        assert package.file_id != without.file_id


def test_it_does_not_depend_on_how_weights_are_stored(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, router: PrefetchRouter, file: Path
) -> None:
    output = tmp_path / "model.emoe"
    options = BuildOptions(experts="w8", dense="w4g32", name="other", page_shift=12, prefetch=str(file))
    build(olmoe_checkpoint("base", shards=3), output, options)
    with open_package(output, integrity="full") as package:
        assert package.prefetch_router == router


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "lfm2_moe", "granitemoe", "phimoe"])
def test_routers_are_the_same_before_they_are_packed(tmp_path: Path, packed_family: FamilyFactory, name: str) -> None:
    """Whatever biases they have, and whatever was multiplied into them."""
    path, output = tmp_path / "router.prefetch", tmp_path / "model.emoe"
    path.write_bytes(encode_prefetch_router(router_for(packed_family(name))))
    build(write_family(tmp_path / "checkpoint", name), output, BuildOptions(prefetch=str(path)))
    with open_package(output, integrity="full") as package:
        assert package.prefetch_router is not None


def decoding(package: Package) -> list[int]:
    """When the programs of a package that decode read."""
    return [each.policy for each in package.schedules.values() if each.phase == Phase.DECODE]


def refused(source: Path, tmp_path: Path, options: BuildOptions, made: list[int]) -> EmoeError:
    """How a build is refused, before anything was made."""
    output = tmp_path / "out" / "model.emoe"
    output.parent.mkdir(exist_ok=True)
    with pytest.raises(EmoeError) as error:
        build(source, output, options)
    assert list(output.parent.iterdir()) == []
    assert made == []
    return error.value


def test_one_for_another_checkpoint_is_refused_before_anything_is_made(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, file: Path, made: list[int]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the three thieves thought so " * 9)
    for calibration in (None, CalibrationTable(text=str(text), tokens=64)):
        options = BuildOptions(prefetch=str(file), calibration=calibration)
        fault = refused(olmoe_checkpoint("clipped"), tmp_path, options, made)
        assert isinstance(fault, FormatError)
        assert (fault.rule, fault.path) == ("EMOE-PRE-002", str(file))
        assert "prefetch router is for another model" in str(fault)
        assert "train-prefetch" in (fault.hint or "")


Changed = Callable[[PrefetchRouter], PrefetchRouter]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda each: replace(each, layers=each.layers[:-1]), "EMOE-PRE-003"),
        (lambda each: replace(each, layers=(*each.layers[:-1], replace(each.layers[-1], bias=b""))), "EMOE-PRE-004"),
        (
            lambda each: replace(each, layers=(*each.layers[:-1], replace(each.layers[-1], router=bytes(32)))),
            "EMOE-PRE-008",
        ),
    ],
    ids=["layers", "length", "router"],
)
def test_what_is_at_fault_is_refused_before_anything_is_made(
    tmp_path: Path,
    olmoe_checkpoint: CheckpointFactory,
    router: PrefetchRouter,
    file: Path,
    made: list[int],
    change: Changed,
    rule: str,
) -> None:
    file.write_bytes(encode_prefetch_router(change(router)))
    fault = refused(olmoe_checkpoint("base"), tmp_path, BuildOptions(prefetch=str(file)), made)
    assert (fault.rule, str(fault.path).startswith(str(file))) == (rule, True)


def test_files_that_are_no_prefetch_router_are_refused(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, made: list[int]
) -> None:
    source, file = olmoe_checkpoint("base"), tmp_path / "router.prefetch"
    options = BuildOptions(prefetch=str(file))
    assert "file cannot be opened" in str(refused(source, tmp_path, options, made))
    file.write_bytes(b"[package]")
    assert refused(source, tmp_path, options, made).rule == "EMOE-PRE-001"
    with file.open("wb") as opened:
        opened.truncate(MAX_PREFETCH_ROUTER_LENGTH + 1)
    assert isinstance(refused(source, tmp_path, options, made), PackError)


def test_the_output_does_not_replace_it(olmoe_checkpoint: CheckpointFactory, file: Path) -> None:
    data = file.read_bytes()
    with pytest.raises(PackError, match="output is the prefetch router"):
        build(olmoe_checkpoint("base"), file, BuildOptions(prefetch=str(file)))
    assert file.read_bytes() == data


def test_editing_keeps_it(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, router: PrefetchRouter, file: Path
) -> None:
    output = tmp_path / "model.emoe"
    build(olmoe_checkpoint("base"), output, BuildOptions(prefetch=str(file)))
    choice = DeviceConfiguration(name="phone", arena_bytes=1 << 20, group_size=1, prefetch_depth=1)
    edit_package(output, lambda package: configure_changes(package, [choice]))
    with open_package(output, integrity="full") as package:
        assert package.prefetch_router == router
        assert decoding(package) == [Policy.PRE_ROUTING] * 2
