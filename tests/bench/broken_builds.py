"""Kill builds at random moments and fill their disk, and look at what is left.

    python tests/bench/broken_builds.py --kills 40

Each build replaces an older package. After every one the older package must be untouched or the new one whole, and a
build that runs to its end afterwards must give the same bytes as ever and leave no partial file. The full disk is a
small tmpfs in a mount namespace of its own (`unshare`). Exits 1 if anything else is found.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from fixtures.olmoe import write_checkpoint

COMMAND = [sys.executable, "-c", "from estream_packer.cli import main; main()", "build"]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return sha256(path.read_bytes()).hexdigest()


def killed(checkpoint: Path, output: Path, after: float, how: signal.Signals) -> None:
    """Start a build and end it after some seconds."""
    process = subprocess.Popen(
        [*COMMAND, str(checkpoint), "-o", str(output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # ignored in background jobs
    )
    time.sleep(after)
    process.send_signal(how)
    process.wait()


def main() -> int:
    """Break builds, print what was left behind, judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint folder; default: a tiny one")
    arguments = parser.parse_args()
    chance = random.Random(0)
    outcomes: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint or write_checkpoint(Path(scratch, "checkpoint"), "base")
        folder = Path(scratch, "out")
        folder.mkdir()
        output = folder / "package.emoe"
        begun = time.perf_counter()
        subprocess.run([*COMMAND, str(checkpoint), "-o", str(output)], check=True, capture_output=True)
        whole_build, whole = time.perf_counter() - begun, digest(output)
        for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            for _ in range(arguments.kills):
                output.write_bytes(b"an older package")
                older = digest(output)
                killed(checkpoint, output, chance.uniform(0, whole_build * 1.2), how)
                found = {older: "older package untouched", whole: "new package whole"}.get(digest(output), "BROKEN")
                outcomes[how.name, found] += 1
        subprocess.run([*COMMAND, str(checkpoint), "-o", str(output)], check=True, capture_output=True)
        again = digest(output) == whole and list(folder.iterdir()) == [output]
        outcomes["build afterwards", "same bytes, nothing else left" if again else "BROKEN"] += 1

        mount = Path(scratch, "small")
        mount.mkdir()
        script = (
            'mount -t tmpfs -o size="$2" tmpfs "$1" && printf older > "$1/p.emoe" && shift 2 && '
            '"$@" -o "$0/p.emoe"; echo "exit $? left $(ls -A "$0") holding $(head -c 5 "$0/p.emoe")" >&2'
        )
        for size in ("64k", "128k", "256k", "384k"):
            command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
            command += [str(mount), str(mount), size, *COMMAND, str(checkpoint)]
            last = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
            kept = last[-1] == "exit 1 left p.emoe holding older" and any("no space left" in line for line in last)
            outcomes[f"disk of {size}", "refused, older package untouched" if kept else f"BROKEN: {last}"] += 1
    table = Table("build ended by", "what was left", "times")
    for (cause, found), count in sorted(outcomes.items()):
        table.add_row(cause, found, str(count))
    Console(width=120).print(table)
    return int(any("BROKEN" in found for _, found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
