"""Device configurations that were added on a device: which comes first, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from estream_loader import open_package
from estream_spec.constants import SectionType
from estream_spec.errors import EmoeError, IntegrityError, InvalidError, LinkError, MalformedError
from estream_spec.manifest import DeviceConfiguration
from estream_spec.messagepack import encode
from fixtures.packages import PAGE_SHIFT, Draft, Section
from fixtures.sources import CountingSource

RECORD = 1 << PAGE_SHIFT
"""Bytes of the largest expert record."""


def configuration(name: str = "phone", **changes: Any) -> DeviceConfiguration:
    given = {"arena_bytes": 4 * RECORD, "group_size": 2, "prefetch_depth": 1}
    return DeviceConfiguration(name=name, **{**given, **changes})


def added(*sections: Section) -> bytes:
    draft = Draft()
    draft.sections += sections
    return draft.seal()


def section(data: bytes, number: int = 0) -> Section:
    return Section(SectionType.DEVICE_CONFIGURATION, data, id=number)


def names(data: bytes) -> list[str]:
    with open_package(data, integrity="full") as package:
        return [each.name for each in package.device_configurations]


def test_those_of_the_manifest_where_none_was_added() -> None:
    draft = Draft()
    draft.change_manifest(device_configurations=(configuration("first"), configuration("second")))
    assert names(draft.seal()) == ["first", "second"]


def test_the_latest_is_the_default() -> None:
    """The highest id is the latest, wherever its section lies."""
    data = added(*(section(encode(configuration(f"added {number}")), number) for number in (7, 0, 2**32 - 1, 3)))
    assert names(data) == ["added 4294967295", "added 7", "added 3", "added 0", "generic"]


def test_one_of_a_name_in_the_manifest_hides_it() -> None:
    data = added(section(encode(configuration("generic", group_size=1))))
    assert names(data) == ["generic", "generic"]
    with open_package(data) as package:
        assert package.device() == package.device("generic") == (configuration("generic", group_size=1),)


def test_devices() -> None:
    lengths = [configuration(prompt_tokens=length) for length in (0, 512, 64)]
    data = added(
        section(encode(configuration("tablet")), 5),
        *(section(encode(each), number) for each, number in zip(lengths, (2, 9, 7), strict=True)),
    )
    with open_package(data) as package:
        assert package.device() == package.device("phone") == (lengths[1], lengths[2], lengths[0])
        assert package.device("tablet") == (configuration("tablet"),)
        assert package.device("generic") == package.manifest.device_configurations
        with pytest.raises(LinkError, match="no device configuration for 'watch'"):
            package.device("watch")


def test_compressed() -> None:
    each = section(encode(configuration("n" * 99)))
    each.compress()
    assert names(added(each)) == ["n" * 99, "generic"]


def test_they_are_not_read_on_opening() -> None:
    source = CountingSource(added(section(b"\xc1")))
    with open_package(source) as package:
        assert len(source.reads) == 4
        assert package.experts.table.ranges


def test_an_arena_of_just_its_banks() -> None:
    assert names(added(section(encode(configuration(arena_bytes=4 * RECORD))))) == ["phone", "generic"]


GOOD = encode(configuration())
FAULTS: dict[str, tuple[bytes, type[EmoeError], str, str]] = {
    "cut": (GOOD[:-1], MalformedError, "EMOE-MAN-001", ""),
    "longer": (GOOD + b"\xc0", MalformedError, "EMOE-MAN-001", ""),
    "wrong type": (GOOD.replace(b"\xa5phone", b"\xc4\x05phone"), InvalidError, "EMOE-MAN-002", ".name"),
    "unknown key": (bytes([GOOD[0] + 1]) + GOOD[1:] + b"\xa6colour\x01", InvalidError, "EMOE-MAN-002", ""),
    "no expert in a group": (encode(configuration(group_size=0)), InvalidError, "EMOE-MAN-002", ".group_size"),
    "longer text": (GOOD.replace(b"\xa5phone", b"\xd9\x05phone"), InvalidError, "EMOE-MAN-003", ""),
    "arena below its banks": (
        encode(configuration(arena_bytes=4 * RECORD - 1)),
        InvalidError,
        "EMOE-CFG-001",
        ".arena_bytes",
    ),
    "few banks to keep all": (
        encode(configuration(policy="resident")),
        InvalidError,
        "EMOE-CFG-002",
        ".prefetch_depth",
    ),
    "one there already": (GOOD, InvalidError, "EMOE-CFG-003", ".prompt_tokens"),
    "no arena": (encode(configuration(arena_bytes=0)), InvalidError, "EMOE-CFG-001", ".arena_bytes"),
}


@pytest.mark.parametrize(("data", "kind", "rule", "place"), FAULTS.values(), ids=FAULTS)
def test_refused(data: bytes, kind: type[EmoeError], rule: str, place: str) -> None:
    """When it is asked for, and under `full`; the package's own part can still be used."""
    package_bytes = added(section(GOOD, 1), section(data, 9))
    errors = []
    with open_package(package_bytes) as package:
        with pytest.raises(kind) as caught:
            assert package.device_configurations
        errors.append(caught.value)
        assert package.experts.table.ranges
        offset = package.container.section(SectionType.DEVICE_CONFIGURATION, 9).offset
    with pytest.raises(kind) as caught:
        open_package(package_bytes, integrity="full")
    errors.append(caught.value)
    path = f"device_configuration section 9{place}"
    for error in errors:
        assert (error.rule, error.path, error.offset) == (rule, path, offset)


def test_damaged() -> None:
    data = bytearray(added(section(GOOD)))
    data[data.index(GOOD) + 8] ^= 1
    with open_package(bytes(data)) as package, pytest.raises(IntegrityError) as caught:
        assert package.device_configurations
    assert (caught.value.rule, caught.value.path) == ("EMOE-SEC-018", "device_configuration section 0")
