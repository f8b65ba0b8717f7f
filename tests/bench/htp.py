"""Measure graphs compiled for the NPU: their number, what compiling them takes, and what they compute when simulated.

    python tests/bench/htp.py
    python tests/bench/htp.py --part graphs --part sample

Needs onnxruntime-qnn on x86-64, whose simulator stands for the NPU. It is slow: standard error tells how far all is.
Compiling runs in a process of its own in a memory cgroup, all its children counted. Exits 1 if a target is missed.

- `graphs`: how many graphs a package needs, for other numbers of experts and layers.
- `sample`: compiling the sample model for all chips in one call: time, memory, bytes.
- `olmoe`: the same for OLMoE-1B-7B by the default recipe, proofs left out; then the proof for one chip. Its package has
  one layer, since the others would add no graph.
- `fidelity`: the sample model on the NPU and in f32: texts, hidden states, scores, choice of experts.
- `identity`: whether the logits are the same for arenas, group sizes, depths, lanes and policies of all kinds.
- `padding`: rows that are computed and stand for none.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from bench.htp_compiling import Done, Stages, Task, put_in, say
from bench.htp_fidelity import Comparison, Observed, compared, observed, passages
from estream_loader import open_package
from estream_loader.console import run_command
from estream_packer.build import build
from estream_packer.htp.tiles import Weights, tiles_for
from estream_packer.recipe import BuildOptions
from estream_packer.sample import write_sample
from estream_packer.synth import synthesise
from estream_runtime import Session
from estream_spec.chips import Chip, chip_named
from estream_spec.graph_interface import ROLES
from estream_spec.shapes import OLMOE_1B_7B

MIB: Final = 1 << 20
CHIPS: Final = ("sm8550", "sm8650", "sm8750", "sm8850")
SAMPLE_S, OLMOE_S = 120, 600
"""Most seconds to compile for all chips."""
EXPERTS, LAYERS = (16, 64), (4, 8)
TEXTS, TEXT_TOKENS = 5, 128
"""Passages of the held-out text, and tokens of each: no more than enter the head at once."""
PROMPT_TOKENS, NEW_TOKENS = 16, 20
MOST_ERROR, LEAST_SAME, LEAST_TEXTS = 1e-2, 0.99, 4
IDENTITY_TOKENS: Final = 40
PADDING_TOKENS: Final = (16, 64, 256)
F32: Final = BuildOptions(experts="f32", dense="f32", activations="f32")
STORED: Final = BuildOptions(activations="f32")
"""The default recipe, its weights multiplied in f32 where no NPU does it."""

Figure = tuple[str, str, str, bool | None]
"""What it is, what it should be, what it is found to be, whether that is so; None where nothing is asked."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where packages are made, and for which chips."""

    folder: Path
    chips: tuple[Chip, ...]

    @property
    def checkpoint(self) -> Path:
        """The sample's checkpoint."""
        folder = self.folder / "checkpoint"
        if not folder.exists():
            write_sample(folder)
        return folder

    def sample(self, options: BuildOptions | None = None) -> Path:
        """The sample model, packed anew."""
        path = self.folder / "sample.emoe"
        build(self.checkpoint, path, options)
        return path

    def compiled_sample(self, name: str, options: BuildOptions | None = None) -> Path:
        """The sample model with a proven binary for the first chip."""
        path = self.sample(options).rename(self.folder / f"{name}.emoe")
        put_in(path, self.chips[:1], Stages(), proven=True)
        return path


def graphs_figures(place: Place) -> Iterator[Figure]:
    """The number of graphs of models that differ in experts and layers alone."""
    with open_package(place.sample(), integrity="open") as package:
        model = package.manifest.model
    path, numbers = place.folder / "synthetic.emoe", set[tuple[int, ...]]()
    for experts in EXPERTS:
        for layers in LAYERS:
            blocks = tuple(replace(block, experts=experts) for block in model.expert_blocks)
            synthesise(replace(model, expert_blocks=blocks, layers=model.layers[:1] * layers), path)
            with open_package(path) as package:
                counts = Counter(tile.graph.role for tile in tiles_for(Weights.of(package)))
            path.unlink()
            found = ", ".join(f"{role} {counts[role]}" for role in ROLES)
            yield f"graphs for {experts} experts in {layers} layers", "", f"{counts.total()}: {found}", None
            numbers.add(tuple(counts[role] for role in ROLES))
    yield "different numbers of graphs", "1", str(len(numbers)), len(numbers) == 1


