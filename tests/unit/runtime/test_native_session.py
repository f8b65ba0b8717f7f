"""Packages of all kinds of models on the compiled kernel, whose results ONNX Runtime confirms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from estream_loader import open_package
from estream_packer.recipe import BuildOptions
from estream_runtime import Session
from fixtures.olmoe import token_ids
from fixtures.packed import FamilyFactory

PROMPT = token_ids("session", 40)
CLOSE = 2e-2
"""What logits of a row may differ by, as a share of their size."""


@pytest.fixture(params=["deepseek_v3-latent", "gpt_oss", "lfm2_moe", "phimoe", "qwen2_moe", "qwen3_moe"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(name: str, packed_family: FamilyFactory) -> Path:
    """Stored as the packer does unless told otherwise."""
    return packed_family(name)


def test_the_kernel_computes_all_of_it_as_well_as_the_graphs_do(
    name: str, path: Path, packed_family: FamilyFactory
) -> None:
    """Against the same weights without rounded activations: those cost some percent, whoever computes with them."""
    unrounded = packed_family(name, BuildOptions(activations="f32"))
    with open_package(unrounded) as package, Session(package, "portable", threads=1) as session:
        exact = session.forward(PROMPT)
    errors = {}
    with open_package(path) as package:
        for backend in ("native", "portable"):
            with Session(package, backend, threads=1) as session:
                off = np.linalg.norm(session.forward(PROMPT) - exact, axis=1) / np.linalg.norm(exact, axis=1)
                errors[backend] = float(np.median(off))
                assert "_portable" not in vars(session.backend)
    assert errors["native"] < 1.5 * errors["portable"] < 0.2


def test_the_arena_changes_no_bit(path: Path) -> None:
    with open_package(path) as package:
        smallest = max(package.expert_shape.record_lengths)
        logits = []
        for arena_bytes, policy, threads in ((None, None, 1), (smallest, None, 2), (4 * smallest, "post-routing", 1)):
            with Session(package, "native", arena_bytes=arena_bytes, policy=policy, threads=threads) as session:
                logits.append(session.forward(PROMPT))
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def test_tokens_taken_one_by_one_are_those_taken_at_once(path: Path) -> None:
    """Attention alone may sum in another order for a single row."""
    with open_package(path) as package, Session(package, "native") as session:
        continued = list(session.generate(PROMPT, 3))
        whole = np.concatenate([PROMPT, continued])
        logits = session.forward(whole)
    for row, token in enumerate(continued, len(PROMPT) - 1):
        assert logits[row, token] >= logits[row].max() - CLOSE * np.abs(logits[row]).max()
