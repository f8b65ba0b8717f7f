"""Pack synthetic checkpoints of growing size and report peak memory, time, and whether shards change the package.

    python tests/bench/pack_memory.py --gigabytes 2 4 --shards 1 3 7

Exits 1 if a build takes more than 600 MB of anonymous memory, if memory grows with the checkpoint, or if one checkpoint
in differently many shards gives different packages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from hashlib import file_digest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from estream_loader import open_package
from fixtures.synthetic import write_sparse_checkpoint

MAX_BYTES = 600_000_000
MAX_GROWTH = 1.2
"""How much more the largest checkpoint may take than the smallest."""
COMMAND = [sys.executable, "-c", "from estream_packer.cli import main; main()", "build"]


def peak_anonymous(command: list[str]) -> int:
    """Most anonymous memory, in bytes, that a command had at any of many looks at it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
        peak = max(peak, int(found[1]) * 1024 if found else 0)
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return peak


def main() -> int:
    """Build every checkpoint, print the table, judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--experts", default="w4g32")
    arguments = parser.parse_args()

    table = Table("checkpoint", "shards", "peak anonymous memory", "seconds", "package", "opened in", "SHA-256")
    peaks: dict[float, list[int]] = {}
    contents: dict[float, set[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch, "package.emoe")
        for gigabytes in arguments.gigabytes:
            for shards in arguments.shards:
                checkpoint = write_sparse_checkpoint(Path(scratch, f"{gigabytes}-{shards}"), gigabytes, shards)
                begun = time.perf_counter()
                peak = peak_anonymous([*COMMAND, str(checkpoint), "-o", str(package), "--experts", arguments.experts])
                seconds = time.perf_counter() - begun
                begun = time.perf_counter()
                with open_package(package):
                    opened = time.perf_counter() - begun
                with package.open("rb") as written:
                    content = file_digest(written, "sha256").hexdigest()
                peaks.setdefault(gigabytes, []).append(peak)
                contents.setdefault(gigabytes, set()).add(content)
                table.add_row(
                    f"{gigabytes} GB",
                    str(shards),
                    f"{peak / 1e6:.0f} MB",
                    f"{seconds:.0f}",
                    f"{package.stat().st_size / 1e6:.0f} MB",
                    f"{opened * 1e3:.1f} ms",
                    content[:12],
                )
    Console(width=120).print(table)
    worst = [max(found) for found in peaks.values()]
    small = max(worst) <= MAX_BYTES and max(worst) <= worst[0] * MAX_GROWTH
    return 0 if small and all(len(found) == 1 for found in contents.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
