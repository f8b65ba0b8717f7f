"""What is told of a context binary from its bytes."""

from __future__ import annotations

import pytest

from estream_packer.htp.context import sdk_build
from estream_spec.errors import PackError


@pytest.mark.parametrize(
    "data",
    [
        b"\0v2.51.0.260929181845\0",
        b"\x14\0\0\0v2.51.0.260929181845\0.." * 3,
        b"QNN v2.51.0.260929181845_99241\0",
    ],
)
def test_the_build_stands_in_the_bytes(data: bytes) -> None:
    assert sdk_build(data) == "2.51.0.260929181845"


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 v2.51.0", b"\0v2.51.0.260929181845.7\0", b"1v2.51.0.260929181845"])
def test_bytes_without_a_build_are_no_context_binary(data: bytes) -> None:
    with pytest.raises(PackError, match="name no build of the QNN SDK, expected a context binary"):
        sdk_build(data)


def test_several_builds_are_refused() -> None:
    with pytest.raises(
        PackError, match=r"several builds of the QNN SDK, expected one: 2\.50\.1\.260101, 2\.51\.0\.260929"
    ):
        sdk_build(b"v2.51.0.260929\0v2.50.1.260101\0v2.51.0.260929\0")
