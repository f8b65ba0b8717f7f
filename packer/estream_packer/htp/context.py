"""Which SDK made a context binary, told from its bytes."""

from __future__ import annotations

from estream_runtime.npu.contents import builds_in
from estream_spec.errors import PackError


def sdk_build(data: bytes) -> str:
    """Build of the SDK that made a context binary, such as `2.51.0.260929181845`.

    Raises:
        PackError: the bytes name no build, so they are no context binary, or several.
    """
    match builds_in(data):
        case [build]:
            return build
        case []:
            raise PackError(f"{len(data)} bytes that name no build of the QNN SDK, expected a context binary")
        case builds:
            raise PackError(f"a context binary of several builds of the QNN SDK, expected one: {', '.join(builds)}")
