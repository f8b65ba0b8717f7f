"""Programs as a whole: those that every reader accepts, their bytes and headers, and when they are judged.

SCHEDULE.md sections 2, 5 and 6, rules SCH-001 to 010.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Section, edit
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.frames import raw
from estream_conformance.packages import draft, paging, smallest_model
from estream_conformance.programs import (
    LOAD,
    ON_DEMAND,
    POST_ROUTING,
    PRE_ROUTING,
    PREFILL,
    RESIDENT,
    Program,
)
from estream_conformance.signing import asking, sign, with_signatures
from estream_spec.constants import SectionType
from estream_spec.limits import MAX_EXPERTS, MAX_FILE_LENGTH, MAX_INSTRUCTIONS, MAX_SCHEDULES

PAGE: Final = 4096
"""Bytes of an expert record."""


def two_layers(intermediates: tuple[int, int] = (1, 1)) -> Draft:
    """A package of two layers, the first of three experts and the second of two: the example of SCHEDULE.md."""
    model: dict[str, Any] = smallest_model()
    block = model["expert_blocks"][0]
    model["expert_blocks"] = [
        {**block, "experts": experts, "intermediate": inner}
        for experts, inner in zip((3, 2), intermediates, strict=True)
    ]
    model["layers"].append({"attention": 0, "experts": 1})
    return draft(model)


def program(policy: int, phase: int = PREFILL, /, *, group: int = 2, ahead: int = 1, **changes: Any) -> Program:
    """A program for it: groups of two and one read ahead unless said otherwise; `changes` are of its header."""
    made = paging(two_layers(), group, ahead).draft(policy, phase)
    made.header |= changes
    return made


def on_demand(**changes: Any) -> Program:
    """All in one bank."""
    return program(ON_DEMAND, **{"ahead": 0, **changes})


def pre_routing(**changes: Any) -> Program:
    """The example of SCHEDULE.md."""
    return program(PRE_ROUTING, **changes)


def to_load(**changes: Any) -> Program:
    """Brings the three groups into three banks."""
    return program(RESIDENT, LOAD, **{"ahead": 2, **changes})


def resident(**changes: Any) -> Program:
    """Computes with what stays in three banks."""
    return program(RESIDENT, **{"ahead": 2, **changes})


def section(data: Program | bytes, number: int = 0, **changes: int | bytes) -> Section:
    """A section with a program, or with anything."""
    content = data if isinstance(data, bytes) else data.encode()
    return Section(SectionType.SCHEDULE, content, id=number, changes=dict(changes))


def scheduled(*programs: Program | bytes) -> Sealed:
    """The package of two layers with programs, by ids that ascend."""
    return with_sections(*(section(one, number) for number, one in enumerate(programs)))


def with_sections(*sections: Section) -> Sealed:
    """The same with any sections."""
    made = two_layers()
    made.sections += sections
    return made.seal()


# Accepted.
@accepted(base=None)
def two_layers_without_a_program() -> Sealed:
    """Two layers of experts, three and two; the package has no program."""
    return two_layers().seal()


WITHOUT = "two_layers_without_a_program"
for _name, _about, _program in (
    ("on_demand", "A program reads one group at a time.", on_demand()),
    ("post_routing", "A program reads when a layer is routed, into two banks.", program(POST_ROUTING)),
    ("pre_routing", "A program reads across layers; it is the example of SCHEDULE.md.", pre_routing()),
    ("to_load", "A program brings every group into a bank of its own.", to_load()),
    ("resident", "A resident program stands alone: who needs one to load makes it.", resident()),
    ("of_single_experts", "Every group is one expert.", pre_routing(group=1)),
    ("of_whole_layers", "A group has room for far more experts than a layer.", pre_routing(group=MAX_EXPERTS)),
    ("with_more_banks_than_a_layer_has_groups", "All groups are read before anything.", pre_routing(ahead=2)),
    ("with_the_most_read_ahead", "No more banks are used than there are groups.", pre_routing(ahead=MAX_EXPERTS)),
    ("with_a_bank_that_is_not_used", "The program uses one of its two banks.", on_demand(ahead=1)),
    ("that_promises_too_much", "A program of policy PRE_ROUTING reads on demand.", on_demand(policy=PRE_ROUTING)),
    ("that_promises_too_little", "A program of policy ON_DEMAND reads ahead.", pre_routing(policy=ON_DEMAND)),
    ("of_a_byte_more", "The arena has a byte more than the banks.", pre_routing(arena_bytes=4 * PAGE + 1)),
    ("of_the_largest_arena", "The arena is as large as a file may be.", pre_routing(arena_bytes=MAX_FILE_LENGTH)),
    ("to_load_with_the_most_read_ahead", "Far more would be read ahead than there is.", to_load(ahead=MAX_EXPERTS)),
    ("resident_of_single_experts", "A resident program has five banks.", resident(group=1, ahead=4)),
):
    accept(f"program_{_name}", _about, partial(scheduled, _program), base=WITHOUT)
ON_DEMAND_BASE, PRE_ROUTING_BASE = "program_on_demand", "program_pre_routing"
LOAD_BASE, RESIDENT_BASE = "program_to_load", "program_resident"


@accepted(base=WITHOUT)
def programs_to_load_and_resident() -> Sealed:
    """A program loads and another one computes with what it loaded."""
    return scheduled(to_load(), resident())


@accepted(base=WITHOUT)
def programs_for_one_configuration() -> Sealed:
    """Three programs have the same sizes: the one with the highest id counts."""
    return scheduled(pre_routing(), program(POST_ROUTING), on_demand(ahead=1))


@accepted(base=WITHOUT)
def programs_for_several_configurations() -> Sealed:
    """Four programs have other sizes, of which no configuration has any."""
    return scheduled(on_demand(), pre_routing(), on_demand(group=1), pre_routing(group=3, ahead=1))


@accepted(base=WITHOUT)
def programs_in_another_order() -> Sealed:
    """The programs are to be given in the order of the directory, which is not that of their ids."""
    return with_sections(section(on_demand(), 2**32 - 1), section(pre_routing(), 0), section(resident(), 7))


@accepted(base=WITHOUT)
def program_before_all_sections() -> Sealed:
    """The program is the first section: its place says nothing."""
    made = two_layers()
    made.sections.insert(0, section(pre_routing()))
    return made.seal()


@accepted("zstd", base=WITHOUT)
def compressed_program() -> Sealed:
    """The program is compressed."""
    added = section(pre_routing())
    added.stored = raw(pre_routing().encode())
    return with_sections(added)


@accepted(base=WITHOUT, committed=False)
def programs_384() -> Sealed:
    """There are as many programs as may be."""
    return scheduled(*[on_demand(group=3)] * MAX_SCHEDULES)


@refused("EMOE-SEC-017", base="programs_384")
def programs_385() -> Sealed:
    """There is one program more than may be; each is right."""
    return scheduled(*[on_demand(group=3)] * (MAX_SCHEDULES + 1))


@accepted("signature", base="two_layers_without_a_program")
def program_added_to_a_signed_package() -> Made:
    """A program was added in place behind the signature, which still holds."""
    signature = sign(1, two_layers().seal().file_id)
    sealed = edit(with_signatures(two_layers(), signature), [section(pre_routing(), 9)])
    return asking(sealed, 1, signatures=(signature,))


@accepted(base=PRE_ROUTING_BASE)
def program_replaced_in_place() -> Sealed:
    """A program was replaced in place by one with a higher id."""
    return edit(scheduled(pre_routing()), [section(on_demand(), 1)], [(SectionType.SCHEDULE, 0)])


@accepted(base=None, committed=False)
def programs_of_many_layers_experts_and_banks() -> Sealed:
    """Layers, groups of a layer and banks have numbers that do not fit a byte."""
    model: dict[str, Any] = smallest_model()
    model["expert_blocks"].append({**model["expert_blocks"][0], "experts": 258})
    model["layers"] = [{"attention": 0, "experts": number // 258} for number in range(259)]
    made = draft(model)
    sizes = paging(made, 1, 600)
    for number, one in enumerate((sizes.draft(PRE_ROUTING), sizes.draft(RESIDENT, LOAD), sizes.draft(RESIDENT))):
        made.sections.append(section(one, number))
    return made.seal()


def of_uneven_records(short: int = 0) -> Sealed:
    """An arena for the longest expert records, of three pages, which are the second layer's."""
    made = two_layers((1, 1024))
    for one in made.tables[SectionType.EXPERTS]:
        one.payloads = [bytearray(len(each)) for each in one.payloads]
    own = paging(made, 2, 1).draft(PRE_ROUTING)
    own.header["arena_bytes"] -= short
    made.sections.append(section(own))
    return made.seal()


