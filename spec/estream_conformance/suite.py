"""The vectors as they are kept, and the features that a loader may lack."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from estream_conformance.errors import UsageError
from estream_conformance.vector import FOLDER, SUFFIX, Content, Vector, decode_vector
from estream_spec.rulebook import RULES

FEATURES: Final = {
    "accept": "the JSON of an accepted file",
    "records": "checks inside records",
    "padding": "the padding between superblocks, sections and directory",
    "zstd": "compressed sections",
    "embedded": "--offset",
    "signature": "--key, --minimum-counter, --detached",
    "large": "sparse files of more than 2 GiB",
}
"""What a test can need, LOADER-CLI.md section 4."""
ACCEPTED_AREA: Final = "accepted"


def load_vectors() -> list[Vector]:
    """All vectors: first those to accept, then the others in the order of the rules they break, by name."""
    vectors: dict[str, Vector] = {}
    for path in FOLDER.glob(f"*{SUFFIX}"):
        text = path.read_text(encoding="utf-8")
        vectors[path.stem] = decode_vector(path.stem, text, lambda name: vectors[name].image, _make)
    order = {rule: number for number, rule in enumerate(RULES, 1)}
    return sorted(vectors.values(), key=lambda each: (order.get(each.rule or "", 0), each.name))


def _make(name: str) -> Content:
    """What a vector's text does not have."""
    import estream_conformance.cases  # noqa: F401 (it fills CASES; few calls need it, and it brings much along)
    from estream_conformance.case import CASES, made

    _, image, json = made(CASES[name])
    return Content(image, json)


def area(vector: Vector) -> str:
    """Where a vector belongs in a summary: the letters in the middle of its rule."""
    return ACCEPTED_AREA if vector.rule is None else vector.rule.split("-")[1]


def rule_of(vector: Vector) -> str:
    """The rule a vector breaks; a word for those that break none."""
    return vector.rule or ACCEPTED_AREA


def needed(vector: Vector) -> frozenset[str]:
    """Features without which a loader is not asked at all; without `accept`, less of its answer is compared."""
    return vector.features - {"accept"}


def chosen(vectors: Iterable[Vector], patterns: Iterable[str]) -> list[Vector]:
    """The vectors whose name, rule or rule area is like one of the patterns, in any case; all where there are none.

    Raises:
        UsageError: a pattern that is empty, or that no vector is like.
    """
    vectors = list(vectors)
    names: set[str] = set()
    for pattern in patterns:
        if not pattern:
            raise UsageError("the pattern of --only is empty", hint="leave --only out to take all tests")
        found = {each.name for each in vectors if _is_like(each, pattern.lower())}
        if not found:
            message = f"no test has a name, rule or rule area like {pattern!r}"
            raise UsageError(message, hint="'estream-conformance list' shows what there is; * stands for anything")
        names |= found
    return [each for each in vectors if each.name in names] if names else vectors


def _is_like(vector: Vector, pattern: str) -> bool:
    """Whether a pattern in lower case chooses a vector. Areas only as a whole: `s*` would be three of them."""
    names = (vector.name, (vector.rule or "").lower())
    return pattern == area(vector).lower() or any(fnmatchcase(name, pattern) for name in names)


def parse_features(text: str) -> frozenset[str]:
    """A comma-separated list of features, or the word `all`.

    Raises:
        UsageError: one that is not known.
    """
    features = {each.strip() for each in text.split(",")} - {""}
    if features == {"all"}:
        return frozenset(FEATURES)
    for each in sorted(features - FEATURES.keys()):
        raise UsageError(f"there is no feature {each!r}", hint=f"features are {', '.join(FEATURES)}; all are 'all'")
    return frozenset(features)
