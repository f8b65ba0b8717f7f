"""Trains a prefetch router and writes it: the verb `train-prefetch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from estream_loader import Package, open_package
from estream_loader.progress import Progress
from estream_loader.small_files import require_writable, write_over
from estream_packer.calibration import CalibrationText, read_calibration_text
from estream_packer.checkpoint import TOKENIZER
from estream_packer.packing import WRITER
from estream_packer.prefetch.blocks import Purpose, Window, blocks_of, windows_by_purpose
from estream_packer.prefetch.calibrating import calibrated_target, needed_by_rank, ranks_of
from estream_packer.prefetch.confidence import chances, extras_needed, fit_confidence
from estream_packer.prefetch.fitting import Linear, chosen_by_scores, fit_linear
from estream_packer.prefetch.recording import (
    Ids,
    Recorded,
    Recording,
    RouterTensors,
    recorded,
    router_tensors,
)
from estream_packer.prefetch.report import (
    Asked,
    LayerReport,
    Measured,
    PrefetchReport,
    binned,
    calibration_error,
    fixed_curve,
    fixed_extra,
    mean_curve,
    mean_of,
    measured,
    previous_overlap,
    together,
)
from estream_packer.running import WINDOW, encode_prompt
from estream_spec.errors import LinkError, PackError
from estream_spec.model import ModelDescription
from estream_spec.prefetch_predictor import LayerPredictor, Ranked, features, ranked_by
from estream_spec.prefetch_router import (
    PrefetchLayer,
    PrefetchRouter,
    check_prefetch_router,
    encode_prefetch_router,
    model_digest,
    router_digest,
)

OTHER_TARGETS: Final = (0.9, 0.95, 0.99, 0.995)
"""Overlaps that the report tells of beside the one that was asked for."""
LEAST_TEST_TOKENS: Final = 256
"""Fewest tokens of a text to report on: what fewer say of it is left to chance. Chosen, not measured."""
_CHUNK: Final = 4096
"""Rows that are ranked together."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be trained.

    Attributes:
        package: what it is for.
        texts: what its model reads.
        output: the file to write.
        tokens: how much of the texts is used, at most.
        target: share of needed experts that is to be predicted.
        test: a text to report on in place of a part of `texts`; None takes that part.
    """

    package: Path
    texts: tuple[Path, ...]
    output: Path
    tokens: int
    target: float
    test: Path | None = None


def train_prefetch(task: Task, progress: Progress) -> PrefetchReport:
    """Train a prefetch router, write it, and tell what it is worth.

    Args:
        task: what to train.
        progress: told how far it is, in tokens.

    Raises:
        PackError: a text cannot be read, is too short or there twice; the output cannot be written or the disk has no
            room.
        LinkError: the package has no tokenizer.
        TrapError: a value is not finite.
        FormatError: the package is faulty.
    """
    require_writable(task.output)
    for path in task.texts if task.test is None else (*task.texts, task.test):
        if task.output.exists() and path.exists() and task.output.samefile(path):
            raise PackError("output is the text", path=str(task.output), hint="give another name")
    read = [read_calibration_text(path, path.name, "text") for path in task.texts]
    test = None if task.test is None else read_calibration_text(task.test, task.test.name, "text")
    _require_different(read if test is None else [*read, test])
    with open_package(task.package) as package:
        model = package.manifest.model
        tensors = {layer: router_tensors(package, layer) for layer in model.expert_layers}
        windows = _windows(package, read, test, task.tokens)
        with recorded(package, tensors, windows, task.output, progress) as recording:
            tokens = recording.tokens
            progress.begin("training", tokens["train"] * len(tensors))
            layers = []
            for layer in model.expert_layers:
                layers.append(_train_layer(model, layer, tensors[layer], recording, task.target))
                progress.advance(tokens["train"])
        report = _report(task, model, layers, tokens)
        router = PrefetchRouter(
            model=model_digest(package.manifest),
            layers=tuple(each.predictor for each in layers),
            writer=WRITER,
            tokens=tokens["train"],
            sources=tuple(each.source for each in read),
            overlap=report.found.overlap,
            extra=report.found.extra,
        )
        check_prefetch_router(router, package.manifest, str(task.output))
    write_over(task.output, encode_prefetch_router(router))
    return report


def _require_different(texts: Sequence[CalibrationText]) -> None:
    """Refuse a text that is there twice: what is trained on it would be judged by it."""
    first = dict[bytes, Path]()
    for text in texts:
        if (other := first.setdefault(text.source.sha256, text.path)) is not text.path:
            hint = "give each text once, and one of its own to report on"
            raise PackError(f"text says the same as {other}", path=str(text.path), hint=hint)


def _windows(
    package: Package, texts: Sequence[CalibrationText], test: CalibrationText | None, tokens: int
) -> dict[Purpose, list[Window]]:
    """What the model reads, by purpose. Where there is a text to report on, nothing is kept back from the others."""
    if package.tokenizer_json is None:
        hint = f"train with one built from the same checkpoint and its {TOKENIZER}; synthetic packages have neither"
        raise LinkError("training reads text, and the package has no tokenizer", path=package.source.name, hint=hint)
    length = min(WINDOW, package.manifest.model.context_length)

    def encode(text: str) -> Window:
        return encode_prompt(package, text)

    found = windows_by_purpose([each.content for each in texts], tokens, length, encode)
    if test is not None:
        found["train"] += found["test"]
        ids = [encode(block) for block in blocks_of(test.content)]
        found["test"] = [each[at : at + length] for each in ids for at in range(0, len(each), length)]
        if (count := sum(map(len, ids))) < LEAST_TEST_TOKENS:
            message = f"text to report on has {count} token{'s' * (count != 1)}, expected at least {LEAST_TEST_TOKENS}"
            raise PackError(
                message, path=str(test.path), hint="give a longer one, or none: a part of the others is kept"
            )
    return found


@dataclass(frozen=True, slots=True)
class _TrainedLayer:
    """A layer's predictor, and what it is worth; `others` is what asking for `OTHER_TARGETS` brings."""

    predictor: PrefetchLayer
    report: LayerReport
    others: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a linear map makes of tokens: N of them.

    Attributes:
        ranked: the experts of each.
        ranks: int32 `[N, k]`, at which rank each needed expert was predicted.
    """

    ranked: Ranked
    ranks: Ids

    @classmethod
    def of(cls, linear: Linear, found: Recorded) -> _Seen:
        parts = [
            ranked_by(linear.scores(found.rows[begin : begin + _CHUNK].astype(np.float32)))
            for begin in range(0, len(found.rows), _CHUNK)
        ]
        ranked = Ranked(*map(np.concatenate, zip(*parts, strict=True)))
        return cls(ranked, ranks_of(ranked.experts, found.experts))


def _train_layer(
    model: ModelDescription, layer: int, tensors: RouterTensors, recording: Recording, overlap: float
) -> _TrainedLayer:
    """Train one layer's predictor and measure it."""
    block, parts = model.expert_block(layer), recording.layers[layer]
    experts, top_k = block.experts, block.router.top_k
    random = np.random.default_rng(layer)
    fitted = fit_linear(parts["train"], parts["stop"], tensors, block.router, random)
    fit, calibrate, test = (_Seen.of(fitted.linear, parts[purpose]) for purpose in ("fit", "calibrate", "test"))
    confidence = fit_confidence(features(fit.ranked, top_k), extras_needed(fit.ranks, top_k), experts - top_k)
    doubts = features(calibrate.ranked, top_k) @ confidence.weights

    def predictor(wanted: float) -> PrefetchLayer:
        return PrefetchLayer(
            layer=layer,
            router=router_digest(tensors),
            weights=fitted.linear.weights.astype("<f2").tobytes(),
            bias=fitted.linear.bias.astype("<f4").tobytes(),
            confidence=confidence.weights.astype("<f4").tobytes(),
            thresholds=confidence.thresholds.astype("<f4").tobytes(),
            needed=needed_by_rank(calibrate.ranks, experts).astype("<f4").tobytes(),
            target=calibrated_target(doubts, confidence.thresholds, calibrate.ranks, wanted),
        )

    def extras(made: PrefetchLayer) -> Ids:
        return LayerPredictor.of(made, model).extras(test.ranked)

    made = predictor(overlap)
    found, curve = measured(test.ranks, extras(made)), fixed_curve(test.ranks, experts)
    told = chances(features(test.ranked, top_k), confidence)
    bins = binned(told, np.arange(told.shape[1]) >= extras_needed(test.ranks, top_k)[:, None])
    needed = parts["test"].experts
    strangers = ranks_of(test.ranked.experts, random.permutation(needed))
    report = LayerReport(
        layer=layer,
        experts=experts,
        top_k=top_k,
        start=fitted.start,
        start_loss=fitted.start_loss,
        loss=fitted.loss,
        target=made.target,
        found=found,
        fixed_extra=fixed_extra(curve, found.overlap),
        fixed=curve,
        calibration_error=calibration_error(bins),
        reliability=bins,
        previous_token=previous_overlap(needed, recording.begins),
        shuffled=measured(strangers, extras(made)).overlap,
        untrained=measured(_Seen.of(fitted.untrained, parts["test"]).ranks, 0).overlap,
    )
    others = tuple(measured(test.ranks, extras(predictor(each))) for each in OTHER_TARGETS)
    return _TrainedLayer(made, report, others)


