"""Which input channels matter: the mean square of what meets each matrix while the model reads a text.

The sum of squares that a stored matrix's output is off by is, as far as its input channels do not correlate, the sum
of its weights' squared errors, each times the mean square of its channel. That is what `quantise_matrix` takes as
importance. Means of few rows are noisy, so each begins at the mean of all channels, which counts as `PRIOR_ROWS` rows.

Memory is one f32 number for each channel that enters an expert or a dense matrix, however long the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from tokenizers import Tokenizer

from estream_loader import Package
from estream_loader.progress import Progress
from estream_loader.tokenizing import tokenizer_faults
from estream_packer.checkpoint import TOKENIZER, Checkpoint
from estream_packer.checkpoint.files import InputFile
from estream_spec.errors import PackError
from estream_spec.manifest import Source
from estream_spec.model import ModelDescription
from estream_spec.weights import Floats

Site = tuple[int | None, int | None]
"""Layer, None for what follows the last; expert, None outside of experts."""

SOURCE: Final = "calibration"
"""What the text is called among the sources of a package."""
MAX_TEXT_LENGTH: Final = 1 << 24
"""16 MiB: far more text than anybody has the patience to calibrate on."""
PRIOR_ROWS: Final = 16
LEAST_TOKENS: Final = 2
"""The last token of a text is only predicted."""
_ENOUGH: Final = 1 << 12
"""Characters that have more than the least tokens in any language."""
LISTED: Final = 8
"""Layers that a notice lists, at most."""


class Unreached(Struct, frozen=True, kw_only=True):
    """Experts of one layer that no token of the text was routed to."""

    layer: int
    experts: tuple[int, ...]


class CalibrationSummary(Struct, frozen=True, kw_only=True):
    """What calibration saw.

    Attributes:
        tokens: tokens of the text that were used.
        sha256: digest of the text, hexadecimal.
        unreached: experts that saw none of them, so that all their weights counted alike.
    """

    tokens: int
    sha256: str
    unreached: tuple[Unreached, ...]


@dataclass(slots=True)
class Moment:
    """Sums of squares of the rows that met a matrix.

    Attributes:
        rows: how many there were.
        squares: by channel, f32 `[K]`.
    """

    rows: int
    squares: Floats

    def importance(self) -> Floats | None:
        """What a squared error counts in each channel, f32 `[K]`; None where all channels were silent."""
        squares = self.squares.astype(np.float64)
        total = squares.sum()
        if total == 0:
            return None
        mean = total / self.rows / len(squares)
        # In units of the mean the numbers are near 1, whatever the size of the activations.
        relative: Floats = ((squares / mean + PRIOR_ROWS) / (self.rows + PRIOR_ROWS)).astype(np.float32)
        return relative


class Moments:
    """Collects sums of squares while a model runs."""

    def __init__(self) -> None:
        self._found: dict[Site, dict[str, Moment]] = defaultdict(dict)

    def observe(self, layer: int | None, expert: int | None, rows: Mapping[str, Floats]) -> None:
        """Add rows, f32 `[T, K]`, by the matrix that they met.

        Raises:
            PackError: one is not finite.
        """
        found, seen = self._found[layer, expert], dict[int, Moment]()
        for matrix, each in rows.items():
            # Matrices that share their rows share what is known of them.
            if (moment := seen.get(id(each))) is None:
                moment = found.setdefault(matrix, Moment(0, np.zeros(each.shape[1], np.float32)))
                moment.squares += np.einsum("tk,tk->k", each, each, dtype=np.float64).astype(np.float32)
                moment.rows += len(each)
                if not np.isfinite(moment.squares).all():
                    raise PackError(f"what meets matrix {matrix!r} is not finite", path=_spelled(layer, expert))
                seen[id(each)] = moment
            found[matrix] = moment

    def of(self, layer: int | None, expert: int | None = None) -> Mapping[str, Moment]:
        """What was found at a site, by matrix; nothing where nothing passed."""
        return self._found.get((layer, expert), {})


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a text has shown.

    Attributes:
        source: the text, as the package names it.
        tokens: tokens of it that were used.
        moments: what met the matrices.
    """

    source: Source
    tokens: int
    moments: Moments

    def importance(self, layer: int | None, expert: int | None = None) -> dict[str, Floats]:
        """What a squared error counts in each input channel, by matrix, as far as that is known."""
        found = {matrix: moment.importance() for matrix, moment in self.moments.of(layer, expert).items()}
        return {matrix: importance for matrix, importance in found.items() if importance is not None}

    def summary(self, model: ModelDescription) -> CalibrationSummary:
        """What it saw of a model."""
        unreached = []
        for layer, count in enumerate(model.expert_counts):
            if silent := tuple(each for each in range(count) if not self.moments.of(layer, each)):
                unreached.append(Unreached(layer=layer, experts=silent))
        return CalibrationSummary(tokens=self.tokens, sha256=self.source.sha256.hex(), unreached=tuple(unreached))


