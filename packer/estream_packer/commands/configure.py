"""`estream-pack configure`: say how to run a package on the device it is on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import click

from estream_loader.console import FILE, SIZE_HELP, size
from estream_packer.commands.plan import MEMORY_HELP, PROFILE_HELP, prompt_lengths
from estream_spec.limits import MAX_EXPERTS, MAX_LANES
from estream_spec.manifest import LANES, POLICY, PolicyName

if TYPE_CHECKING:
    from estream_packer.planning import Planned
    from estream_spec.manifest import DeviceConfiguration

PROMPTS = (64, 512, 4096)
"""Lengths to plan for unless some are given, each at most the model's context."""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@click.command(short_help="Say how to run a package on a device.")
@click.argument("package", type=FILE)
@click.option("--name", help="What the device is called.  [default: the profile's name]")
@click.option("--profile", help=PROFILE_HELP)
@click.option("--memory", type=size, metavar="SIZE", help=MEMORY_HELP)
@click.option(
    "--prompt",
    "prompts",
    type=prompt_lengths,
    metavar="N[,N...]",
    help=f"Tokens of the prompts to plan for.  [default: {','.join(map(str, PROMPTS))}, or the context if less]",
)
@click.option("--arena", type=size, metavar="SIZE", help=f"Memory for experts: {SIZE_HELP}.")
@click.option("--group-size", type=click.IntRange(1, MAX_EXPERTS), help="Experts that are read together.")
@click.option("--prefetch-depth", type=click.IntRange(0, MAX_EXPERTS), help="Groups that are read ahead.")
@click.option("--lanes", type=click.IntRange(1, MAX_LANES), help=f"Reads outstanding at a time.  [default: {LANES}]")
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    help=f"When groups are read; resident needs an arena with a bank for each group.  [default: {POLICY}]",
)
@click.option("--remove", is_flag=True, help="Take all configurations of that name away.")
def command(
    package: Path,
    name: str | None,
    profile: str | None,
    memory: int | None,
    prompts: tuple[int, ...] | None,
    arena: int | None,
    group_size: int | None,
    prefetch_depth: int | None,
    lanes: int | None,
    policy: str | None,
    remove: bool,
) -> None:
    """Add device configurations to PACKAGE, in place, replacing those added before under that name.

    With --profile and --memory they are what `plan` chooses, one for each length of the prompt where it matters, all in
    an arena that fits beside the longest prompt, and one for single tokens, which decoding goes by: its arena is all
    memory that is left then, since no expert that stays has to be read again. Otherwise there is one for all, of
    --arena, --group-size and --prefetch-depth.

    They are the default from then on. They change speed and memory and never a result, and no signature minds them.
    Each edit in place leaves old bytes behind, the list of sections above all: one or two thousand in most packages.
    """
    from estream_spec.manifest import DeviceConfiguration

    sizes = {"--arena": arena, "--group-size": group_size, "--prefetch-depth": prefetch_depth}
    manual, planned = sizes | {"--lanes": lanes, "--policy": policy}, {"--memory": memory, "--prompt": prompts}
    if remove:
        if name is None or profile is not None or _given(manual) or _given(planned):
            raise _usage("--remove goes with --name alone")
        _remove(package, name)
    elif profile is not None:
        if given := _given(manual):
            raise _usage(f"{given[0]} does not go with --profile")
        if memory is None:
            raise _usage("--profile needs --memory")
        _configure_planned(package, name, profile, memory, prompts)
    else:
        if given := _given(planned):
            raise _usage(f"{given[0]} needs --profile")
        if not _given(manual):
            message = "--name, --arena, --group-size and --prefetch-depth are needed, or --profile and --memory"
            raise _usage(f"{message}, or --remove")
        if name is None or arena is None or group_size is None or prefetch_depth is None:
            missing = [option for option, each in ({"--name": name} | sizes).items() if each is None]
            raise _usage(f"missing: {', '.join(missing)}")
        choice = DeviceConfiguration(
            name=name,
            arena_bytes=arena,
            group_size=_possible(package, group_size),
            prefetch_depth=prefetch_depth,
            lanes=LANES if lanes is None else lanes,
            policy=cast("PolicyName", policy or POLICY),
        )
        _show(_write(package, [choice]), [choice])


