"""Compile a package's graphs for chips or prove them in a process of its own: what `htp.py` measures.

    python tests/bench/htp_compiling.py '{"package": "sample.emoe", "chips": ["sm8650"], "action": "compile"}'

Prints what it found as JSON; standard error tells how far it is.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Final, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.bounded import run_bounded
from estream_loader import Package, open_package
from estream_loader.progress import Progress
from estream_packer.compiling import compile_changes
from estream_packer.editing import Changes, edit_package
from estream_packer.htp.local import LocalCompiler
from estream_packer.htp.proof import prove_binary
from estream_packer.htp.targets import Target, compile_targets
from estream_packer.htp.tiles import Weights, tiles_for
from estream_spec.chips import Chip, chip_named, chip_numbered

_BEGUN: Final = time.perf_counter()


def say(what: str) -> None:
    """Tell how far it is."""
    print(f"{time.perf_counter() - _BEGUN:7.0f} s  {what}", file=sys.stderr, flush=True)


class Stages:
    """Progress that says what begins and takes the time of it.

    Attributes:
        seconds: of each stage that has ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._begun = "", 0.0

    def begin(self, stage: str, total: int) -> None:
        """The stage before is over."""
        self.end()
        say(f"{stage}, {total} graphs")
        self._stage, self._begun = stage, time.perf_counter()

    def advance(self, amount: int) -> None:
        """Only stages count."""

    def end(self) -> None:
        """All stages are over."""
        if self._stage:
            self.seconds[self._stage] = time.perf_counter() - self._begun
        self._stage = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a task took.

    Attributes:
        stages: seconds of each, by what it is called.
        sizes: bytes of each binary, by chip.
        errors: the farthest of a row from the reference as a share of its size, by chip; of proven ones.
        largest_bytes: largest resident set of one process.
        seconds: all together.
        processor_s: seconds that processors spent on it.
        peak_bytes: most memory of all processes, page cache included; None where nobody counted.
    """

    stages: dict[str, float]
    sizes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    largest_bytes: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to do with a package.

    Attributes:
        package: its path.
        chips: names of chips.
        action: compile for them, as the verb does; compile and prove nothing; or prove what was compiled for them.
    """

    package: str
    chips: Sequence[str]
    action: Literal["compile", "compile unproven", "prove"]

    def __call__(self) -> Done:
        """Do it, in this process."""
        stages, chips = Stages(), [chip_named(name) for name in self.chips]
        if self.action == "prove":
            errors, sizes = _prove(Path(self.package), chips, stages), dict[str, int]()
        else:
            targets = put_in(Path(self.package), chips, stages, proven=self.action == "compile")
            errors = {each.chip.name: each.error for each in targets if isfinite(each.error)}
            sizes = {each.chip.name: len(each.compiled.data) for each in targets}
        stages.end()
        resident = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return Done(stages=stages.seconds, sizes=sizes, errors=errors, largest_bytes=resident << 10)

    def run(self) -> Done:
        """Do it in a process and a cgroup of its own."""
        finished = run_bounded([sys.executable, __file__, json.dumps(asdict(self))])
        return replace(
            Done(**json.loads(finished.output)),
            seconds=finished.seconds,
            processor_s=finished.processor_s,
            peak_bytes=finished.peak_bytes,
        )


def put_in(path: Path, chips: Sequence[Chip], progress: Progress, *, proven: bool) -> list[Target]:
    """Compile a package's graphs for chips and put them in, as the verb `compile` does."""
    made: list[Target] = []

    def decide(package: Package) -> Changes:
        weights, compiler = Weights.of(package), LocalCompiler()
        if proven:
            made.extend(compile_targets(weights, chips, compiler, progress))
        else:
            tiles = tiles_for(weights)
            made.extend(Target(chip, compiler.compile(tiles, chip, progress)) for chip in chips)
        return compile_changes(package, made)

    edit_package(path, decide)
    return made


def _prove(path: Path, chips: Sequence[Chip], progress: Progress) -> dict[str, float]:
    """The farthest of a row from the reference, by chip."""
    found = {}
    with open_package(path) as package:
        for binary in package.manifest.binaries:
            chip = chip_numbered(binary.soc_model, binary.architecture)
            if chip in chips:
                proofs = prove_binary(binary, package.binary(binary), package.manifest.model, progress)
                found[chip.name] = max(proof.error for proof in proofs)
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(Task(**json.loads(sys.argv[1]))())))
