"""Decides what to read before a layer is routed: who predicts, and how much of it fits in the time there is.

Reading ahead takes nothing from a result, but it can cost time: a record that turns out not to be needed delays one
that is. So experts are taken in the order in which they are likely to be needed, as long as what is gained by starting
early outweighs what a mistake costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from estream_loader.package import Package
from estream_runtime.weights import DenseWeights
from estream_spec.prefetch_predictor import LayerPredictor
from estream_spec.prefetch_router import check_router
from estream_spec.weights import Floats


class Prediction(NamedTuple):
    """Experts that a layer will probably need.

    Attributes:
        experts: by how likely each is needed, the likeliest first.
        needed: how likely that is, 0 to 1.
    """

    experts: Sequence[int]
    needed: Sequence[float]


class Predictor(Protocol):
    """Says before a layer's attention block which experts the layer will need."""

    def predict(self, layer: int, x: Floats) -> Prediction:
        """The experts to read ahead, the likeliest first.

        Args:
            layer: a layer with experts.
            x: f32 `[1, hidden]`, the row that enters it.
        """
        ...

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """Learn which experts the layer needed."""
        ...


class LearnedPredictor:
    """Predicts by the package's prefetch router. FORMAT.md annex A.7.

    Args:
        package: one that has a prefetch router.
        dense: the weights that it was trained for.

    Raises:
        FormatError: the prefetch router is at fault, or for another model.
    """

    def __init__(self, package: Package, dense: DenseWeights):
        router = package.prefetch_router
        assert router is not None
        self._model, self._dense, self._path = package.manifest.model, dense, package.source.name
        self._stored = router.layers
        self._layers: dict[int, LayerPredictor] = {}

    def prove(self) -> None:
        """Compare it with the routers that it was trained for, once; waits for weights that are still being read.

        Raises:
            IntegrityError: one is another.
        """
        if not self._layers:
            for each in self._stored:
                check_router(each, self._dense.router(each.layer), self._path)
            self._layers = {each.layer: LayerPredictor.of(each, self._model) for each in self._stored}

    def predict(self, layer: int, x: Floats) -> Prediction:
        """See `Predictor.predict`. Raises as `prove` does."""
        self.prove()
        predictor = self._layers[layer]
        ranked = predictor.rank(x)
        count = predictor.top_k + int(predictor.extras(ranked)[0])
        return Prediction(ranked.experts[0, :count].tolist(), predictor.needed[:count].tolist())

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing is learned any more."""


class Pace:
    """Measures how long records take to read, and what time a layer leaves for it before they are needed.

    Means fade, so that a device that heats up is followed.
    """

    FADE: Final = 0.9

    def __init__(self) -> None:
        self.record_s: float | None = None
        """Seconds that one record takes when lanes are busy; None before anything is known."""
        self._before_need: dict[int, float] = {}

    def read(self, records: float, seconds: float) -> None:
        """So many records were read in so many seconds of reading."""
        if records > 0:
            self.record_s = self._faded(self.record_s, seconds / records)

    def elapsed(self, layer: int, seconds: float) -> None:
        """So many seconds passed in a layer between the prediction and the need."""
        self._before_need[layer] = self._faded(self._before_need.get(layer), seconds)

    def before_need(self, layer: int) -> float:
        """Seconds between the prediction and the need; 0 before anything is known."""
        return self._before_need.get(layer, 0.0)

    def _faded(self, old: float | None, new: float) -> float:
        return new if old is None else self.FADE * old + (1 - self.FADE) * new


def worthwhile(needed: Sequence[float], before_need_s: float, record_s: float) -> int:
    """How many records to begin to read ahead, of those that are not there.

    Read j begins when those before it are done, so it has `w = before_need - j * record` seconds left. Started, it
    gains `min(w, record)` if it is needed, and otherwise delays what is by what it takes beyond the need. One that
    would begin only after the need gains nothing.

    Args:
        needed: how likely each is needed, in the order of reading.
        before_need_s: seconds until it is known which are.
        record_s: seconds that reading one takes.
    """
    for number, probability in enumerate(needed):
        left = before_need_s - number * record_s
        gain, cost = probability * min(left, record_s), (1 - probability) * max(record_s - left, 0.0)
        if left <= 0 or gain <= cost:
            return number
    return len(needed)
