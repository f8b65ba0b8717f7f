"""Unquantised packages of every family compute what Hugging Face transformers does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import open_package
from estream_packer.build import build
from estream_runtime import Session
from estream_runtime.backends import GRAPH_BACKENDS
from fixtures.families import FAMILIES, GREEDY_PROMPT, GREEDY_TOKENS, reference, write_checkpoint
from fixtures.packed import UNQUANTISED

Routes = list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def package_path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    build(write_checkpoint(folder / "checkpoint", family), folder / "model.emoe", UNQUANTISED)
    return folder / "model.emoe"


def forward(session: Session, token_ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], Routes]:
    """Logits, and by layer with experts the chosen ones and their weights."""
    routes: Routes = []

    def note(layer: int, expert_ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        routes.append((expert_ids, weights))

    return session.forward(token_ids, note), routes


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_every_prompt_routes_and_predicts_alike(family: str, package_path: Path, backend: str) -> None:
    with open_package(package_path) as package, Session(package, backend) as session:
        for length, prompt in reference(family).prompts.items():
            logits, routes = forward(session, prompt.tokens)
            assert len(routes) == len(prompt.experts)
            for layer, (experts, weights) in enumerate(routes):
                assert np.array_equal(experts, prompt.experts[layer]), (length, layer)
                assert np.abs(weights - prompt.weights[layer]).max() < 1e-5, (length, layer)
            assert np.abs(logits[prompt.positions] - prompt.logits).max() < 1e-3, length
            assert np.abs(session.prefill(prompt.tokens).logits - prompt.logits[-1]).max() < 1e-3, length


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_greedy_tokens_are_the_same(family: str, package_path: Path, backend: str) -> None:
    vectors = reference(family)
    with open_package(package_path) as package, Session(package, backend) as session:
        found = list(session.generate(vectors.prompts[GREEDY_PROMPT].tokens, GREEDY_TOKENS))
    assert found == vectors.greedy.tolist()


def test_the_arena_changes_no_bit(family: str, package_path: Path) -> None:
    tokens = reference(family).prompts[GREEDY_PROMPT].tokens
    with open_package(package_path) as package:
        largest = max(package.expert_shape.record_lengths)
        found = []
        for arena_bytes, group_size, depth in ((None, None, None), (largest, None, None), (None, 3, 2)):
            with Session(package, arena_bytes=arena_bytes, group_size=group_size, prefetch_depth=depth) as session:
                logits = session.forward(tokens)
                continued = [session.prefill(tokens[:end]).logits for end in (1, 33)]
                found.append([logits.tobytes(), *(each.tobytes() for each in continued)])
    assert found[1:] == found[:1] * 2
