"""Count which experts the tokens of a random prompt choose in each layer of a model: a package or a GGUF file.

    python tests/bench/routing.py build/bench/olmoe-1b-7b-w4g32.emoe
    python tests/bench/routing.py build/bench/olmoe-1b-7b-olmoe.gguf

    python tests/bench/routing.py build/bench/olmoe-1b-7b-w4g32-skew-1.emoe --skew 1

A package is run as it is; a GGUF file in numpy, from its own weights, so that no program has to be asked.
Exits 1 if they prefer some: with independent choices, the entropy lacks `(experts - 1) / (2 ln 2 choices)` bits on
average, and four times that is called uneven. With `--skew`, exits 1 if the entropy is off that of the law by which the
package was made by more than `TOLERANCE` bits. Takes a minute.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import gguf
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bench.gguf_model import Floats
from estream_loader import open_package
from estream_packer.favourites import shares
from estream_runtime import Session

TOLERANCE: Final = 0.15
"""Bits."""


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """What the tokens of a prompt chose in a layer.

    Attributes:
        chosen: integers `[tokens, top_k]`, experts of each token.
        experts: of the layer.
    """

    chosen: npt.NDArray[np.integer]
    experts: int

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """int64 `[experts]`, tokens of each expert."""
        return np.bincount(self.chosen.ravel(), minlength=self.experts)

    @property
    def entropy(self) -> float:
        """Bits, of log2 of the experts at most."""
        return _entropy(self.counts)

    @property
    def even(self) -> bool:
        """Whether no expert is preferred, as far as this many choices tell."""
        by_chance = (self.experts - 1) / (2 * math.log(2) * self.chosen.size)
        return math.log2(self.experts) - self.entropy <= 4 * by_chance

    def law(self, skew: float) -> float:
        """The entropy that a synthetic package of that skew is meant to have, bits."""
        return _entropy(np.asarray(shares(self.experts, self.chosen.shape[1], skew)))

    def lawful(self, skew: float) -> bool:
        """Whether experts are chosen as in a synthetic package of that skew, as far as this many choices tell."""
        return abs(self.entropy - self.law(skew)) <= TOLERANCE if skew else self.even

    @property
    def shared(self) -> float:
        """Experts that a token has in common with the one before, on average."""
        pairs = zip(self.chosen[:-1], self.chosen[1:], strict=True)
        return float(np.mean([len(np.intersect1d(one, other)) for one, other in pairs]))


def _entropy(weights: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> float:
    """Bits, of choices in proportion to the weights."""
    some = weights[weights > 0] / weights.sum()
    return float(-(some * np.log2(some)).sum())


def random_prompt(vocabulary: int, tokens: int) -> npt.NDArray[np.int64]:
    """The same for equal numbers."""
    return np.random.default_rng(0).integers(0, vocabulary, tokens)


class _File:
    """A GGUF file's keys and weights."""

    def __init__(self, path: Path):
        self._reader = gguf.GGUFReader(path)
        self._tensors = {each.name: each for each in self._reader.tensors}
        self.label = str(self._reader.fields["general.architecture"].contents())

    def number(self, key: str) -> float:
        """A number that describes the model."""
        return float(self._reader.fields[f"{self.label}.{key}"].contents())

    def weight(self, name: str, *part: int | npt.NDArray[np.int64]) -> Floats:
        """A tensor or a part of its first axis, as f32."""
        tensor = self._tensors[f"{name}.weight"]
        data = tensor.data[part] if part else tensor.data
        return np.asarray(gguf.dequantize(np.ascontiguousarray(data), tensor.tensor_type), np.float32)


def package_routing(path: Path, tokens: int) -> list[LayerRouting]:
    """What the tokens of a random prompt choose in each layer of a package."""
    with open_package(path) as package, Session(package) as session:
        model = package.manifest.model
        chosen: list[list[npt.NDArray[np.int32]]] = [[] for _ in model.layers]
        session.forward(random_prompt(model.vocabulary, tokens), lambda layer, ids, weights: chosen[layer].append(ids))
        experts = [count for count in model.expert_counts if count]
    return [LayerRouting(np.concatenate(ids), count) for ids, count in zip(filter(None, chosen), experts, strict=True)]


