"""What the mode `stall-free` costs the sample model, for several thresholds of its prefetch router.

    python tests/bench/stall_free.py
    python tests/bench/stall_free.py --tokens 1024 --share 0.25

As in APEX (arXiv 2608.11688) exactly what a layer's prefetch router predicts is there when the layer is routed, and
nothing else: what is missing is replaced by the best of that. So nothing depends on time, and the threshold, how sure
the confidence model must be, decides alone. Each token of the sample's held-out text is decoded by itself after those
before it in its window. Beside perplexity stand the experts that were replaced and the share of their layers' weights
that they had; `--share` bounds what one expert may have, 1 is the paper's mode.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from estream_loader import Package, open_package
from estream_loader.pager import Pager
from estream_loader.slots import Slots
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_packer.sample import write_sample
from estream_runtime import Session
from estream_runtime.likelihood import log_probabilities
from estream_runtime.prefetching import Prediction
from estream_spec.prefetch_predictor import LayerPredictor
from estream_spec.weights import Floats

THRESHOLDS: Final = (0.5, 0.6, 0.8, 0.9, 0.97)
WINDOW: Final = 256


class PredictedOnly:
    """Predicts by the package's prefetch router at one threshold, and has nothing read ahead."""

    def __init__(self, package: Package, threshold: float):
        router = package.prefetch_router
        assert router is not None
        model = package.manifest.model
        made = (LayerPredictor.of(replace(each, target=threshold), model) for each in router.layers)
        self._layers = {each.layer: each for each in made}
        self._predicted: dict[int, set[int]] = {}
        self.extra: list[int] = []

    def predict(self, layer: int, x: Floats) -> Prediction:
        """The layer begins; nothing is read ahead, since what is ready is said here."""
        predictor = self._layers[layer]
        ranked = predictor.rank(x)
        extra = int(predictor.extras(ranked)[0])
        self.extra.append(extra)
        self._predicted[layer] = set(ranked.experts[0, : predictor.top_k + extra].tolist())
        return Prediction((), ())

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing is learned."""

    def predicted(self, layer: int) -> set[int]:
        """What was predicted of a layer last."""
        return self._predicted[layer]


class PredictedSlots(Slots):
    """Slots of which only predicted experts count as ready."""

    def __init__(self, pager: Pager, only: PredictedOnly):
        super().__init__(pager, pager.shape)
        self._only = only

    def ready(self, layer: int) -> set[int]:
        """See `Slots.ready`."""
        return self._only.predicted(layer)


@contextmanager
def opened(package: Package, threshold: float | None, share: float) -> Iterator[tuple[Session, PredictedOnly | None]]:
    """A session of which only predicted experts count as ready; an exact one for no threshold."""
    shape = package.expert_shape
    room = sum(shape.counts) * max(shape.record_lengths) * 3 // 4  # with all of them there, nothing would be predicted
    exact = threshold is None
    with Session(
        package,
        arena_bytes=room,
        prefetch=False,
        mode="exact" if exact else "stall-free",
        substitute_share=None if exact else share,
    ) as session:
        decoding, only = session.interpreter.decoding, None
        if threshold is not None:
            only = PredictedOnly(package, threshold)
            decoding.predictor, decoding.slots = only, PredictedSlots(session.interpreter.pager, only)
        yield session, only


def measured(package: Package, tokens: np.ndarray, threshold: float | None, share: float) -> dict[str, float]:
    """Perplexity of tokens decoded one by one, and what was replaced."""
    total, count = 0.0, 0
    with opened(package, threshold, share) as (session, only):
        for start in range(0, len(tokens) - 1, WINDOW):
            window, context = tokens[start : start + WINDOW + 1], session.new_context()
            for token, following in pairwise(window):
                logits = session._next_logits(np.array([token]), context.cache)
                total -= float(log_probabilities(logits[None], np.array([following]))[0])
                count += 1
        stats = session.interpreter.decoding.stats
        return {
            "perplexity": math.exp(total / count),
            "extra": float(np.mean(only.extra)) if only is not None else 0.0,
            "replaced": stats.substituted / stats.demanded,
            "lost": stats.lost_share / stats.layers,
        }


@click.command()
@click.option("--tokens", default=2048, show_default=True, help="Tokens of the held-out text.")
@click.option("--share", default=1.0, show_default=True, help="Largest share of a replaced expert.")
def main(tokens: int, share: float) -> None:
    """Measure."""
    with TemporaryDirectory() as folder:
        checkpoint, file = Path(folder, "checkpoint"), Path(folder, "sample.emoe")
        write_sample(checkpoint)
        build(checkpoint, file, BuildOptions(prefetch=str(checkpoint / "model.prefetch")))
        with open_package(file) as package:
            text = (checkpoint / "held-out.txt").read_text(encoding="utf-8")
            ids = np.array(package.tokenizer.encode(text).ids[: tokens + 1])
            exact = measured(package, ids, None, share)["perplexity"]
            table = Table("threshold", "extra experts", "experts replaced", "weight lost", "perplexity", "change")
            table.add_row("exact", "", "0.00 %", "0.00 %", f"{exact:.2f}", "")
            for threshold in THRESHOLDS:
                found = measured(package, ids, threshold, share)
                table.add_row(
                    f"{threshold}",
                    f"{found['extra']:.2f}",
                    f"{found['replaced']:.2%}",
                    f"{found['lost']:.2%}",
                    f"{found['perplexity']:.2f}",
                    f"{found['perplexity'] / exact - 1:+.2%}",
                )
            Console(width=120).print(table)


if __name__ == "__main__":
    main()
