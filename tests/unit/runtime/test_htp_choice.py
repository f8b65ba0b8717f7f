"""Which binary backend `htp` runs, and everything it refuses before the vendor's library is called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from estream_loader import open_package
from estream_runtime import device, vendor_sdk
from estream_runtime.backends import htp_choice, open_backend
from estream_runtime.npu import contents, qnn
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.chips import Chip, chip_named
from estream_spec.constants import SectionType
from estream_spec.errors import EmoeError, IntegrityError, LinkError
from estream_spec.graph_interface import Interface
from estream_spec.manifest import Binary, BinaryGraph
from estream_spec.model import ModelDescription
from fixtures.packages import Draft, binary, with_binaries

SDK = "2.51.0.260929181845"
SM8650, SM8750 = chip_named("sm8650"), chip_named("sm8750")
DATA = f"\0v{SDK}\0attend\0".encode()


class Calls(list[tuple[bytes, Sequence[BinaryGraph], Chip]]):
    """A stand-in for the backend's class, which takes notes of what the vendor's library would have been given."""

    def __call__(self, model: ModelDescription, data: bytes, graphs: Sequence[BinaryGraph], chip: Chip) -> None:
        self.append((data, graphs, chip))


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What came so far that the library takes; the library itself is never asked for anything."""
    noted = Calls()
    monkeypatch.setattr(htp_choice, "HtpBackend", noted)
    monkeypatch.setattr(contents, "interface_of", lambda *_: Interface((), ()))  # no tensor has to be in these bytes
    monkeypatch.setattr(qnn, "_devices", lambda: pytest.fail("the vendor's library was called"))
    monkeypatch.setattr(device, "installed_sdk", lambda: SDK)
    monkeypatch.setattr(htp_choice, "simulated", lambda: True)
    monkeypatch.setattr(htp_choice, "chip_here", lambda: pytest.fail("a simulator has no chip of its own"))
    return noted


def on_a_phone(monkeypatch: pytest.MonkeyPatch, chip: Chip | None) -> None:
    """As if this were a device with a chip, known or not."""
    monkeypatch.setattr(htp_choice, "simulated", lambda: False)
    monkeypatch.setattr(htp_choice, "chip_here", lambda: chip)


def binary_for(chip: Chip, section: int = 3, sdk: str = SDK, **changes: Any) -> Binary:
    return binary(section, soc_model=chip.soc_model, architecture=chip.architecture, sdk=sdk, **changes)


def draft(*binaries: Binary, data: bytes = DATA) -> Draft:
    """A package with binaries of these bytes."""
    made = with_binaries(*binaries)
    for each in binaries:
        made.section(SectionType.BINARY, each.section).data = data
    return made


def opened(name: str, *binaries: Binary, data: bytes = DATA) -> None:
    """Open the backend over a package with these binaries."""
    with open_package(draft(*binaries, data=data).seal()) as package:
        open_backend(name, package, 1)


def refused(name: str, *binaries: Binary, data: bytes = DATA) -> EmoeError:
    with pytest.raises(LinkError) as caught:
        opened(name, *binaries, data=data)
    return caught.value


def test_the_binary_for_the_chip_is_taken(calls: Calls) -> None:
    one, other = binary_for(SM8650, 3), binary_for(SM8750, 4)
    for name, chip in (("htp", SM8650), ("htp:sm8650", SM8650), ("htp:8-elite", SM8750), ("htp:v75", SM8650)):
        opened(name, one, other)
        assert calls.pop() == (DATA, one.graphs, chip)


def test_without_a_name_a_simulator_takes_the_first_one(calls: Calls) -> None:
    opened("htp", binary_for(SM8750, 4), binary_for(SM8650, 3))
    assert calls.pop()[2] == SM8750


def test_one_of_an_older_sdk_is_taken(calls: Calls) -> None:
    older = "2.49.7.260101"
    opened("htp", binary_for(SM8650, sdk=older), data=b"\0v2.49.7.260101\0attend\0")
    assert len(calls) == 1


