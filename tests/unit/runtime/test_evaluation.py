from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream_loader import open_package
from estream_packer.recipe import BuildOptions
from estream_runtime import Session, evaluation
from estream_runtime.evaluation import bits_per_byte, compare, perplexity, read_text, token_log_likelihoods
from estream_runtime.likelihood import log_softmax
from estream_spec.errors import TrapError
from estream_spec.weights import Floats
from fixtures.olmoe import CONTEXT_LENGTH, VOCABULARY, token_ids
from fixtures.packed import UNQUANTISED, PackageFactory
from fixtures.sources import CountingSource

TEXT = token_ids("evaluation", 200)
PROMPT, CHOICES = TEXT[:20], [TEXT[20:24], TEXT[30:31], TEXT[40:53]]


@pytest.fixture
def session(packed: PackageFactory) -> Iterator[Session]:
    """Unquantised: what is computed in another order stays close."""
    with open_package(packed("grouped", UNQUANTISED)) as package, Session(package, threads=1) as opened:
        yield opened


def by_hand(session: Session, text: list[int]) -> list[float]:
    """Log-probability of each token but the first, from the logits of the whole."""
    shares = log_softmax(session.forward(text))
    return [float(shares[at, token]) for at, token in enumerate(text[1:])]


def test_log_softmax_is_exact_where_it_is_known() -> None:
    found = log_softmax(np.array([[0, math.log(3)], [1e30, 0]], np.float32))
    assert found == pytest.approx(np.array([[math.log(0.25), math.log(0.75)], [0, -1e30]]), rel=1e-6)


def test_scores_are_sums_over_each_choice(session: Session) -> None:
    scores = session.score(PROMPT, CHOICES)
    for score, choice in zip(scores, CHOICES, strict=True):
        whole = by_hand(session, [*PROMPT.tolist(), *choice.tolist()])
        assert score == pytest.approx(sum(whole[len(PROMPT) - 1 :]), abs=1e-3)


def test_choices_do_not_see_each_other(session: Session) -> None:
    together = session.score(PROMPT, CHOICES)
    assert session.score(PROMPT, CHOICES[::-1]) == pytest.approx(together[::-1], abs=1e-4)
    assert [session.score(PROMPT, [choice])[0] for choice in CHOICES] == pytest.approx(together, abs=1e-4)


def test_a_one_token_prompt_and_more_choices_than_a_block_has_rows(session: Session) -> None:
    choices = [[token] for token in range(VOCABULARY)]
    shares = np.exp(session.score(PROMPT[:1], choices))
    assert shares.sum() == pytest.approx(1, abs=1e-5)


def test_choices_share_every_read(packed: PackageFactory) -> None:
    source = CountingSource(packed("grouped", UNQUANTISED).read_bytes())
    with open_package(source) as package, Session(package, threads=1) as session:
        section = package.experts.entry
        source.reads.clear()
        session.score(PROMPT, CHOICES)
        read = sum(length for offset, length in source.reads if section.offset <= offset < section.end)
    assert 0 < read <= section.length


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "no choices to score"),
        (7, "choices are 7, expected a list of them"),
        ([[1], []], "choice 1 has no tokens"),
        ([[1], [VOCABULARY]], r"token id 260 is outside the vocabulary of 260 \(at choice 1\[0\]\)"),
        ([[1] * (CONTEXT_LENGTH - 19)], "prompt and choice 0 have 513 tokens, the context holds 512"),
    ],
)
def test_choices_that_cannot_be_scored_are_refused(choices: Any, message: str, session: Session) -> None:
    with pytest.raises(TrapError, match=message):
        session.score(PROMPT, choices)
    assert len(session.score(PROMPT, [[1] * (CONTEXT_LENGTH - 20)])) == 1


def test_log_likelihoods_are_those_of_the_logits(session: Session) -> None:
    assert session.log_likelihoods(TEXT) == pytest.approx(np.array(by_hand(session, TEXT.tolist())), abs=1e-4)
    assert session.log_likelihoods(TEXT[:1]).shape == (0,)


