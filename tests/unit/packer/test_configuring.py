"""What the planner's choices become in a package."""

from __future__ import annotations

import pytest

from estream_loader import Package, open_package
from estream_packer.configuring import configure_changes, planned_configurations
from estream_spec.constants import SectionType
from estream_spec.errors import InvalidError, PackError
from estream_spec.limits import MAX_DEVICE_CONFIGURATIONS
from estream_spec.manifest import DeviceConfiguration, decode_device_configuration
from estream_spec.planner import PlanPolicy, Prediction, PromptPlan
from estream_spec.schedule import Phase, Policy, Program
from fixtures.packages import Draft

RECORD = 4096


def plan(tokens: int, policy: PlanPolicy, group_size: int = 1, depth: int = 1, seconds: float = 1.0) -> PromptPlan:
    choice = Prediction(
        mode="paged",
        policy=policy,
        arena_bytes=group_size * (depth + 1) * RECORD,
        group_size=group_size,
        prefetch_depth=depth,
        lanes=4,
        time_s=seconds,
        bubble=0.0,
        io_floor_s=0.0,
        compute_floor_s=0.0,
        bytes_read=0,
    )
    return PromptPlan(tokens=tokens, arena_cap=1 << 30, choice=choice, frontier=(choice,))


PLANS = [
    plan(512, "pre-routing"),
    plan(1, "on-demand", 2, 0),
    plan(64, "post-routing", seconds=2.0),
    plan(16, "post-routing", seconds=3.0),
    plan(4096, "post-routing"),
]


def added(package: Package, choices: list[DeviceConfiguration]) -> tuple[list[DeviceConfiguration], list[Program]]:
    """The configurations that an edit adds, latest first, and the programs."""
    new = configure_changes(package, choices).add
    kinds = SectionType.DEVICE_CONFIGURATION, SectionType.SCHEDULE
    local, programs = (sorted((each for each in new if each.type == kind), key=lambda each: each.id) for kind in kinds)
    return (
        [decode_device_configuration(each.data, "configuration") for each in reversed(local)],
        [Program.decode(each.data, path="program") for each in programs],
    )


def test_lengths_that_follow_each_other_and_are_run_alike_become_one() -> None:
    choices = planned_configurations("phone", PLANS)
    found = [(each.prompt_tokens, each.policy, each.group_size, each.prefetch_depth) for each in choices]
    assert found == [
        (1, "on-demand", 2, 0),
        (64, "post-routing", 1, 1),
        (512, "pre-routing", 1, 1),
        (4096, "post-routing", 1, 1),
    ]
    assert {(each.name, each.lanes) for each in choices} == {("phone", 4)}


def test_configurations_are_listed_shortest_first_and_share_programs() -> None:
    choices = planned_configurations("phone", PLANS)
    with open_package(Draft().seal()) as package:
        found, programs = added(package, choices)
    assert found == choices
    prefill = [each for each in programs if each.phase == Phase.PREFILL]
    assert [each.policy for each in prefill] == [Policy.ON_DEMAND, Policy.POST_ROUTING, Policy.PRE_ROUTING]
    [decode] = [each for each in programs if each.phase == Phase.DECODE]
    assert (decode.arena_bytes, decode.bank_count) == (2 * RECORD, 2)
    assert all(any(program.matches(choice) for program in programs) for choice in choices)


def test_a_resident_one_is_loaded_by_a_program_of_its_own() -> None:
    with open_package(Draft().seal()) as package:
        _, programs = added(package, planned_configurations("phone", [plan(64, "resident", 3, 1)]))
    assert [each.phase for each in programs] == [Phase.LOAD, Phase.PREFILL, Phase.DECODE]


def test_more_configurations_than_there_is_room_for() -> None:
    plans = [plan(tokens + 1, "pre-routing", 1 + tokens % 2) for tokens in range(MAX_DEVICE_CONFIGURATIONS + 1)]
    with open_package(Draft().seal()) as package:
        assert len(added(package, planned_configurations("phone", plans[1:]))[0]) == MAX_DEVICE_CONFIGURATIONS
        with pytest.raises(PackError, match=r"package has 0 other local .* 65 would be added: the limit"):
            configure_changes(package, planned_configurations("phone", plans))


def test_two_for_one_length_are_refused() -> None:
    [choice] = planned_configurations("phone", PLANS[:1])
    with open_package(Draft().seal()) as package, pytest.raises(InvalidError, match=r"\[EMOE-CFG-003\]"):
        configure_changes(package, [choice, choice])
