"""The checkpoints that tests write are those the reference vectors were computed for, in every way of storing them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from fixtures.olmoe import EXPERTS, LAYERS, VARIANTS, VOCABULARY, CheckpointFactory, VariantName, digest
from fixtures.reference import GREEDY_TOKENS, PROMPT_LENGTHS, Reference, ReferenceLoader
from fixtures.synthetic import write_sparse_checkpoint


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_belongs_to_the_checkpoint(
    variant: VariantName, olmoe_checkpoint: CheckpointFactory, reference: ReferenceLoader
) -> None:
    stored = load_file(olmoe_checkpoint(variant) / "model.safetensors")
    assert digest(stored) == reference(variant).checkpoint


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_is_whole(variant: VariantName, reference: ReferenceLoader) -> None:
    vectors: Reference = reference(variant)
    top_k = VARIANTS[variant].top_k
    for length in PROMPT_LENGTHS:
        prompt = vectors.prompts[length]
        assert prompt.tokens.shape == (length,)
        assert prompt.experts.shape == prompt.weights.shape == (LAYERS, length, top_k)
        assert prompt.logits.shape == (len(prompt.positions), VOCABULARY)
        assert prompt.positions[-1] == length - 1
        assert np.isfinite(prompt.logits).all()
        assert ((prompt.experts >= 0) & (prompt.experts < EXPERTS)).all()
        sums = prompt.weights.sum(axis=-1)
        assert np.allclose(sums, 1.0) if VARIANTS[variant].renormalise else (sums < 0.9999).all()
    assert vectors.greedy.shape == (GREEDY_TOKENS,)


def test_shards_hold_the_same_tensors(olmoe_checkpoint: CheckpointFactory) -> None:
    folder = olmoe_checkpoint("base", 3)
    shards = sorted(folder.glob("*.safetensors"))
    together = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) == 3
    assert digest(together) == digest(load_file(olmoe_checkpoint("base") / "model.safetensors"))


@pytest.mark.parametrize("text", ["the end", "in the beginning", "naïve 🙂\n\t\x00"])
def test_tokenizer_gives_the_text_back(text: str, olmoe_checkpoint: CheckpointFactory) -> None:
    tokenizer = Tokenizer.from_file(str(olmoe_checkpoint() / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("shards", [1, 3])
def test_sparse_checkpoint_has_the_size_asked_for(shards: int, tmp_path: Path) -> None:
    folder = write_sparse_checkpoint(tmp_path / "large", gigabytes=2.0, shards=shards)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == shards
    assert sum(file.stat().st_size for file in files) == pytest.approx(2e9, rel=0.03)
    with safe_open(files[-1], framework="numpy") as opened:
        assert not opened.get_slice("lm_head.weight")[:1].any()
