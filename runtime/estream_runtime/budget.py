"""How much work a chat template may cause, in steps: what it does and how large its values are both count.

A template comes with a package, so it may be anyone's. Work is counted before or right after it is done, and no value
is ever larger than the steps that were paid for it, so time and memory stay small whatever a template does.
"""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Final

from jinja2.utils import Namespace

from estream_spec.errors import TrapError

STEPS: Final = 500_000
"""Steps for one rendering, a second or two. A message of a thousand characters takes about a hundred."""
CHARACTERS: Final = 32
"""Characters that are read or written in one step."""
ITEMS: Final = 16
"""Items that are walked over in one step by what does nothing else with them."""
MATCHES: Final = 1024
"""Characters that are compared in one step."""
MAX_BITS: Final = 4096
"""Of a whole number: calculating with longer ones takes long."""
_VIEWS: Final = (KeysView, ValuesView, ItemsView)


class Budget:
    """Steps that are left.

    Args:
        steps: how many there are.
    """

    def __init__(self, steps: int = STEPS):
        self._steps = self._left = steps

    def spend(self, steps: float) -> None:
        """Take steps away.

        Raises:
            TrapError: not so many are left.
        """
        assert steps >= 0, steps
        self._left -= math.ceil(steps)
        if self._left < 0:
            hint = "it loops or grows without an end, or the conversation is far too long for it"
            raise TrapError(f"the chat template takes more than {self._steps:,} steps", hint=hint)

    def spend_text(self, characters: int) -> None:
        """Pay for so many characters. Raises as `spend` does."""
        self.spend(1 + characters / CHARACTERS)

    def search(self, text: object, wanted: object) -> None:
        """Pay for looking for a text, or for any of its characters, at every place of another one.

        Raises as `spend` does.
        """
        if isinstance(text, str) and isinstance(wanted, str):
            self.spend(len(text) * len(wanted) / MATCHES)

    def glance(self, value: object) -> None:
        """Pay for what walks over a value without a look at what its items hold. Raises as `spend` does."""
        if isinstance(value, str):
            self.spend_text(len(value))
        else:
            self.spend(1 + (len(value) / ITEMS if isinstance(value, (list, tuple, dict, range, *_VIEWS)) else 0))

    def weigh(self, value: object, times: int = 1) -> None:
        """Pay for a value with all it holds, each part as often as it is in it.

        Args:
            value: what was made, or is to be read or written whole.
            times: how often.

        Raises:
            TrapError: not so many steps are left, a number is too long, or a namespace is used as a value.
        """
        pending = [value]
        while pending:
            each = pending.pop()
            if isinstance(each, str):
                self.spend(times * (1 + len(each) / CHARACTERS))
            elif isinstance(each, (list, tuple)):
                self.spend(times * (1 + len(each)))
                pending.extend(each)
            elif isinstance(each, dict):
                self.spend(times * (1 + 2 * len(each)))
                pending.extend(each)
                pending.extend(each.values())
            elif isinstance(each, range):
                self.spend(times * (1 + len(each)))
            elif isinstance(each, _VIEWS):
                self.spend(times * (1 + len(each)))
                pending.extend(each)
            elif isinstance(each, int):
                if each.bit_length() > MAX_BITS:
                    bits = f"{each.bit_length()} bits, more than {MAX_BITS}"
                    raise TrapError(f"the chat template makes a number of {bits}")
                self.spend(times * (1 + each.bit_length() // (3 * CHARACTERS)))  # it may be written
            elif isinstance(each, Namespace):  # it could hold itself
                raise TrapError("the chat template uses a namespace as a value")
            else:
                self.spend(times)

    def metered(self, items: Iterable[object]) -> Iterator[object]:
        """The items, each for one step."""
        for item in items:
            self.spend(1)
            yield item
