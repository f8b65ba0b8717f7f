"""One vector: a file and the one right answer to it, as text.

A vector stands in a file of its name. Header lines `key: value`, an empty line, then the lines of 32 bytes in which the
file differs from its base (from zeros where it has none): offset and bytes, hexadecimal. So a bad file shows
its fault beside what mends the digests around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Final

from estream_conformance.errors import UnwritableError
from estream_conformance.image import Image

FOLDER: Final = Path(__file__).parent / "vectors"
SUFFIX: Final = ".vector"
MAX_HASHED: Final = 1 << 24
"""No digest is given of longer files."""


@dataclass(frozen=True, slots=True)
class Content:
    """A vector's file, and what a loader must print of one that it must accept."""

    image: Image
    json: str | None = None


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A file and its answer.

    Attributes:
        name: what is special about it, in a few words joined by `_`.
        about: the same as a sentence.
        refused_as: class of the refusal; None where the file must be accepted.
        rule: id of the rule that is broken; None where the file must be accepted.
        base: name of an accepted file that this one differs from in little; None where there is none.
        features: what a loader needs to be asked, LOADER-CLI.md section 4.
        arguments: options behind the path; `{detached}` stands for the name of a file that holds `detached`.
        detached: a detached signature.
        content: gives the file; called once, when it is needed, since some take long to make.
    """

    name: str
    about: str
    content: Callable[[], Content] = field(repr=False)
    refused_as: str | None = None
    rule: str | None = None
    base: str | None = None
    features: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    detached: bytes | None = None

    @cached_property
    def _content(self) -> Content:
        return self.content()

    @property
    def image(self) -> Image:
        """The file."""
        return self._content.image

    @property
    def json(self) -> str | None:
        """What a loader must print of an accepted file."""
        return self._content.json

    def write(self, path: Path, signature: Path) -> None:
        """Write the file, and its detached signature where it has one.

        Raises:
            UnwritableError: one cannot be written; none has more than 1 TiB, which some file systems do not take.
        """
        image = self.image
        try:
            image.write(path)
            if self.detached is not None:
                signature.write_bytes(self.detached)
        except OSError as error:
            raise UnwritableError(
                f"the file of {self.name!r} cannot be written: {(error.strerror or str(error)).lower()}",
                hint="leave `large` out of --features" if "large" in self.features else None,
            ) from error


def encode_vector(vector: Vector, bases: Mapping[str, Image], *, with_lines: bool = True) -> str:
    """The vector's text.

    Args:
        vector: what to write.
        bases: files by name; `vector.base` is one of them, or None.
        with_lines: give the file's bytes and its JSON; without, only their digests, and they have to be made.
    """
    json = vector.json or ""
    header = {
        "about": vector.about,
        "answer": "accepted" if vector.rule is None else f"{vector.refused_as} {vector.rule}",
        "features": " ".join(sorted(vector.features)),
        "arguments": " ".join(vector.arguments),
        "detached": (vector.detached or b"").hex(),
        "base": vector.base or "",
        "length": str(vector.image.length),
        "sha256": vector.image.digest() if vector.image.length <= MAX_HASHED else "",
        "bytes": "" if with_lines else "made by the suite",
        "json_sha256": "" if with_lines or not json else sha256(json.encode()).hexdigest(),
        "json": json if with_lines else "",
    }
    lines = vector.image.over(bases[vector.base] if vector.base else Image(0, {})) if with_lines else {}
    return "\n".join(
        [
            *(f"{key}: {value}" for key, value in header.items() if value),
            "",
            *(f"{at:08x} {line.hex()}" for at, line in lines.items()),
            "",
        ]
    )


def decode_header(text: str) -> dict[str, str]:
    """Keys and values of a vector's header."""
    header, _, _ = text.partition("\n\n")
    return {key: value for key, _, value in (line.partition(": ") for line in header.splitlines())}


def decode_vector(name: str, text: str, image_of: Callable[[str], Image], make: Callable[[str], Content]) -> Vector:
    """The vector a text describes.

    Args:
        name: the vector's.
        text: the text.
        image_of: gives the file of another vector.
        make: gives the content of a vector whose text does not have it.
    """
    header = decode_header(text)
    refused_as, _, rule = header["answer"].partition(" ")

    def content() -> Content:
        if "bytes" in header:
            return make(name)
        base = image_of(header["base"]) if "base" in header else Image(0, {})
        pairs = (line.split() for line in text.partition("\n\n")[2].splitlines())
        lines = {int(at, 16): bytes.fromhex(data) for at, data in pairs}
        return Content(base.patched(int(header["length"]), lines), header.get("json"))

    return Vector(
        name=name,
        about=header["about"],
        content=content,
        refused_as=refused_as if rule else None,
        rule=rule or None,
        base=header.get("base"),
        features=frozenset(header.get("features", "").split()),
        arguments=tuple(header.get("arguments", "").split()),
        detached=bytes.fromhex(header["detached"]) if "detached" in header else None,
    )
