"""How cases are written: one function a vector, named after what is special about the file.

The function makes the file; its docstring is the sentence about it; the decorator says the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from estream_conformance.builder import Sealed, Values
from estream_conformance.expected import expected_json
from estream_conformance.image import Image
from estream_spec.rulebook import RULES


@dataclass(frozen=True)
class Made:
    """A case's file.

    Attributes:
        package: the package; needed where the file must be accepted.
        image: the file, where it is not just the package's bytes.
        signatures: what an accepted package's JSON says of its signatures.
        configurations: what it says of its device configurations outside the manifest.
        arguments: options behind the path.
        detached: a detached signature, which `{detached}` in the arguments stands for.
    """

    package: Sealed | None = None
    image: Image | None = None
    signatures: Sequence[Values] = ()
    configurations: Sequence[Values] = ()
    arguments: tuple[str, ...] = ()
    detached: bytes | None = None


Build = Callable[[], "Made | Sealed | bytes"]


@dataclass(frozen=True)
class Case:
    """A vector that can be made.

    Attributes:
        build: makes the file.
        rule: id of the rule that is broken; None where the file must be accepted.
        base: name of the accepted case that the file differs from in little but its fault; None for the first ones.
        features: what a loader needs, LOADER-CLI.md section 4, besides `accept`.
        committed: whether the file's bytes are kept with its vector, or made when they are needed.
    """

    build: Build
    rule: str | None
    base: str | None
    features: frozenset[str] = field(default_factory=frozenset)
    committed: bool = True

    @property
    def name(self) -> str:
        """The function's name."""
        return self.build.__name__

    @property
    def about(self) -> str:
        """The docstring."""
        return " ".join((self.build.__doc__ or "").split())


CASES: Final[dict[str, Case]] = {}
"""Every case by name."""


def refused(rule: str, *features: str, base: str = "smallest", committed: bool = True) -> Callable[[Build], Build]:
    """The file must be refused by a rule."""
    assert rule in RULES, rule
    return _register(rule, base, features, committed)


def accepted(*features: str, base: str | None = "smallest", committed: bool = True) -> Callable[[Build], Build]:
    """The file must be accepted."""
    return _register(None, base, features, committed)


def _register(
    rule: str | None, base: str | None, features: tuple[str, ...], committed: bool
) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        case = Case(build, rule, base, frozenset(features), committed)
        assert case.name not in CASES, case.name
        assert case.about, case.name
        CASES[case.name] = case
        return build

    return register


def made(case: Case) -> tuple[Made, Image, str | None]:
    """A case's file: what the case gave, the bytes, and the JSON that a loader must print of it."""
    result = case.build()
    if isinstance(result, bytes):
        result = Made(image=Image.of((0, result)))
    if isinstance(result, Sealed):
        result = Made(package=result)
    image = result.image
    if image is None:
        assert result.package is not None, case.name
        image = Image.of((0, result.package.data))
    if case.rule is not None:
        return result, image, None
    assert result.package is not None, case.name
    return result, image, expected_json(result.package, list(result.signatures), list(result.configurations))