def sample_figures(place: Place) -> Iterator[Figure]:
    """Compiling the sample model with all proofs."""
    done = Task(package=str(place.sample()), chips=_names(place.chips), action="compile").run()
    yield from _compiling_figures("sample", place.chips, done, done.seconds, SAMPLE_S)
    yield "sample: of which compiling", "", _each(done, "compiling for", place.chips), None
    yield "sample: of which proving", "", _each(done, "proving for", place.chips), None
    yield "sample: farthest of a row from the reference", "", f"{max(done.errors.values()):.1e}", None


def olmoe_figures(place: Place) -> Iterator[Figure]:
    """Compiling graphs as large as those of OLMoE-1B-7B; then proving them for one chip."""
    path, chips = place.folder / "olmoe.emoe", place.chips
    say("writing one layer of OLMoE-1B-7B")
    synthesise(replace(OLMOE_1B_7B, layers=OLMOE_1B_7B.layers[:1]), path)
    done = Task(package=str(path), chips=_names(chips), action="compile unproven").run()
    yield from _compiling_figures("OLMoE-1B-7B", chips, done, done.seconds, OLMOE_S)
    yield "OLMoE-1B-7B: each chip", "", _each(done, "compiling for", chips), None
    proof = Task(package=str(path), chips=_names(chips[:1]), action="prove").run()
    took = f"{proof.seconds:.0f} s, {_memory(proof)}; off by at most {proof.errors[chips[0].name]:.1e}"
    yield f"OLMoE-1B-7B: proof for {chips[0].name}", "", took, None


def _compiling_figures(what: str, chips: Sequence[Chip], done: Done, seconds: float, target: float) -> Iterator[Figure]:
    took = f"{seconds:.0f} s, of processors {done.processor_s:.0f} s"
    yield f"{what}: compiling for {len(chips)} chips", f"<= {target} s", took, seconds <= target
    yield f"{what}: peak memory", "", _memory(done), None
    yield f"{what}: bytes of binaries", "", ", ".join(f"{name} {size:,}" for name, size in done.sizes.items()), None


def _memory(done: Done) -> str:
    largest = f"largest process {done.largest_bytes / MIB:.0f} MiB"
    if done.peak_bytes is None:
        return f"{largest}; all together not measured: no cgroup counts it"
    return f"{done.peak_bytes / MIB:.0f} MiB, page cache included; {largest}"


def _each(done: Done, stage: str, chips: Sequence[Chip]) -> str:
    seconds = [done.stages[f"{stage} {chip.name}"] for chip in chips]
    return f"{sum(seconds):.0f} s: {', '.join(f'{each:.1f}' for each in seconds)}"


def _names(chips: Sequence[Chip]) -> tuple[str, ...]:
    return tuple(chip.name for chip in chips)


def fidelity_figures(place: Place) -> Iterator[Figure]:
    """What the NPU computes against f32 products with the same weights, and with those of the checkpoint."""
    packages = {"stored": place.compiled_sample("stored", STORED), "f32": place.compiled_sample("f32", F32)}
    found = dict[tuple[str, str], list[Observed]]()
    for weights, path in packages.items():
        for backend in ("portable", "htp"):
            with open_package(path) as package, Session(package, backend) as session:
                texts = passages(package.tokenizer, place.checkpoint / "held-out.txt", TEXTS, TEXT_TOKENS)
                found[backend, weights] = []
                for number, text in enumerate(texts):
                    say(f"{backend}, {weights} weights: text {number + 1} of {TEXTS}")
                    found[backend, weights].append(observed(session, text, PROMPT_TOKENS, NEW_TOKENS))
    cases = (
        ("htp / portable, both of stored weights", packages["stored"], ("portable", "stored"), ("htp", "stored"), True),
        ("htp / portable, both of f32 weights", packages["f32"], ("portable", "f32"), ("htp", "f32"), True),
        ("htp of stored / portable of f32 weights", packages["f32"], ("portable", "f32"), ("htp", "stored"), False),
    )
    for what, path, right, other, judged in cases:
        with open_package(path) as package, Session(package, "portable") as session:
            comparison = compared(session, found[right], found[other])
        yield from _fidelity_figures(what, comparison, judged)


