"""Which build of Qualcomm's SDK is installed, found without running any of it.

A library of the vendor that is asked might end the process, where a file that is read cannot.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from estream_runtime.npu.contents import builds_in

PACKAGE: Final = "onnxruntime_qnn"
LIBRARIES: Final = ("libQnnHtp.so", "QnnHtp.dll")
"""The library that runs binaries, on Linux and on Windows."""


@cache
def installed_sdk() -> str:
    """The build of the SDK in the package `onnxruntime-qnn`, such as `2.51.0.260929181845`; empty without one."""
    try:
        spec = find_spec(PACKAGE)
    except ValueError:  # something else has the name, and is no package that was found on a path
        return ""
    return sdk_build(map(Path, spec.submodule_search_locations or ())) if spec is not None else ""


def sdk_build(folders: Iterable[Path]) -> str:
    """The build that the libraries in some folders are of; empty where there are none, or no build or several."""
    found = {
        build for folder in folders for name in LIBRARIES for path in folder.rglob(name) for build in _builds(path)
    }
    return found.pop() if len(found) == 1 else ""


def _builds(path: Path) -> list[str]:
    """The builds that a file names."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return builds_in(data)
    except (OSError, ValueError):  # it cannot be read, or is empty
        return []
