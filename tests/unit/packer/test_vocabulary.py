"""Three numbers that are often called the vocabulary: tokens of the tokenizer, `vocab_size`, rows of the embedding.

Rows past `vocab_size` are left out, so a package holds one number for both. There may be fewer tokens; the rows beyond
stand for nothing, and are never chosen. Buglog A71.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.inspection import inspect_package
from estream_packer.recipe import BuildOptions
from estream_runtime import Session
from fixtures.olmoe import VOCABULARY, write_checkpoint


def checkpoint(folder: Path, vocab_size: int, rows: int) -> Path:
    """The base checkpoint with another `vocab_size` and other rows of embedding and head, the last the largest."""
    write_checkpoint(folder, "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        grown = np.resize(tensors[name].astype(np.float32), (rows, tensors[name].shape[1]))
        grown[VOCABULARY:] *= 100
        tensors[name] = grown.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_rows_beyond_the_tokens_are_never_chosen(tmp_path: Path) -> None:
    rows = VOCABULARY + 6
    build(
        checkpoint(tmp_path / "checkpoint", rows, rows),
        tmp_path / "model.emoe",
        BuildOptions(experts="f32", dense="f32"),
    )
    with open_package(tmp_path / "model.emoe") as package:
        with Session(package) as session:
            logits = session.prefill([1, 2, 3]).logits
            assert logits.shape == (rows,)
            assert np.argmax(logits) >= VOCABULARY
            for temperature in (0.0, 5.0):
                made = list(session.generate([1, 2, 3], 20, temperature=temperature, seed=1))
                assert max(made) < VOCABULARY
        assert package.tokenizer.decode(list(range(VOCABULARY, rows))) == ""
        model = inspect_package(package).model
    assert model["vocabulary"].startswith(f"{rows} rows")
    assert (
        model["tokenizer"] == f"{VOCABULARY} tokens; 6 rows of the vocabulary stand for no token, and are never chosen"
    )