def unreached_notices(summary: CalibrationSummary) -> list[str]:
    """What to tell of experts that calibration did not reach; nothing where there are none."""
    if not summary.unreached:
        return []
    count = sum(len(each.experts) for each in summary.unreached)
    listed = [f"layer {each.layer}: {', '.join(map(str, each.experts))}" for each in summary.unreached[:LISTED]]
    if rest := len(summary.unreached) - len(listed):
        listed.append(f"and {rest} more layers, see --json")
    experts = f"{count} expert{'s' * (count != 1)}"
    return [f"no token of the calibration text reached {experts}, stored without it: {'; '.join(listed)}"]


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text to calibrate on.

    Attributes:
        path: where it is.
        content: what it says.
        source: how the package names it.
    """

    path: Path
    content: str
    source: Source


def read_calibration_text(path: Path, name: str = SOURCE, what: str = "calibration text") -> CalibrationText:
    """Read a text to calibrate on.

    Args:
        path: where it is.
        name: what it is called among sources.
        what: what messages call it.

    Raises:
        PackError: it cannot be read, is longer than `MAX_TEXT_LENGTH` bytes, empty, or not UTF-8.
    """
    with InputFile(path) as file:
        data = file.read_all(MAX_TEXT_LENGTH)
    if not data:
        raise PackError(f"{what} is empty", path=str(path))
    try:
        content = data.decode()
    except UnicodeDecodeError as error:
        raise PackError(f"{what} is not UTF-8", path=str(path), offset=error.start) from None
    return CalibrationText(path, content, Source(name=name, length=len(data), sha256=sha256(data).digest()))


def check_calibration_text(text: CalibrationText, checkpoint: Checkpoint) -> None:
    """Refuse a text that the checkpoint's model cannot read, before anything is packed for it.

    Raises:
        PackError: the checkpoint has no tokenizer, or the text has fewer than two tokens.
    """
    if checkpoint.tokenizer is None:
        hint = f"put its {TOKENIZER} there, or do not calibrate"
        raise PackError(
            "calibration needs a tokenizer, and the checkpoint has none", path=str(checkpoint.folder), hint=hint
        )
    beginning = text.content[:_ENOUGH]
    with tokenizer_faults(TOKENIZER, PackError):
        tokens = len(Tokenizer.from_buffer(checkpoint.tokenizer).encode(beginning).ids)
    if tokens < LEAST_TOKENS:
        raise PackError(f"calibration text has {tokens} tokens, expected at least {LEAST_TOKENS}", path=str(text.path))


def calibrate(package: Package, text: CalibrationText, tokens: int, progress: Progress) -> Calibration:
    """Let a package read a text.

    Args:
        package: of the model, near enough to it and with f32 activations.
        text: what it reads.
        tokens: how much of that, at most.
        progress: told how far it is, in bytes of the text.

    Raises:
        PackError: the text has fewer than two tokens, or something that enters a matrix is not finite.
        LinkError: the package has no tokenizer.
        TrapError: a value is not finite.
    """
    # Imported when asked for: only who calibrates needs what runs a model.
    from estream_packer.running import observe_text

    moments = Moments()
    read = observe_text(package, text.content, tokens, moments.observe, progress)
    return Calibration(text.source, read, moments)


def _spelled(layer: int | None, expert: int | None) -> str:
    """A site, for people."""
    if layer is None:
        return "head"
    return f"layer {layer}" if expert is None else f"layer {layer}, expert {expert}"
