"""What a context binary tells without the library that reads it."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from estream_runtime.npu.contents import builds_in, check_contents, holds_name
from estream_spec.errors import LinkError
from estream_spec.manifest import Binary
from fixtures.packages import binary

SDK = "2.51.0.260929181845"
DATA = b"\x14\0\0\0v2.51.0.260929181845\0\0attend\0\0\0\0"


def entry(**changes: object) -> Binary:
    """What a manifest says of `DATA`."""
    return binary(3, **{"sdk": SDK, **changes})


def test_builds_are_told() -> None:
    assert builds_in(DATA * 2) == [SDK]
    assert builds_in(b"v2.51.0.260929\0v2.50.1.260101\0") == ["2.50.1.260101", "2.51.0.260929"]
    assert builds_in(b"2.51.0.260929181845") == []


def test_names_are_whole() -> None:
    data = b"\0expert_0_32\0expert_0_64_x\0"
    assert holds_name(data, "expert_0_32")
    assert not holds_name(data, "expert_0_64")


@pytest.mark.parametrize("sdk", [SDK, f"{SDK}.0", f"2.051.0.{SDK.rpartition('.')[2]}"])
def test_a_binary_that_is_what_the_manifest_says_passes(sdk: str) -> None:
    check_contents(entry(sdk=sdk), DATA)


@pytest.mark.parametrize(
    ("data", "sdk", "message"),
    [
        (b"", SDK, "0 bytes that name no build of the QNN SDK, expected a context binary"),
        (b"ELF" * 1000, SDK, "3,000 bytes that name no build of the QNN SDK"),
        (DATA[:12], SDK, "12 bytes that name no build"),
        (DATA, "2.51.0.260929181844", f"it was made by SDK {SDK}, the manifest says 2.51.0.260929181844"),
        (DATA, "2.51", f"it was made by SDK {SDK}, the manifest says 2.51"),
        (DATA + b"v2.50.1.260101\0", SDK, f"it was made by SDK 2.50.1.260101 and {SDK}, the manifest says {SDK}"),
    ],
)
def test_a_binary_that_is_something_else_is_refused(data: bytes, sdk: str, message: str) -> None:
    with pytest.raises(LinkError, match=re.escape(message)) as refusal:
        check_contents(entry(sdk=sdk), data)
    assert refusal.value.path == "binary for sm8650"


def test_a_graph_that_is_not_in_it_is_named() -> None:
    [there] = entry().graphs
    missing = replace(there, name="attend_2", tokens=64)
    with pytest.raises(LinkError, match="it has no graph 'attend_2', which the manifest lists"):
        check_contents(entry(graphs=(there, missing)), DATA)
