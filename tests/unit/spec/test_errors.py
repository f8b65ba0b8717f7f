"""What every refusal tells: a stable class, a sentence, the place."""

from __future__ import annotations

import pytest

from estream_spec import errors
from estream_spec.errors import EmoeError, FormatError, LinkError

SLUGS = {
    "MalformedError": "malformed",
    "InvalidError": "invalid",
    "IntegrityError": "integrity",
    "UnsupportedError": "unsupported",
    "LimitError": "limit",
    "LinkError": "link",
    "TrapError": "trap",
    "PackError": "pack",
}


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({}, "found 1"),
        ({"path": "a.b"}, "found 1 (at a.b)"),
        ({"offset": 64}, "found 1 (at offset 0x40)"),
        ({"path": "a.b", "offset": 0, "hint": "look"}, "found 1 (at offset 0x0, a.b)"),
    ],
)
def test_text_ends_with_the_place(place: dict[str, object], text: str) -> None:
    assert str(EmoeError("found 1", **place)) == text  # type: ignore[arg-type]


def test_slugs_are_stable() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, EmoeError)]
    slugs = {each.__name__: each.slug for each in classes}
    assert slugs == {**SLUGS, "EmoeError": "error", "FormatError": "format"}


def test_what_is_wrong_with_a_package_is_a_value_error() -> None:
    kinds = [getattr(errors, name) for name in SLUGS]
    refused = [kind for kind in kinds if issubclass(kind, FormatError)]
    assert [kind.slug for kind in refused] == ["malformed", "invalid", "integrity", "unsupported", "limit"]
    assert all(issubclass(kind, ValueError) for kind in refused)
    assert not issubclass(LinkError, ValueError)
