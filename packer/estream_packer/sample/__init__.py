"""The sample model: a small OLMoE trained on English novels in the public domain.

Its checkpoint comes with the program, in the folder `checkpoint` beside this file, and `write_sample` copies it out.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from estream_spec.errors import PackError, reason

FILES: Final = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "README.md",
    "held-out.txt",
    "calibration.txt",
    "model.prefetch",
)
"""What the checkpoint consists of: the model, its card, the text it was measured on and never trained on, some of the
text it was trained on, to calibrate on, and a prefetch router, for `build --prefetch`."""


def sample_files() -> Traversable:
    """The folder in this installation that holds the checkpoint."""
    return resources.files(__name__) / "checkpoint"


def write_sample(folder: Path) -> None:
    """Write the sample checkpoint; when that fails, nothing of it is left.

    Args:
        folder: made when missing; refused when anything is in it.

    Raises:
        PackError: the folder is not empty or cannot be written, or this installation lacks the sample.
    """
    files = {name: sample_files() / name for name in FILES}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise PackError(f"this installation lacks the sample's {', '.join(missing)}", hint="install it again")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PackError("not an empty folder", path=str(folder), hint="give the name of a new one")
        with ExitStack() as undo:
            if not folder.exists():
                folder.mkdir(parents=True)
                undo.callback(folder.rmdir)
            for name, file in files.items():
                copy = folder / name
                undo.callback(copy.unlink, missing_ok=True)
                with file.open("rb") as content, copy.open("xb") as target:
                    shutil.copyfileobj(content, target)
            undo.pop_all()
    except OSError as error:
        raise PackError(f"sample cannot be written: {reason(error)}", path=str(folder)) from error
