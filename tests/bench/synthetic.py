"""Synthetic packages to measure with, each made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def made(shape: str, dense: str | None, skew: float = 0) -> Path:
    """A synthetic package with experts as `w4g32`, written unless it is there."""
    path = Path("build", "bench", f"{shape}{f'-{dense}' if dense else ''}{f'-skew-{skew:g}' if skew else ''}.emoe")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["from estream_packer.cli import main; main()", "synth", "--shape", shape, "-o", str(path)]
        chosen = ["--experts", "w4g32", *(["--dense", dense] if dense else []), "--skew", str(skew)]
        subprocess.run([sys.executable, "-c", *command, *chosen], check=True, stdout=sys.stderr)
    return path
