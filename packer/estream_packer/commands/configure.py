"""`estream-pack configure`: say how to run a package on the device it is on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from estream_loader.console import FILE, SIZE_HELP, size
from estream_spec.limits import MAX_EXPERTS

if TYPE_CHECKING:
    from estream_spec.manifest import DeviceConfiguration


@click.command(short_help="Add a device configuration to a package.")
@click.argument("package", type=FILE)
@click.option("--name", required=True, help="What the configuration is called.")
@click.option("--arena", type=size, metavar="SIZE", help=f"Memory for experts: {SIZE_HELP}.")
@click.option("--group-size", type=click.IntRange(1, MAX_EXPERTS), help="Experts that are read together.")
@click.option("--prefetch-depth", type=click.IntRange(0, MAX_EXPERTS), help="Groups that are read ahead.")
@click.option("--remove", is_flag=True, help="Take the configuration of that name away.")
def command(
    package: Path, name: str, arena: int | None, group_size: int | None, prefetch_depth: int | None, remove: bool
) -> None:
    """Add a device configuration to PACKAGE, in place, replacing one added before under that name.

    It is the default from then on. It changes speed and memory and never a result, and no signature minds it. Each edit
    in place leaves old bytes behind, the list of sections above all: one or two thousand in most packages.
    """
    from estream_loader import open_package
    from estream_packer.configuring import configure_changes, unconfigure_changes
    from estream_packer.editing import edit_package
    from estream_spec.errors import printable
    from estream_spec.manifest import DeviceConfiguration

    if remove:
        if (arena, group_size, prefetch_depth) != (None, None, None):
            raise click.UsageError("--remove goes with --name alone", click.get_current_context())
        edit_package(package, lambda opened: unconfigure_changes(opened, name))
        with open_package(package) as opened:
            left = opened.device_configurations[0]
        click.echo(printable(f"removed {name!r}, the default now is {left.name!r}: {_sizes(left)}"))
        return
    if arena is None or group_size is None or prefetch_depth is None:
        message = "--arena, --group-size and --prefetch-depth are needed, or --remove"
        raise click.UsageError(message, click.get_current_context())
    choice = DeviceConfiguration(name=name, arena_bytes=arena, group_size=group_size, prefetch_depth=prefetch_depth)
    _, changes = edit_package(package, lambda opened: configure_changes(opened, choice))
    done = ("replaced" if changes.remove else "added") if changes else "nothing to change for"
    click.echo(printable(f"{done} {name!r}, the default now: {_sizes(choice)}"))


def _sizes(choice: DeviceConfiguration) -> str:
    sizes = f"group size {choice.group_size}, prefetch depth {choice.prefetch_depth}"
    return f"arena {choice.arena_bytes:,} bytes, {sizes}"
