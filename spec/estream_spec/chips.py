"""Chips with a Hexagon tensor processor (HTP) that computes in fp16, by the names that people give them.

Numbers of chips are those that Qualcomm's QNN SDK uses; not every chip it knows stands here, and one that does not is
named by its number and the version of its processor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from estream_spec.errors import LinkError

OLDEST_ARCHITECTURE: Final = 69
"""The first Hexagon version that computes in fp16."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip.

    Attributes:
        name: its part number in lower case, such as `sm8650`, or `soc57-v75` where it has none here.
        title: what it is sold as.
        soc_model: its number in the QNN SDK.
        architecture: version of its Hexagon processor.
    """

    name: str
    title: str
    soc_model: int
    architecture: int

    def __str__(self) -> str:
        return f"{self.title} ({self.name}, Hexagon v{self.architecture})"


CHIPS: Final = (
    Chip("sm8450", "Snapdragon 8 Gen 1", 36, 69),
    Chip("sm8550", "Snapdragon 8 Gen 2", 43, 73),
    Chip("sm8650", "Snapdragon 8 Gen 3", 57, 75),
    Chip("sm8750", "Snapdragon 8 Elite", 69, 79),
    Chip("sm8850", "Snapdragon 8 Elite Gen 5", 87, 81),
    Chip("x1e80100", "Snapdragon X Elite", 60, 73),
)

_NUMBERED: Final = re.compile(r"soc([0-9]{1,9})-v([0-9]{1,4})\Z")


def chip_numbered(soc_model: int, architecture: int) -> Chip:
    """The chip of a number, or one named by its number where no such chip stands here."""
    for chip in CHIPS:
        if (chip.soc_model, chip.architecture) == (soc_model, architecture):
            return chip
    return Chip(f"soc{soc_model}-v{architecture}", f"chip {soc_model}", soc_model, architecture)


def chip_named(text: str) -> Chip:
    """The chip that a name means.

    Args:
        text: a part number (`sm8650`), what it is sold as, with the brand or without (`8-gen-3`), the version of its
            Hexagon processor, which means the first of that version (`v75`), its number in the QNN SDK (`soc57`), or
            number and version of one that does not stand here (`soc52-v73`).

    Raises:
        LinkError: there is no such chip, or its Hexagon version does not compute in fp16.
    """
    wanted = text.lower().removeprefix("snapdragon-")
    for chip in CHIPS:
        sold_as = chip.title.lower().removeprefix("snapdragon ").replace(" ", "-")
        if wanted in (chip.name, sold_as, f"v{chip.architecture}", f"soc{chip.soc_model}"):
            return chip
    if numbered := _NUMBERED.match(wanted):
        soc_model, architecture = map(int, numbered.groups())
        if soc_model and architecture >= OLDEST_ARCHITECTURE:
            return chip_numbered(soc_model, architecture)
        message = (
            f"chip {text!r} cannot be compiled for, expected Hexagon v{OLDEST_ARCHITECTURE} or later, a chip above 0"
        )
        raise LinkError(message)
    known = ", ".join(chip.name for chip in CHIPS)
    raise LinkError(f"unknown chip {text!r}", hint=f"known are {known}; others by number and version: soc52-v73")
