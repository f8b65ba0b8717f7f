"""The reader written from FORMAT.md alone gives every answer of the suite, and this loader's JSON byte for byte."""

from __future__ import annotations

from pathlib import Path

from estream_conformance.vector import Vector
from estream_loader.trust import SignaturePolicy
from fixtures.readers import loader_answer, second_answer


def options_of(vector: Vector) -> tuple[int, SignaturePolicy | None]:
    """The offset and the signature policy that a vector's arguments ask for."""
    pairs = list(zip(vector.arguments[::2], vector.arguments[1::2], strict=True))
    keys = tuple(bytes.fromhex(value) for name, value in pairs if name == "--key")
    numbers = {name: int(value) for name, value in pairs if name in ("--offset", "--minimum-counter")}
    detached = tuple(vector.detached or b"" for name, _ in pairs if name == "--detached")
    policy = SignaturePolicy(keys, numbers.get("--minimum-counter", 0), detached) if keys else None
    return numbers.get("--offset", 0), policy


def test_both_readers_give_every_answer(suite: list[Vector], tmp_path: Path) -> None:
    path, wrong = tmp_path / "package", []
    for vector in suite:
        vector.image.write(path)
        right = (vector.refused_as, vector.rule) if vector.rule else ("accepted", vector.json)
        found = [reader(path, *options_of(vector)) for reader in (loader_answer, second_answer)]
        if found != [right, right]:
            wrong.append((vector.name, right[0], [answer[:2] for answer in found]))
    assert wrong == []
