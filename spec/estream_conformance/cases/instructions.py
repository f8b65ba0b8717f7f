"""Instructions of programs: SCHEDULE.md sections 3 and 4, rules SCH-011 to 033, of programs that load and prefill.

A case changes steps of one of four sound programs. `{5: "AWAIT 0 0 0; EMBED"}` puts these two in the place of step 5,
`{5: ""}` takes it away.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from estream_conformance.cases.schedules import (
    LOAD_BASE,
    ON_DEMAND_BASE,
    PRE_ROUTING_BASE,
    RESIDENT_BASE,
    on_demand,
    pre_routing,
    resident,
    scheduled,
    to_load,
)
from estream_conformance.changes import accept, refuse
from estream_conformance.programs import OPCODES, Program

Edits = Mapping[int, str]

DEMAND, AHEAD, LOAD, STAY = "on_demand", "pre_routing", "to_load", "resident"
SOUND: Final = {
    DEMAND: (ON_DEMAND_BASE, on_demand),
    AHEAD: (PRE_ROUTING_BASE, pre_routing),
    LOAD: (LOAD_BASE, to_load),
    STAY: (RESIDENT_BASE, resident),
}
STEPS: Final = {
    DEMAND: "EMBED; ATTEND 0; ROUTE 0; FILL 0 0 0; AWAIT 0 0 0; EXPERTS 0 0 0; RELEASE 0 0 0; FILL 0 1 0; AWAIT 0 1 0; "
    "EXPERTS 0 1 0; RELEASE 0 1 0; COMBINE 0; ATTEND 1; ROUTE 1; FILL 1 0 0; AWAIT 1 0 0; EXPERTS 1 0 0; "
    "RELEASE 1 0 0; COMBINE 1; HEAD; HALT",
    AHEAD: "FILL 0 0 0; FILL 0 1 1; EMBED; ATTEND 0; ROUTE 0; AWAIT 0 0 0; EXPERTS 0 0 0; RELEASE 0 0 0; FILL 1 0 0; "
    "AWAIT 0 1 1; EXPERTS 0 1 1; RELEASE 0 1 1; COMBINE 0; ATTEND 1; ROUTE 1; AWAIT 1 0 0; EXPERTS 1 0 0; "
    "RELEASE 1 0 0; COMBINE 1; HEAD; HALT",
    LOAD: "FILL 0 0 0; FILL 0 1 1; FILL 1 0 2; AWAIT 0 0 0; AWAIT 0 1 1; AWAIT 1 0 2; HALT",
    STAY: "EMBED; ATTEND 0; ROUTE 0; EXPERTS 0 0 0; RELEASE 0 0 0; EXPERTS 0 1 1; RELEASE 0 1 1; COMBINE 0; ATTEND 1; "
    "ROUTE 1; EXPERTS 1 0 2; RELEASE 1 0 2; COMBINE 1; HEAD; HALT",
}
"""The sound programs, to count in."""

ABOUT: Final = {
    DEMAND: "A program that reads on demand",
    AHEAD: "A program that reads ahead",
    LOAD: "A program that loads",
    STAY: "A resident program",
}


def edited(kind: str, edits: Edits) -> Program:
    """A sound program with some of its steps replaced."""
    made = SOUND[kind][1]()
    assert made.steps == STEPS[kind].split("; "), kind
    given = {index % len(made.steps): text for index, text in edits.items()}
    steps = [given.get(index, step) for index, step in enumerate(made.steps)]
    made.steps = [step for text in steps for step in text.split("; ") if step]
    return made


RIGHT: Final[list[tuple[str, str, str, Edits]]] = [
    (
        "await_before_everything",
        "It waits for a group before it computes anything.",
        AHEAD,
        {1: "FILL 0 1 1; AWAIT 0 0 0", 5: ""},
    ),
    (
        "await_in_another_order",
        "It waits for the second group before the first.",
        AHEAD,
        {5: "AWAIT 0 1 1; AWAIT 0 0 0", 9: ""},
    ),
    (
        "both_banks_in_use",
        "Two banks are in use at one time.",
        AHEAD,
        {7: "", 8: "", 11: "RELEASE 0 1 1; RELEASE 0 0 0; FILL 1 0 0"},
    ),
    (
        "release_behind_combine",
        "A bank is released when its layer is long over.",
        AHEAD,
        {11: "", 14: "ROUTE 1; RELEASE 0 1 1"},
    ),
    ("release_last", "The last bank is released right before HALT.", AHEAD, {17: "", 20: "RELEASE 1 0 0; HALT"}),
    ("fill_before_route", "A group is read when its layer attends.", DEMAND, {12: "FILL 1 0 0; ATTEND 1", 14: ""}),
    (
        "other_banks",
        "The banks are exchanged.",
        AHEAD,
        {0: "FILL 0 0 1", 1: "FILL 0 1 0", 5: "AWAIT 0 0 1", 6: "EXPERTS 0 0 1", 7: "RELEASE 0 0 1", 8: "FILL 1 0 1"}
        | {9: "AWAIT 0 1 0", 10: "EXPERTS 0 1 0", 11: "RELEASE 0 1 0", 15: "AWAIT 1 0 1", 16: "EXPERTS 1 0 1"}
        | {17: "RELEASE 1 0 1"},
    ),
    (
        "bank_kept_free",
        "The bank that the first group leaves is filled again only when the second one is done with.",
        AHEAD,
        {8: "", 12: "FILL 1 0 0; COMBINE 0"},
    ),
    (
        "load_one_by_one",
        "It waits for each group before it reads the next.",
        LOAD,
        {0: "FILL 0 0 0; AWAIT 0 0 0", 3: ""},
    ),
    (
        "load_in_another_order",
        "It loads the last group first.",
        LOAD,
        {0: "FILL 1 0 2", 2: "FILL 0 0 0", 3: "AWAIT 1 0 2", 5: "AWAIT 0 0 0"},
    ),
    (
        "resident_release_last",
        "No bank is released before all is computed.",
        STAY,
        {4: "", 6: "", 11: "", -1: "RELEASE 1 0 2; RELEASE 0 0 0; RELEASE 0 1 1; HALT"},
    ),
]
for _name, _about, _kind, _edits in RIGHT:
    accept(f"program_with_{_name}", _about, partial(scheduled, edited(_kind, _edits)), base=SOUND[_kind][0])

WRONG: Final[list[tuple[str, str, str, str, Edits]]] = [
    ("011", "halt_twice", "HALT stands behind HALT", AHEAD, {-1: "HALT; HALT"}),
    ("011", "halt_twice_to_load", "HALT stands behind HALT", LOAD, {-1: "HALT; HALT"}),
    ("011", "a_fill_behind_halt", "a group is read behind HALT", LOAD, {6: "HALT; FILL 0 0 0"}),
    ("011", "release_behind_halt", "a bank is released behind HALT", STAY, {-1: "HALT; RELEASE 1 0 2"}),
    *(
        ("012", f"opcode_{number}", f"opcode {number} is reserved or none", AHEAD, {2: str(number)})
        for number in (0, 11, 19, 20, 128, 255)
    ),
    ("012", "opcode_11_to_load", "opcode 11 is reserved", LOAD, {0: "11"}),
    ("012", "opcode_0_last", "the last opcode is none", AHEAD, {-1: "0"}),
    *(
        ("013", f"{name.lower()}_to_load", f"{name} stands where only reading may", LOAD, {6: f"{name}; HALT"})
        for name in OPCODES
        if name not in ("FILL", "AWAIT", "HALT")
    ),
    (
        "013",
        "experts_of_a_layer_that_is_none_to_load",
        "EXPERTS stands where only reading may",
        LOAD,
        {6: "EXPERTS 9; HALT"},
    ),
    ("014", "layer_of_embed", "EMBED names a layer", AHEAD, {2: "EMBED 1"}),
    ("014", "group_of_embed", "EMBED names a group", AHEAD, {2: "EMBED 0 1"}),
    ("014", "bank_of_embed", "EMBED names a bank", AHEAD, {2: "EMBED 0 0 1"}),
    ("014", "highest_bank_of_embed", "EMBED names bank 2^31", AHEAD, {2: f"EMBED 0 0 {1 << 31}"}),
    ("014", "group_of_attend", "ATTEND names a group", AHEAD, {3: "ATTEND 0 1"}),
    ("014", "bank_of_attend", "ATTEND names a bank", AHEAD, {13: "ATTEND 1 0 1"}),
    ("014", "group_of_route", "ROUTE names a group", AHEAD, {4: "ROUTE 0 1"}),
    ("014", "bank_of_route", "ROUTE names a bank", AHEAD, {14: "ROUTE 1 0 1"}),
    ("014", "group_of_combine", "COMBINE names a group", AHEAD, {12: "COMBINE 0 1"}),
    ("014", "bank_of_combine", "COMBINE names a bank", AHEAD, {18: "COMBINE 1 0 1"}),
    ("014", "layer_of_head", "HEAD names a layer", AHEAD, {19: "HEAD 1"}),
    ("014", "group_of_head", "HEAD names a group", AHEAD, {19: "HEAD 0 1"}),
    ("014", "bank_of_halt", "HALT names a bank", AHEAD, {20: "HALT 0 0 1"}),
    ("014", "layer_of_halt", "HALT names a layer", AHEAD, {20: "HALT 1"}),
    ("014", "layer_of_halt_to_load", "HALT names a layer", LOAD, {6: "HALT 2"}),
    (
        "014",
        "bank_of_attend_of_layer_2",
        "ATTEND names a bank and a layer that is none: unused operands come first",
        AHEAD,
        {13: "ATTEND 2 0 1"},
    ),
    ("014", "layer_of_early_head", "HEAD is early and names a layer: unused operands come first", AHEAD, {2: "HEAD 1"}),
    ("015", "attend_of_layer_2", "ATTEND names a layer that is none", AHEAD, {13: "ATTEND 2"}),
    ("015", "attend_of_layer_256", "ATTEND names layer 256, 0 in 8 bits", AHEAD, {3: "ATTEND 256"}),
    ("015", "route_of_layer_65535", "ROUTE names the highest layer there is a number for", AHEAD, {4: "ROUTE 65535"}),
    ("015", "combine_of_layer_2", "COMBINE names a layer that is none", AHEAD, {18: "COMBINE 2"}),
    ("015", "fill_of_layer_2", "FILL names a layer that is none", AHEAD, {0: "FILL 2 0 0"}),
    ("015", "await_of_layer_2", "AWAIT names a layer that is none", LOAD, {5: "AWAIT 2 0 2"}),
    ("015", "experts_of_layer_257", "EXPERTS names layer 257, 1 in 8 bits", AHEAD, {16: "EXPERTS 257 0 0"}),
    ("015", "release_of_layer_3", "RELEASE names a layer that is none", STAY, {4: "RELEASE 3 0 0"}),
    (
        "015",
        "layer_2_and_group_9",
        "FILL names a layer and a group that are none: layers come first",
        AHEAD,
        {0: "FILL 2 9 9"},
    ),
    ("016", "fill_of_group_2", "FILL names a group that its layer has not", AHEAD, {1: "FILL 0 2 1"}),
    (
        "016",
        "fill_of_another_layer_s_group",
        "FILL names a group that only the other layer has",
        AHEAD,
        {8: "FILL 1 1 0"},
    ),
    ("016", "fill_by_number_in_the_model", "FILL names a group by its number in the model", LOAD, {2: "FILL 1 2 2"}),
    ("016", "await_of_group_256", "AWAIT names group 256, 0 in 8 bits", AHEAD, {5: "AWAIT 0 256 0"}),
    ("016", "experts_of_group_65536", "EXPERTS names group 65536, 0 in 16 bits", AHEAD, {6: "EXPERTS 0 65536 0"}),
    ("016", "release_of_group_2_to_32_less_1", "RELEASE names group 2^32 - 1", AHEAD, {7: f"RELEASE 0 {2**32 - 1} 0"}),
    (
        "016",
        "group_2_and_bank_9",
        "FILL names a group and a bank that are none: groups come first",
        AHEAD,
        {1: "FILL 0 2 9"},
    ),
    ("017", "fill_of_bank_2", "FILL names a bank that is none", AHEAD, {0: "FILL 0 0 2"}),
    ("017", "fill_of_bank_1_on_demand", "FILL names the second bank of one", DEMAND, {7: "FILL 0 1 1"}),
    ("017", "await_of_bank_256", "AWAIT names bank 256, 0 in 8 bits", AHEAD, {5: "AWAIT 0 0 256"}),
    ("017", "experts_of_bank_65536", "EXPERTS names bank 65536, 0 in 16 bits", AHEAD, {6: "EXPERTS 0 0 65536"}),
    ("017", "release_of_bank_2_to_32_less_1", "RELEASE names bank 2^32 - 1", AHEAD, {7: f"RELEASE 0 0 {2**32 - 1}"}),
    ("017", "experts_of_bank_3_resident", "EXPERTS names a bank that is none", STAY, {10: "EXPERTS 1 0 3"}),
    ("018", "head_first", "HEAD stands first", AHEAD, {0: "HEAD; FILL 0 0 0"}),
    ("018", "head_for_embed", "HEAD stands where EMBED should", AHEAD, {2: "HEAD"}),
    ("018", "head_behind_the_first_layer", "HEAD stands behind the first layer", AHEAD, {12: "COMBINE 0; HEAD"}),
    (
        "018",
        "head_before_the_last_combine",
        "HEAD stands before the last COMBINE",
        AHEAD,
        {18: "HEAD; COMBINE 1", 19: ""},
    ),
    ("019", "no_embed", "EMBED is missing", AHEAD, {2: ""}),
    ("019", "embed_twice", "EMBED stands twice", AHEAD, {2: "EMBED; EMBED"}),
    ("019", "embed_for_each_layer", "EMBED stands before each layer", AHEAD, {13: "EMBED; ATTEND 1"}),
    ("019", "attend_first", "ATTEND stands before EMBED", AHEAD, {2: "ATTEND 0; EMBED", 3: ""}),
    ("019", "attend_twice", "ATTEND stands twice", AHEAD, {3: "ATTEND 0; ATTEND 0"}),
    ("019", "no_attend", "ATTEND of the second layer is missing", AHEAD, {13: ""}),
    ("019", "route_before_attend", "ROUTE stands before ATTEND", AHEAD, {3: "ROUTE 0", 4: "ATTEND 0"}),
    ("019", "no_route", "ROUTE of the second layer is missing", STAY, {9: "", 10: "", 11: ""}),
    ("019", "route_twice", "ROUTE stands twice", AHEAD, {4: "ROUTE 0; ROUTE 0"}),
    ("019", "combine_before_route", "COMBINE stands before ROUTE", AHEAD, {4: "COMBINE 0"}),
    ("019", "combine_twice", "COMBINE stands twice", AHEAD, {12: "COMBINE 0; COMBINE 0"}),
    ("019", "no_combine", "COMBINE of the first layer is missing", AHEAD, {12: ""}),
    ("019", "head_twice", "HEAD stands twice", AHEAD, {19: "HEAD; HEAD"}),
    ("019", "no_head", "HEAD is missing", AHEAD, {19: ""}),
    ("019", "halt_alone", "HALT is all that stands there", AHEAD, dict.fromkeys(range(20), "")),
    ("019", "halt_behind_the_first_layer", "HALT stands behind the first layer", AHEAD, {12: "COMBINE 0; HALT"}),
    ("019", "a_layer_once_more", "the last layer is begun again", AHEAD, {19: "ATTEND 1; HEAD"}),
    (
        "019",
        "route_of_another_layer_too_early",
        "ROUTE has neither its turn nor its layer: turns come first",
        AHEAD,
        {3: "ROUTE 1"},
    ),
    ("020", "attend_of_the_second_layer_first", "ATTEND names the second layer first", AHEAD, {3: "ATTEND 1"}),
    ("020", "route_of_the_next_layer", "ROUTE names the next layer", AHEAD, {4: "ROUTE 1"}),
    (
        "020",
        "combine_of_the_next_layer",
        "COMBINE names the next layer, and no group of it was computed",
        AHEAD,
        {12: "COMBINE 1"},
    ),
    ("020", "the_first_layer_twice", "the first layer comes again for the second", AHEAD, {13: "ATTEND 0"}),
    ("020", "route_of_the_layer_before", "ROUTE names the layer before", STAY, {9: "ROUTE 0"}),
    ("021", "fill_of_a_filling_bank", "a bank is filled that is FILLING", AHEAD, {1: "FILL 0 1 0"}),
    ("021", "fill_of_a_filling_bank_again", "one FILL stands twice", AHEAD, {0: "FILL 0 0 0; FILL 0 0 0"}),
    ("021", "fill_of_a_ready_bank", "a bank is filled that is READY", AHEAD, {5: "AWAIT 0 0 0; FILL 1 0 0", 8: ""}),
    ("021", "fill_of_a_bank_in_use", "a bank is filled that is IN_USE", AHEAD, {7: "FILL 1 0 0", 8: "RELEASE 0 0 0"}),
    ("021", "fill_of_a_loaded_bank", "a bank is filled that is loaded", LOAD, {6: "FILL 0 0 0; HALT"}),
    ("021", "fill_in_a_resident_program", "a resident program reads", STAY, {0: "FILL 0 0 0; EMBED"}),
    (
        "021",
        "fill_in_a_resident_program_behind_release",
        "a resident program reads into a released bank",
        STAY,
        {4: "RELEASE 0 0 0; FILL 0 0 0"},
    ),
    ("022", "fill_of_a_group_into_two_banks", "a group is read into two banks", AHEAD, {1: "FILL 0 0 1"}),
    (
        "022",
        "fill_of_a_group_that_was_released",
        "a group is read again when it was released",
        AHEAD,
        {8: "FILL 0 0 0"},
    ),
    (
        "022",
        "fill_of_a_group_of_the_layer_before",
        "a group of the layer before is read again",
        DEMAND,
        {14: "FILL 0 1 0"},
    ),
    (
        "022",
        "load_of_a_group_into_two_banks",
        "a group is loaded twice; that its bank is another's comes later",
        LOAD,
        {1: "FILL 0 0 1"},
    ),
    ("023", "load_into_another_bank", "a group is loaded into another's bank", LOAD, {0: "FILL 0 0 1"}),
    (
        "023",
        "load_by_number_in_the_layer",
        "a group is loaded into the bank of its number in its layer",
        LOAD,
        {0: "FILL 1 0 0"},
    ),
    ("024", "await_of_an_available_bank", "AWAIT names a bank that is AVAILABLE", AHEAD, {0: "", 5: "AWAIT 0 0 0"}),
    ("024", "await_of_a_ready_bank", "AWAIT stands twice", AHEAD, {5: "AWAIT 0 0 0; AWAIT 0 0 0"}),
    ("024", "await_of_a_bank_in_use", "AWAIT names a bank that is IN_USE", AHEAD, {6: "EXPERTS 0 0 0; AWAIT 0 0 0"}),
    (
        "024",
        "await_of_a_released_bank",
        "AWAIT names a bank that was released",
        AHEAD,
        {7: "RELEASE 0 0 0; AWAIT 0 0 0"},
    ),
    ("024", "await_of_a_loaded_bank", "AWAIT stands twice", LOAD, {3: "AWAIT 0 0 0; AWAIT 0 0 0"}),
    (
        "024",
        "await_in_a_resident_program",
        "AWAIT names a bank that is READY from the beginning",
        STAY,
        {0: "AWAIT 0 0 0; EMBED"},
    ),
    (
        "024",
        "await_of_an_available_bank_with_another_group",
        "AWAIT names no bank that is FILLING, and the other's group: states come first",
        DEMAND,
        {3: "AWAIT 1 0 0"},
    ),
    ("025", "experts_without_fill", "EXPERTS names a bank that is AVAILABLE", DEMAND, {3: "", 4: ""}),
    ("025", "experts_without_await", "EXPERTS names a bank that is FILLING", AHEAD, {5: ""}),
    ("025", "experts_twice", "EXPERTS names a bank that is IN_USE", AHEAD, {6: "EXPERTS 0 0 0; EXPERTS 0 0 0"}),
    (
        "025",
        "experts_behind_release",
        "EXPERTS names a bank that was released",
        AHEAD,
        {7: "RELEASE 0 0 0; EXPERTS 0 0 0"},
    ),
    ("025", "experts_twice_resident", "EXPERTS names a bank that is IN_USE", STAY, {3: "EXPERTS 0 0 0; EXPERTS 0 0 0"}),
    (
        "025",
        "experts_without_await_of_another_layer",
        "EXPERTS names a bank that is FILLING, before its layer: states come first",
        AHEAD,
        {8: "FILL 1 0 0; EXPERTS 1 0 0"},
    ),
    ("026", "release_without_experts", "RELEASE names a bank that is READY", AHEAD, {6: ""}),
    ("026", "release_without_await", "RELEASE names a bank that is FILLING", AHEAD, {5: "RELEASE 0 0 0"}),
    ("026", "release_twice", "RELEASE names a bank that is AVAILABLE", AHEAD, {7: "RELEASE 0 0 0; RELEASE 0 0 0"}),
    ("026", "release_without_experts_resident", "RELEASE names a bank that is READY", STAY, {3: ""}),
    (
        "026",
        "release_twice_resident",
        "RELEASE names a bank that is READY again",
        STAY,
        {4: "RELEASE 0 0 0; RELEASE 0 0 0"},
    ),
    ("027", "await_of_another_group", "AWAIT names the group of the other bank", AHEAD, {5: "AWAIT 0 1 0"}),
    ("027", "await_of_another_layer", "AWAIT names a group of the other layer", AHEAD, {5: "AWAIT 1 0 0"}),
    ("027", "experts_of_another_group", "EXPERTS names the group of the other bank", AHEAD, {6: "EXPERTS 0 1 0"}),
    (
        "027",
        "experts_of_another_layer",
        "EXPERTS names a group of the other layer, which is not at work either",
        AHEAD,
        {6: "EXPERTS 1 0 0"},
    ),
    ("027", "release_of_another_group", "RELEASE names the group of the other bank", AHEAD, {7: "RELEASE 0 1 0"}),
    ("027", "await_to_load_another_group", "AWAIT names the group of the other bank", LOAD, {3: "AWAIT 0 1 0"}),
    (
        "027",
        "experts_of_another_group_resident",
        "EXPERTS names the group of the other bank",
        STAY,
        {3: "EXPERTS 0 0 1"},
    ),
    (
        "027",
        "experts_by_number_in_the_layer",
        "EXPERTS names the bank of the group's number in its layer",
        STAY,
        {10: "EXPERTS 1 0 0"},
    ),
    (
        "028",
        "experts_before_route",
        "EXPERTS stands before ROUTE",
        AHEAD,
        {4: "AWAIT 0 0 0; EXPERTS 0 0 0; ROUTE 0", 5: "", 6: ""},
    ),
    ("028", "experts_before_embed", "EXPERTS stands before EMBED", STAY, {0: "EXPERTS 0 0 0; EMBED"}),
    (
        "028",
        "experts_of_the_next_layer",
        "EXPERTS names a group of the next layer",
        AHEAD,
        {12: "AWAIT 1 0 0; EXPERTS 1 0 0; COMBINE 0", 15: "", 16: ""},
    ),
    (
        "028",
        "experts_before_attend",
        "EXPERTS stands behind COMBINE of the layer before",
        STAY,
        {7: "COMBINE 0; EXPERTS 1 0 2"},
    ),
    (
        "028",
        "experts_behind_combine",
        "EXPERTS stands behind COMBINE of its layer, and is not the first of its group",
        STAY,
        {7: "COMBINE 0; EXPERTS 0 0 0"},
    ),
    ("028", "experts_behind_head", "EXPERTS stands behind HEAD", STAY, {13: "HEAD; EXPERTS 1 0 2"}),
    (
        "029",
        "experts_in_another_order",
        "the second group is computed before the first",
        AHEAD,
        {
            5: "AWAIT 0 0 0; AWAIT 0 1 1",
            6: "EXPERTS 0 1 1",
            7: "EXPERTS 0 0 0",
            8: "",
            9: "",
            10: "RELEASE 0 0 0",
            11: "RELEASE 0 1 1; FILL 1 0 0",
        },
    ),
    (
        "029",
        "experts_in_another_order_resident",
        "the second group is computed before the first",
        STAY,
        {3: "EXPERTS 0 1 1", 4: "RELEASE 0 1 1; EXPERTS 0 0 0"},
    ),
    ("029", "experts_of_a_group_again", "a group is computed twice", STAY, {4: "RELEASE 0 0 0; EXPERTS 0 0 0"}),
    ("030", "a_group_left_out", "the ragged group is left out", DEMAND, dict.fromkeys(range(7, 11), "")),
    ("030", "the_first_group_left_out", "the first group is left out", DEMAND, dict.fromkeys(range(3, 7), "")),
    ("030", "a_group_left_out_resident", "the ragged group is left out", STAY, {5: "", 6: ""}),
    ("030", "a_layer_left_out", "no group of the second layer is computed", STAY, {10: "", 11: ""}),
    ("030", "a_group_that_waits", "the ragged group is in its bank and was not computed", AHEAD, {10: "", 11: ""}),
    ("031", "a_group_not_loaded", "a group is not loaded", LOAD, {1: "", 4: ""}),
    ("031", "the_last_layer_not_loaded", "the last layer is not loaded", LOAD, {2: "", 5: ""}),
    ("031", "nothing_loaded", "nothing is loaded", LOAD, dict.fromkeys(range(6), "")),
    (
        "031",
        "a_group_not_loaded_and_one_on_its_way",
        "a group is not loaded, another not awaited",
        LOAD,
        {1: "", 4: "", 5: ""},
    ),
    ("032", "a_bank_in_use_at_the_end", "a bank is IN_USE at the end", AHEAD, {17: ""}),
    ("032", "a_bank_of_the_first_layer_in_use", "a bank of the first layer is never released", AHEAD, {11: ""}),
    ("032", "a_bank_filling_at_the_end_to_load", "a bank is FILLING at the end", LOAD, {5: ""}),
    ("032", "all_banks_filling_at_the_end_to_load", "every bank is FILLING at the end", LOAD, {3: "", 4: "", 5: ""}),
    ("032", "a_bank_in_use_at_the_end_resident", "a bank is IN_USE at the end", STAY, {4: ""}),
    ("033", "no_halt", "HALT is missing", AHEAD, {-1: ""}),
    ("033", "no_halt_to_load", "HALT is missing", LOAD, {-1: ""}),
    ("033", "no_halt_resident", "HALT is missing", STAY, {-1: ""}),
    ("033", "no_instructions", "there are no instructions", AHEAD, dict.fromkeys(range(21), "")),
    ("033", "no_instructions_to_load", "there are no instructions", LOAD, dict.fromkeys(range(7), "")),
    ("033", "a_layer_alone", "it ends behind its first layer", AHEAD, dict.fromkeys(range(13, 21), "")),
]
for _rule, _name, _about, _kind, _edits in WRONG:
    refuse(
        f"EMOE-SCH-{_rule}",
        f"program_with_{_name}",
        f"{ABOUT[_kind]}: {_about}.",
        partial(scheduled, edited(_kind, _edits)),
        base=SOUND[_kind][0],
    )
