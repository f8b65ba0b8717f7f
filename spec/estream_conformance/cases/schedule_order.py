"""When programs are judged, and which of two faults of one is named: FORMAT.md section 9.4."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Sealed
from estream_conformance.case import refused
from estream_conformance.cases.device_sections import section as configuration
from estream_conformance.cases.schedules import (
    LOAD_BASE,
    PAGE,
    PRE_ROUTING_BASE,
    RESIDENT_BASE,
    pre_routing,
    resident,
    section,
    to_load,
    two_layers,
    with_reserved,
    with_sections,
)
from estream_conformance.changes import refuse
from estream_conformance.programs import Program
from estream_spec.constants import SectionType
from estream_spec.limits import MAX_INSTRUCTIONS

TWO = "programs_for_one_configuration"


def behind(step: str, **changes: int) -> Program:
    """A program with a step behind HALT."""
    made = pre_routing(**changes)
    made.steps.append(step)
    return made


_program: Program
for _rule, _name, _about, _base, _program in (
    (
        "001",
        "reserved_bytes_before_count",
        "reserved bytes of the header come before the number of instructions",
        PRE_ROUTING_BASE,
        pre_routing(reserved=b"\0\1", instruction_count=MAX_INSTRUCTIONS + 1),
    ),
    (
        "003",
        "length_before_reserved_bytes",
        "the length comes before reserved bytes of instructions",
        PRE_ROUTING_BASE,
        with_reserved(0, 1, instruction_count=20),
    ),
    (
        "004",
        "reserved_bytes_before_phase",
        "reserved bytes of the last instruction come before the phase",
        PRE_ROUTING_BASE,
        with_reserved(-1, 1, phase=0),
    ),
    (
        "005",
        "phase_before_policy",
        "the phase comes before the policy",
        PRE_ROUTING_BASE,
        pre_routing(phase=4, policy=9),
    ),
    ("006", "policy_before_sizes", "the policy comes before the sizes", LOAD_BASE, to_load(policy=1, group_size=0)),
    (
        "007",
        "range_of_arena_before_banks",
        "the range of the arena comes before the number of banks",
        PRE_ROUTING_BASE,
        pre_routing(arena_bytes=2**63, bank_count=9),
    ),
    (
        "008",
        "banks_before_banks_of_a_resident_program",
        "it has as many banks as groups, but reads fewer ahead",
        RESIDENT_BASE,
        resident(prefetch_depth=1),
    ),
    (
        "009",
        "banks_of_a_resident_program_before_arena",
        "the number of banks comes before their room",
        RESIDENT_BASE,
        resident(ahead=1, arena_bytes=0),
    ),
    (
        "010",
        "arena_before_instructions",
        "the arena comes before the first instruction",
        PRE_ROUTING_BASE,
        Program({**pre_routing().header, "arena_bytes": PAGE}, ["0", "HALT"]),
    ),
    (
        "011",
        "opcode_0_behind_halt",
        "that it stands behind HALT comes before the opcode",
        PRE_ROUTING_BASE,
        behind("0"),
    ),
    (
        "011",
        "instruction_behind_halt_that_would_be_wrong",
        "that it stands behind HALT comes before the operands",
        PRE_ROUTING_BASE,
        behind("ATTEND 9 9 9"),
    ),
):
    refuse(
        f"EMOE-SCH-{_rule}",
        f"program_with_{_name}",
        f"A program has two faults: {_about}.",
        partial(with_sections, section(_program)),
        base=_base,
    )


@refused("EMOE-SCH-033", base=TWO)
def first_program_before_second() -> Sealed:
    """The first program lacks its HALT, the second one its magic: they are judged one by one."""
    first = pre_routing()
    del first.steps[-1]
    return with_sections(section(first, 1), section(b"no program", 2))


@refused("EMOE-SCH-001", base=TWO)
def programs_in_the_order_of_the_directory() -> Sealed:
    """The first program has no magic and the higher id, the second one no HALT: ids say nothing."""
    second = pre_routing()
    del second.steps[-1]
    return with_sections(section(b"no program", 2), section(second, 1))


@refused("EMOE-SEC-018", base=TWO)
def digest_of_second_program_before_content_of_first() -> Sealed:
    """The first program is none, the second one has another digest: all digests are judged before."""
    return with_sections(section(b"no program", 1), section(pre_routing(), 2, sha256=bytes(32)))


@refused("EMOE-SEC-019", "zstd", base="compressed_program")
def frame_of_program() -> Sealed:
    """A program is said to be compressed, but is no frame."""
    added = section(pre_routing())
    added.stored = b"no frame"
    return with_sections(added)


@refused("EMOE-CFG-001", base=PRE_ROUTING_BASE)
def configuration_of_the_manifest_before_program() -> Sealed:
    """The manifest's device configuration has too little room, and a program is none."""
    made = two_layers()
    made.manifest["device_configurations"][0]["arena_bytes"] = PAGE - 1
    made.sections.append(section(b"no program"))
    return made.seal()


@refused("EMOE-MAN-001", base=PRE_ROUTING_BASE)
def configuration_in_a_later_section_before_program() -> Sealed:
    """A program is none, and a device configuration behind it is no value: configurations are judged before."""
    return with_sections(section(b"no program"), configuration(b"\xc1"))


@refused("EMOE-SCH-032", "records", base=PRE_ROUTING_BASE)
def program_before_records() -> Sealed:
    """A program leaves a bank in use, and a record has another checksum: programs are judged before records."""
    made = two_layers()
    made.tables[SectionType.DENSE][0].digests[0] = {"checksum": 0}
    program = pre_routing()
    program.steps.remove("RELEASE 1 0 0")
    made.sections.append(section(program))
    return made.seal()


@refused("EMOE-TAB-012", base=PRE_ROUTING_BASE)
def tables_before_program() -> Sealed:
    """The digest over the records' digests is another, and a program is none."""
    made = two_layers()
    made.section(SectionType.EXPERTS).changes["sha256"] = bytes(32)
    made.sections.append(section(b"no program"))
    return made.seal()
