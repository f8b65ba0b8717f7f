"""Measure what a cache of experts and reading ahead are worth in decoding, with OLMoE-1B-7B's shape in 4 bits.

    python tests/bench/decode.py
    python tests/bench/decode.py --skew 0 --tokens 8 --rounds 1

Runs `estream-run bench --decode`, cold, in a memory cgroup that counts page cache too: with random weights that send
tokens to all experts evenly, where a cache finds little, and with some that prefer a few, as trained ones do. The
packages, of 3.7 GB each, are made in `build/bench` unless they are there already. Needs root for the cgroup.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from bench.bounded import run_bounded
from bench.synthetic import made

SHAPE: Final = "olmoe-1b-7b"
MIB: Final = 1 << 20


@click.command(help=f"\b\n{__doc__.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}")
@click.option("--skew", "skews", type=click.FloatRange(0), multiple=True, default=(0, 1), show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True, help="Tokens to decode.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--arena", type=click.IntRange(1), default=700, show_default=True, help="MiB of the arena.")
@click.option("--limit", type=click.IntRange(1), default=1024, show_default=True, help="MiB of the cgroup.")
def main(skews: tuple[float, ...], tokens: int, rounds: int, arena: int, limit: int) -> None:
    """Measure, print the tables."""
    program = [sys.executable, "-c", "from estream_runtime.cli import main; main()", "bench"]
    for skew in skews:
        options = ["--decode", "--cold", "--tokens", str(tokens), "--rounds", str(rounds), "--arena", f"{arena}M"]
        done = run_bounded([*program, str(made(SHAPE, "w4g32", skew)), *options], limit * MIB)
        assert done.peak_bytes is not None
        print(f"skew {skew:g}, at most {done.peak_bytes / MIB:.0f} MiB of memory")
        print(done.output, flush=True)


if __name__ == "__main__":
    main()
