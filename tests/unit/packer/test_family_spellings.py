"""Every family's checkpoint in the other spellings that exist gives the same stored tensors, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream_packer.build import build
from estream_packer.checkpoint import Checkpoint, open_checkpoint
from estream_packer.families import WeightSources, family_of
from estream_spec.errors import PackError
from fixtures import families
from fixtures.checkpoints.gpt_oss import decoded
from fixtures.olmoe import Weights
from fixtures.spellings import BF16, E4M3, prefixed, write_tensors

NAMES = tuple(name for name in families.FAMILIES if "-" not in name)
Change = Callable[[Weights], Weights]

_EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def stacked(tensors: Weights) -> Weights:
    """Experts in two stacks per layer, as newer tools save them."""
    blocks: dict[str, dict[int, Weights]] = {}
    others: Weights = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others[name] = tensor
        else:
            expert = blocks.setdefault(match["block"], {}).setdefault(int(match["expert"]), {})
            expert[_MATRICES[match["matrix"]]] = tensor
    for block, held in blocks.items():
        experts = [held[number] for number in range(len(held))]
        others[f"{block}.gate_up_proj"] = np.stack([np.concatenate([one["gate"], one["up"]]) for one in experts])
        others[f"{block}.down_proj"] = np.stack([one["down"] for one in experts])
    return others


def renamed(tensors: Weights, *pairs: tuple[str, str]) -> Weights:
    def new(name: str) -> str:
        for old, other in pairs:
            name = name.replace(old, other)
        return name

    return {new(name): tensor for name, tensor in tensors.items()}


def in_bf16(tensors: Weights) -> Weights:
    """GPT-OSS's experts as they are where they are not in MXFP4: every matrix `[in, out]`."""
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in tensors:
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            values = decoded(tensors[name], tensors[f"{stack}_scales"])
            others[stack] = np.ascontiguousarray(values.transpose(0, 2, 1)).astype(BF16)
    return others


def statics_below_gate(tensors: Weights) -> Weights:
    return renamed(tensors, ("mlp.moe_statics.", "mlp.gate.moe_statics."))


NEWER: dict[str, Change] = {
    "qwen2_moe": stacked,
    "deepseek_v2": stacked,
    "mixtral": lambda tensors: renamed(stacked(tensors), ("block_sparse_moe", "mlp")),
    "qwen3_moe": stacked,
    "gpt_oss": in_bf16,
    "granitemoe": lambda tensors: renamed(
        tensors,
        ("input_linear.weight", "experts.gate_up_proj"),
        ("output_linear.weight", "experts.down_proj"),
        ("router.layer.", "router."),
    ),
    "lfm2_moe": stacked,
    "deepseek_v3": stacked,
    "phimoe": lambda tensors: renamed(
        stacked(tensors), ("block_sparse_moe.gate", "mlp.router"), ("block_sparse_moe", "mlp")
    ),
    "ernie4_5_moe": lambda tensors: statics_below_gate(stacked(tensors)),
}
"""What transformers 5 calls the tensors."""


def write(folder: Path, name: str, tensors: Weights, **keys: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(families.config(name) | keys))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def resolve(checkpoint: Checkpoint) -> WeightSources:
    return family_of(checkpoint.config).read(checkpoint.config, None).resolve(checkpoint)


def stored(folder: Path) -> Iterator[bytes]:
    """Every stored tensor, in the order of records."""
    with open_checkpoint(folder) as checkpoint:
        for source in resolve(checkpoint).sources():
            yield source.read(checkpoint).tobytes()


