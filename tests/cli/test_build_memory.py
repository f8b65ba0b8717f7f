from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from fixtures.synthetic import write_sparse_checkpoint

MEASURED: Final = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))
import atexit, pathlib, sys
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
from estream_packer.cli import main
main()
"""


def peak(checkpoint: Path, output: Path) -> int:
    """Most memory that a build had, in KiB, in an address space of 1 GB."""
    command = [sys.executable, "-c", MEASURED, "build", str(checkpoint), "-o", str(output), "--experts", "w8"]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "--jobs", "1"], env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert found is not None
    return int(found[1])


def test_memory_does_not_grow_with_the_checkpoint_or_its_files(tmp_path: Path) -> None:
    small = peak(write_sparse_checkpoint(tmp_path / "small", 0.2, 4), tmp_path / "small.emoe")
    large = peak(write_sparse_checkpoint(tmp_path / "large", 0.4, 8), tmp_path / "large.emoe")
    assert (tmp_path / "large.emoe").stat().st_size > 1.4 * (tmp_path / "small.emoe").stat().st_size
    assert large < 1.1 * small
