"""What the suite's tests share: small vectors, and loaders of a few lines."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estream_conformance.image import Image
from estream_conformance.suite import load_vectors
from estream_conformance.vector import Content, Vector

Program = Callable[[str], str]
GOOD_JSON = '{"a":[1,{"b":"é"}]}'


@pytest.fixture(scope="session")
def suite() -> list[Vector]:
    """All vectors of the suite."""
    return load_vectors()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """`program(source)`: the command line that runs a Python program."""

    def write(source: str) -> str:
        path = tmp_path / f"loader-{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(source))
        return shlex.join([sys.executable, "-S", "-E", str(path)])

    return write


def good(data: bytes | Image = b"good", **changes: Any) -> Vector:
    """A vector to be accepted; it is no package, which no loader here minds."""
    image = data if isinstance(data, Image) else Image.of((0, data))
    values = {"name": "good", "about": "It is good.", "content": lambda: Content(image, GOOD_JSON)}
    return Vector(**{**values, **changes})


def bad(data: bytes | Image = b"bad", **changes: Any) -> Vector:
    """A vector to be refused."""
    image = data if isinstance(data, Image) else Image.of((0, data))
    values = {"name": "bad", "about": "It is bad.", "content": lambda: Content(image)}
    return Vector(**{**values, "refused_as": "invalid", "rule": "EMOE-SEC-012", **changes})
