"""What can be told of a context binary without the library that reads it, whose format the vendor does not publish."""

from __future__ import annotations

import re
from typing import Final

from estream_spec.errors import PackError

_BUILD: Final = re.compile(rb"(?<![0-9A-Za-z_.])v([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{6,18})(?![0-9.])")
"""How the SDK writes its build into each graph, such as `v2.51.0.260929181845`, to which some add `_99241`."""


def sdk_build(data: bytes) -> str:
    """Build of the SDK that made a context binary, such as `2.51.0.260929181845`.

    Raises:
        PackError: the bytes name no build, so they are no context binary, or several.
    """
    builds = sorted({found.group(1).decode() for found in _BUILD.finditer(data)})
    match builds:
        case [build]:
            return build
        case []:
            raise PackError(f"{len(data)} bytes that name no build of the QNN SDK, expected a context binary")
        case _:
            raise PackError(f"a context binary of several builds of the QNN SDK, expected one: {', '.join(builds)}")


def holds_name(data: bytes, name: str) -> bool:
    """Whether a context binary holds a name, of a graph or a tensor. Names stand in it as they are, ended by a zero."""
    return name.encode() + b"\0" in data
