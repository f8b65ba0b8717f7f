"""The one place where the packer runs a model: how far a package is from another of the same model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from estream_loader import Package
from estream_runtime.commands.options import token_progress
from estream_runtime.evaluation import Comparison, compare
from estream_runtime.session import Session
from estream_runtime.text import encode_prompt

WINDOW = 512
"""Tokens a prediction may look back on, at most."""


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """A package against the unquantised one, over the same text.

    Attributes:
        tokens: predictions compared.
        max_logit_difference: largest absolute difference of two logits.
        mean_kl: mean of `KL(unquantised || package)`, in nats.
        top1_agreement: share of predictions with the same likeliest token, 0 to 1.
        reference_perplexity: of the unquantised package.
        perplexity: of the package.
        perplexity_ratio: the second over the first.
    """

    tokens: int
    max_logit_difference: float
    mean_kl: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float


def measure_quality(reference: Package, package: Package, text: str, tokens: int) -> Quality:
    """Run two packages of one model over a text; a progress bar shows on a terminal.

    Args:
        reference: the unquantised package.
        package: the package to be judged.
        text: what both predict.
        tokens: how much of the text is used, at most.

    Raises:
        LinkError: the package has no tokenizer.
        TrapError: a text of fewer than two tokens, or a value that is not finite.
    """
    token_ids: Sequence[int] = encode_prompt(package, text)[:tokens]
    window = min(WINDOW, package.manifest.model.context_length)
    with (
        Session(reference) as expected,
        Session(package) as found,
        token_progress("comparing", max(len(token_ids) - 1, 0)) as advance,
    ):
        return _quality(compare(expected, found, token_ids, window, advance))


def _quality(comparison: Comparison) -> Quality:
    return Quality(
        tokens=comparison.tokens,
        max_logit_difference=comparison.max_logit_difference,
        mean_kl=comparison.mean_kl,
        top1_agreement=comparison.top1_agreement,
        reference_perplexity=comparison.reference_perplexity,
        perplexity=comparison.other_perplexity,
        perplexity_ratio=comparison.other_perplexity / comparison.reference_perplexity,
    )
