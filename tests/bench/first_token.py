"""One start to the first token, for `startup.py`, which runs this in a process of its own and with nothing imported.

    python tests/bench/first_token.py STARTED PACKAGE TOKENS BACKEND ARENA_BYTES

STARTED is when the process was started, as `time.monotonic` tells it. Prints a JSON object of seconds since then, and of
seconds in which reads past the page cache were under way.
"""

from __future__ import annotations

import sys
import time

MOMENTS = {"python": time.monotonic()}

import json

import numpy as np

from estream_loader import open_package
from estream_loader.direct import DirectFile
from estream_runtime import Session

MOMENTS["imported"] = time.monotonic()
_STEP = 7919
"""Of token ids: a prime, so that they are all over the vocabulary. Random ones would need an import."""
READS: list[tuple[float, float, int]] = []
"""Begin and end of each read, and its offset."""


class WatchedFile(DirectFile):
    """Notes when it is read."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `DirectFile.read_into`."""
        begun = time.monotonic()
        count = super().read_into(buffer, offset)
        READS.append((begun, time.monotonic(), offset))
        return count


def busy_s(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the spans."""
    covered, reached = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        covered += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return covered


def main() -> None:
    """Open, prefill, and tell when what happened."""
    started, path, tokens, backend, arena_bytes = sys.argv[1:]
    import estream_loader.source

    estream_loader.source.DirectFile = WatchedFile  # type: ignore[misc]
    with open_package(path) as package:
        MOMENTS["package"] = time.monotonic()
        experts = package.experts.entry
        with Session(package, backend, int(arena_bytes) or None) as session:
            MOMENTS["session"] = time.monotonic()
            token_ids = np.arange(int(tokens)) * _STEP % package.manifest.model.vocabulary
            result = session.prefill(token_ids)
            MOMENTS["first token"] = time.monotonic()
    assert np.isfinite(result.logits).all()
    MOMENTS["first read"] = min(begun for begun, _, _ in READS)
    MOMENTS["first expert read"] = min(begun for begun, _, at in READS if experts.offset <= at < experts.end)
    MOMENTS["last read"] = max(ended for _, ended, _ in READS)
    print(
        json.dumps(
            {name: at - float(started) for name, at in MOMENTS.items()}
            | {
                "reading": busy_s([read[:2] for read in READS]),
            }
        )
    )


if __name__ == "__main__":
    main()
