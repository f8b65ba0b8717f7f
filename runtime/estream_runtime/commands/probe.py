"""`estream-run probe`: measure this device with a package, for a device profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from estream_loader import open_package
from estream_loader.console import FILE, print_json
from estream_loader.progress import open_progress
from estream_loader.small_files import require_writable, write_over
from estream_runtime.commands.options import tell_of_fallback
from estream_runtime.probe import Probe, probe
from estream_runtime.session import MAX_THREADS
from estream_spec.limits import MAX_NAME
from estream_spec.profile import NAME_PATTERN, encode_profile

NOISY: Final = 0.2
"""Above this share, the middle half of what is measured for one thing is too far apart."""


def profile_name(text: str) -> str:
    """A name as device profiles have them."""
    if len(text) > MAX_NAME or re.fullmatch(NAME_PATTERN, text) is None:
        raise click.BadParameter(f"{text!r} is not lower case with hyphens, such as my-phone")
    return text


@click.command(short_help="Measure this device, for a profile to plan with.")
@click.argument("package", type=FILE)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="PROFILE", help="Write the profile to this file."
)
@click.option("--name", type=profile_name, default="probed", show_default=True, help="What to call this device.")
@click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    help="Threads for computing.  [default: all processors this process may use]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(package: Path, output: Path | None, name: str, threads: int | None, as_json: bool) -> None:
    """Measure how fast this device reads PACKAGE and computes with it.

    That takes a minute or so, longer where reading is slow; keep the device quiet meanwhile. Reads go to PACKAGE itself
    and past the page cache; where that is not proven, nothing is measured.

    The result is a device profile, which `estream-pack plan` takes. Without -o it is shown and not kept.
    """
    if output is not None:
        require_writable(output)  # before a minute is spent
    tell_of_fallback()
    with open_package(package) as opened, open_progress("measurements") as progress:
        found = probe(opened, name, threads, progress)
    if output is not None:
        write_over(output, encode_profile(found.profile))
    if found.spread > NOISY:
        click.echo(f"notice: measurements vary by {found.spread:.0%}: probe again on a quiet device", err=True)
    if as_json:
        print_json(found.profile)
        return
    click.echo("\n".join(_summary(found)))
    if output is not None:
        click.echo(f"wrote {output}")


def _summary(found: Probe) -> Iterator[str]:
    """The figures as people read them."""
    profile = found.profile
    yield found.computing
    yield ""
    yield "GB/s by request" + "".join(f"{rate.lanes:>4} lane{'s' * (rate.lanes > 1):1}" for rate in profile.read_rates)
    for number, size in enumerate(profile.read_rates[0].at):  # of more lanes, large ones may not have been measured
        rates = "".join(f"{each / 1e9:>10.2f}" for rate in profile.read_rates for each in rate.values[number:][:1])
        yield f"{size / 1024:>11,.0f} KiB{rates}"
    yield ""
    yield "one layer, ms  experts with tokens  tokens of each  experts  all else"
    for layer in found.layers:
        mean = layer.rows / max(layer.active, 1)
        times = f"{layer.experts_s * 1e3:>9.2f}{layer.other_s * 1e3:>10.2f}"
        yield f"{layer.tokens:>6,} tokens{layer.active:>21}{mean:>16.1f}{times}"
    yield ""
    weight_s, flops = profile.experts.weight_s.value, max(profile.experts.flops.values)
    yield f"experts   {weight_s * 1e9:.4f} ns a weight, then up to {flops / 1e9:.0f} GFLOP/s"
    yield f"groups    {profile.experts.group_call_s.value * 1e3:.3f} ms each beside their experts"
    yield f"head      {profile.head_weight_s.value * 1e9:.4f} ns a weight"
    yield f"reading   starts in {profile.read_start_s.value * 1e6:.0f} us"
    if profile.read_toll_s is not None:
        group_s, toll_s = profile.group_toll_s, profile.read_toll_s.value
        yield f"          takes {group_s * 1e3:.2f} ms a group and {toll_s * 1e9:.3f} s a GB from computing beside it"
    if profile.memory_bytes is not None:
        yield f"memory    {profile.memory_bytes.value / (1 << 30):.2f} GiB: {profile.memory_bytes.source}"
