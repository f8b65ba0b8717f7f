"""Which device configurations belong together, and which of them is for how many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from estream_spec.devices import for_tokens, of_device
from estream_spec.errors import LinkError
from estream_spec.manifest import DeviceConfiguration


def configuration(name: str, prompt_tokens: int = 0, group_size: int = 1) -> DeviceConfiguration:
    return DeviceConfiguration(
        name=name, arena_bytes=1 << 20, group_size=group_size, prefetch_depth=1, prompt_tokens=prompt_tokens
    )


PHONE = [configuration("phone", length) for length in (64, 512)]
TABLET, GENERIC = configuration("tablet"), configuration("generic")
OTHER_GENERIC = configuration("generic", 8, group_size=2)


@pytest.mark.parametrize(
    ("added", "name", "expected"),
    [
        ([], None, [GENERIC]),
        ([], "generic", [GENERIC]),
        (PHONE, None, PHONE),
        ([TABLET, *PHONE], None, [TABLET]),
        ([PHONE[0], TABLET, PHONE[1]], "phone", PHONE),
        ([TABLET, *PHONE], "generic", [GENERIC]),
        ([OTHER_GENERIC], "generic", [OTHER_GENERIC]),
        ([TABLET, OTHER_GENERIC], "generic", [OTHER_GENERIC]),
    ],
)
def test_a_device_is_all_that_was_added_of_its_name_or_what_the_manifest_has(
    added: list[DeviceConfiguration], name: str | None, expected: list[DeviceConfiguration]
) -> None:
    assert list(of_device(added, [GENERIC], name)) == expected


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(LinkError, match="no device configuration for 'watch'") as caught:
        of_device([*PHONE, TABLET], [GENERIC], "watch")
    assert caught.value.hint == "the package has 'phone', 'tablet', 'generic'"


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ((64,), {1: 64, 64: 64, 65: 64}),
        ((0,), {1: 0, 9999: 0}),
        ((512, 64, 4096), {1: 64, 64: 64, 65: 512, 512: 512, 513: 4096, 4097: 4096}),
        ((0, 512, 64), {1: 64, 65: 512, 513: 0, 1 << 24: 0}),
    ],
)
def test_the_shortest_that_is_long_enough_is_taken(lengths: Sequence[int], chosen: dict[int, int]) -> None:
    choices = [configuration("phone", length) for length in lengths]
    assert {tokens: for_tokens(choices, tokens).prompt_tokens for tokens in chosen} == chosen