@pytest.mark.parametrize("window", [2, 7, 39, 40, 500])
def test_windows_predict_every_token_but_the_first_once(window: int, session: Session) -> None:
    text = TEXT[:40]
    advanced: list[int] = []
    found = token_log_likelihoods(session, text, window, advanced.append)
    assert found.shape == (len(text) - 1,)
    assert sum(advanced) == len(found)
    # The last window, whose tokens see no further back than to its start.
    start = (len(text) - 2) // (window - 1) * (window - 1)
    assert found[start:] == pytest.approx(np.array(by_hand(session, text[start:].tolist())), abs=1e-4)


def test_perplexity_and_bits_per_byte() -> None:
    even = np.full(10, -math.log(50))
    assert perplexity(even) == pytest.approx(50)
    assert bits_per_byte(np.full(8, -math.log(16)), 4) == pytest.approx(8)


def test_what_is_too_large_for_a_number_is_infinite() -> None:
    assert perplexity(np.full(3, -1000.0)) == math.inf
    assert bits_per_byte(np.full(3, -1.0), 0) == math.inf


def test_texts_are_read_as_they_are_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nä".encode())
    monkeypatch.setattr(evaluation, "MAX_TEXT_LENGTH", 5)
    assert read_text(path) == "a\r\nä"
    monkeypatch.setattr(evaluation, "MAX_TEXT_LENGTH", 4)
    with pytest.raises(TrapError, match="longer than the limit of 4 bytes"):
        read_text(path)


def test_logits_are_made_of_hidden_rows(session: Session) -> None:
    rows = session.hidden_rows(TEXT)
    found = np.concatenate([session.logits(rows[:50]), session.logits(rows[50:])])
    assert found == pytest.approx(session.forward(TEXT), abs=1e-4)


def test_a_comparison_holds_few_logits_at_a_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    make = Session.logits

    def counted(session: Session, rows: Floats) -> Floats:
        asked.append(len(rows))
        return make(session, rows)

    monkeypatch.setattr(Session, "logits", counted)
    compare(session, [session], TEXT, len(TEXT))
    assert asked == [128, 128, 71, 71]


def test_a_package_agrees_with_itself(session: Session) -> None:
    [found] = compare(session, [session], TEXT, 64)
    assert (found.tokens, found.mean_kl, found.top1_agreement, found.max_logit_difference) == (199, 0, 1, 0)
    assert found.reference_perplexity == found.perplexity
    assert found.perplexity_ratio == 1
    assert found.reference_perplexity == pytest.approx(perplexity(token_log_likelihoods(session, TEXT, 64)), rel=1e-4)


def test_fewer_bits_are_further_away(session: Session, packed: PackageFactory) -> None:
    found = []
    for experts in ("w8", "w4g32"):
        path = packed("grouped", BuildOptions(experts=experts, dense="f32"))
        with open_package(path) as package, Session(package, threads=1) as other:
            found += compare(session, [other], TEXT, 64)
    assert 0 < found[0].mean_kl < found[1].mean_kl
    assert 1 > found[0].top1_agreement > found[1].top1_agreement
    assert 0 < found[0].max_logit_difference < found[1].max_logit_difference


@pytest.mark.parametrize(
    ("text", "window", "message"),
    [
        (TEXT, 1, "window of 1 tokens, expected at least 2"),
        (TEXT[:1], 8, "text of 1 tokens, expected at least 2"),
        ([], 8, "text of 0 tokens"),
        ([*TEXT[:3].tolist(), VOCABULARY], 8, "outside the vocabulary"),
        (np.resize(TEXT, 600), 600, "the context holds 512"),
    ],
)
def test_texts_that_cannot_be_evaluated_are_refused(
    text: list[int], window: int, message: str, session: Session
) -> None:
    with pytest.raises(TrapError, match=message):
        token_log_likelihoods(session, text, window)
    with pytest.raises(TrapError, match=message):
        compare(session, [session], text, window)