def test_without_a_name_a_phone_takes_the_one_for_its_chip(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_phone(monkeypatch, SM8750)
    for name in ("htp", "htp:sm8750"):
        opened(name, binary_for(SM8650, 3), binary_for(SM8750, 4))
        assert calls.pop()[2] == SM8750


def test_a_phone_that_does_not_know_its_chip_is_told_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_phone(monkeypatch, None)
    opened("htp:sm8650", binary_for(SM8650))
    assert calls.pop()[2] == SM8650
    refusal = refused("htp", binary_for(SM8650))
    assert (refusal.message, refusal.hint) == ("this device's chip is not known", "name it, for example htp:sm8650")
    assert not calls


@pytest.mark.parametrize("name", ["htp:nonsense", "htp:", "htp:htp", "htp:sm8650 "])
def test_a_chip_that_nobody_knows_is_refused(name: str, calls: Calls) -> None:
    refusal = refused(name, binary_for(SM8650))
    assert refusal.message == f"unknown chip {name.removeprefix('htp:')!r}"
    assert (
        refusal.hint
        == "known are sm8450, sm8550, sm8650, sm8750, sm8850, x1e80100; others by number and version: soc52-v73"
    )
    assert not calls


def test_a_package_without_binaries_is_refused(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = refused("htp")
    assert refusal.message == "the package has no binary for any NPU"
    assert refusal.hint is not None
    assert re.fullmatch("compile it: estream-pack compile .* --target htp:sm8650", refusal.hint)
    told = f"the package has no binary for any NPU; the device is {SM8750}, SDK {SDK}"
    assert refused("htp:sm8750").message == told
    on_a_phone(monkeypatch, SM8750)
    assert refused("htp").message == told
    assert not calls


@pytest.mark.parametrize("chip", [SM8750, chip_named("soc60-v75"), chip_named("soc57-v73")])
@pytest.mark.parametrize("phone", [False, True])
def test_a_binary_for_another_chip_is_refused(
    phone: bool, chip: Chip, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another architecture, of the same on another chip, and one that says so of the chip's own number."""
    if phone:
        on_a_phone(monkeypatch, SM8650)
    refusal = refused("htp" if phone else "htp:sm8650", binary_for(chip))
    assert refusal.message == (f"the binary of section 3 is for {chip}, SDK {SDK}; the device is {SM8650}, SDK {SDK}")
    assert refusal.hint is not None
    assert refusal.hint.endswith("--target htp:sm8650")
    assert not calls


@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.parametrize("sdk", ["2.51.0.260929181846", "2.52.0.250101", "3", "10.0"])
def test_a_binary_of_a_newer_sdk_is_refused(
    sdk: str, phone: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if phone:
        on_a_phone(monkeypatch, SM8650)
    refusal = refused("htp", binary_for(SM8650, sdk=sdk))
    assert refusal.message == (f"the binary of section 3 is for {SM8650}, SDK {sdk}; the device is {SM8650}, SDK {SDK}")
    assert refusal.hint is not None
    assert refusal.hint.startswith(f"give the device SDK {sdk} or later, or compile with its own: ")
    assert not calls


def test_another_chip_than_the_phone_s_own_is_refused(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_phone(monkeypatch, SM8750)
    assert refused("htp:sm8650", binary_for(SM8650)).message == f"this device is {SM8750}, not {SM8650}"
    assert not calls


@pytest.mark.parametrize("phone", [False, True])
def test_without_the_vendor_s_library_it_is_said_what_to_install(
    phone: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if phone:
        on_a_phone(monkeypatch, SM8650)
    monkeypatch.setattr(vendor_sdk, "find_spec", lambda name: None)
    monkeypatch.setattr(device, "installed_sdk", installed_sdk.__wrapped__)
    refusal = refused("htp", binary_for(SM8650))
    assert refusal.message == "backend htp needs onnxruntime-qnn, which is not installed"
    assert refusal.hint == "pip install 'estream-pack[npu]'"
    assert not calls


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"graphs of a chip " * 9, "153 bytes that name no build of the QNN SDK, expected a context binary"),
        (b"v2.52.0.261111\0attend\0", f"it was made by SDK 2.52.0.261111, the manifest says {SDK}"),
        (f"v{SDK}\0".encode(), "it has no graph 'attend', which the manifest lists"),
    ],
)
def test_a_binary_that_is_not_what_the_manifest_says_is_refused(data: bytes, message: str, calls: Calls) -> None:
    assert refused("htp", binary_for(SM8650), data=data).message == message
    assert not calls


@pytest.mark.parametrize("integrity", ["open", "paged"])
def test_a_damaged_binary_is_refused(integrity: Any, calls: Calls) -> None:
    made = draft(binary_for(SM8650))
    made.section(SectionType.BINARY, 3).sha256 = bytes(32)
    with open_package(made.seal(), integrity=integrity) as package, pytest.raises(IntegrityError) as caught:
        open_backend("htp", package, 1)
    assert (caught.value.rule, caught.value.path) == ("EMOE-SEC-018", "binary section 3")
    assert not calls
