"""Makes the vectors' texts from the cases: `python -m estream_conformance.generate` writes what has changed.

Cases that give the same bytes give the same text, so a second run changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import estream_conformance.cases  # noqa: F401 (it fills CASES)
from estream_conformance.case import CASES, Case, made
from estream_conformance.vector import FOLDER, SUFFIX, Content, Vector, encode_vector
from estream_spec.rulebook import RULES

MAX_TEXT_BYTES: Final = 128 << 10
"""Longer texts are not kept: their cases say `committed=False`."""


def vector_of(case: Case) -> Vector:
    """The vector of a case."""
    result, image, json = made(case)
    return Vector(
        name=case.name,
        about=case.about,
        content=lambda: Content(image, json),
        refused_as=None if case.rule is None else RULES[case.rule].slug,
        rule=case.rule,
        base=case.base,
        features=case.features | ({"accept"} if case.rule is None else set()),
        arguments=result.arguments,
        detached=result.detached,
    )


def texts() -> dict[str, str]:
    """The text of every case, by name."""
    vectors = {case.name: vector_of(case) for case in CASES.values()}
    images = {name: vector.image for name, vector in vectors.items()}
    found = {name: encode_vector(vector, images, with_lines=CASES[name].committed) for name, vector in vectors.items()}
    for name, text in found.items():
        assert len(text) <= MAX_TEXT_BYTES, (name, len(text))
    return found


def write(folder: Path) -> list[str]:
    """Bring a folder of vectors up to date; returns the names of those that changed."""
    folder.mkdir(exist_ok=True)
    wanted = texts()
    changed = []
    for path in folder.glob(f"*{SUFFIX}"):
        if path.stem not in wanted:
            path.unlink()
            changed.append(path.stem)
    for name, text in wanted.items():
        path = folder / f"{name}{SUFFIX}"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


if __name__ == "__main__":
    print(f"{len(write(FOLDER))} vectors changed of {len(CASES)}")  # noqa: T201 (what it is for)
