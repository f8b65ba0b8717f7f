"""Measure what each encoding costs the sample model on held-out text, as the Markdown tables of its card.

    python tests/bench/quality.py [TOKENS]

TOKENS of the text are used, all of them unless said.
The first table has whole packages. The second has ways to store experts in four bits, all else being as in the
checkpoint: our encodings rounded plainly, searched, and searched with calibration, and llama.cpp's `Q4_0` of the same
weights, from its own library, without and with the same calibration.

Exits 1 if `w8` loses more than 1 % of perplexity, `w4g64` more than 6 %, or calibrated `w4g32` more than 2 %, all with
8-bit activations; or if calibrated `w4g32` is not nearer to the checkpoint than plain rounding and than uncalibrated
`Q4_0`, by divergence, and than plain rounding by perplexity, too.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from bench.four_bits import Way, plainly, q4_0, searched
from bench.peer_programs import LLAMA, UnavailableError, bench_program
from estream_loader import open_package
from estream_loader.progress import Quiet
from estream_packer.build import build
from estream_packer.calibration import Calibration, calibrate, read_calibration_text
from estream_packer.quality import UNQUANTISED
from estream_packer.recipe import BuildOptions, CalibrationTable
from estream_packer.running import Comparison, measure_quality
from estream_packer.sample import write_sample
from estream_spec.weights import Floats

CHOICES: Final = (
    UNQUANTISED,
    BuildOptions(experts="w8", dense="w8", activations="f32"),
    BuildOptions(experts="w8"),
    BuildOptions(),
    BuildOptions(calibration=CalibrationTable(text="calibration.txt")),
    BuildOptions(experts="w4g64"),
    BuildOptions(experts="w4g64", calibration=CalibrationTable(text="calibration.txt")),
    BuildOptions(dense="w4g32"),
    BuildOptions(dense="w4g32", calibration=CalibrationTable(text="calibration.txt")),
)
BOUNDS: Final = {
    BuildOptions(experts="w8"): 1.01,
    BuildOptions(experts="w4g64"): 1.06,
    BuildOptions(calibration=CalibrationTable(text="calibration.txt")): 1.02,
}
"""Largest perplexity, as a multiple of the unquantised one."""
EXPERT: Final = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FIGURES: Final = "perplexity | ratio | mean KL, nats | same likeliest token |"


@dataclass(slots=True)
class Errors:
    """Relative errors of the tensors that one way stored, in percent, and the bits that it took.

    Attributes:
        bits: of all tensors.
        weights: in all tensors.
        plain: by tensor, every weight counting alike.
        weighted: by tensor, each weight counting as its channel does.
    """

    bits: int = 0
    weights: int = 0
    plain: dict[str, float] = field(default_factory=dict)
    weighted: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, bits: int, found: Floats, weight: Floats, importance: Floats | None) -> None:
        """One more tensor."""
        self.bits, self.weights = self.bits + bits, self.weights + weight.size
        self.plain[name] = 100 * float(np.linalg.norm(found - weight) / np.linalg.norm(weight))
        root = np.ones((len(weight), 1)) if importance is None else np.sqrt(importance)[:, None]
        self.weighted[name] = 100 * float(np.linalg.norm(root * (found - weight)) / np.linalg.norm(root * weight))


def main() -> int:
    """Build every choice, compare each with the first, print the tables, judge them."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch, "checkpoint")
        write_sample(checkpoint)
        build(checkpoint, Path(scratch, "reference.emoe"), UNQUANTISED)
        good = _packages(checkpoint, Path(scratch))
        return 0 if _experts(checkpoint, Path(scratch)) and good else 1


def _packages(checkpoint: Path, scratch: Path) -> bool:
    """The first table; whether every package is within its bound."""
    print(f"| experts | dense | activations | calibrated | package, bytes | {FIGURES}")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    packages = []
    for number, choice in enumerate(CHOICES):
        options = choice
        if choice.calibration is not None:
            table = replace(choice.calibration, text=str(checkpoint / choice.calibration.text))
            options = replace(choice, calibration=table)
        packages.append(scratch / f"package-{number}.emoe")
        build(checkpoint, packages[-1], options)
    good = True
    for choice, package, found in zip(CHOICES, packages, _compared(checkpoint, scratch, packages), strict=True):
        calibrated = "no" if choice.calibration is None else "yes"
        row = f"| {choice.experts} | {choice.dense} | {choice.activations} | {calibrated} "
        print(f"{row}| {package.stat().st_size:,} | {_figures(found)} |", flush=True)
        good &= found.perplexity_ratio <= BOUNDS.get(choice, np.inf)
    return good


