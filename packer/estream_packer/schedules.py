"""The programs of a package: which it gets, and what they say of themselves. SCHEDULE.md."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from estream_loader import Package
from estream_spec.manifest import DeviceConfiguration
from estream_spec.schedule import POLICIES_BY_NAME, POLICY_NAMES, ExpertShape, Phase, Policy, Program, disassemble
from estream_spec.schedule_compiler import compile_program
from estream_spec.schedule_verifier import verify_program


def programs_for(shape: ExpertShape, choice: DeviceConfiguration) -> tuple[Program, ...]:
    """The programs that a package gets for a device configuration: one, or to load and to prefill a resident one.

    Raises:
        LinkError: the arena has no room for the banks, or there are too many groups.
    """
    policy = POLICIES_BY_NAME[choice.policy]
    phases = (Phase.LOAD, Phase.PREFILL) if policy == Policy.RESIDENT else (Phase.PREFILL,)
    return tuple(
        compile_program(
            shape,
            arena_bytes=choice.arena_bytes,
            group_size=choice.group_size,
            prefetch_depth=choice.prefetch_depth,
            policy=policy,
            phase=phase,
        )
        for phase in phases
    )


class ScheduleSummary(Struct, frozen=True, kw_only=True):
    """A program in figures, all of them proven.

    Attributes:
        section: id of its section.
        phase: `load` or `prefill`.
        policy: when it reads, such as `pre-routing`.
        configurations: names of the device configurations that it is for.
        arena_bytes: memory for experts.
        group_size: experts read together.
        prefetch_depth: groups read ahead.
        banks: banks it needs.
        instructions: how many it has.
        peak_bytes: most of the arena in use at one time.
        groups_read: groups it reads where routing leaves none out.
        bytes_read: their bytes.
        furthest_ahead: most groups read ahead.
    """

    section: int
    phase: str
    policy: str
    configurations: tuple[str, ...]
    arena_bytes: int
    group_size: int
    prefetch_depth: int
    banks: int
    instructions: int
    peak_bytes: int
    groups_read: int
    bytes_read: int
    furthest_ahead: int


class ScheduleListing(ScheduleSummary, frozen=True, kw_only=True):
    """A program in full.

    Attributes:
        proof: what was proven of it, in words.
        assembly: a line that says what it is, then its instructions.
    """

    proof: tuple[str, ...]
    assembly: tuple[str, ...]


def list_schedules(package: Package) -> Iterator[ScheduleListing]:
    """Every program of a package, in the order of the directory.

    Raises:
        FormatError: one is at fault.
    """
    choices = package.device_configurations
    for entry, program in package.schedules.items():
        proof = verify_program(program, package.expert_shape)
        yield ScheduleListing(
            section=entry.id,
            phase=Phase(program.phase).name.lower(),
            policy=POLICY_NAMES[proof.policy],
            configurations=tuple(dict.fromkeys(each.name for each in choices if program.matches(each))),
            arena_bytes=program.arena_bytes,
            group_size=program.group_size,
            prefetch_depth=program.prefetch_depth,
            banks=program.bank_count,
            instructions=len(program.instructions),
            peak_bytes=proof.peak_bytes,
            groups_read=proof.groups_read,
            bytes_read=proof.bytes_read,
            furthest_ahead=proof.furthest_ahead,
            proof=tuple(proof.lines()),
            assembly=tuple(disassemble(program).splitlines()),
        )


def summarise_schedules(package: Package) -> Iterator[ScheduleSummary]:
    """Every program of a package without its instructions. Raises as `list_schedules` does."""
    for listing in list_schedules(package):
        yield ScheduleSummary(**{name: getattr(listing, name) for name in ScheduleSummary.__struct_fields__})
