"""Which device configurations belong to one device, and which of them is for how many tokens. FORMAT.md section 6.7."""

from __future__ import annotations

from collections.abc import Sequence

from estream_spec.errors import LinkError
from estream_spec.manifest import DeviceConfiguration


def of_device(
    added: Sequence[DeviceConfiguration], shipped: Sequence[DeviceConfiguration], name: str | None = None
) -> tuple[DeviceConfiguration, ...]:
    """All device configurations of one name: those that were added, or those of the manifest where there are none.

    Args:
        added: those that were added where the package is used, latest first.
        shipped: the manifest's.
        name: the device; None takes the first one's.

    Raises:
        LinkError: there is no such device.
    """
    everything = [*added, *shipped]
    wanted = everything[0].name if name is None else name
    for source in (added, shipped):
        if found := tuple(each for each in source if each.name == wanted):
            return found
    names = ", ".join(repr(each) for each in dict.fromkeys(each.name for each in everything))
    raise LinkError(f"no device configuration for {wanted!r}", hint=f"the package has {names}")


def for_tokens(choices: Sequence[DeviceConfiguration], tokens: int) -> DeviceConfiguration:
    """The device configuration for so many tokens at a time.

    It is the one for the shortest prompts that are as long, or else the one for any, or else the one for the longest.

    Args:
        choices: all of one device, at least one.
        tokens: tokens that go through the layers together.
    """
    enough = [each for each in choices if each.prompt_tokens >= tokens]
    if enough:
        return min(enough, key=lambda each: each.prompt_tokens)
    any_length = [each for each in choices if each.prompt_tokens == 0]
    return max(any_length or choices, key=lambda each: each.prompt_tokens)