def _experts(checkpoint: Path, scratch: Path) -> bool:
    """The second table; whether calibration is better than what it must be better than."""
    nearly = scratch / "nearly.emoe"
    build(checkpoint, nearly, BuildOptions(experts="w8", dense="w8", activations="f32"))
    with open_package(nearly) as package:
        calibration = calibrate(package, read_calibration_text(checkpoint / "calibration.txt"), 1 << 15, Quiet())
    ways: dict[str, tuple[Way, bool]] = {
        "w4g32, rounded": (plainly, False),
        "w4g32": (searched("w4g32"), False),
        "w4g32, calibrated": (searched("w4g32"), True),
        "w4g64": (searched("w4g64"), False),
        "w4g64, calibrated": (searched("w4g64"), True),
    }
    try:
        theirs = q4_0(bench_program(LLAMA).with_name("libggml-base.so"))
        ways |= {"Q4_0": (theirs, False), "Q4_0, calibrated": (theirs, True)}
    except UnavailableError as error:
        print(f"Q4_0 is not measured: {error}", file=sys.stderr)
    print(f"\n| experts | bits per weight | error | weighted error | {FIGURES}")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    errors, packages = dict[str, Errors](), list[Path]()
    for name, (way, calibrated) in ways.items():
        errors[name] = _store_experts(checkpoint, scratch / "changed", way, calibration, calibrated)
        packages.append(scratch / f"experts-{len(packages)}.emoe")
        build(scratch / "changed", packages[-1], UNQUANTISED)
    figures = dict(zip(ways, _compared(checkpoint, scratch, packages), strict=True))
    for name, found in errors.items():
        mean, weighted = (np.mean(list(each.values())) for each in (found.plain, found.weighted))
        row = f"| {name} | {found.bits / found.weights:.3f} | {mean:.2f} % | {weighted:.2f} % "
        print(f"{row}| {_figures(figures[name])} |", flush=True)
    print()
    best = figures["w4g32, calibrated"]
    good = best.perplexity < figures["w4g32, rounded"].perplexity
    good &= all(best.mean_kl < figures[name].mean_kl for name in ("w4g32, rounded", "Q4_0") if name in figures)
    for ours, other in (("w4g32", "Q4_0"), ("w4g32, calibrated", "Q4_0, calibrated")):
        if other in errors:
            _tensor_by_tensor(ours, errors[ours], other, errors[other])
    return good


def _store_experts(checkpoint: Path, changed: Path, way: Way, calibration: Calibration, calibrated: bool) -> Errors:
    """Write a checkpoint whose experts went through a way to store them."""
    changed.mkdir(exist_ok=True)
    tensors = {name: tensor.astype(np.float32) for name, tensor in _bfloat16(checkpoint).items()}
    errors = Errors()
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            continue
        layer, expert, matrix = int(match[1]), int(match[2]), match[3]
        importance = calibration.importance(layer, expert).get(matrix)
        weight = np.ascontiguousarray(tensor.T)
        stored = way(weight, importance if calibrated else None)
        errors.add(name, stored.bits, stored.weight, weight, importance)
        tensors[name] = np.ascontiguousarray(stored.weight.T)
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (changed / name).write_bytes((checkpoint / name).read_bytes())
    return errors


def _bfloat16(checkpoint: Path) -> dict[str, np.ndarray]:
    import ml_dtypes  # noqa: F401  # which is what makes numpy know the type

    return load_file(checkpoint / "model.safetensors")


def _compared(checkpoint: Path, scratch: Path, paths: Sequence[Path]) -> list[Comparison]:
    text = (checkpoint / "held-out.txt").read_text()
    with ExitStack() as stack:
        reference, *packages = (
            stack.enter_context(open_package(path)) for path in (scratch / "reference.emoe", *paths)
        )
        return measure_quality(reference, packages, text, int(sys.argv[1]) if sys.argv[1:] else len(text))


def _figures(found: Comparison) -> str:
    ratio = f"{found.perplexity_ratio:.4f} ± {found.perplexity_ratio_error:.4f}"
    return f"{found.perplexity:.2f} | {ratio} | {found.mean_kl:.5f} | {found.top1_agreement:.1%}"


def _tensor_by_tensor(ours: str, our: Errors, other: str, their: Errors) -> None:
    """Say how the errors of single tensors compare."""
    kinds: tuple[tuple[str, Callable[[Errors], dict[str, float]]], ...] = (
        ("error", lambda each: each.plain),
        ("weighted error", lambda each: each.weighted),
    )
    for kind, of in kinds:
        ratios = [of(our)[name] / of(their)[name] for name in of(our)]
        print(
            f"{kind} of {ours} as a multiple of that of {other}, {len(ratios)} tensors: {min(ratios):.3f} to "
            f"{max(ratios):.3f}, less in {sum(each < 1 for each in ratios)}"
        )


if __name__ == "__main__":
    sys.exit(main())
