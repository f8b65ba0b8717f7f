"""The compiled model, opened once for all tests that only run it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from estream_packer.htp.compiler import Compiled
from estream_runtime.backends.htp import HtpBackend
from fixtures.compiled import CHIP, MODEL, compiled_model


@pytest.fixture(scope="package")
def compiled() -> Compiled:
    """What was compiled of `fixtures.compiled.MODEL`."""
    return compiled_model()


@pytest.fixture(scope="package")
def backend(compiled: Compiled) -> Iterator[HtpBackend]:
    """All of it, ready to run."""
    opened = HtpBackend(MODEL, compiled.data, compiled.graphs, CHIP)
    yield opened
    opened.close()
