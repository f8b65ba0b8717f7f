"""What every refusal tells: a stable class, a sentence, the place."""

from __future__ import annotations

import pytest

from estream_spec import errors
from estream_spec.errors import EmoeError, FormatError, LinkError, TrustError, located

SLUGS = {
    "MalformedError": "malformed",
    "InvalidError": "invalid",
    "IntegrityError": "integrity",
    "UnsupportedError": "unsupported",
    "LimitError": "limit",
    "TrustError": "untrusted",
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
        ({"path": "a.b", "offset": 0, "rule": "EMOE-XYZ-001"}, "found 1 (at offset 0x0, a.b) [EMOE-XYZ-001]"),
        ({"rule": "EMOE-XYZ-001"}, "found 1 [EMOE-XYZ-001]"),
    ],
)
def test_text_ends_with_the_place_and_the_rule(place: dict[str, object], text: str) -> None:
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
    assert not issubclass(TrustError, ValueError)


def test_an_offset_is_filled_in_where_none_is_known() -> None:
    for known, told in ((None, 64), (7, 7)):
        with pytest.raises(EmoeError) as caught, located(64):
            raise EmoeError("found 1", offset=known)
        assert caught.value.offset == told
