"""Programs of models with dense blocks and layers without experts. SCHEDULE.md sections 3 and 4.

The package has a layer of three experts, one with a dense block alone, and one of two experts beside a dense block.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed
from estream_conformance.case import accepted
from estream_conformance.cases.schedules import section
from estream_conformance.changes import accept, refuse
from estream_conformance.packages import draft, paging, smallest_model
from estream_conformance.programs import LOAD, ON_DEMAND, POST_ROUTING, PRE_ROUTING, PREFILL, RESIDENT, Program

WITHOUT: Final = "layers_with_and_without_experts"
BASE: Final = "program_pre_routing_over_a_dense_layer"


def three_layers() -> Draft:
    """The package."""
    model: dict[str, Any] = smallest_model()
    block = model["expert_blocks"][0]
    model["expert_blocks"] = [{**block, "experts": 3}, {**block, "experts": 2}]
    model["layers"] = [{"attention": 0, "experts": 0}, {"attention": 0, "dense": 0}]
    model["layers"].append({"attention": 0, "experts": 1, "dense": 0})
    return draft(model | {"dense_blocks": [{"intermediate": 1}]})


def program(policy: int, phase: int = PREFILL, ahead: int = 1) -> Program:
    """A program for it, of groups of two."""
    return paging(three_layers(), 2, ahead).draft(policy, phase)


def scheduled(made: Program) -> Sealed:
    """The package with a program."""
    package = three_layers()
    package.sections.append(section(made))
    return package.seal()


@accepted()
def layers_with_and_without_experts() -> Sealed:
    """A layer has experts, one a dense block, and one both; there is no program."""
    return three_layers().seal()


for _name, _about, _made in (
    (BASE, "It reads across a layer without experts.", program(PRE_ROUTING)),
    ("program_on_demand_over_a_dense_layer", "It reads one group at a time.", program(ON_DEMAND, ahead=0)),
    ("program_post_routing_over_a_dense_layer", "It reads when a layer is routed.", program(POST_ROUTING)),
    ("program_to_load_with_a_dense_layer", "It loads three groups of two layers.", program(RESIDENT, LOAD, 2)),
    ("program_resident_over_a_dense_layer", "It computes with three groups.", program(RESIDENT, ahead=2)),
):
    accept(_name, _about, partial(scheduled, _made), base=WITHOUT)

STEPS: Final = (
    "FILL 0 0 0; FILL 0 1 1; EMBED; ATTEND 0; ROUTE 0; AWAIT 0 0 0; EXPERTS 0 0 0; RELEASE 0 0 0; FILL 2 0 0; "
    "AWAIT 0 1 1; EXPERTS 0 1 1; RELEASE 0 1 1; COMBINE 0; ATTEND 1; DENSE 1; COMBINE 1; ATTEND 2; ROUTE 2; DENSE 2; "
    "AWAIT 2 0 0; EXPERTS 2 0 0; RELEASE 2 0 0; COMBINE 2; HEAD; HALT"
)
"""The sound program, to count in."""


def edited(edits: dict[int, str]) -> Program:
    """The sound program with some of its steps replaced."""
    made = program(PRE_ROUTING)
    assert made.steps == STEPS.split("; ")
    steps = [edits.get(index, step) for index, step in enumerate(made.steps)]
    made.steps = [step for text in steps for step in text.split("; ") if step]
    return made


for _name, _about, _edits in (
    ("await_before_dense", "It waits for a group before the dense block.", {18: "AWAIT 2 0 0; DENSE 2", 19: ""}),
    ("fill_between_route_and_dense", "It reads before the dense block.", {8: "", 18: "FILL 2 0 0; DENSE 2"}),
    ("release_in_a_dense_layer", "It releases a bank in the next layer.", {11: "", 14: "RELEASE 0 1 1; DENSE 1"}),
):
    accept(f"program_with_{_name}", _about, partial(scheduled, edited(_edits)), base=BASE)

for _rule, _name, _about, _edits in (
    ("014", "group_of_dense", "DENSE names a group", {14: "DENSE 1 1"}),
    ("014", "bank_of_dense", "DENSE names a bank", {18: "DENSE 2 0 1"}),
    ("015", "dense_of_layer_3", "DENSE names a layer that is none", {18: "DENSE 3"}),
    ("016", "fill_of_a_layer_without_experts", "FILL names a layer that has no groups", {8: "FILL 1 0 0"}),
    ("016", "experts_of_a_layer_without_experts", "EXPERTS names a layer without groups", {14: "DENSE 1; EXPERTS 1"}),
    ("018", "head_for_the_last_dense", "HEAD stands where DENSE should", {18: "HEAD"}),
    ("019", "no_dense", "DENSE of the layer without experts is missing", {14: ""}),
    ("028", "no_dense_beside_experts", "DENSE of the layer with experts is missing", {18: ""}),
    ("019", "dense_twice", "DENSE stands twice", {14: "DENSE 1; DENSE 1"}),
    ("019", "dense_before_attend", "DENSE stands before ATTEND", {13: "DENSE 1", 14: "ATTEND 1"}),
    ("019", "dense_before_route", "DENSE stands before ROUTE", {17: "DENSE 2", 18: "ROUTE 2"}),
    ("019", "dense_of_a_layer_without_one", "DENSE stands in a layer without a dense block", {4: "ROUTE 0; DENSE 0"}),
    ("019", "route_of_a_layer_without_experts", "ROUTE stands in a layer without experts", {14: "ROUTE 1; DENSE 1"}),
    ("019", "route_for_dense", "ROUTE stands for DENSE", {14: "ROUTE 1"}),
    ("019", "combine_before_dense", "COMBINE stands before DENSE", {14: "COMBINE 1", 15: "DENSE 1"}),
    ("020", "dense_of_the_next_layer", "DENSE names the next layer", {14: "DENSE 2"}),
    ("020", "dense_of_the_layer_before", "DENSE names the layer before", {18: "DENSE 1"}),
    (
        "028",
        "experts_before_dense",
        "EXPERTS stands between ROUTE and DENSE",
        {18: "AWAIT 2 0 0; EXPERTS 2 0 0; DENSE 2"},
    ),
    (
        "028",
        "experts_of_the_last_layer_in_a_dense_one",
        "EXPERTS of the last layer stands before it",
        {15: "AWAIT 2 0 0; EXPERTS 2 0 0; COMBINE 1"},
    ),
    ("030", "combine_without_experts", "COMBINE stands before EXPERTS of its layer", {20: "COMBINE 2"}),
    ("032", "bank_kept_over_a_dense_layer", "a bank is never released", {11: ""}),
):
    refuse(
        f"EMOE-SCH-{_rule}",
        f"program_with_{_name}",
        f"A program has a fault: {_about}.",
        partial(scheduled, edited(_edits)),
        base=BASE,
    )
_loading = program(RESIDENT, LOAD, 2)
_loading.steps.insert(0, "FILL 1 0 2")
refuse(
    "EMOE-SCH-016",
    "program_with_dense_layer_to_load",
    "A program loads a group of a layer without experts.",
    partial(scheduled, _loading),
    base="program_to_load_with_a_dense_layer",
)


def _miscounted(bank_count: int) -> Sealed:
    made = program(PRE_ROUTING, ahead=3)
    made.header["bank_count"] = bank_count
    return scheduled(made)


for _count in (2, 4):
    refuse(
        "EMOE-SCH-008",
        f"program_of_{_count}_banks_for_three_groups",
        "Three of four groups would have a bank: the layer without experts has none.",
        partial(_miscounted, _count),
        base=BASE,
    )