@accepted(base=None)
def program_for_records_of_two_lengths() -> Sealed:
    """The arena has room for the longest records, those of the second layer, and no more."""
    return of_uneven_records()


# Bytes.
RIGHT: Final = pre_routing().encode()
for _name, _about, _data in (
    ("of_1_byte", "has one byte", b"E"),
    ("of_39_bytes", "lacks the last byte of its header", RIGHT[:39]),
    ("without_magic", "begins with zeros", bytes(8) + RIGHT[8:]),
    ("with_another_magic", "begins as a record table does", b"EMOETAB\0" + RIGHT[8:]),
    ("with_a_magic_in_lower_case", "begins with the magic in lower case", RIGHT[:8].lower() + RIGHT[8:]),
    *(
        (
            f"with_reserved_byte_{at}",
            f"has a reserved byte that is not zero, {at}",
            RIGHT[:at] + b"\1" + RIGHT[at + 1 :],
        )
        for at in (10, 11, 28, 31)
    ),
):
    refuse(
        "EMOE-SCH-001",
        f"program_{_name}",
        f"A program {_about}.",
        partial(scheduled, _data),
        base=PRE_ROUTING_BASE,
    )


def of_zeros(count: int) -> Sealed:
    """A program of so many instructions that are all zero."""
    head = pre_routing(instruction_count=count)
    head.steps = []
    return scheduled(head.encode() + bytes(16 * count))


