"""Programs that decode. SCHEDULE.md sections 3.3 and 4.1, rules SCH-034 to 042, and what those before ask of them.

The package has a layer of three experts that routes to two, one with a dense block alone, and one of two experts beside
a dense block that routes to one. Two programs decode in an arena for four records; one of them reads ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed
from estream_conformance.case import accepted
from estream_conformance.cases.instructions import AHEAD, SOUND, STAY, edited
from estream_conformance.cases.schedules import scheduled as without_decoding
from estream_conformance.cases.schedules import section
from estream_conformance.changes import accept, refuse
from estream_conformance.packages import draft, paging, smallest_model
from estream_conformance.programs import ON_DEMAND, POST_ROUTING, PRE_ROUTING, RESIDENT, Program
from estream_spec.limits import MAX_FILE_LENGTH, MAX_RECORDS

WITHOUT: Final = "layers_that_route_to_two_and_to_one"
KEPT: Final = (2, 0, 1)
READ_AHEAD: Final = (1, 0, 1)


def three_layers() -> Draft:
    """The package."""
    model: dict[str, Any] = smallest_model()
    block = model["expert_blocks"][0]
    model["expert_blocks"] = [
        {**block, "experts": 3, "router": {**block["router"], "top_k": 2}},
        {**block, "experts": 2},
    ]
    model["layers"] = [{"attention": 0, "experts": 0}, {"attention": 0, "dense": 0}]
    model["layers"].append({"attention": 0, "experts": 1, "dense": 0})
    return draft(model | {"dense_blocks": [{"intermediate": 1}]})


def program(kept: Sequence[int] = KEPT, ahead: Sequence[int] = (), *, banks: int = 4, **changes: int) -> Program:
    """A program for it; `changes` are of its header."""
    made = paging(three_layers(), 1, banks - 1).decode(kept, ahead)
    made.header |= changes
    return made


def scheduled(*programs: Program) -> Sealed:
    """The package with programs."""
    package = three_layers()
    package.sections += [section(one, number) for number, one in enumerate(programs)]
    return package.seal()


@accepted()
def layers_that_route_to_two_and_to_one() -> Sealed:
    """A layer routes to two of three experts, one has none, and one routes to one of two; there is no program."""
    return three_layers().seal()


DEMAND_BASE, BASE = "program_to_decode", "program_to_decode_ahead"
for _name, _about, _program in (
    (DEMAND_BASE, "It reads what is routed to, and no more.", program()),
    (BASE, "It reads an expert ahead in each layer.", program(KEPT, READ_AHEAD)),
    ("program_to_decode_in_the_smallest_arena", "No layer keeps anything.", program((0, 0, 0), banks=2)),
    ("program_to_decode_in_an_arena_for_all", "Every layer keeps all its experts.", program((3, 0, 2), banks=5)),
    ("program_to_decode_with_a_share_below_top_k", "The first layer keeps less than it needs.", program((1, 0, 2))),
    ("program_to_decode_that_keeps_little", "It could keep more.", program((1, 0, 0))),
    ("program_to_decode_that_keeps_one_layer_alone", "One layer keeps all.", program((3, 0, 0))),
    ("program_to_decode_that_reads_none_ahead", "It predicts, and reads nothing ahead.", program(KEPT, (0, 0, 0))),
    ("program_to_decode_that_reads_a_layer_ahead", "It reads whole layers.", program((0, 0, 0), (2, 0, 2))),
    (
        "program_to_decode_that_promises_too_little",
        "A program of policy POST_ROUTING reads ahead.",
        program(KEPT, READ_AHEAD, policy=POST_ROUTING),
    ),
    (
        "program_to_decode_that_promises_too_much",
        "A program of policy PRE_ROUTING reads nothing ahead.",
        program(policy=PRE_ROUTING),
    ),
    (
        "program_to_decode_of_the_greatest_depth",
        "Its depth is as high as it may be, and its banks are as many as there are experts.",
        program(banks=5, prefetch_depth=MAX_RECORDS),
    ),
    (
        "program_to_decode_in_the_largest_arena",
        "Its arena is as large as a file may be.",
        program(arena_bytes=MAX_FILE_LENGTH),
    ),
):
    accept(_name, _about, partial(scheduled, _program), base=WITHOUT)


@accepted(base=WITHOUT)
def programs_to_prefill_and_to_decode() -> Sealed:
    """There are programs to load, to prefill and to decode."""
    sizes = paging(three_layers(), 1, 4)
    return scheduled(sizes.draft(RESIDENT, 1), sizes.draft(RESIDENT), program((3, 0, 2), banks=5))


STEPS: Final = (
    "EMBED; PREDICT 0; PREFETCH 0 1; ATTEND 0; ROUTE 0; DEMAND_FILL 0; DEMAND_AWAIT 0 1; DEMAND_EXPERTS 0; "
    "DEMAND_AWAIT 0 2; DEMAND_EXPERTS 0; DEMAND_RELEASE 0 2; COMBINE 0; ATTEND 1; DENSE 1; COMBINE 1; PREDICT 2; "
    "PREFETCH 2 1; ATTEND 2; ROUTE 2; DEMAND_FILL 2; DENSE 2; DEMAND_AWAIT 2 1; DEMAND_EXPERTS 2; DEMAND_RELEASE 2 1; "
    "COMBINE 2; HEAD; HALT"
)
"""The sound program that reads ahead, to count in."""


def changed(edits: Mapping[int, str]) -> Sealed:
    """The package with that program, some of its steps replaced."""
    made = program(KEPT, READ_AHEAD)
    assert made.steps == STEPS.split("; ")
    steps = [edits.get(index, step) for index, step in enumerate(made.steps)]
    made.steps = [step for text in steps for step in text.split("; ") if step]
    return scheduled(made)


_edits: Mapping[int, str]
for _name, _about, _edits in (
    ("prefetch_behind_attend", "It reads ahead when the layer has attended.", {2: "ATTEND 0", 3: "PREFETCH 0 1"}),
    ("predict_alone", "It predicts, and reads nothing ahead.", {2: "", 16: ""}),
    ("predict_of_one_layer", "It predicts in one layer only.", {1: "", 2: ""}),
    ("demand_fill_behind_dense", "It reads when the dense block is done.", {19: "DENSE 2", 20: "DEMAND_FILL 2"}),
    ("demand_await_before_dense", "It waits before the dense block.", {20: "DEMAND_AWAIT 2 1", 21: "DENSE 2"}),
    ("all_experts_at_once", "It computes when all experts are there.", {6: "", 7: ""}),
    ("two_demand_awaits", "It waits for one, and for both, before it computes.", {7: ""}),
    (
        "demand_experts_twice",
        "It computes once more, where nothing is left to.",
        {22: "DEMAND_EXPERTS 2; DEMAND_EXPERTS 2"},
    ),
    ("experts_as_they_come", "It looks again, whether more is there.", {7: "DEMAND_EXPERTS 0; DEMAND_EXPERTS 0"}),
    (
        "less_kept_and_more_read_ahead",
        "A layer keeps less, another reads more ahead.",
        {10: "DEMAND_RELEASE 0 1", 16: "PREFETCH 2 2"},
    ),
):
    accept(f"program_to_decode_with_{_name}", _about, partial(changed, _edits), base=BASE)

# Headers, and the rules for every instruction.
for _rule, _name, _about, _program in (
    ("006", "on_demand", "its policy is ON_DEMAND", program(policy=ON_DEMAND)),
    ("006", "that_is_resident", "its policy is RESIDENT", program((3, 0, 2), banks=5, policy=RESIDENT)),
    ("006", "of_policy_0", "it has no policy", program(policy=0)),
    ("007", "of_groups_of_0", "its groups have no experts", program(group_size=0)),
    ("007", "of_groups_of_2", "its groups have two experts", program(group_size=2, bank_count=3, arena_bytes=1 << 20)),
    (
        "007",
        "of_a_depth_of_2_to_17_and_1",
        "its depth is greater than it may be",
        program(banks=5, prefetch_depth=MAX_RECORDS + 1),
    ),
    (
        "007",
        "of_a_depth_of_2_to_32_less_1",
        "it has a depth for which one more wraps to no bank",
        program(banks=5, prefetch_depth=2**32 - 1),
    ),
    ("008", "of_a_bank_more", "it has a bank more than its depth asks for", program(banks=4, prefetch_depth=2)),
    ("008", "of_more_banks_than_experts", "it has more banks than there are experts", program(banks=5, bank_count=6)),
    ("010", "in_an_arena_a_byte_short", "its arena lacks a byte of the banks", program(arena_bytes=4 * 4096 - 1)),
):
    refuse(
        f"EMOE-SCH-{_rule}",
        f"program_to_decode_{_name}",
        f"A program decodes, and {_about}.",
        partial(scheduled, _program),
        base=DEMAND_BASE,
    )

for _kind, _at in ((AHEAD, 5), (STAY, 3)):
    for _opcode in (
        "PREDICT 0",
        "PREFETCH 0 1",
        "DEMAND_FILL 0",
        "DEMAND_AWAIT 0 1",
        "DEMAND_EXPERTS 0",
        "DEMAND_RELEASE 0",
    ):
        _name = _opcode.split()[0].lower()
        refuse(
            "EMOE-SCH-013",
            f"program_with_{_name}_{_kind}",
            f"A program prefills, and has {_opcode.split()[0]}.",
            partial(without_decoding, edited(_kind, {_at: _opcode})),
            base=SOUND[_kind][0],
        )

WRONG: Final[list[tuple[str, str, str, Mapping[int, str]]]] = [
    ("011", "a_demand_behind_halt", "DEMAND_FILL stands behind HALT", {26: "HALT; DEMAND_FILL 2"}),
    ("012", "opcode_11", "opcode 11 is reserved", {2: "11"}),
    ("012", "opcode_19", "opcode 19 is none", {2: "19"}),
    ("013", "fill", "FILL stands where only demands may", {5: "FILL 0 0 0"}),
    ("013", "await", "AWAIT stands where only demands may", {6: "AWAIT 0 0 0"}),
    ("013", "experts", "EXPERTS stands where only demands may", {7: "EXPERTS 0 0 0"}),
    ("013", "release", "RELEASE stands where only demands may", {10: "RELEASE 0 0 0"}),
    ("013", "fill_of_a_bank_that_is_none", "FILL stands there with a bank that is none", {5: "FILL 0 0 9"}),
    ("014", "count_of_predict", "PREDICT names a count", {1: "PREDICT 0 1"}),
    ("014", "bank_of_predict", "PREDICT names a bank", {1: "PREDICT 0 0 1"}),
    ("014", "bank_of_prefetch", "PREFETCH names a bank", {2: "PREFETCH 0 1 1"}),
    ("014", "count_of_demand_fill", "DEMAND_FILL names a count", {5: "DEMAND_FILL 0 2"}),
    ("014", "bank_of_demand_fill", "DEMAND_FILL names a bank", {5: "DEMAND_FILL 0 0 1"}),
    ("014", "bank_of_demand_await", "DEMAND_AWAIT names a bank", {6: "DEMAND_AWAIT 0 1 1"}),
    ("014", "count_of_demand_experts", "DEMAND_EXPERTS names a count", {9: "DEMAND_EXPERTS 0 2"}),
    ("014", "bank_of_demand_experts", "DEMAND_EXPERTS names a bank", {9: "DEMAND_EXPERTS 0 0 1"}),
    ("014", "bank_of_demand_release", "DEMAND_RELEASE names a bank", {10: "DEMAND_RELEASE 0 2 1"}),
    ("015", "predict_of_layer_3", "PREDICT names a layer that is none", {15: "PREDICT 3"}),
    ("015", "prefetch_of_layer_256", "PREFETCH names layer 256, 0 in 8 bits", {2: "PREFETCH 256 1"}),
    ("015", "demand_fill_of_layer_3", "DEMAND_FILL names a layer that is none", {19: "DEMAND_FILL 3"}),
    ("015", "demand_await_of_layer_65535", "DEMAND_AWAIT names the highest layer", {21: "DEMAND_AWAIT 65535 1"}),
    ("015", "demand_experts_of_layer_3", "DEMAND_EXPERTS names a layer that is none", {22: "DEMAND_EXPERTS 3"}),
    ("015", "demand_release_of_layer_3", "DEMAND_RELEASE names a layer that is none", {23: "DEMAND_RELEASE 3 9"}),
    ("016", "prefetch_of_4_of_3_experts", "PREFETCH asks for more experts than there are", {2: "PREFETCH 0 4"}),
    ("016", "prefetch_of_2_to_32_less_1_experts", "PREFETCH asks for 2^32 - 1", {16: f"PREFETCH 2 {2**32 - 1}"}),
    ("016", "prefetch_of_a_layer_without_experts", "PREFETCH asks for one where none is", {2: "PREFETCH 1 1"}),
    ("016", "demand_await_of_4_of_3_experts", "DEMAND_AWAIT waits for more than there are", {8: "DEMAND_AWAIT 0 4"}),
    ("016", "demand_release_of_4_of_3_experts", "more is kept than there is", {10: "DEMAND_RELEASE 0 4"}),
    ("016", "demand_release_of_256_experts", "256, 0 in 8 bits, are kept", {23: "DEMAND_RELEASE 2 256"}),
    ("018", "head_before_the_last_combine", "HEAD stands before the last COMBINE", {24: "HEAD", 25: "COMBINE 2"}),
    ("019", "no_embed", "EMBED is missing", {0: "", 1: "", 2: ""}),
    ("019", "no_route", "ROUTE of the first layer is missing", {4: "", **dict.fromkeys(range(5, 11), "")}),
    ("019", "route_of_a_layer_without_experts", "ROUTE stands in a layer without experts", {13: "ROUTE 1; DENSE 1"}),
    ("020", "the_first_layer_twice", "the first layer comes again for the second", {12: "ATTEND 0"}),
    (
        "028",
        "demand_experts_before_dense",
        "DEMAND_EXPERTS stands before DENSE",
        {20: "DEMAND_AWAIT 2 1; DEMAND_EXPERTS 2; DENSE 2", 21: "", 22: ""},
    ),
    ("028", "demand_experts_before_route", "DEMAND_EXPERTS stands before ROUTE", {4: "DEMAND_EXPERTS 0; ROUTE 0"}),
    (
        "028",
        "demand_experts_behind_combine",
        "DEMAND_EXPERTS stands behind COMBINE",
        {11: "COMBINE 0; DEMAND_EXPERTS 0"},
    ),
    (
        "028",
        "demand_experts_of_the_next_layer",
        "DEMAND_EXPERTS names the next layer with experts",
        {7: "DEMAND_EXPERTS 2"},
    ),
    ("028", "demand_experts_first", "DEMAND_EXPERTS stands before EMBED", {0: "DEMAND_EXPERTS 0; EMBED"}),
    ("033", "no_halt", "HALT is missing", {26: ""}),
    ("033", "no_instructions", "there are no instructions", dict.fromkeys(range(27), "")),
    ("034", "predict_before_embed", "PREDICT stands before EMBED", {0: "PREDICT 0", 1: "EMBED"}),
    (
        "034",
        "predict_behind_attend",
        "PREDICT stands behind ATTEND",
        {1: "ATTEND 0", 2: "PREDICT 0", 3: "PREFETCH 0 1"},
    ),
    ("034", "predict_behind_route", "PREDICT stands behind ROUTE", {1: "", 2: "", 4: "ROUTE 0; PREDICT 0"}),
    ("034", "predict_twice", "PREDICT stands twice", {1: "PREDICT 0; PREDICT 0"}),
    ("034", "predict_twice_around_prefetch", "PREDICT stands again behind PREFETCH", {2: "PREFETCH 0 1; PREDICT 0"}),
    (
        "034",
        "predict_of_a_later_layer",
        "PREDICT names a later layer",
        {1: "PREDICT 2", 2: "PREFETCH 2 1", 15: "", 16: ""},
    ),
    (
        "034",
        "predict_in_the_layer_before",
        "PREDICT stands in the layer before its own",
        {12: "PREDICT 2; ATTEND 1", 15: "", 16: ""},
    ),
    ("034", "predict_of_a_layer_without_experts", "PREDICT names a layer without experts", {12: "PREDICT 1; ATTEND 1"}),
    ("034", "predict_of_the_layer_before", "PREDICT names the layer before", {15: "PREDICT 0"}),
    ("034", "predict_behind_the_last_layer", "PREDICT stands behind the last layer", {24: "COMBINE 2; PREDICT 0"}),
    ("035", "prefetch_without_predict", "PREFETCH stands without PREDICT", {1: ""}),
    ("035", "prefetch_before_predict", "PREFETCH stands before PREDICT", {1: "PREFETCH 0 1", 2: "PREDICT 0"}),
    ("035", "prefetch_without_predict_of_its_layer", "PREDICT of another layer alone stands before PREFETCH", {15: ""}),
    ("035", "prefetch_twice", "PREFETCH stands twice", {2: "PREFETCH 0 1; PREFETCH 0 1"}),
    ("035", "prefetch_of_none_twice", "PREFETCH stands twice, of no experts", {2: "PREFETCH 0 0; PREFETCH 0 0"}),
    ("035", "prefetch_behind_route", "PREFETCH stands behind ROUTE", {2: "", 4: "ROUTE 0; PREFETCH 0 1"}),
    ("035", "prefetch_of_a_later_layer", "PREFETCH names a later layer", {2: "PREFETCH 2 1"}),
    (
        "035",
        "prefetch_of_none_of_a_layer_without_experts",
        "PREFETCH names a layer without experts",
        {12: "PREFETCH 1; ATTEND 1"},
    ),
    ("036", "demand_fill_before_route", "DEMAND_FILL stands before ROUTE", {4: "DEMAND_FILL 0", 5: "ROUTE 0"}),
    ("036", "demand_fill_before_attend", "DEMAND_FILL stands before ATTEND", {3: "DEMAND_FILL 0; ATTEND 0", 5: ""}),
    ("036", "demand_fill_twice", "DEMAND_FILL stands twice", {5: "DEMAND_FILL 0; DEMAND_FILL 0"}),
    (
        "036",
        "demand_fill_behind_release",
        "DEMAND_FILL stands again behind DEMAND_RELEASE",
        {10: "DEMAND_RELEASE 0 2; DEMAND_FILL 0"},
    ),
    ("036", "demand_fill_behind_combine", "DEMAND_FILL stands again behind COMBINE", {11: "COMBINE 0; DEMAND_FILL 0"}),
    ("036", "demand_fill_of_a_later_layer", "DEMAND_FILL names a later layer", {5: "DEMAND_FILL 2"}),
    (
        "036",
        "demand_fill_of_a_layer_without_experts",
        "DEMAND_FILL names a layer without experts",
        {13: "DEMAND_FILL 1; DENSE 1"},
    ),
    ("037", "demand_await_without_fill", "DEMAND_FILL is missing", {5: ""}),
    (
        "037",
        "demand_await_before_fill",
        "DEMAND_AWAIT stands before DEMAND_FILL",
        {5: "DEMAND_AWAIT 0 1", 6: "DEMAND_FILL 0"},
    ),
    (
        "037",
        "demand_await_behind_release",
        "DEMAND_AWAIT stands behind DEMAND_RELEASE",
        {10: "DEMAND_RELEASE 0 2; DEMAND_AWAIT 0 2"},
    ),
    ("037", "demand_await_behind_combine", "DEMAND_AWAIT stands behind COMBINE", {11: "COMBINE 0; DEMAND_AWAIT 0 2"}),
    ("037", "demand_await_of_a_later_layer", "DEMAND_AWAIT names a later layer", {8: "DEMAND_AWAIT 2 1"}),
    (
        "037",
        "demand_await_of_a_layer_without_experts",
        "DEMAND_AWAIT names a layer without experts",
        {13: "DENSE 1; DEMAND_AWAIT 1"},
    ),
    (
        "037",
        "demand_await_of_none_behind_release",
        "DEMAND_AWAIT stands behind DEMAND_RELEASE and waits for none: places come first",
        {10: "DEMAND_RELEASE 0 2; DEMAND_AWAIT 0"},
    ),
    ("038", "demand_await_of_none", "DEMAND_AWAIT waits for none", {6: "DEMAND_AWAIT 0"}),
    ("038", "demand_await_of_as_many", "DEMAND_AWAIT waits for as many as the one before", {8: "DEMAND_AWAIT 0 1"}),
    (
        "038",
        "demand_await_of_fewer",
        "DEMAND_AWAIT waits for fewer than the one before",
        {6: "DEMAND_AWAIT 0 2", 8: "DEMAND_AWAIT 0 1"},
    ),
    ("038", "demand_await_of_3_of_2_routed", "DEMAND_AWAIT waits for more than are routed to", {8: "DEMAND_AWAIT 0 3"}),
    (
        "038",
        "demand_await_of_2_of_1_routed",
        "DEMAND_AWAIT waits for as many as another layer routes to",
        {21: "DEMAND_AWAIT 2 2"},
    ),
    ("039", "demand_experts_without_await", "DEMAND_AWAIT is missing", {6: "", 8: ""}),
    (
        "039",
        "demand_experts_before_await",
        "DEMAND_EXPERTS stands before DEMAND_AWAIT",
        {21: "DEMAND_EXPERTS 2", 22: "DEMAND_AWAIT 2 1"},
    ),
    (
        "039",
        "demand_experts_behind_release",
        "DEMAND_EXPERTS stands behind DEMAND_RELEASE",
        {10: "DEMAND_RELEASE 0 2; DEMAND_EXPERTS 0"},
    ),
    (
        "039",
        "demand_experts_of_a_layer_without_experts",
        "DEMAND_EXPERTS names a layer without experts",
        {13: "DENSE 1; DEMAND_EXPERTS 1"},
    ),
    ("040", "an_expert_left_out", "all but one of the routed experts are computed", {8: "", 9: ""}),
    ("040", "the_last_expert_awaited_and_left_out", "the last expert is awaited and not computed", {9: ""}),
    ("040", "demand_release_without_experts", "no expert is computed", {21: "", 22: ""}),
    (
        "040",
        "demand_release_before_fill",
        "DEMAND_RELEASE stands before DEMAND_FILL",
        {5: "DEMAND_RELEASE 0 2; DEMAND_FILL 0", 10: ""},
    ),
    ("040", "demand_release_twice", "DEMAND_RELEASE stands twice", {10: "DEMAND_RELEASE 0 2; DEMAND_RELEASE 0 2"}),
    (
        "040",
        "demand_release_again_behind_combine",
        "DEMAND_RELEASE stands again behind COMBINE",
        {11: "COMBINE 0; DEMAND_RELEASE 0 2"},
    ),
    ("040", "demand_release_of_a_later_layer", "DEMAND_RELEASE names a later layer", {10: "DEMAND_RELEASE 2 1"}),
    (
        "040",
        "demand_release_of_a_layer_without_experts",
        "DEMAND_RELEASE names a layer without experts",
        {13: "DENSE 1; DEMAND_RELEASE 1"},
    ),
    ("041", "no_demand_release", "DEMAND_RELEASE is missing", {10: ""}),
    (
        "041",
        "demand_release_behind_combine",
        "DEMAND_RELEASE stands behind COMBINE",
        {10: "COMBINE 0", 11: "DEMAND_RELEASE 0 2"},
    ),
    ("041", "no_demands", "a layer's experts are left out", dict.fromkeys((19, 21, 22, 23), "")),
    ("041", "no_demands_but_fill", "a layer's experts are read and left out", dict.fromkeys((21, 22, 23), "")),
    ("042", "one_kept_too_many", "a layer keeps a record too many", {10: "DEMAND_RELEASE 0 3"}),
    (
        "042",
        "one_kept_too_many_by_the_last_layer",
        "the last layer keeps a record too many",
        {23: "DEMAND_RELEASE 2 2"},
    ),
    ("042", "one_read_ahead_too_many", "a record too many is read ahead", {2: "PREFETCH 0 2"}),
    (
        "042",
        "one_read_ahead_too_many_by_the_last_layer",
        "a record too many is read ahead in the last layer",
        {16: "PREFETCH 2 2"},
    ),
    (
        "042",
        "no_bank_for_a_routed_expert",
        "what is kept and read ahead leaves no bank for a routed expert",
        {2: "PREFETCH 0 2", 10: "DEMAND_RELEASE 0 1"},
    ),
]
for _rule, _name, _about, _edits in WRONG:
    refuse(
        f"EMOE-SCH-{_rule}",
        f"program_to_decode_with_{_name}",
        f"A program that decodes has a fault: {_about}.",
        partial(changed, _edits),
        base=BASE,
    )
for _name, _about, _program in (
    (
        "too_small_for_a_token",
        "It has fewer banks than experts that a token is routed to.",
        program((0, 0, 0), banks=1),
    ),
    (
        "for_all_and_one_read_ahead",
        "All banks are kept, and one more is read ahead.",
        program((3, 0, 2), (1, 0, 0), banks=5),
    ),
    ("for_all_but_one", "All experts are kept, and there is a bank less.", program((3, 0, 2))),
):
    refuse(
        "EMOE-SCH-042", f"program_to_decode_in_an_arena_{_name}", _about, partial(scheduled, _program), base=DEMAND_BASE
    )
