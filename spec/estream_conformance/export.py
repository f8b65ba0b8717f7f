"""Writes the suite's files into a folder, each with its answer beside it. LOADER-CLI.md section 5."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from estream_conformance.errors import UsageError
from estream_conformance.vector import Vector


def export(folder: Path, vectors: Sequence[Vector], advance: Callable[[], None] = lambda: None) -> None:
    """Write vectors into a new or empty folder; where that fails nothing stays.

    Args:
        folder: where to.
        vectors: what to write.
        advance: called after each.

    Raises:
        UsageError: the folder is none, or is not empty.
        UnwritableError: a vector's file cannot be written.
        OSError: an answer cannot be written.
    """
    fresh = not folder.exists()
    if fresh:
        folder.mkdir()
    elif not folder.is_dir():
        raise UsageError("there is a file of that name", path=str(folder), hint="name a folder")
    elif any(folder.iterdir()):
        raise UsageError("the folder is not empty", path=str(folder), hint="name an empty folder, or a new one")
    written: list[Path] = []
    try:
        for vector in vectors:
            paths = [folder / f"{vector.name}.{suffix}" for suffix in ("emoe", "json", "signature")]
            written += paths
            vector.write(paths[0], paths[2])
            text = json.dumps(answer_values(vector), indent=2, ensure_ascii=False)
            paths[1].write_text(f"{text}\n", encoding="utf-8")
            advance()
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        if fresh:
            folder.rmdir()
        raise


def answer_values(vector: Vector) -> dict[str, Any]:
    """What stands beside a vector's file: how to ask about it, and the right answer."""
    return {
        "about": vector.about,
        "base": vector.base,
        "features": sorted(vector.features),
        "arguments": [each.replace("{detached}", f"{vector.name}.signature") for each in vector.arguments],
        "status": 0 if vector.rule is None else 1,
        "class": vector.refused_as,
        "rule": vector.rule,
        "output": vector.json,
    }