def gguf_routing(path: Path, tokens: int) -> Iterator[LayerRouting]:
    """What the tokens of a random prompt choose, layer by layer of a GGUF file."""
    file = _File(path)
    epsilon, theta = file.number("attention.layer_norm_rms_epsilon"), file.number("rope.freq_base")
    heads, key_heads = int(file.number("attention.head_count")), int(file.number("attention.head_count_kv"))
    top_k, experts = int(file.number("expert_used_count")), int(file.number("expert_count"))
    x = file.weight("token_embd", random_prompt(int(file.number("vocab_size")), tokens))
    for layer in range(int(file.number("block_count"))):
        name = f"blk.{layer}"
        normed = _norm(x, epsilon)
        queries = _heads(normed @ file.weight(f"{name}.attn_q").T, heads, file.label, epsilon)
        keys = _heads(normed @ file.weight(f"{name}.attn_k").T, key_heads, file.label, epsilon)
        values = np.split(normed @ file.weight(f"{name}.attn_v").T, key_heads, axis=1)
        mixed = [
            _attend(
                _turn(query, theta), _turn(keys[head * key_heads // heads], theta), values[head * key_heads // heads]
            )
            for head, query in enumerate(queries)
        ]
        x = x + np.concatenate(mixed, axis=1) @ file.weight(f"{name}.attn_output").T
        normed = _norm(x, epsilon)
        scores = _softmax(normed @ file.weight(f"{name}.ffn_gate_inp").T)
        chosen = np.argsort(-scores, axis=1)[:, :top_k]
        yield LayerRouting(chosen, experts)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if file.label == "qwen3moe":
            weights /= weights.sum(axis=1, keepdims=True)
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            gate, up, down = (file.weight(f"{name}.ffn_{each}_exps", expert) for each in ("gate", "up", "down"))
            gated = normed[rows] @ gate.T
            inner = gated / (1 + np.exp(-gated)) * (normed[rows] @ up.T)
            x[rows] += weights[rows, places, None] * (inner @ down.T)


def _norm(rows: Floats, epsilon: float) -> Floats:
    """Rows over their root mean square; the weights of all norms are ones."""
    scale: Floats = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + np.float32(epsilon))
    return rows / scale


def _heads(rows: Floats, heads: int, label: str, epsilon: float) -> list[Floats]:
    """Queries or keys by head, normalised all together in OLMoE and each by itself in Qwen3-MoE."""
    if label == "olmoe":
        return np.split(_norm(rows, epsilon), heads, axis=1)
    return [_norm(each, epsilon) for each in np.split(rows, heads, axis=1)]


def _turn(rows: Floats, theta: float) -> Floats:
    """Rotary positions: the two halves of a head are turned against each other."""
    half = rows.shape[1] // 2
    angles = np.outer(np.arange(len(rows)), theta ** (-np.arange(half) / half)).astype(np.float32)
    first, second = rows[:, :half], rows[:, half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)


def _attend(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """One head, causal."""
    scores = queries @ keys.T / np.float32(np.sqrt(queries.shape[1]))
    later = np.triu(np.ones(scores.shape, bool), 1)
    return _softmax(np.where(later, np.float32(-np.inf), scores)) @ values


def _softmax(rows: Floats) -> Floats:
    """Softmax of each row."""
    powers: Floats = np.exp(rows - rows.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


@click.command()
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, help="Random tokens of the prompt.")
@click.option("--skew", type=click.FloatRange(0), default=0, show_default=True, help="What a package was made with.")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def main(tokens: int, skew: float, path: Path) -> None:
    """Count which experts a random prompt chooses in the model at PATH."""
    found = list(gguf_routing(path, tokens) if path.suffix == ".gguf" else package_routing(path, tokens))
    table = Table("layer", "experts chosen", "tokens an expert", "entropy, bits", "shared with the token before", "")
    for layer, each in enumerate(found):
        used = f"{np.count_nonzero(each.counts)} of {each.experts}"
        spread = f"{each.counts.min()} to {each.counts.max()}"
        entropy = f"{each.entropy:.2f} of {each.law(skew):.2f}"
        verdict = "" if each.lawful(skew) else "OFF" if skew else "UNEVEN"
        table.add_row(str(layer), used, spread, entropy, f"{each.shared:.2f}", verdict)
    Console(width=120).print(table)
    sys.exit(not all(each.lawful(skew) for each in found))


if __name__ == "__main__":
    main()
