"""Fills slots behind the banks with what a prompt was routed to most, while its experts pass through the banks.

Decoding goes on with the prompt's topic, so what the prompt needed most is what its first tokens will need. It is in a
bank anyway: copying a record takes a fraction of the time that reading it again would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from estream_loader.pager import Pager
from estream_loader.slots import Slots

FEW_TOKENS: Final = 16
"""Fewer tokens than this add to what is known of earlier ones; so many or more say enough by themselves.

Chosen, not measured.
"""


class Seeding:
    """The slots behind the banks during one prefill program.

    A slot whose record is not worth keeping any more takes another only when nothing can need it in this program.

    Args:
        pager: its arena divided for that program.
        slots: ranks experts.
        keep: how many records each layer will keep when decoding; the room there is is shared out in this proportion.
    """

    def __init__(self, pager: Pager, slots: Slots, keep: Mapping[int, int]):
        self._pager, self._slots = pager, slots
        first, total = len(pager.arena.banks) * pager.group_size, sum(keep.values())
        room = max(pager.slots - first, 0)
        self._allotted = {layer: count * room // total if total else 0 for layer, count in keep.items()}
        self._held: dict[int, dict[int, int]] = {layer: {} for layer in keep}
        for (layer, expert), slot in pager.kept.items():
            self._held[layer][expert] = slot
        taken = set(pager.kept.values())
        self._vacant = [slot for slot in range(first, first + room) if slot not in taken]
        self._wanted: set[int] = set()
        """Experts of the layer at work that are to be copied."""
        self._waning: dict[int, int] = {}
        """Experts of it that are held and not worth it, and their slots, until they are computed."""

    def routed(self, layer: int, experts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """The prompt is routed in a layer.

        Args:
            layer: the layer.
            experts: of each token.
            counts: tokens by expert.
        """
        if len(experts) < FEW_TOKENS:
            for each in experts:
                self._slots.note(layer, each)
        else:
            self._slots.seed(layer, counts)
        best, held = self._slots.favourites(layer, self._allotted[layer]), self._held[layer]
        self._wanted = {expert for expert in best if counts[expert] and expert not in held}
        waning = {expert: slot for expert, slot in held.items() if expert not in best}
        self._waning = {expert: slot for expert, slot in waning.items() if counts[expert]}
        self._vacant += [slot for expert, slot in waning.items() if not counts[expert]]

    def passed(self, layer: int, expert: int, record: memoryview) -> None:
        """An expert has been computed, and its record is still there: it is copied if it is to be kept."""
        if expert in self._waning:
            self._vacant.append(self._waning.pop(expert))
        elif expert in self._wanted and self._vacant:
            self._pager.keep((layer, expert), record, self._vacant.pop())