def refusal(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint, pytest.raises(PackError) as caught:
        resolve(checkpoint)
    return caught.value.message


@pytest.mark.parametrize("name", NAMES)
def test_newer_names_and_prefixes_give_the_same_tensors(tmp_path: Path, name: str) -> None:
    tensors = families.weights(name)
    usual = list(stored(write(tmp_path / "usual", name, tensors)))
    newer = NEWER[name](tensors)
    assert list(stored(write(tmp_path / "newer", name, newer))) == usual
    below = prefixed(newer, "model.language_model.", "")
    assert list(stored(write(tmp_path / "below", name, below))) == usual
    beside = prefixed(tensors, "language_model.model.", "language_model.")
    assert list(stored(write(tmp_path / "beside", name, beside))) == usual


def test_a_spelling_does_not_show_in_the_package(tmp_path: Path) -> None:
    tensors = families.weights("gpt_oss")
    found = []
    for spelling, change in (("usual", dict), ("newer", NEWER["gpt_oss"])):
        result = build(write(tmp_path / spelling, "gpt_oss", change(tensors)), tmp_path / f"{spelling}.emoe")
        found.append(result.content_id)
    assert found[0] == found[1]


def test_layers_that_draft_tokens_are_left_out_with_a_notice(tmp_path: Path) -> None:
    tensors = families.weights("deepseek_v3")
    usual = list(stored(write(tmp_path / "usual", "deepseek_v3", tensors)))
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    drafts = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in last.items()}
    drafts["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), BF16)
    folder = write(tmp_path / "more", "deepseek_v3", tensors | drafts, num_nextn_predict_layers=1)
    assert list(stored(folder)) == usual
    with open_checkpoint(folder) as checkpoint:
        (notice,) = resolve(checkpoint).notices
    assert notice.startswith(f"{len(drafts)} tensors of model.layers.3.* are left out")
    write(folder, "deepseek_v3", tensors | drafts, num_nextn_predict_layers=0)
    assert f"{len(drafts)} superfluous tensors" in refusal(folder)


def test_the_part_of_ernie_that_drafts_tokens_is_left_out_with_a_notice(tmp_path: Path) -> None:
    tensors = families.weights("ernie4_5_moe")
    more = {"model.mtp_block.0.mlp.gate_proj.weight": np.zeros((4, 4), BF16)}
    with open_checkpoint(write(tmp_path, "ernie4_5_moe", tensors | more)) as checkpoint:
        (notice,) = resolve(checkpoint).notices
    assert notice.startswith("1 tensors of model.mtp_* are left out")


@pytest.mark.parametrize("name", NAMES)
def test_everything_wrong_with_a_checkpoint_is_told_at_once(tmp_path: Path, name: str) -> None:
    tensors = families.weights(name)
    norm = "model.embedding_norm.weight" if name == "lfm2_moe" else "model.norm.weight"
    del tensors[norm]
    first = min(key for key in tensors if key.startswith("model.layers.1.") and "norm" in key)
    tensors[first] = np.ones(3, BF16)
    codes = ("_blocks", "_scales")
    last = max(key for key in tensors if re.search("experts|linear", key) and not key.endswith(codes))
    tensors[last] = tensors[last][:1]
    tensors["model.layers.0.self_attn.surplus.weight"] = np.ones(1, BF16)
    message = refusal(write(tmp_path, name, tensors))
    assert f"1 missing tensors ({norm!r})" in message
    assert "1 superfluous tensors ('model.layers.0.self_attn.surplus.weight')" in message
    assert f"{first!r} has [3], expected" in message
    assert f"{last!r} has " in message


def test_layers_past_the_last_one_are_superfluous_where_none_draft(tmp_path: Path) -> None:
    more = {"model.layers.3.input_layernorm.weight": np.ones(64, BF16)}
    message = refusal(write(tmp_path, "deepseek_v2", families.weights("deepseek_v2") | more))
    assert "1 superfluous tensors ('model.layers.3.input_layernorm.weight')" in message


def test_deepseek_v3_in_fp8_gives_what_its_codes_stand_for(tmp_path: Path) -> None:
    """As published: matrices of layers in FP8 with a scale for each block, the router and all else as they were."""
    coded: Weights = {}
    plain: Weights = {}
    for name, tensor in families.weights("deepseek_v3-latent").items():
        inside = name.startswith("model.layers.") and tensor.ndim == 2 and not name.endswith("mlp.gate.weight")
        if not inside:
            coded[name] = plain[name] = tensor
            continue
        rows, columns = tensor.shape
        grid = np.ones((-(-rows // 16), -(-columns // 16)), np.float32)
        grid *= 2.0 ** np.arange(grid.size).reshape(grid.shape) / 2.0**grid.size if grid.size < 9 else 0.5
        each = np.kron(grid, np.ones((16, 16), np.float32))[:rows, :columns]
        coded[name] = (tensor.astype(np.float32) / each).clip(-400, 400).astype(E4M3)
        coded[f"{name}_scale_inv"] = grid
        plain[name] = coded[name].astype(np.float32) * each
    settings: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    folder = write(tmp_path / "coded", "deepseek_v3-latent", coded, quantization_config=settings)
    assert list(stored(folder)) == list(stored(write(tmp_path / "plain", "deepseek_v3-latent", plain)))
