"""Facts of this machine and of chips, and the SDK that is installed, as systems of every kind tell them."""

from __future__ import annotations

import importlib.util
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from estream_runtime import device, vendor_sdk
from estream_runtime.device import (
    CHIP_MEMORY_BYTES,
    KERNEL_NUMBERS,
    chip_here,
    facts_here,
    facts_of_chip,
    weights_memory,
)
from estream_runtime.host_memory import usable_memory
from estream_runtime.vendor_sdk import installed_sdk, sdk_build
from estream_spec.chips import CHIPS, chip_named
from estream_spec.profiles import shipped_profile
from estream_spec.workload import RUNTIME_BYTES

BUILD = "2.51.0.260929181845"


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What is installed is looked for anew, here and by tests behind."""
    installed_sdk.cache_clear()
    yield
    installed_sdk.cache_clear()


def system(folder: Path, **numbers: str) -> Path:
    """A made-up /sys/devices."""
    for name, number in numbers.items():
        (folder / name).mkdir()
        (folder / name / "soc_id").write_text(number)
    return folder


@pytest.mark.parametrize(("number", "name"), KERNEL_NUMBERS.items())
def test_the_chip_is_told_by_its_number(tmp_path: Path, number: str, name: str) -> None:
    chip = chip_here(system(tmp_path, soc0=f"{number}\n"))
    assert chip is not None
    assert chip.name == name


def test_every_chip_has_a_number() -> None:
    assert sorted(KERNEL_NUMBERS.values()) == sorted(chip.name for chip in CHIPS)


@pytest.mark.parametrize("number", ["", "1", "57", "jep106:0426:8195", "i.MX8QM", "5577", "\xb2"])
def test_other_chips_are_not_known(tmp_path: Path, number: str) -> None:
    assert chip_here(system(tmp_path, soc0=number)) is None


def test_it_may_be_told_second(tmp_path: Path) -> None:
    folder = system(tmp_path, soc0="jep106:0070:022d", soc1="557")
    (tmp_path / "soc2").mkdir()
    assert chip_here(folder) == chip_named("sm8650")


def test_bytes_that_are_no_text_are_no_number(tmp_path: Path) -> None:
    (system(tmp_path, soc0="") / "soc0" / "soc_id").write_bytes(b"\xff557")
    assert chip_here(tmp_path) is None


def test_a_system_without_chips(tmp_path: Path) -> None:
    assert chip_here(tmp_path / "nothing") is None


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "installed_sdk", lambda: BUILD)
    monkeypatch.setattr(device, "chip_here", lambda: None)
    facts = facts_here()
    assert facts.page_bytes == mmap.PAGESIZE
    assert facts.memory_bytes == usable_memory()[0] - RUNTIME_BYTES
    assert (facts.soc_model, facts.architecture, facts.sdk) == (0, 0, BUILD)
    assert facts_here(memory_bytes=1 << 30).memory_bytes == (1 << 30) - RUNTIME_BYTES


def test_this_machine_with_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "chip_here", lambda: chip_named("sm8750"))
    found = facts_here()
    assert (found.soc_model, found.architecture, found.configuration) == (69, 79, "snapdragon-8-elite")
    assert found.page_bytes == mmap.PAGESIZE
    named = facts_here(chip=chip_named("sm8650"))
    assert (named.soc_model, named.architecture) == (57, 75)


def test_a_chip_with_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed_sdk", lambda: BUILD)
    profile = shipped_profile("snapdragon-8-gen-3")
    assert profile.npu is not None
    assert profile.memory_bytes is not None
    facts = facts_of_chip(chip_named("8-gen-3"))
    assert (facts.soc_model, facts.architecture, facts.sdk) == (57, 75, BUILD)
    assert (facts.npu_buffer_bytes, facts.npu_session_bytes) == (
        profile.npu.buffer_bytes.value,
        profile.npu.session_bytes.value,
    )
    assert facts.memory_bytes == profile.memory_bytes.value - RUNTIME_BYTES
    assert facts.configuration == profile.name
    assert facts_of_chip(chip_named("8-gen-3"), memory_bytes=1 << 30).memory_bytes == (1 << 30) - RUNTIME_BYTES


def test_a_chip_without_a_profile() -> None:
    facts = facts_of_chip(chip_named("soc60-v73"))
    assert facts.memory_bytes == CHIP_MEMORY_BYTES - RUNTIME_BYTES
    assert (facts.npu_session_bytes, facts.configuration) == (None, "")
    assert facts.npu_buffer_bytes == 1 << 31


def test_the_program_takes_memory_too() -> None:
    assert [weights_memory(RUNTIME_BYTES + left) for left in (-1, 0, 1)] == [0, 0, 1]


def library(path: Path, *texts: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF\0".join([bytes(5000), *texts, bytes(70_000)]))
    return path


@pytest.mark.parametrize("name", ["libQnnHtp.so", "QnnHtp.dll", "libs/arm64/QnnHtp.dll"])
def test_the_build_is_read_out_of_the_library(tmp_path: Path, name: str) -> None:
    library(tmp_path / name, b"v2.51.0.260929181845\0", b"hexnn_ver_v2.51.0.260929181845.\0", b"v1.2.3\0v1.2.3.4\0")
    library(tmp_path / "libQnnGpu.so", b"v2.49.0.260929181845\0")
    assert sdk_build([tmp_path / "nothing", tmp_path]) == BUILD


@pytest.mark.parametrize(
    "texts", [(), (b"v2.51.0",), (b"2.51.0.260929181845",), (b"v2.5.0.2609291", b"v2.5.0.2609292")]
)
def test_no_build_or_several_are_none(tmp_path: Path, texts: tuple[bytes, ...]) -> None:
    library(tmp_path / "libQnnHtp.so", *texts)
    assert sdk_build([tmp_path]) == ""


def test_libraries_of_two_builds_are_none(tmp_path: Path) -> None:
    library(tmp_path / "one" / "libQnnHtp.so", b"v2.51.0.260929181845\0")
    library(tmp_path / "other" / "libQnnHtp.so", b"v2.50.0.260929181845\0")
    assert sdk_build([tmp_path]) == ""
    assert sdk_build([tmp_path / "other"]) == "2.50.0.260929181845"


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "libQnnHtp.so").touch()
    (tmp_path / "QnnHtp.dll").mkdir()
    assert sdk_build([tmp_path]) == ""
    assert sdk_build([]) == ""


def test_the_installed_package_is_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / vendor_sdk.PACKAGE
    library(package / "libQnnHtp.so", b"v9.8.7.654321\0")
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, vendor_sdk.PACKAGE, raising=False)
    assert installed_sdk() == "9.8.7.654321"


def test_without_the_package_there_is_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_sdk, "find_spec", lambda name: None)
    assert installed_sdk() == ""


def test_a_module_of_the_package_s_name_has_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_sdk, "find_spec", lambda name: importlib.util.find_spec("ast"))
    assert installed_sdk() == ""


def test_something_of_the_package_s_name_has_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, vendor_sdk.PACKAGE, ModuleType(vendor_sdk.PACKAGE))
    assert installed_sdk() == ""


def test_the_package_that_is_installed_has_a_build() -> None:
    from onnxruntime_qnn.build_and_package_info import qnn_version

    assert installed_sdk().startswith(f"{qnn_version}.")
