"""Which programs a session runs: the package's own for its device or the sizes asked for, or some made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from msgspec.structs import replace

from estream_loader.package import Package
from estream_spec.decode_compiler import decode_program
from estream_spec.devices import for_tokens
from estream_spec.errors import LinkError
from estream_spec.limits import MAX_DIMENSION, MAX_EXPERTS
from estream_spec.manifest import POLICY, DeviceConfiguration, PolicyName
from estream_spec.model import ModelDescription
from estream_spec.routing_load import few_tokens
from estream_spec.schedule import POLICIES_BY_NAME, ExpertShape, Phase, Policy, Program
from estream_spec.schedule_compiler import compile_program
from estream_spec.schedule_verifier import verify_program

POLICIES: Final[tuple[PolicyName, ...]] = ("pre-routing", "post-routing", "on-demand")
"""Policies a session may be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a session was asked for; None where nothing was said.

    Attributes:
        arena_bytes: memory for experts.
        group_size: experts read together.
        prefetch_depth: groups read ahead.
    """

    arena_bytes: int | None = None
    group_size: int | None = None
    prefetch_depth: int | None = None


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The proven programs of one device configuration, all for the same banks.

    Attributes:
        shape: what they are for.
        many: for batches in which nearly every expert has tokens.
        load: what must run once before the others, if they are resident.
    """

    shape: ExpertShape
    many: Program
    load: Program | None

    @cached_property
    def few(self) -> Program:
        """For smaller batches, such as a single token; nothing is read before routing."""
        return (
            self.many
            if self.many.policy != Policy.PRE_ROUTING
            else _compile(self.shape, self.many, Policy.POST_ROUTING)
        )