def _fidelity_figures(what: str, found: Comparison, judged: bool) -> Iterator[Figure]:
    def judge(target: str, holds: bool) -> tuple[str, bool | None]:
        return (target, holds) if judged else ("", None)

    target, holds = judge(f">= {LEAST_TEXTS} of {TEXTS}", found.same_texts >= LEAST_TEXTS)
    texts = "; ".join([f"{found.same_texts} of {TEXTS}", *found.differences])
    yield f"{what}: same {NEW_TOKENS} tokens", target, texts, holds
    for name, errors in (("hidden states", found.hidden), ("scores", found.scores)):
        target, holds = judge(f"<= {MOST_ERROR:g}", max(errors) <= MOST_ERROR)
        yield f"{what}: error of {name}, by layer", target, ", ".join(f"{each:.1e}" for each in errors), holds
    yield (
        f"{what}: hidden states, worst token, by layer",
        "",
        ", ".join(f"{each:.1e}" for each in found.worst_hidden),
        None,
    )
    yield f"{what}: error of logits", "", f"{found.logits:.1e}", None
    target, holds = judge(f">= {LEAST_SAME:.0%}", found.same_experts >= LEAST_SAME)
    yield f"{what}: same experts", target, f"{found.same_experts:.2%} of {found.choices:,}", holds


def identity_figures(place: Place) -> Iterator[Figure]:
    """Whether the logits after every token are the same however a prompt is run."""
    digests = set()
    with open_package(place.compiled_sample("identity")) as package:
        bank = package.expert_shape.bank_bytes(1)
        variants: tuple[dict[str, Any], ...] = (
            {},
            {"policy": "post-routing"},
            {"policy": "on-demand"},
            {"arena_bytes": bank},
            {"lanes": 1, "group_size": 1, "prefetch_depth": 0},
            {"lanes": 4, "group_size": 2, "prefetch_depth": 1, "policy": "on-demand"},
            {"lanes": 8, "group_size": 3, "prefetch_depth": 2, "arena_bytes": 9 * bank},
            {"group_size": 16, "arena_bytes": 64 * bank, "policy": "post-routing"},
        )
        [text] = passages(package.tokenizer, place.checkpoint / "held-out.txt", 1, IDENTITY_TOKENS)
        for number, options in enumerate(variants):
            say(f"identity: setting {number + 1} of {len(variants)}")
            with Session(package, "htp", **options) as session:
                digests.add(sha256(session.forward(text).tobytes()).hexdigest())
    yield "different logits", "1", f"{len(digests)} among {len(variants)} settings", len(digests) == 1


def padding_figures(place: Place) -> Iterator[Figure]:
    """Rows that stand for none when the sample model takes in a prompt."""
    with open_package(place.compiled_sample("padding")) as package, Session(package, "htp") as session:
        [text] = passages(package.tokenizer, place.checkpoint / "held-out.txt", 1, max(PADDING_TOKENS))
        for tokens in PADDING_TOKENS:
            say(f"padding: {tokens} tokens")
            stats = session.prefill(text[:tokens]).stats
            share = f"{stats.padded_rows / stats.tile_rows:.1%} of {stats.tile_rows:,}, {stats.total_s:.1f} s"
            yield f"rows that stand for none, prefill of {tokens} tokens", "", share, None


PARTS: Final = {
    "graphs": graphs_figures,
    "sample": sample_figures,
    "olmoe": olmoe_figures,
    "fidelity": fidelity_figures,
    "identity": identity_figures,
    "padding": padding_figures,
}


@click.command(help=f"\b\n{__doc__.replace(chr(10) * 2, chr(10) * 2 + chr(8) + chr(10))}")
@click.option("--chip", "chips", multiple=True, default=CHIPS, show_default=True, help="Compile for it.  Repeatable.")
@click.option("--part", "parts", type=click.Choice(tuple(PARTS)), multiple=True, help="Repeatable.  [default: all]")
def command(chips: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Measure, print the table, judge it."""
    table = Table("figure", "target", "measured", "", title="graphs for the NPU, compiled and simulated")
    good = True
    for part in parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="estream-bench-") as folder:
            for what, target, found, holds in PARTS[part](Place(Path(folder), tuple(map(chip_named, chips)))):
                table.add_row(what, target, found, {True: "met", False: "MISSED", None: ""}[holds])
                good = good and holds is not False
    Console(width=150).print(table)
    click.get_current_context().exit(0 if good else 1)


if __name__ == "__main__":
    sys.exit(run_command(command, "htp.py"))