def _report(
    task: Task, model: ModelDescription, trained: Sequence[_TrainedLayer], tokens: Mapping[Purpose, int]
) -> PrefetchReport:
    """All layers together."""
    layers = [each.report for each in trained]
    curve, found = mean_curve([each.fixed for each in layers]), mean_of([each.found for each in layers])
    others = []
    for number, overlap in enumerate(OTHER_TARGETS):
        brought = mean_of([each.others[number] for each in trained])
        if overlap != task.target:
            others.append(Asked(overlap=overlap, found=brought, fixed_extra=fixed_extra(curve, brought.overlap)))

    def mean(name: str) -> float:
        return float(np.mean([getattr(each, name) for each in layers]))

    return PrefetchReport(
        output=str(task.output),
        package=str(task.package),
        texts=tuple(path.name for path in task.texts),
        test=None if task.test is None else task.test.name,
        distribution=_distribution(model),
        tokens=dict[str, int](tokens.items()),
        asked=task.target,
        found=found,
        fixed_extra=fixed_extra(curve, found.overlap),
        fixed=curve,
        calibration_error=mean("calibration_error"),
        reliability=together([each.reliability for each in layers]),
        previous_token=mean("previous_token"),
        shuffled=mean("shuffled"),
        untrained=mean("untrained"),
        others=tuple(others),
        layers=tuple(layers),
    )


def _distribution(model: ModelDescription) -> str:
    """What linear maps are trained to, in words."""
    by_scores = {chosen_by_scores(block.router) for block in model.expert_blocks}
    words = {
        True: "the softmax of the router's scores",
        False: "the softmax of what experts are chosen by, bias and left-out groups included, over its spread",
    }
    return ", or ".join(words[each] for each in sorted(by_scores, reverse=True))
