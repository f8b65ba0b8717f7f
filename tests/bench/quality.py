"""Measure what each encoding costs the sample model on held-out text, as the Markdown table of its card.

    python tests/bench/quality.py

Exits 1 if `w8` loses more than 1 % of perplexity or `w4g64` more than 6 %, both with 8-bit activations.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_packer.running import measure_quality
from estream_packer.sample import write_sample

CHOICES = (
    BuildOptions(experts="f32", dense="f32", activations="f32"),
    BuildOptions(experts="w8", dense="w8", activations="f32"),
    BuildOptions(experts="w8", dense="w8", activations="dynamic-int8"),
    BuildOptions(experts="w4g32", dense="w8", activations="dynamic-int8"),
    BuildOptions(experts="w4g64", dense="w8", activations="dynamic-int8"),
    BuildOptions(experts="w4g32", dense="w4g32", activations="dynamic-int8"),
)
BOUNDS = {("w8", "dynamic-int8"): 1.01, ("w4g64", "dynamic-int8"): 1.06}
"""Largest perplexity, as a multiple of the unquantised one, by experts and activations."""


def main() -> int:
    """Build every choice, compare each with the first, print the table, judge it."""
    print(
        "| experts | dense | activations | package, bytes | perplexity | ratio | mean KL, nats | same likeliest token |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    good = True
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch, "checkpoint")
        write_sample(checkpoint)
        text = (checkpoint / "held-out.txt").read_text()
        build(checkpoint, Path(scratch, "reference.emoe"), CHOICES[0])
        for choice in CHOICES:
            path = Path(scratch, "package.emoe")
            build(checkpoint, path, choice)
            with open_package(Path(scratch, "reference.emoe")) as reference, open_package(path) as package:
                found = measure_quality(reference, package, text, len(text))
            print(
                f"| {choice.experts} | {choice.dense} | {choice.activations} | {path.stat().st_size:,} "
                f"| {found.perplexity:.2f} | {found.perplexity_ratio:.4f} | {found.mean_kl:.5f} "
                f"| {found.top1_agreement:.1%} |",
                flush=True,
            )
            bound = BOUNDS.get((choice.experts, choice.activations))
            good &= bound is None or found.perplexity_ratio <= bound
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
