"""`estream-pack plan`: choose how to run a model on a device, and say what that will cost."""

from __future__ import annotations

from pathlib import Path

import click

from estream_loader.console import size
from estream_spec.limits import MAX_DEVICE_CONFIGURATIONS
from estream_spec.profiles import shipped_profiles

PROFILE_HELP = f"The device: a file of `estream-run probe`, or one of {', '.join(shipped_profiles())}."
MEMORY_HELP = "Most memory for everything, such as 1G: the program, weights, what a prompt needs, and the arena."
RULE = "the smallest arena within 2 % of the best time, but a model that fits the memory stays resident"
"""What is chosen, see `estream_spec.planner`."""


def prompt_lengths(text: str) -> tuple[int, ...]:
    """Tokens of one or several prompts: `512`, or `64,512,4096`. As many as a package has room for configurations."""
    lengths = text.split(",", MAX_DEVICE_CONFIGURATIONS)
    if len(lengths) > MAX_DEVICE_CONFIGURATIONS:
        raise click.BadParameter(f"more than {MAX_DEVICE_CONFIGURATIONS} lengths")
    if not all(each.isascii() and each.isdigit() and len(each) <= 8 and 0 < int(each) < 1 << 24 for each in lengths):
        raise click.BadParameter(f"{text!r} is not a list of numbers of tokens such as 64,512")
    return tuple(dict.fromkeys(map(int, lengths)))


@click.command(short_help="Choose arena, group size and depth for a device.")
@click.argument("model", metavar="PACKAGE_OR_SHAPE")
@click.option("--profile", required=True, help=PROFILE_HELP)
@click.option("--memory", type=size, metavar="SIZE", required=True, help=MEMORY_HELP)
@click.option(
    "--prompt",
    "prompts",
    type=prompt_lengths,
    metavar="N[,N...]",
    default="512",
    show_default=True,
    help="Tokens of the prompts to plan for.",
)
@click.option("--svg", type=click.Path(path_type=Path), help="Draw arena against time to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
def command(model: str, profile: str, memory: int, prompts: tuple[int, ...], svg: Path | None, as_json: bool) -> None:
    """Choose how to run PACKAGE_OR_SHAPE, a package or the name of a published model's shape, on a device.

    For each prompt length: the arena, the group size, how many groups are read ahead, how many reads are outstanding,
    and when reads start; what that will cost; and what more or less memory would do. Chosen is the smallest arena
    within 2 % of the best time, but a model that fits the memory stays resident.

    Then what decoding a token after the prompt will cost in the largest arena that fits: without prefetching, with the
    package's own prefetch router, or one as good as published ones where it has none, and with one that is always
    right, which is the most that prefetching can give on the device. Where the profile says what bytes and products
    take, energy is told too.

    `configure` puts a choice into a package.
    """
    from estream_loader.console import console, print_json
    from estream_loader.small_files import require_writable, write_over
    from estream_packer.decode_tables import decode_lines, decode_tables
    from estream_packer.planning import find_profile, notices, plan_prompts, plan_tables, seconds_text

    if svg is not None:
        require_writable(svg)
    planned = plan_prompts(model, find_profile(profile), memory, prompts)
    if svg is not None:
        from estream_packer.frontier_picture import frontier_svg

        write_over(svg, frontier_svg(planned).encode())
    for notice in notices(planned):
        click.echo(f"notice: {notice}", err=True)
    if as_json:
        print_json(planned)
        return
    shown = console()
    for table in (*plan_tables(planned), *decode_tables(planned)):
        shown.print(table)
        shown.print()
    for line in decode_lines(planned):
        click.echo(line)
    click.echo(f"chosen: {RULE}")
    for plan in planned.plans:
        if plan.choice.mode == "resident":
            click.echo(f"all experts are read once, before any prompt, in {seconds_text(plan.choice.load_s)}")
            break
    if svg is not None:
        click.echo(f"wrote {svg}")
