"""One start up to the first token: `startup.py` runs this in a process of its own.

    python tests/bench/first_token.py STARTED PACKAGE TOKENS BACKEND

STARTED is when the process was started, as `time.monotonic` tells it. Prints an object of JSON: seconds from then to
each moment, and seconds in which the package was being read past the page cache.
"""

from __future__ import annotations

import sys
import time

PYTHON = time.monotonic()  # before all that has to be imported

import json  # noqa: E402
from typing import Final  # noqa: E402

import numpy as np  # noqa: E402

import estream_loader.source  # noqa: E402
from estream_loader import open_package  # noqa: E402
from estream_loader.direct import DirectFile  # noqa: E402
from estream_runtime import Session  # noqa: E402

IMPORTED: Final = time.monotonic()
STEP: Final = 7919
"""Between token ids: a prime, so that they are all over the vocabulary. Random ones would need another import."""


class WatchedFile(DirectFile):
    """Notes when it is read."""

    reads: Final[list[tuple[float, float, int]]] = []
    """When each read began and ended, and its offset."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `DirectFile.read_into`."""
        begun = time.monotonic()
        count = super().read_into(buffer, offset)
        self.reads.append((begun, time.monotonic(), offset))
        return count


def main(started: str, path: str, tokens: str, backend: str) -> None:
    """Open, prefill, and print when what happened."""
    setattr(estream_loader.source, "DirectFile", WatchedFile)  # noqa: B010
    with open_package(path) as package:
        opened, experts = time.monotonic(), package.experts.entry
        with Session(package, backend) as session:
            ready = time.monotonic()
            session.prefill(np.arange(int(tokens)) * STEP % package.manifest.model.vocabulary)
            done = time.monotonic()
    reads = sorted(WatchedFile.reads)
    moments = {
        "python": PYTHON,
        "imports": IMPORTED,
        "package": opened,
        "first read": reads[0][0],
        "session": ready,
        "first expert read": next(begun for begun, _, at in reads if experts.offset <= at < experts.end),
        "last read": max(ended for _, ended, _ in reads),
        "first token": done,
    }
    seconds = {name: at - float(started) for name, at in moments.items()}
    print(json.dumps({**seconds, "reading": _covered(reads)}))


def _covered(reads: list[tuple[float, float, int]]) -> float:
    """Seconds in which at least one read was under way; reads in the order in which they began."""
    reached, covered = 0.0, 0.0
    for begun, ended, _ in reads:
        covered += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return covered


if __name__ == "__main__":
    main(*sys.argv[1:])
