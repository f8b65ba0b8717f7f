"""Which programs a session runs, in banks of which sizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from estream_loader import Package, open_package
from estream_packer.editing import Changes, NewSection, edit_package
from estream_runtime import Session
from estream_runtime.programs import DevicePrograms, Programs, Sizes, choose_programs
from estream_spec.constants import SectionType
from estream_spec.decode_compiler import compile_decode
from estream_spec.errors import InvalidError, LinkError
from estream_spec.manifest import DeviceConfiguration
from estream_spec.messagepack import encode
from estream_spec.schedule import Opcode, Phase, Policy, Program
from estream_spec.schedule_compiler import compile_program
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import PackageFactory

RECORD = 16384
PROMPT = token_ids("programs", 33)
TUNED = DeviceConfiguration(
    name="tuned", arena_bytes=12 * RECORD, group_size=3, prefetch_depth=2, lanes=3, policy="post-routing"
)
ALL = DeviceConfiguration(name="all", arena_bytes=24 * RECORD, group_size=1, prefetch_depth=23, policy="resident")


def compiled(package: Package, choice: DeviceConfiguration, policy: Policy, phase: Phase = Phase.PREFILL) -> Program:
    return compile_program(
        package.expert_shape,
        arena_bytes=choice.arena_bytes,
        group_size=choice.group_size,
        prefetch_depth=choice.prefetch_depth,
        policy=policy,
        phase=phase,
    )


def configured(path: Path, folder: Path, choice: DeviceConfiguration, *programs: Program) -> Path:
    """A copy of a package that has a device configuration as its first, and programs."""

    def add(package: Package) -> Changes:
        sections = [NewSection(type=SectionType.DEVICE_CONFIGURATION, id=7, data=encode(choice))]
        numbered = enumerate(programs, 100)
        sections += [NewSection(type=SectionType.SCHEDULE, id=number, data=each.encode()) for number, each in numbered]
        return Changes(add=sections)

    copy = folder / "configured.emoe"
    shutil.copy(path, copy)
    edit_package(copy, add)
    return copy


def only(programs: DevicePrograms) -> Programs:
    """Those of a session with one configuration."""
    [choice] = programs.choices
    return programs.of(choice)


def test_the_packages_own_program_runs_for_its_sizes(packed: PackageFactory, tmp_path: Path) -> None:
    with open_package(packed()) as package:
        own = compiled(package, TUNED, Policy.POST_ROUTING)
    with open_package(configured(packed(), tmp_path, TUNED, own)) as package:
        found = only(choose_programs(package, Sizes()))
        assert (found.many, found.few, found.load) == (own, own, None)
        asked = Sizes(arena_bytes=TUNED.arena_bytes, group_size=3, prefetch_depth=2)
        assert only(choose_programs(package, asked)).many == own
        assert only(choose_programs(package, asked, "post-routing")).many == own
        other = only(choose_programs(package, asked, "pre-routing"))
        assert (other.many.policy, other.few.policy, other.load) == (Policy.PRE_ROUTING, Policy.POST_ROUTING, None)
        assert only(choose_programs(package, Sizes(prefetch_depth=1))).many.policy == Policy.PRE_ROUTING
        assert only(choose_programs(package, Sizes(), device="generic")).many.policy == Policy.PRE_ROUTING
        with Session(package) as session:
            stats = session.prefill(PROMPT).stats
    assert (stats.policy, stats.peak_arena_bytes, stats.lanes) == ("post-routing", TUNED.arena_bytes, 3)


def test_a_program_of_another_policy_is_not_taken(packed: PackageFactory, tmp_path: Path) -> None:
    with open_package(packed()) as package:
        other = compiled(package, TUNED, Policy.ON_DEMAND)
    with open_package(configured(packed(), tmp_path, TUNED, other)) as package:
        assert only(choose_programs(package, Sizes())).many.policy == Policy.POST_ROUTING


@pytest.mark.parametrize(
    ("asked", "group_size", "banks"),
    [
        (Sizes(), 3, 3),
        (Sizes(prefetch_depth=0), 3, 1),
        (Sizes(prefetch_depth=9), 3, 4),
        (Sizes(group_size=2), 2, 3),
        (Sizes(group_size=2, prefetch_depth=1), 2, 2),
        (Sizes(group_size=99), 12, 1),
        (Sizes(arena_bytes=RECORD), 1, 1),
        (Sizes(arena_bytes=2 * RECORD), 1, 2),
        (Sizes(arena_bytes=3 * RECORD), 1, 3),
        (Sizes(arena_bytes=3 * RECORD, prefetch_depth=0), 3, 1),
        (Sizes(arena_bytes=3 * RECORD, group_size=2), 2, 1),
        (Sizes(arena_bytes=5 * RECORD + 1), 2, 2),
        (Sizes(arena_bytes=6 * RECORD), 3, 2),
        (Sizes(arena_bytes=20 * RECORD), 3, 3),
        (Sizes(arena_bytes=20 * RECORD, prefetch_depth=3), 3, 4),
        (Sizes(arena_bytes=1 << 40), 3, 8),
        (Sizes(arena_bytes=1 << 80, group_size=1 << 80, prefetch_depth=1 << 80), 12, 2),
    ],
)
def test_what_an_arena_is_divided_into(
    asked: Sizes, group_size: int, banks: int, packed: PackageFactory, tmp_path: Path
) -> None:
    with open_package(configured(packed(), tmp_path, TUNED)) as package:
        found = only(choose_programs(package, asked))
    for program in (found.many, found.few):
        assert (program.group_size, program.bank_count) == (group_size, banks)
        assert program.arena_bytes == group_size * banks * RECORD


@pytest.mark.parametrize(
    ("arena_bytes", "slots"),
    [
        (None, 12),
        (2 * RECORD, None),
        (3 * RECORD, 3),
        (20 * RECORD + 1, 20),
        (23 * RECORD, 23),
        (24 * RECORD, 24),
        (1 << 80, 24),
    ],
)
@pytest.mark.parametrize("predicts", [False, True])
def test_decoding_has_all_of_the_arena_if_a_tokens_experts_find_room(
    arena_bytes: int | None, slots: int | None, predicts: bool, packed: PackageFactory, tmp_path: Path
) -> None:
    with open_package(configured(packed(), tmp_path, TUNED)) as package:
        programs = choose_programs(package, Sizes(arena_bytes=arena_bytes))
        found = programs.decode(predicts=predicts)
        assert found is programs.decode(predicts=predicts)
    if slots is None:
        assert found is None
        return
    assert found is not None
    assert (found.phase, found.bank_count, found.arena_bytes) == (Phase.DECODE, slots, slots * RECORD)
    assert found.policy == (Policy.PRE_ROUTING if predicts else Policy.POST_ROUTING)
    assert programs.arena_bytes == slots * RECORD


def test_the_packages_own_decode_program_runs_in_its_arena(packed: PackageFactory, tmp_path: Path) -> None:
    """It keeps fewer records than one that is made on the spot, so that they can be told apart."""
    with open_package(packed()) as package:
        made = compile_decode(package.expert_shape, arena_bytes=TUNED.arena_bytes, slots=12, policy=Policy.POST_ROUTING)
        fewer = [each._replace(group=1) if each.opcode == Opcode.DEMAND_RELEASE else each for each in made.instructions]
        own = replace(made, instructions=tuple(fewer))
    assert own != made
    with open_package(configured(packed(), tmp_path, TUNED, own)) as package:
        assert choose_programs(package, Sizes()).decode(predicts=False) == own
        predicting = choose_programs(package, Sizes()).decode(predicts=True)
        assert predicting is not None
        assert predicting.policy == Policy.PRE_ROUTING
        assert choose_programs(package, Sizes(arena_bytes=11 * RECORD)).decode(predicts=False) != own


@pytest.mark.parametrize("arena_bytes", [0, 1, RECORD - 1, -RECORD])
def test_an_arena_below_one_record(arena_bytes: int, packed: PackageFactory) -> None:
    with open_package(packed()) as package, pytest.raises(LinkError) as caught:
        choose_programs(package, Sizes(arena_bytes=arena_bytes))
    assert caught.value.hint == f"the smallest arena for this package is {RECORD} bytes"


def test_few_tokens_are_routed_before_anything_is_read(packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        programs, model = choose_programs(package, Sizes()), package.manifest.model
        found = only(programs)
        chosen = [programs.for_rows(rows, model) for rows in (1, 7, 8, 9, 512)]
    assert EXPERTS == 12
    assert chosen == [(found.few, None)] * 2 + [(found.many, None)] * 3
    opcodes = [each.opcode for each in found.few.instructions]
    assert opcodes.index(Opcode.ROUTE) < opcodes.index(Opcode.FILL)
    opcodes = [each.opcode for each in found.many.instructions]
    assert opcodes.index(Opcode.FILL) < opcodes.index(Opcode.EMBED)


@pytest.mark.parametrize(("tokens", "policy"), [(7, "post-routing"), (8, "pre-routing")])
def test_policy_that_runs_is_the_one_that_is_told(tokens: int, policy: str, packed: PackageFactory) -> None:
    prompt = [1] * tokens
    with open_package(packed()) as package, Session(package, policy="pre-routing") as session:
        assert session.prefill(prompt).stats.policy == policy
        assert session.trace(prompt).other_data.policy == policy
        run = session.generate(prompt, 1)
        assert len(list(run)) == 1
        assert run.stats.policy == policy


def fail(layer: int, expert_ids: object, weights: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("with_load", [True, False])
def test_a_resident_program_loads_once(with_load: bool, packed: PackageFactory, tmp_path: Path) -> None:
    with open_package(packed()) as package:
        own = compiled(package, ALL, Policy.RESIDENT)
        load = compiled(package, ALL, Policy.RESIDENT, Phase.LOAD)
    with open_package(packed()) as package, Session(package) as session:
        expected = session.forward(PROMPT)
    programs = (own, load) if with_load else (own,)
    with open_package(configured(packed(), tmp_path, ALL, *programs)) as package, Session(package) as session:
        found = only(session._programs)
        assert (found.many, found.few, found.load) == (own, own, load)
        stats = session.prefill(PROMPT[:1]).stats
        assert (stats.policy, stats.bytes_read) == ("resident", EXPERTS * LAYERS * RECORD)
        assert np.array_equal(session.forward(PROMPT), expected)
        with pytest.raises(ZeroDivisionError):
            session.forward(PROMPT, fail)
        assert np.array_equal(session.forward(PROMPT), expected)
        assert session.prefill(PROMPT).stats.bytes_read == 0


def test_a_wrong_program_of_the_package_is_refused_before_anything_runs(packed: PackageFactory, tmp_path: Path) -> None:
    with open_package(packed()) as package:
        good = compiled(package, TUNED, Policy.PRE_ROUTING)
    without_wait = tuple(each for each in good.instructions if each.opcode != Opcode.AWAIT)
    path = configured(packed(), tmp_path, TUNED, replace(good, instructions=without_wait))
    with open_package(path) as package, pytest.raises(InvalidError, match=r"\[EMOE-SCH-025\]"):
        Session(package)


def test_a_program_made_for_the_session_is_proven_too(packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> Program:
        good: Program = compile_program(*arguments, **options)  # type: ignore[arg-type]
        return replace(good, instructions=good.instructions[:-1])

    monkeypatch.setattr("estream_runtime.programs.compile_program", broken)
    with open_package(packed()) as package, pytest.raises(InvalidError, match=r"\[EMOE-SCH-033\]"):
        Session(package, group_size=5)