def _given(options: Mapping[str, object]) -> list[str]:
    """Those that were given."""
    return [option for option, each in options.items() if each is not None]


def _usage(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())


def _remove(package: Path, name: str) -> None:
    from estream_loader import open_package
    from estream_packer.configuring import unconfigure_changes
    from estream_packer.editing import edit_package

    edit_package(package, lambda opened: unconfigure_changes(opened, name))
    with open_package(package) as opened:
        left = opened.device()
    _show(f"removed {name!r}, the default now is {left[0].name!r}", left)


def _configure_planned(
    package: Path, name: str | None, profile: str, memory: int, prompts: tuple[int, ...] | None
) -> None:
    """Ask the planner and write what it chose."""
    from estream_packer.configuring import planned_configurations
    from estream_packer.planning import find_profile, plan_prompts

    device = find_profile(profile)
    planned = plan_prompts(str(package), device, memory, prompts or _default_prompts(package), one_arena=True)
    decoding = max(planned.decoding, key=lambda plan: plan.tokens)
    choices = planned_configurations(device.name if name is None else name, planned.plans, decoding)
    written = _write(package, choices)
    _show_plans(planned)
    _show(written, choices)


def _possible(package: Path, group_size: int) -> int:
    """A group size, or where no layer has so many experts, as many as one has; then it is told."""
    from estream_loader import open_package

    with open_package(package) as opened:
        most = max(opened.expert_shape.counts)
    if group_size > most:
        click.echo(
            f"notice: no layer has more than {most} experts, which is the group size and not {group_size}", err=True
        )
    return min(group_size, most)


def _default_prompts(package: Path) -> tuple[int, ...]:
    from estream_loader import open_package

    with open_package(package) as opened:
        context = opened.manifest.model.context_length
    return tuple(dict.fromkeys(min(each, context) for each in PROMPTS))


def _write(package: Path, choices: Sequence[DeviceConfiguration]) -> str:
    """Edit the package; what that did, in words."""
    from estream_packer.configuring import configure_changes
    from estream_packer.editing import edit_package

    _, changes = edit_package(package, lambda opened: configure_changes(opened, choices))
    done = ("replaced" if changes.remove else "added") if changes else "nothing to change for"
    return f"{done} {choices[0].name!r}, the default now"


def _show_plans(planned: Planned) -> None:
    from estream_loader.console import console
    from estream_packer.planning import notices, plan_tables

    for notice in notices(planned):
        click.echo(f"notice: {notice}", err=True)
    shown = console()
    shown.print(next(plan_tables(planned)))
    shown.print()


def _show(heading: str, choices: Sequence[DeviceConfiguration]) -> None:
    """What was done; behind it the only configuration, or each in a line, the one that serves longer prompts last."""
    from estream_spec.errors import printable

    if len(choices) == 1 and not choices[0].prompt_tokens:
        click.echo(printable(f"{heading}: {_described(choices[0])}"))
        return
    click.echo(printable(f"{heading}:"))
    *others, last = sorted(choices, key=lambda choice: (choice.prompt_tokens == 0, choice.prompt_tokens))
    for choice in others:
        served = f"prompts up to {choice.prompt_tokens:,}" if choice.prompt_tokens > 1 else "single tokens"
        click.echo(f"  {served}: {_described(choice)}")
    length = f"up to {last.prompt_tokens:,}, and longer ones" if last.prompt_tokens else "of any other length"
    click.echo(f"  prompts {length}: {_described(last)}")


def _described(choice: DeviceConfiguration) -> str:
    sizes = f"group size {choice.group_size}, prefetch depth {choice.prefetch_depth}"
    reading = f"{choice.lanes} lane{'s' * (choice.lanes != 1)}, {choice.policy}"
    return f"arena {choice.arena_bytes:,} bytes, {sizes}, {reading}"
