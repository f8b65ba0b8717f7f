"""How well a package predicts a text, alone and against another package of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from estream_runtime.interpreter import ROW_BLOCK
from estream_runtime.likelihood import Doubles, log_softmax
from estream_runtime.session import Session, TokenIds
from estream_spec.errors import TrapError
from estream_spec.weights import Floats

MAX_TEXT_LENGTH: Final = 1 << 24
"""Bytes of a text that is predicted."""
Advance = Callable[[int], None]
"""Told how many more tokens have been predicted."""


def read_text(path: Path) -> str:
    """A text file as it is, line ends included.

    Raises:
        OSError: it cannot be read.
        TrapError: it is longer than `MAX_TEXT_LENGTH` bytes, or not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_TEXT_LENGTH + 1)
    if len(data) > MAX_TEXT_LENGTH:
        hint = "cut it: a few thousand tokens tell packages apart"
        raise TrapError(f"text is longer than the limit of {MAX_TEXT_LENGTH} bytes", path=str(path), hint=hint)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TrapError("text is not UTF-8", path=str(path), offset=error.start) from None


def token_log_likelihoods(
    session: Session, token_ids: TokenIds, window: int, advance: Advance = lambda tokens: None
) -> Doubles:
    """Natural log-probability of every token of a text but the first.

    Args:
        session: what predicts.
        token_ids: the text, longer than any context if need be.
        window: tokens in a window, which begins with the last token of the one before; a prediction looks back no
            further than to its start.
        advance: told after each window.

    Returns:
        f64 `[T - 1]`.

    Raises:
        TrapError: a window of fewer than two tokens, fewer than two tokens, or as `Session.forward` does.
    """
    found = []
    for tokens in _windows(token_ids, window):
        found.append(session.log_likelihoods(tokens))
        advance(len(found[-1]))
    return np.concatenate(found)


def perplexity(log_likelihoods: Doubles) -> float:
    """`exp` of the mean negative log-likelihood; infinite where that is too large for a number."""
    try:
        return math.exp(-float(np.mean(log_likelihoods)))
    except OverflowError:
        return math.inf


def bits_per_byte(log_likelihoods: Doubles, text_bytes: int) -> float:
    """Bits it takes to encode each byte of a text.

    Args:
        log_likelihoods: of the text's tokens.
        text_bytes: bytes of UTF-8 those tokens stand for; 0 gives infinity.
    """
    if text_bytes == 0:
        return math.inf
    return -float(np.sum(log_likelihoods)) / math.log(2) / text_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two packages over the same text.

    Attributes:
        tokens: predictions compared.
        max_logit_difference: largest absolute difference of two logits.
        mean_kl: mean of `KL(reference || other)`, in nats.
        top1_agreement: share of predictions with the same likeliest token, 0 to 1.
        reference_perplexity: of the reference.
        perplexity: of the other.
        perplexity_ratio: the second over the first.
        perplexity_ratio_error: standard error of that, as if tokens were independent.
    """

    tokens: int
    max_logit_difference: float
    mean_kl: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float


class _Tally:
    """What is known of two packages after some blocks of rows."""

    def __init__(self) -> None:
        self._difference = 0.0
        self._divergences, self._agreements = list[Doubles](), list[npt.NDArray[np.bool_]]()
        self._expected, self._found = list[Doubles](), list[Doubles]()

    def add(self, first: Floats, second: Floats, targets: npt.NDArray[np.int64]) -> None:
        """Compare logits f32 `[T, vocabulary]` of the reference and the other before each of the targets `[T]`."""
        shares, other_shares = log_softmax(first), log_softmax(second)
        self._divergences.append(np.sum(np.exp(shares) * (shares - other_shares), axis=-1))
        self._agreements.append(first.argmax(axis=-1) == second.argmax(axis=-1))
        self._difference = max(self._difference, float(np.abs(first - second).max()))
        rows = np.arange(len(targets))
        self._expected.append(shares[rows, targets])
        self._found.append(other_shares[rows, targets])

    def comparison(self) -> Comparison:
        """All blocks together."""
        expected, found = np.concatenate(self._expected), np.concatenate(self._found)
        ratio = perplexity(found - expected)  # defined even where both are infinite
        return Comparison(
            tokens=len(expected),
            max_logit_difference=self._difference,
            mean_kl=float(np.concatenate(self._divergences).mean()),
            top1_agreement=float(np.concatenate(self._agreements).mean()),
            reference_perplexity=perplexity(expected),
            perplexity=perplexity(found),
            perplexity_ratio=ratio,
            perplexity_ratio_error=ratio * float((found - expected).std()) / math.sqrt(len(expected)),
        )


def compare(
    reference: Session,
    others: Sequence[Session],
    token_ids: TokenIds,
    window: int,
    advance: Advance = lambda tokens: None,
) -> list[Comparison]:
    """Compare what packages of one model predict, token by token.

    Args:
        reference: what the others are held against.
        others: packages with the same vocabulary.
        token_ids: the text.
        window: as for `token_log_likelihoods`.
        advance: told after each window of each of them.

    Raises:
        TrapError: as `token_log_likelihoods` does, or the vocabularies differ.
    """
    size, *sizes = (each.package.manifest.model.vocabulary for each in (reference, *others))
    if unequal := [each for each in sizes if each != size]:
        raise TrapError(f"vocabularies of {unequal[0]} and {size} tokens cannot be compared")
    tallies = [_Tally() for _ in others]
    for tokens in _windows(token_ids, window):
        expected, found = reference.hidden_rows(tokens), []
        for other in others:
            found.append(other.hidden_rows(tokens))
            advance(len(tokens) - 1)
        for start in range(0, len(tokens) - 1, ROW_BLOCK):
            targets = tokens[start + 1 : start + 1 + ROW_BLOCK]
            rows = slice(start, start + len(targets))
            first = reference.logits(expected[rows])
            for other, hidden, tally in zip(others, found, tallies, strict=True):
                tally.add(first, other.logits(hidden[rows]), targets)
    return [tally.comparison() for tally in tallies]


def _windows(token_ids: TokenIds, window: int) -> Iterator[npt.NDArray[np.int64]]:
    """Windows that overlap by one token, so that every token but the first is predicted once."""
    tokens = np.asarray(token_ids)
    if window < 2:
        raise TrapError(f"window of {window} tokens, expected at least 2")
    if len(tokens) < 2:
        raise TrapError(f"text of {len(tokens)} tokens, expected at least 2")
    for start in range(0, len(tokens) - 1, window - 1):
        yield tokens[start : start + window]
