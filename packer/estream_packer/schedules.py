"""The programs of a package: which it gets, and what they say of themselves. SCHEDULE.md."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from estream_loader import Package
from estream_spec.decode_compiler import decode_program
from estream_spec.manifest import DeviceConfiguration
from estream_spec.schedule import POLICIES_BY_NAME, POLICY_NAMES, ExpertShape, Phase, Policy, Program, disassemble
from estream_spec.schedule_compiler import compile_program
from estream_spec.schedule_verifier import verify_program


def programs_for(shape: ExpertShape, choice: DeviceConfiguration, *, predicts: bool) -> tuple[Program, ...]:
    """The programs that a package gets for a device configuration.

    One to prefill, and before it one to load if that one is resident. Behind them one to decode in the same arena, if
    that has room for the experts that a token needs at one time.

    Args:
        shape: experts and record lengths of the model.
        choice: the device configuration.
        predicts: whether there is something to predict experts with.

    Raises:
        LinkError: the arena has no room for the banks, or there are too many groups.
    """
    policy = POLICIES_BY_NAME[choice.policy]
    phases = (Phase.LOAD, Phase.PREFILL) if policy == Policy.RESIDENT else (Phase.PREFILL,)
    prefill = [
        compile_program(
            shape,
            arena_bytes=choice.arena_bytes,
            group_size=choice.group_size,
            prefetch_depth=choice.prefetch_depth,
            policy=policy,
            phase=phase,
        )
        for phase in phases
    ]
    decode = decode_program(shape, choice.arena_bytes, predicts=predicts)
    return tuple(prefill) if decode is None else (*prefill, decode)


class ScheduleSummary(Struct, frozen=True, kw_only=True):
    """A program in figures, all of them proven.

    Attributes:
        section: id of its section.
        phase: `load`, `prefill` or `decode`.
        policy: when it reads, such as `pre-routing`.
        configurations: names of the device configurations that it is for.
        arena_bytes: memory for experts.
        group_size: experts read together.
        prefetch_depth: groups read ahead.
        banks: banks it needs.
        instructions: how many it has.
        peak_bytes: most of the arena in use at one time.
        groups_read: groups it reads where routing leaves none out; to decode, the most experts that a token reads.
        bytes_read: their bytes.
        furthest_ahead: most groups read ahead.
        groups_kept: most groups that stay in the arena for the next run.
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
    groups_kept: int


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
            groups_kept=proof.groups_kept,
            proof=tuple(proof.lines()),
            assembly=tuple(disassemble(program).splitlines()),
        )


def summarise_schedules(package: Package) -> Iterator[ScheduleSummary]:
    """Every program of a package without its instructions. Raises as `list_schedules` does."""
    for listing in list_schedules(package):
        yield ScheduleSummary(**{name: getattr(listing, name) for name in ScheduleSummary.__struct_fields__})
