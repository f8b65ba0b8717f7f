"""`estream-pack configure`: say how to run a package on the device it is on."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import size
from estream_spec.limits import MAX_EXPERTS


@click.command(short_help="Add a device configuration to a package.")
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="What the configuration is called.")
@click.option("--arena", type=size, metavar="SIZE", help="Memory for experts, such as 512K or 64M.")
@click.option("--group-size", type=click.IntRange(1, MAX_EXPERTS), help="Experts that are read together.")
@click.option("--prefetch-depth", type=click.IntRange(0, MAX_EXPERTS), help="Groups that are read ahead.")
@click.option("--remove", is_flag=True, help="Take the configuration of that name away.")
def command(
    package: Path, name: str, arena: int | None, group_size: int | None, prefetch_depth: int | None, remove: bool
) -> None:
    """Add a device configuration to PACKAGE, in place, replacing one added before under that name.

    It is the default from then on. It changes speed and memory and never a result, and no signature minds it.
    """
    from estream_packer.configuring import configure_changes, unconfigure_changes
    from estream_packer.editing import edit_package
    from estream_spec.errors import printable
    from estream_spec.manifest import DeviceConfiguration

    if remove:
        if (arena, group_size, prefetch_depth) != (None, None, None):
            raise click.UsageError("--remove goes with --name alone", click.get_current_context())
        edit_package(package, lambda opened: unconfigure_changes(opened, name))
        click.echo(printable(f"removed {name!r}"))
        return
    if arena is None or group_size is None or prefetch_depth is None:
        message = "--arena, --group-size and --prefetch-depth are needed, or --remove"
        raise click.UsageError(message, click.get_current_context())
    choice = DeviceConfiguration(name=name, arena_bytes=arena, group_size=group_size, prefetch_depth=prefetch_depth)
    edit_package(package, lambda opened: configure_changes(opened, choice))
    sizes = f"arena {arena:,} bytes, group size {group_size}, prefetch depth {prefetch_depth}"
    click.echo(printable(f"added {name!r}, the default now: {sizes}"))