class DevicePrograms:
    """The programs of one session, those of each device configuration made when a batch first needs them.

    Attributes:
        choices: the device configurations, at least one.
        device: the name that all of them have.
        arena_bytes: what the banks of those that need most take.
        lanes: the most lanes that a configuration asks for.

    Raises:
        LinkError: an arena is smaller than one record.
        FormatError: a program of the package is at fault.
    """

    def __init__(
        self, package: Package, asked: Sizes, policy: PolicyName | None, choices: tuple[DeviceConfiguration, ...]
    ):
        self.choices, self.device, self._package = choices, choices[0].name, package
        shape = package.expert_shape
        self._wished = {choice: _filled_in(asked, policy, choice) for choice in choices}
        self._sizes: dict[DeviceConfiguration, DeviceConfiguration | Program] = {
            choice: package.program(wished, Phase.PREFILL) or _divide(shape, asked, wished, choice)
            for choice, wished in self._wished.items()
        }
        self._made: dict[DeviceConfiguration, Programs] = {}
        self.arena_bytes = max(map(self._needed, choices))
        self._decode: dict[bool, Program | None] = {}
        self.lanes = max(each.lanes for each in choices)

    def of(self, choice: DeviceConfiguration) -> Programs:
        """Those of one of the device configurations.

        Raises:
            LinkError: there are too many groups.
        """
        if choice not in self._made:
            self._made[choice] = _programs(self._package, self._wished[choice], self._sizes[choice])
        return self._made[choice]

    def for_rows(self, rows: int, model: ModelDescription) -> tuple[Program, Program | None]:
        """The program for a batch of so many token rows, and the one that has to have run before it, if any.

        Raises:
            LinkError: there are too many groups.
        """
        programs = self.of(for_tokens(self.choices, rows))
        return programs.few if few_tokens(model, rows) else programs.many, programs.load

    def decode(self, *, predicts: bool) -> Program | None:
        """The program for a single row, in all of the arena; None where that has no room for a layer's experts.

        Args:
            predicts: whether it reads ahead.

        Raises:
            FormatError: a program of the package is at fault.
        """
        if predicts not in self._decode:
            self._decode[predicts] = self._find_decode(predicts)
        return self._decode[predicts]

    def _find_decode(self, predicts: bool) -> Program | None:
        shape, policy = self._package.expert_shape, Policy.PRE_ROUTING if predicts else Policy.POST_ROUTING
        for choice in self._wished.values():
            own = self._package.program(choice, Phase.DECODE)
            if own is not None and own.policy == policy and own.bank_count * shape.bank_bytes(1) == self.arena_bytes:
                return own
        program = decode_program(shape, self.arena_bytes, predicts=predicts)
        if program is not None:
            verify_program(program, shape)
        return program

    def _needed(self, choice: DeviceConfiguration) -> int:
        """Bytes of the banks, and beyond them as far as the arena goes, or there are experts: decoding keeps them.

        Banks of the package's own program are counted there.
        """
        sizes, shape = self._sizes[choice], self._package.expert_shape
        banks = sizes.bank_count if isinstance(sizes, Program) else sizes.prefetch_depth + 1
        records = min(self._wished[choice].arena_bytes // shape.bank_bytes(1), sum(shape.counts))
        return max(banks * shape.bank_bytes(sizes.group_size), records * shape.bank_bytes(1))


def no_room_to_decode(shape: ExpertShape, arena_bytes: int) -> LinkError:
    """What to raise where `DevicePrograms.decode` finds no program but one is needed."""
    hint = f"the smallest arena to decode in is {max(shape.top_k) * shape.bank_bytes(1)} bytes"
    return LinkError(f"the arena of {arena_bytes} bytes has no room for a token's experts", hint=hint)


def choose_programs(
    package: Package, asked: Sizes, policy: PolicyName | None = None, device: str | None = None
) -> DevicePrograms:
    """Find or make the programs for a session and prove them.

    Args:
        package: the package.
        asked: sizes. Where there are any, or a policy, one configuration is made that serves all lengths: what is left
            open is as in the device's configuration for the longest prompts, or as the arena allows.
        policy: when experts are read; None is as configured, and for other sizes than those before routing.
        device: whose configurations count; None takes the default.

    Raises:
        LinkError: no such device, or the arena is smaller than one record, or has too many groups.
        FormatError: a device configuration or a program of the package is at fault.
    """
    choices = package.device(device)
    longest = for_tokens(choices, MAX_DIMENSION)
    if asked != Sizes() or policy is not None:
        choices = (longest,)
    found = DevicePrograms(package, asked, policy, choices)
    found.of(longest)  # what most prompts will need, so that what is wrong with it is told at once
    return found


def _programs(package: Package, wished: DeviceConfiguration, sizes: DeviceConfiguration | Program) -> Programs:
    """Those of one configuration: `sizes` is the package's own program for it, or banks to make one for."""
    shape = package.expert_shape
    many = sizes if isinstance(sizes, Program) else _compile(shape, sizes, POLICIES_BY_NAME[wished.policy])
    load = None
    if many.policy == Policy.RESIDENT:
        load = package.program(wished, Phase.LOAD) or _compile(shape, many, Policy.RESIDENT, Phase.LOAD)
    return Programs(shape=shape, many=many, load=load)


def _filled_in(asked: Sizes, policy: PolicyName | None, configuration: DeviceConfiguration) -> DeviceConfiguration:
    """The configuration, changed to what was asked for. Its policy was chosen for its own sizes."""
    arena, group_size, depth = asked.arena_bytes, asked.group_size, asked.prefetch_depth
    resized = replace(
        configuration,
        arena_bytes=configuration.arena_bytes if arena is None else arena,
        group_size=configuration.group_size if group_size is None else group_size,
        prefetch_depth=configuration.prefetch_depth if depth is None else depth,
    )
    return replace(resized, policy=policy or (configuration.policy if resized == configuration else POLICY))


def _divide(
    shape: ExpertShape, asked: Sizes, wished: DeviceConfiguration, configuration: DeviceConfiguration
) -> DeviceConfiguration:
    """Banks that fit the arena.

    What was left open is as in the package's configuration if that is for the same arena. Another arena has at least
    two banks where it holds more than one record, since nothing is read into the only bank while it computes; one for
    every group where it holds them all; and otherwise no more than configured, which leaves the rest for decoding.
    """
    slots = wished.arena_bytes // max(shape.record_lengths)
    if slots < 1:
        message = f"an arena of {wished.arena_bytes} bytes holds no expert record"
        hint = f"the smallest arena for this package is {max(shape.record_lengths)} bytes"
        raise LinkError(message, hint=hint)
    group_size, depth = wished.group_size, wished.prefetch_depth
    other_arena = wished.arena_bytes != configuration.arena_bytes
    if asked.group_size is None and other_arena and depth > 0:
        group_size = min(group_size, max(slots // 2, 1))
    group_size = min(group_size, slots, max(shape.counts))
    groups = sum(shape.group_counts(group_size))
    if asked.prefetch_depth is None and (asked.group_size is not None or other_arena):
        depth = MAX_EXPERTS if slots // group_size >= groups else max(depth, 1)
    banks = min(slots // group_size, depth + 1, MAX_EXPERTS + 1, groups)
    return replace(
        wished, arena_bytes=banks * shape.bank_bytes(group_size), group_size=group_size, prefetch_depth=banks - 1
    )


def _compile(
    shape: ExpertShape, sizes: DeviceConfiguration | Program, policy: Policy, phase: Phase = Phase.PREFILL
) -> Program:
    """A program for these sizes, proven, as those of a package are when it gives them out."""
    program = compile_program(
        shape,
        arena_bytes=sizes.arena_bytes,
        group_size=sizes.group_size,
        prefetch_depth=sizes.prefetch_depth,
        policy=policy,
        phase=phase,
    )
    verify_program(program, shape)
    return program