refuse(
    "EMOE-SCH-002",
    "program_an_instruction_longer_than_it_may_be",
    "A program has one instruction more than there may be; the first one is none.",
    partial(of_zeros, MAX_INSTRUCTIONS + 1),
    base=PRE_ROUTING_BASE,
)
refuse(
    "EMOE-SCH-012",
    "program_as_long_as_it_may_be",
    "A program has as many instructions as there may be; the first one is none.",
    partial(of_zeros, MAX_INSTRUCTIONS),
    base=PRE_ROUTING_BASE,
)
for _name, _about, _changes in (
    ("and_1", "one more than there may be, and has none", {"instruction_count": MAX_INSTRUCTIONS + 1}),
    ("less_1_in_32_bits", "2^32 - 1", {"instruction_count": 2**32 - 1}),
    ("that_wrap_to_its_own", "2^28 more than it has", {"instruction_count": 2**28 + 21}),
):
    refuse(
        "EMOE-SCH-002",
        f"program_of_too_many_instructions_{_name}",
        f"A program says that its instructions are {_about}.",
        partial(scheduled, pre_routing(**_changes)),
        base=PRE_ROUTING_BASE,
    )
for _name, _about, _data in (
    ("a_byte_short", "lacks its last byte", RIGHT[:-1]),
    ("with_a_byte_more", "has a byte behind its last instruction", RIGHT + b"\0"),
    ("an_instruction_short", "lacks its last instruction", RIGHT[:-16]),
    ("with_an_instruction_more", "has an instruction more than it says", RIGHT + RIGHT[-16:]),
    ("said_to_be_empty", "has instructions and says that it has none", pre_routing(instruction_count=0).encode()),
    ("of_a_header_alone", "says that it has instructions and has none", RIGHT[:40]),
    ("with_zeros_behind_it", "has zeros up to the next page", RIGHT.ljust(PAGE, b"\0")),
):
    refuse(
        "EMOE-SCH-003",
        f"program_{_name}",
        f"A program {_about}.",
        partial(scheduled, _data),
        base=PRE_ROUTING_BASE,
    )


def with_reserved(index: int, at: int, **changes: int) -> Program:
    """A program with a reserved byte that is not zero in one of its instructions; `at` counts from its start."""
    made = pre_routing(**changes)
    made.changes[index] = {"reserved": 1} if at == 1 else {"reserved_too": bytes(at - 12) + b"\x80"}
    return made


for _index, _at in ((0, 1), (0, 12), (0, 15), (2, 13), (-1, 1), (-1, 14)):
    refuse(
        "EMOE-SCH-004",
        f"byte_{_at}_of_{'the_last_instruction' if _index < 0 else f'instruction_{_index}'}",
        "A reserved byte of an instruction is not zero.",
        partial(scheduled, with_reserved(_index, _at)),
        base=PRE_ROUTING_BASE,
    )


