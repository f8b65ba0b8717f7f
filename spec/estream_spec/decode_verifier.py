"""What a program that decodes asks for, proven: demands stand in order, and banks suffice. SCHEDULE.md section 4.1.

Which experts are asked for is known only when it runs. So what is proven is a count: together, the layers never hold
more records than there are banks.
"""

from __future__ import annotations

from typing import Final, NoReturn, Protocol

from estream_spec.schedule import ExpertShape, Instruction, Opcode

DEMANDS: Final = frozenset(
    {
        Opcode.PREDICT,
        Opcode.PREFETCH,
        Opcode.DEMAND_FILL,
        Opcode.DEMAND_AWAIT,
        Opcode.DEMAND_EXPERTS,
        Opcode.DEMAND_RELEASE,
    }
)
"""Opcodes about experts that only the run knows."""


class _Refuse(Protocol):
    def __call__(self, rule: str, message: str) -> NoReturn: ...


class Demands:
    """What has been asked for, layer by layer.

    Attributes:
        ahead: records of each layer that are read before they are routed to, at most.
        kept: records that each layer keeps, at most.
        most_read: experts of each layer that are read in one run, at most.
    """

    def __init__(self, shape: ExpertShape, banks: int, refuse: _Refuse):
        self._shape, self._banks, self._refuse = shape, banks, refuse
        self.ahead = [0] * len(shape.counts)
        self.kept = [0] * len(shape.counts)
        self.most_read = [0] * len(shape.counts)
        self._begin_layer()

    def _begin_layer(self) -> None:
        self._predicted = self._prefetched = self._filled = self._released = False
        # Counts of the last DEMAND_AWAIT, and of the last one that a DEMAND_EXPERTS stands behind.
        self._awaited = self._computed = 0

    def step(self, instruction: Instruction, expected: Instruction) -> None:
        """Carry out one instruction, or refuse it.

        Args:
            instruction: one of `DEMANDS`.
            expected: the next of the steps that have one order.
        """
        opcode, layer, count, _ = instruction
        # What comes next in its layer, where that is at work. A layer without experts is never asked for any.
        turn = expected.opcode if layer == expected.layer and self._shape.counts[layer] else None
        match opcode:
            case Opcode.PREDICT:
                self._predict(turn)
            case Opcode.PREFETCH:
                self._prefetch(turn, layer, count)
            case Opcode.DEMAND_FILL:
                self._fill(turn, layer)
            case Opcode.DEMAND_AWAIT:
                self._await(turn, layer, count)
            case Opcode.DEMAND_EXPERTS:
                self._compute()
            case _:
                self._release(turn, layer, count)

    def end_layer(self, layer: int) -> None:
        """A layer is done with: `COMBINE`."""
        if self._shape.counts[layer] and not self._released:
            self._refuse("EMOE-SCH-041", "the layer's experts are not released, expected DEMAND_RELEASE before")
        self._begin_layer()

    def end(self) -> int:
        """All layers are done with: `HALT`.

        Returns:
            The most banks that are taken at one time.
        """
        sizes = zip(self._shape.top_k, self.kept, self.ahead, strict=True)
        grown = [max(top_k - kept, 0) + ahead for top_k, kept, ahead in sizes]
        layer = grown.index(most := max(grown))
        if (taken := sum(self.kept) + most) > self._banks:
            message = f"layer {layer} needs {taken - sum(self.kept) + self.kept[layer]} banks"
            message += f" beside {sum(self.kept) - self.kept[layer]} of other layers"
            self._refuse("EMOE-SCH-042", f"{message}, there are {self._banks}")
        return taken

    def _predict(self, turn: int | None) -> None:
        if turn != Opcode.ATTEND or self._predicted:
            self._refuse("EMOE-SCH-034", "out of place, expected once, before ATTEND of a layer with experts")
        self._predicted = True

    def _prefetch(self, turn: int | None, layer: int, count: int) -> None:
        if turn not in (Opcode.ATTEND, Opcode.ROUTE) or not self._predicted or self._prefetched:
            self._refuse("EMOE-SCH-035", "out of place, expected once, between PREDICT and ROUTE of its layer")
        self._prefetched, self.ahead[layer] = True, count

    def _fill(self, turn: int | None, layer: int) -> None:
        if turn not in (Opcode.DENSE, Opcode.COMBINE) or self._filled:
            self._refuse("EMOE-SCH-036", "out of place, expected once, between ROUTE and COMBINE of its layer")
        self._filled = True
        self.most_read[layer] = min(self._shape.top_k[layer] + self.ahead[layer], self._shape.counts[layer])

    def _await(self, turn: int | None, layer: int, count: int) -> None:
        if turn is None or not self._filled or self._released:
            self._refuse("EMOE-SCH-037", "out of place, expected between DEMAND_FILL and DEMAND_RELEASE of its layer")
        top_k = self._shape.top_k[layer]
        if not self._awaited < count <= top_k:
            self._refuse("EMOE-SCH-038", f"expected a count of {self._awaited + 1} to {top_k}")
        self._awaited = count

    def _compute(self) -> None:
        if not self._awaited or self._released:
            message = "out of place, expected between DEMAND_AWAIT and DEMAND_RELEASE of its layer"
            self._refuse("EMOE-SCH-039", message)
        self._computed = self._awaited

    def _release(self, turn: int | None, layer: int, count: int) -> None:
        top_k = self._shape.top_k[layer]
        if turn is None or self._computed < top_k or self._released:
            message = f"out of place, expected once, behind DEMAND_EXPERTS of all {top_k} routed experts"
            self._refuse("EMOE-SCH-040", message)
        self._released, self.kept[layer] = True, count
