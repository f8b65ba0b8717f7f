"""Programs in the making: instructions as text, made by policy, and every field of their bytes can be made wrong.

Everything here is read out of SCHEDULE.md: a step such as `FILL 0 1 1` is an opcode, by name or number, with layer,
group, or count, and bank; those left out are 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from estream_conformance.builder import Values, pack
from estream_spec.constants import PROGRAM_MAGIC

PROGRAM: Final = {
    "magic": "8s",
    "phase": "B",
    "policy": "B",
    "reserved": "2s",
    "group_size": "I",
    "prefetch_depth": "I",
    "bank_count": "I",
    "instruction_count": "I",
    "reserved_too": "4s",
    "arena_bytes": "Q",
}
INSTRUCTION: Final = {
    "opcode": "B",
    "reserved": "B",
    "layer": "H",
    "group": "I",
    "bank": "I",
    "reserved_too": "4s",
}
OPCODES: Final = {
    "EMBED": 1,
    "ATTEND": 2,
    "ROUTE": 3,
    "FILL": 4,
    "AWAIT": 5,
    "EXPERTS": 6,
    "RELEASE": 7,
    "COMBINE": 8,
    "HEAD": 9,
    "HALT": 10,
    "DENSE": 12,
    "PREDICT": 13,
    "PREFETCH": 14,
    "DEMAND_FILL": 15,
    "DEMAND_AWAIT": 16,
    "DEMAND_EXPERTS": 17,
    "DEMAND_RELEASE": 18,
}
"""By name; those that are reserved have none."""
LOAD, PREFILL, DECODE = 1, 2, 3
ON_DEMAND, POST_ROUTING, PRE_ROUTING, RESIDENT = 1, 2, 3, 4


@dataclass
class Program:
    """A program in the making.

    Attributes:
        header: fields of the header; what is left out is 0, save for the magic and the number of steps.
        steps: the instructions.
        changes: fields of instructions to set to something else than their step says, by index.
    """

    header: Values
    steps: list[str]
    changes: dict[int, Values] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The program's bytes."""
        head = {"magic": PROGRAM_MAGIC, "instruction_count": len(self.steps), **self.header}
        changed = {index % len(self.steps): values for index, values in self.changes.items()}
        steps = ({**_fields(step), **changed.get(index, {})} for index, step in enumerate(self.steps))
        return pack(PROGRAM, head) + b"".join(pack(INSTRUCTION, each) for each in steps)


def header_of(content: bytes) -> Values:
    """The fields of a program's header."""
    kinds = "".join(PROGRAM.values())
    return dict(zip(PROGRAM, struct.unpack_from(f"<{kinds}", content), strict=True))


def _fields(step: str) -> Values:
    opcode, *operands = step.split()
    number = OPCODES[opcode] if opcode in OPCODES else int(opcode)
    return {"opcode": number, **dict(zip(("layer", "group", "bank"), map(int, operands), strict=False))}


@dataclass(frozen=True)
class Paging:
    """What programs depend on.

    Attributes:
        experts: how many each layer has.
        longest: bytes of the longest expert record.
        group_size: experts read together.
        prefetch_depth: groups read ahead.
        dense: the layers that have a dense block.
        top_k: how many experts a token is routed to in each layer.
    """

    experts: Sequence[int]
    longest: int
    group_size: int = 1
    prefetch_depth: int = 0
    dense: Sequence[int] = ()
    top_k: Sequence[int] = ()

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Layer and number in it of every group, in order."""
        size = self.group_size
        return [(layer, group) for layer, count in enumerate(self.experts) for group in range(-(-count // size))]

    @property
    def banks(self) -> int:
        """How many banks a program uses."""
        return min(self.prefetch_depth + 1, len(self.groups))

    def draft(self, policy: int, phase: int = PREFILL) -> Program:
        """The program of a policy, as the table of SCHEDULE.md section 6 has it."""
        header = self._header(policy, phase)
        places = [f"{layer} {group} {number % self.banks}" for number, (layer, group) in enumerate(self.groups)]
        if phase == LOAD:
            steps = [f"{opcode} {place}" for opcode in ("FILL", "AWAIT") for place in places]
            return Program(header, [*steps, "HALT"])
        return Program(header, self._prefill(policy, places))

    def decode(self, kept: Sequence[int], ahead: Sequence[int] = ()) -> Program:
        """A program to decode, as the table of SCHEDULE.md section 6 has it.

        Args:
            kept: records that each layer keeps.
            ahead: records that each layer reads ahead; if there are any, the policy is PRE_ROUTING.
        """
        steps = ["EMBED"]
        for layer, experts in enumerate(self.experts):
            if ahead and experts:
                steps += [f"PREDICT {layer}", f"PREFETCH {layer} {ahead[layer]}"]
            steps += [f"ATTEND {layer}"]
            steps += [f"ROUTE {layer}", f"DEMAND_FILL {layer}"] if experts else []
            steps += [f"DENSE {layer}"] if layer in self.dense else []
            for count in range(1, self.top_k[layer] + 1):
                steps += [f"DEMAND_AWAIT {layer} {count}", f"DEMAND_EXPERTS {layer}"]
            steps += [f"DEMAND_RELEASE {layer} {kept[layer]}"] if experts else []
            steps += [f"COMBINE {layer}"]
        return Program(self._header(PRE_ROUTING if ahead else POST_ROUTING, DECODE), [*steps, "HEAD", "HALT"])

    def _header(self, policy: int, phase: int) -> Values:
        return {
            "phase": phase,
            "policy": policy,
            "group_size": self.group_size,
            "prefetch_depth": self.prefetch_depth,
            "bank_count": self.banks,
            "arena_bytes": self.banks * self.group_size * self.longest,
        }

    def _prefill(self, policy: int, places: list[str]) -> list[str]:
        """Steps of a program to prefill.

        Args:
            policy: when it reads.
            places: operands of the groups, in order.
        """
        ahead = self.banks if policy == PRE_ROUTING else 0
        steps = [*(f"FILL {place}" for place in places[:ahead]), "EMBED"]
        for layer, experts in enumerate(self.experts):
            own = [number for number, group in enumerate(self.groups) if group[0] == layer]
            steps += [f"ATTEND {layer}", *([f"ROUTE {layer}"] if experts else [])]
            at_once = {ON_DEMAND: 1, POST_ROUTING: self.banks}.get(policy, 0)
            steps += [f"FILL {places[number]}" for number in own[:at_once]]
            steps += [f"DENSE {layer}"] if layer in self.dense else []
            for number in own:
                place, later = places[number], number + (1 if policy == ON_DEMAND else self.banks)
                if policy != RESIDENT:
                    steps.append(f"AWAIT {place}")
                steps += [f"EXPERTS {place}", f"RELEASE {place}"]
                if policy != RESIDENT and (later < len(places) if policy == PRE_ROUTING else later in own):
                    steps.append(f"FILL {places[later]}")
            steps.append(f"COMBINE {layer}")
        return [*steps, "HEAD", "HALT"]
