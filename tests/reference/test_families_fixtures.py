"""The checkpoints of the families that tests write are those their reference vectors were computed for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from fixtures.checkpoints.gpt_oss import FP4, decoded
from fixtures.families import (
    FAMILIES,
    GREEDY_TOKENS,
    PROMPT_LENGTHS,
    config,
    kept_positions,
    prompt,
    reference,
    reference_path,
    weights,
    write_checkpoint,
)
from fixtures.olmoe import VOCABULARY, digest


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_belong_to_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, name)
    assert digest(load_file(folder / "model.safetensors")) == reference(name).checkpoint
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == config(name)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == VOCABULARY


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_whole(name: str) -> None:
    vectors = reference(name)
    assert tuple(vectors.prompts) == PROMPT_LENGTHS
    layers = {found.experts.shape[0] for found in vectors.prompts.values()}
    assert len(layers) == 1
    for length, found in vectors.prompts.items():
        assert np.array_equal(found.tokens, prompt(name, length))
        assert np.array_equal(found.positions, kept_positions(length))
        assert found.logits.shape == (len(found.positions), VOCABULARY)
        assert found.experts.shape == found.weights.shape
        assert found.experts.shape[1] == length
        assert np.isfinite(found.logits).all()
        assert (found.weights > 0).all()
        assert (np.diff(np.sort(found.experts)) > 0).all()
    assert vectors.greedy.shape == (GREEDY_TOKENS,)


def test_no_vectors_without_a_checkpoint() -> None:
    assert {path.stem for path in reference_path("olmoe").parent.glob("*.npz")} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_every_expert_is_its_own(name: str) -> None:
    whole = [tensor for key, tensor in weights(name).items() if tensor.size > 1 and not key.endswith("_scales")]
    assert len({tensor.tobytes() for tensor in whole}) == len(whole)
    assert all(len(np.unique(tensor)) > 1 for tensor in whole)


def test_mxfp4_blocks_are_decoded_low_half_first() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    scales = np.full((1, 1, 16), 128, np.uint8)
    values = decoded(blocks, scales)
    assert values.shape == (1, 1, 512)
    assert values[0, 0, 2 * 0x3A : 2 * 0x3A + 2].tolist() == [2 * FP4[0xA], 2 * FP4[0x3]]