# Headers.
_base_program: Program
for _rule, _name, _about, _base, _base_program in (
    ("005", "of_phase_0", "is for no phase", PRE_ROUTING_BASE, pre_routing(phase=0)),
    ("005", "of_phase_4", "is for a phase that is none", PRE_ROUTING_BASE, pre_routing(phase=4)),
    ("005", "of_phase_255", "is for a phase that is none", PRE_ROUTING_BASE, pre_routing(phase=255)),
    ("006", "of_policy_0", "has no policy", PRE_ROUTING_BASE, pre_routing(policy=0)),
    ("006", "of_policy_5", "has a policy that is none", PRE_ROUTING_BASE, pre_routing(policy=5)),
    ("006", "of_policy_255", "has a policy that is none", PRE_ROUTING_BASE, pre_routing(policy=255)),
    ("006", "to_load_on_demand", "loads, and its policy is ON_DEMAND", LOAD_BASE, to_load(policy=ON_DEMAND)),
    ("006", "to_load_post_routing", "loads, and its policy is POST_ROUTING", LOAD_BASE, to_load(policy=POST_ROUTING)),
    ("006", "to_load_pre_routing", "loads, and its policy is PRE_ROUTING", LOAD_BASE, to_load(policy=PRE_ROUTING)),
    ("007", "of_groups_of_0", "has groups of no experts", PRE_ROUTING_BASE, pre_routing(group_size=0)),
    (
        "007",
        "of_groups_of_4097",
        "has groups of more experts than there may be",
        "program_of_whole_layers",
        pre_routing(group=MAX_EXPERTS, group_size=MAX_EXPERTS + 1, arena_bytes=MAX_FILE_LENGTH),
    ),
    (
        "007",
        "of_groups_of_2_to_32_less_1",
        "has groups of 2^32 - 1 experts",
        "program_of_whole_layers",
        pre_routing(group=MAX_EXPERTS, group_size=2**32 - 1, arena_bytes=MAX_FILE_LENGTH),
    ),
    (
        "007",
        "with_4097_read_ahead",
        "reads more groups ahead than there may be",
        "program_with_the_most_read_ahead",
        pre_routing(ahead=MAX_EXPERTS + 1),
    ),
    (
        "007",
        "with_2_to_32_less_1_read_ahead",
        "reads so many groups ahead that one more wraps to no bank",
        "program_with_the_most_read_ahead",
        pre_routing(ahead=MAX_EXPERTS, prefetch_depth=2**32 - 1),
    ),
    (
        "007",
        "of_an_arena_of_2_to_44_and_1",
        "has an arena a byte larger than there may be",
        "program_of_the_largest_arena",
        pre_routing(arena_bytes=MAX_FILE_LENGTH + 1),
    ),
    (
        "007",
        "of_an_arena_of_2_to_64_less_1",
        "has an arena of 2^64 - 1 bytes",
        "program_of_the_largest_arena",
        pre_routing(arena_bytes=2**64 - 1),
    ),
    ("008", "of_no_bank", "uses no bank", PRE_ROUTING_BASE, pre_routing(bank_count=0)),
    ("008", "of_a_bank_less", "says that it uses one bank of two", PRE_ROUTING_BASE, pre_routing(bank_count=1)),
    (
        "008",
        "of_a_bank_more",
        "says that it uses three banks of two",
        PRE_ROUTING_BASE,
        pre_routing(bank_count=3, arena_bytes=6 * PAGE),
    ),
    (
        "008",
        "of_2_to_32_less_1_banks",
        "says that it uses 2^32 - 1 banks",
        "program_of_the_largest_arena",
        pre_routing(bank_count=2**32 - 1, arena_bytes=MAX_FILE_LENGTH),
    ),
    (
        "008",
        "of_more_banks_than_groups",
        "has a bank for each group that it may read ahead, and there are fewer",
        "program_with_the_most_read_ahead",
        pre_routing(ahead=MAX_EXPERTS, bank_count=MAX_EXPERTS + 1, arena_bytes=MAX_FILE_LENGTH),
    ),
    (
        "008",
        "of_more_banks_than_groups_with_ragged_ones",
        "has a bank for every two experts, but no group of both layers' experts",
        "program_with_more_banks_than_a_layer_has_groups",
        pre_routing(ahead=2, bank_count=2),
    ),
    (
        "009",
        "resident_of_too_few_banks",
        "is resident, and has a bank less than there are groups",
        RESIDENT_BASE,
        resident(ahead=1),
    ),
    (
        "009",
        "to_load_into_too_few_banks",
        "loads, and has a bank less than there are groups",
        LOAD_BASE,
        to_load(ahead=1),
    ),
    ("010", "of_no_arena", "has an arena of no bytes", PRE_ROUTING_BASE, pre_routing(arena_bytes=0)),
    (
        "010",
        "of_an_arena_a_byte_short",
        "lacks a byte of the room for its banks",
        PRE_ROUTING_BASE,
        pre_routing(arena_bytes=4 * PAGE - 1),
    ),
    (
        "010",
        "of_an_arena_for_the_ragged_group_it_has",
        "has room for the records it reads, but not for two whole banks",
        PRE_ROUTING_BASE,
        pre_routing(arena_bytes=3 * PAGE),
    ),
    (
        "010",
        "of_an_arena_for_payloads",
        "has room for the payloads and not for the padding",
        PRE_ROUTING_BASE,
        pre_routing(arena_bytes=4 * 260),
    ),
    (
        "010",
        "to_load_into_an_arena_a_byte_short",
        "loads, and lacks a byte of the room for its banks",
        LOAD_BASE,
        to_load(arena_bytes=6 * PAGE - 1),
    ),
):
    refuse(
        f"EMOE-SCH-{_rule}", f"program_{_name}", f"A program {_about}.", partial(scheduled, _base_program), base=_base
    )
refuse(
    "EMOE-SCH-010",
    "program_of_an_arena_a_byte_short_of_the_longest_records",
    "A program lacks a byte of the room for the longest records, which are those of the second layer.",
    partial(of_uneven_records, 1),
    base="program_for_records_of_two_lengths",
)
