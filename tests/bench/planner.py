"""Hold what the planner predicts against what is measured, for every group size and prefetch depth.

    python tests/bench/planner.py
    python tests/bench/planner.py olmoe.emoe --lengths 64 512 --groups 2 8 --depths 1 3 --rounds 1

The package is made in `build/bench` unless one is given or it is there already. The device is probed with it first,
unless `--profile` names a profile of it. Then each prompt is run with every group size and depth whose arena fits the
memory, experts read before routing. Each run reads all its experts anew, past the page cache. A round opens one session
for each size and depth and takes all prompts through it; figures are medians of the rounds, so that one disturbance
spoils one round of many.

What is printed: for each size and depth predicted and measured time and the error; then for each prompt what the
planner chooses among them, and its regret, how much longer that takes than the fastest that was measured. Exits 1 if
an error is above 15 % or a regret above 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.synthetic import made
from estream_loader import Package, open_package
from estream_loader.console import size
from estream_loader.progress import open_progress
from estream_packer.planning import find_profile, package_workload
from estream_runtime import Session
from estream_runtime.probe import probe
from estream_spec.errors import EmoeError
from estream_spec.planner import Prediction, available_arena, choose, choose_lanes, predict
from estream_spec.profile import DeviceProfile, encode_profile
from estream_spec.routing_load import even_shares, expected_load, few_tokens
from estream_spec.sizes import bytes_text
from estream_spec.workload import Workload, grouped_work

MOST_ERROR, MOST_REGRET = 0.15, 0.05
START_S = 3.0
"""About what opening a session and its first token take."""


@dataclass(frozen=True)
class Case:
    """One way to divide the arena."""

    group_size: int
    depth: int

    def __str__(self) -> str:
        return f"{self.group_size} x {self.depth + 1}"


def predicted(workload: Workload, profile: DeviceProfile, tokens: int, cases: list[Case]) -> dict[Case, Prediction]:
    """What the planner expects of each case."""
    lanes = choose_lanes(profile)
    blocks = [workload.model.expert_block(layer) for layer in range(len(workload.model.layers))]
    loads = [expected_load(even_shares(block), tokens) for block in blocks]
    found = {}
    for case in cases:
        work = grouped_work(workload, profile, tokens, loads, case.group_size, lanes)
        found[case] = predict(workload, profile, work, "pre-routing", case.group_size, case.depth, lanes)
    return found


def measure(package: Package, case: Prediction, lengths: list[int], threads: int | None) -> dict[int, float]:
    """Seconds of each prompt to its first token, in a session of its own."""
    vocabulary = package.manifest.model.vocabulary
    seconds = {}
    with Session(
        package,
        arena_bytes=case.arena_bytes,
        group_size=case.group_size,
        prefetch_depth=case.prefetch_depth,
        lanes=case.lanes,
        threads=threads,
        policy="pre-routing",
    ) as session:
        session.prefill([0])  # makes graphs and memory ready
        for tokens in lengths:
            stats = session.prefill(np.random.default_rng(tokens).integers(0, vocabulary, tokens)).stats
            if stats.reading_mode != "direct":
                raise SystemExit(f"reads are {stats.reading_mode}: give a package on storage that can be read past it")
            seconds[tokens] = stats.ttft_s
    return seconds


def cases_within(workload: Workload, sizes: list[int], depths: list[int], arena_cap: int) -> list[Case]:
    """Those whose arena fits, and holds less than all groups: else the second prompt would find its experts there."""
    bank = max(workload.record_lengths)
    return [
        Case(group_size, depth)
        for group_size in sizes
        for depth in depths
        if (depth + 1) * group_size * bank <= arena_cap
        and depth + 1 < sum(-(-count // group_size) for count in workload.expert_counts)
    ]


def report(
    console: Console, tokens: int, found: dict[Case, Prediction], measured: dict[Case, float]
) -> tuple[float, float]:
    """Print a table; the largest error, and the regret."""
    best = min(measured, key=measured.__getitem__)
    chosen = next(case for case, each in found.items() if each == choose(list(found.values())))
    table = Table("group x banks", "arena", "predicted", "measured", "error", "", title=f"a prompt of {tokens:,}")
    errors = {case: found[case].time_s / measured[case] - 1 for case in found}
    for case, each in found.items():
        remarks = ["chosen"] * (case == chosen) + ["fastest"] * (case == best)
        cells = f"{each.time_s:.2f} s", f"{measured[case]:.2f} s", f"{errors[case]:+.1%}", ", ".join(remarks)
        table.add_row(str(case), bytes_text(each.arena_bytes), *cells)
    console.print(table)
    regret = measured[chosen] / measured[best] - 1
    worst = max(map(abs, errors.values()))
    middle = statistics.median(map(abs, errors.values()))
    console.print(f"error {middle:.1%} in the median, {worst:.1%} at worst; regret {regret:.1%}\n")
    return worst, regret


def main() -> int:
    """Probe, predict, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "package", type=Path, nargs="?", help="on the storage to be measured; default: a synthetic OLMoE"
    )
    parser.add_argument("--profile", help="a profile of this very device with this package; default: probe it now")
    parser.add_argument("--keep", type=Path, help="write the probed profile to this file")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128, 256, 512], help="tokens of the prompts")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="experts read together")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 3], help="groups read ahead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=size, default=1 << 30, help="most memory for everything, such as 1G")
    parser.add_argument("--threads", type=int, help="for computing; default: all processors")
    given = parser.parse_args()
    console = Console(width=100)
    with open_package(given.package or made("olmoe-1b-7b", None)) as package:
        workload = package_workload(package)
        if few_tokens(workload.model, min(given.lengths)):
            parser.error(
                f"of {min(given.lengths)} tokens a session reads after routing, and something else is measured"
            )
        if given.profile is None:
            console.print("probing, about a minute")
            with open_progress("measurements") as progress:
                profile = probe(package, "bench", given.threads, progress).profile
            if given.keep is not None:
                given.keep.write_bytes(encode_profile(profile))
        else:
            profile = find_profile(given.profile)
        arena_cap = available_arena(workload, profile, given.memory, max(given.lengths))
        cases = cases_within(workload, given.groups, given.depths, arena_cap)
        if not cases:
            parser.error("no arena fits this memory")
        found = {tokens: predicted(workload, profile, tokens, cases) for tokens in given.lengths}
        computing_s = sum(each.time_s for tokens in given.lengths for each in found[tokens].values())
        minutes = given.rounds * (computing_s + START_S * len(cases)) / 60
        what = f"{len(cases)} arenas, {len(given.lengths)} prompts, {given.rounds} rounds"
        console.print(f"{what}: about {minutes:.0f} minutes")
        seconds: defaultdict[tuple[int, Case], list[float]] = defaultdict(list)
        begun = time.perf_counter()
        for number in range(given.rounds):
            for case in cases:
                for tokens, each in measure(
                    package, found[given.lengths[0]][case], given.lengths, given.threads
                ).items():
                    seconds[tokens, case].append(each)
            console.print(
                f"round {number + 1} of {given.rounds} after {(time.perf_counter() - begun) / 60:.1f} minutes"
            )
    console.print()
    results = [
        report(console, tokens, found[tokens], {case: statistics.median(seconds[tokens, case]) for case in cases})
        for tokens in given.lengths
    ]
    worst, regret = (max(column) for column in zip(*results, strict=True))
    console.print(f"worst error {worst:.1%}, expected at most {MOST_ERROR:.0%}")
    console.print(f"worst regret {regret:.1%}, expected at most {MOST_REGRET:.0%}")
    return int(worst > MOST_ERROR or regret > MOST_REGRET)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EmoeError as error:
        sys.exit(f"planner.py: error: {error}")
