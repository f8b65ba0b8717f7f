"""Text in blocks of whole paragraphs, each of which serves one purpose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Final, Literal, get_args

from estream_spec.errors import PackError

Purpose = Literal["train", "stop", "fit", "calibrate", "test"]
"""What tokens are for: the linear map, and when to stop training it; the confidence model; the target; the report."""
Window = list[int]
"""Token ids that the model reads together, with nothing before them."""

PURPOSES: Final[tuple[Purpose, ...]] = get_args(Purpose)
CYCLE: Final[tuple[Purpose, ...]] = (
    "train", "fit", "train", "calibrate", "train", "test", "train", "stop", "train", "fit",
    "train", "calibrate", "train", "test", "train", "fit", "train", "train", "train", "train",
)  # fmt: skip
"""Purposes of consecutive blocks, over and over: 60 % of the text, 5 %, 15 %, 10 %, 10 %."""
LEAST_BLOCKS: Final = 8
"""Blocks until each purpose has one."""
BLOCK_CHARACTERS: Final = 2000
"""Least characters of a block, but the last of a text: several hundred tokens."""
_PARAGRAPH_END: Final = re.compile(r"\n[ \t\r]*\n\s*")


def blocks_of(text: str) -> Iterator[str]:
    """A text in order: blocks of as many paragraphs as it takes, a paragraph cut only where it is far too long."""
    begin = 0
    while begin < len(text):
        wanted = begin + BLOCK_CHARACTERS
        found = _PARAGRAPH_END.search(text, wanted, wanted + BLOCK_CHARACTERS)
        end = found.end() if found else min(wanted + BLOCK_CHARACTERS, len(text))
        yield text[begin:end]
        begin = end


def windows_by_purpose(
    texts: Sequence[str], tokens: int, window: int, encode: Callable[[str], Window]
) -> dict[Purpose, list[Window]]:
    """Token ids of all texts by what they are for; texts take turns, so that each has its part in everything.

    Args:
        texts: what there is.
        tokens: how much of that is used, at most.
        window: most tokens of a window; a block of more is read in several.
        encode: gives the token ids of a block.

    Raises:
        PackError: there are too few blocks for all purposes.
    """
    found: dict[Purpose, list[Window]] = {purpose: [] for purpose in PURPOSES}
    number = 0
    for block in (block for turn in zip_longest(*map(blocks_of, texts)) for block in turn if block is not None):
        if tokens == 0:
            break
        ids = encode(block)[:tokens]
        tokens -= len(ids)
        if ids:
            found[CYCLE[number % len(CYCLE)]] += [ids[at : at + window] for at in range(0, len(ids), window)]
            number += 1
    if number < LEAST_BLOCKS:
        found_blocks = f"{number} block{'s' * (number != 1)} of about {BLOCK_CHARACTERS:,} characters"
        message = f"text is too short: {found_blocks}, expected {LEAST_BLOCKS}"
        raise PackError(message, hint="give more text or more --tokens")
    return found
