"""What a package is compiled for: one binary for each chip, compiled and proven before it goes anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from estream_loader.progress import Progress
from estream_packer.htp.compiler import Compiled, Compiler
from estream_packer.htp.proof import check_simulator, prove_binary
from estream_packer.htp.tiles import Weights, tiles_for
from estream_spec.chips import Chip, chip_named
from estream_spec.errors import LinkError, PackError
from estream_spec.limits import MAX_SMALL_SECTION_LENGTH
from estream_spec.manifest import Binary, BinaryTarget

TARGET: Final[BinaryTarget] = "htp"


@dataclass(frozen=True, slots=True)
class Target:
    """What was compiled for one chip, and proven.

    Attributes:
        chip: the chip.
        compiled: the binary.
        error: how far the worst row of all graphs is from the reference, as a share of its size.
    """

    chip: Chip
    compiled: Compiled
    error: float = inf

    def binary(self, section: int) -> Binary:
        """Its entry in the manifest.

        Args:
            section: id of the section that it is to have.
        """
        return Binary(
            section=section,
            target=TARGET,
            soc_model=self.chip.soc_model,
            architecture=self.chip.architecture,
            sdk=self.compiled.sdk,
            compiler=self.compiled.compiler,
            graphs=self.compiled.graphs,
            options=self.compiled.options,
        )

    def described(self) -> str:
        """What was made, in two lines."""
        made, chip = self.compiled, self.chip
        heading = f"compiled for {chip}: {len(made.graphs)} graphs, {len(made.data):,} bytes"
        return f"{heading}\n  {made.compiler}, SDK {made.sdk}; in the simulator off by at most {self.error:.1e}"


def chip_of_target(text: str) -> Chip:
    """The chip that a target names.

    Args:
        text: `htp:` and a chip, see `estream_spec.chips.chip_named`.

    Raises:
        PackError: it is none.
    """
    kind, _, name = text.partition(":")
    if kind != TARGET or not name:
        hint = f"did you mean htp:{text}?" if text and not kind.startswith(TARGET) and ":" not in text else None
        raise PackError(f"target is {text!r}, expected htp and a chip, such as htp:sm8650", hint=hint)
    try:
        return chip_named(name)
    except LinkError as error:
        raise PackError(error.message, hint=error.hint) from None


def compile_targets(weights: Weights, chips: Sequence[Chip], compiler: Compiler, progress: Progress) -> list[Target]:
    """Compiles the graphs of a package for chips, and proves each of them.

    Args:
        weights: how the package stores its weights.
        chips: for which chips, each once.
        compiler: what compiles.
        progress: told of the stages and how many graphs are done.

    Raises:
        LinkError: the compiler or the simulator does not run here.
        PackError: the compiler refuses a graph, or what it made computes something else.
    """
    check_simulator()  # before anyone compiles for long, in the cloud perhaps
    tiles = tiles_for(weights)
    made = []
    for chip in chips:
        compiled = compiler.compile(tiles, chip, progress)
        if len(compiled.data) > MAX_SMALL_SECTION_LENGTH:
            message = f"the binary for {chip} has {len(compiled.data):,} bytes"
            raise PackError(f"{message}, a section holds {MAX_SMALL_SECTION_LENGTH:,}")
        target = Target(chip, compiled)
        try:
            proofs = prove_binary(target.binary(0), compiled.data, weights.model, progress)
        except PackError:
            compiler.forget()  # or a later run would be given the same again
            raise
        made.append(replace(target, error=max(proof.error for proof in proofs)))
    return made
