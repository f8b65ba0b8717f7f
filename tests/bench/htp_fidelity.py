"""What a backend computes on its way through a text, and how far another is from that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from estream_runtime import Session
from estream_runtime.backends import Array, Backend
from estream_spec.manifest import GraphRole

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a backend computed of one text.

    Attributes:
        prompt: beginning of the text.
        made: the likeliest tokens after it, one after the other.
        hidden: f32 `[T, hidden]`, what leaves each layer.
        scores: f32 `[T, experts]`, the router's, of each layer.
        experts: int32 `[T, k]`, chosen in each layer, by rising id.
        logits: f32 `[T, vocabulary]`.
    """

    prompt: Ids
    made: list[int]
    hidden: list[Floats]
    scores: list[Floats]
    experts: list[npt.NDArray[np.int32]]
    logits: Floats


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a backend is from the right one over all texts.

    Attributes:
        same_texts: after how many prompts it makes the same tokens.
        differences: where it makes others, and by how much the right backend prefers its own, for people.
        hidden: size of all differences of what leaves a layer as a share of its size, by layer.
        scores: the same of the router's scores.
        worst_hidden: the same of the row that is worst in it, by layer.
        logits: the same of all logits.
        choices: pairs of a token and a layer.
        same_experts: share of them for which the same experts are chosen.
    """

    same_texts: int
    differences: list[str]
    hidden: list[float]
    scores: list[float]
    worst_hidden: list[float]
    logits: float
    choices: int
    same_experts: float


def passages(tokenizer: Tokenizer, path: Path, count: int, tokens: int) -> list[Ids]:
    """Beginnings of paragraphs all over a text file, int64 `[tokens]` each."""
    paragraphs = path.read_text().split("\n\n")
    rests = ("\n\n".join(paragraphs[number * len(paragraphs) // count :]) for number in range(count))
    return [np.array(tokenizer.encode(rest).ids[:tokens]) for rest in rests]


def observed(session: Session, text: Ids, prompt_tokens: int, new_tokens: int) -> Observed:
    """What a session computes of a text, no longer than enters the head at once; its beginning is the prompt."""
    prompt = text[:prompt_tokens]
    made = list(session.generate(prompt, new_tokens))
    inputs, scores, experts = list[Floats](), list[Floats](), list[npt.NDArray[np.int32]]()
    with _watched(session.backend, inputs, scores):
        logits = session.forward(text, lambda layer, ids, weights: experts.append(np.sort(ids)))
    # What enters the first layer is the embedding, and what leaves the last one enters the head.
    return Observed(prompt, made, inputs[1:], scores, experts, logits)


@contextmanager
def _watched(backend: Backend, inputs: list[Floats], scores: list[Floats]) -> Iterator[None]:
    """Notes what enters each layer and the head, and the router's scores."""
    run = backend.run

    def watching(role: GraphRole, shape_class: int, feeds: Mapping[str, Array]) -> dict[str, Array]:
        outputs = run(role, shape_class, feeds)
        if role in ("qkv", "head"):
            inputs.append(feeds["x"])
        elif role == "out":
            scores.append(outputs["scores"])
        return outputs

    backend.run = watching  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.run = run  # type: ignore[method-assign]


def compared(session: Session, right: Sequence[Observed], other: Sequence[Observed]) -> Comparison:
    """Compare what two backends computed of the same texts.

    Args:
        session: of the right one.
        right: what it computed.
        other: what the other did.
    """
    pairs = list(zip(right, other, strict=True))
    same = [np.all(a == b, axis=-1) for one, two in pairs for a, b in zip(one.experts, two.experts, strict=True)]
    layers = range(len(right[0].hidden))
    hidden = [[(one.hidden[layer], two.hidden[layer]) for one, two in pairs] for layer in layers]
    scores = [[(one.scores[layer], two.scores[layer]) for one, two in pairs] for layer in layers]
    differences = [
        f"prompt {number + 1}: {_difference(session, one, two.made)}"
        for number, (one, two) in enumerate(pairs)
        if one.made != two.made
    ]
    return Comparison(
        same_texts=len(pairs) - len(differences),
        differences=differences,
        hidden=[_error(each) for each in hidden],
        scores=[_error(each) for each in scores],
        worst_hidden=[_worst_row(each) for each in hidden],
        logits=_error([(one.logits, two.logits) for one, two in pairs]),
        choices=sum(map(len, same)),
        same_experts=float(np.concatenate(same).mean()),
    )


def _difference(session: Session, right: Observed, made: Sequence[int]) -> str:
    """Where other tokens begin, and how much likelier the right ones are."""
    at = next(number for number, pair in enumerate(zip(right.made, made, strict=False)) if pair[0] != pair[1])
    logits = session.prefill([*right.prompt, *right.made[:at]]).logits
    texts = (session.package.tokenizer.decode([token]) for token in (made[at], right.made[at]))
    lead = float(logits[right.made[at]] - logits[made[at]])
    spread = float(logits.std())
    other, own = texts
    return (
        f"token {at + 1} is {other!r} and not {own!r}, whose logit is {lead:.4f} higher (deviation of all {spread:.2f})"
    )


def _error(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    """Size of all differences as a share of the size of what is right, which comes first."""
    squares = [(float(np.square(b - a).sum()), float(np.square(a).sum())) for a, b in pairs]
    off, size = map(sum, zip(*squares, strict=True))
    return math.sqrt(off / size)


def _worst_row(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    """The same of the row that is farthest off."""
    return max(float((np.linalg.norm(b - a, axis=-1) / np.linalg.norm(a, axis=-1)).max()) for a, b in pairs)
