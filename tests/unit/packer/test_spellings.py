"""One set of weights in every spelling: the same stored tensors; and what is refused, all of it in one message."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.checkpoint import open_checkpoint
from estream_packer.checkpoint.files import InputFile
from estream_packer.families import WeightMap, WeightSources, family_of, names
from estream_packer.families.places import ExpertSpelling, Group, Place, Selection, halves
from estream_packer.families.sources import TensorSource
from estream_packer.recipe import BuildOptions
from estream_spec.errors import PackError
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router
from fixtures import families
from fixtures.olmoe import EXPERTS, CheckpointFactory
from fixtures.spellings import BF16, Tensors, fused, prefixed, write_tensors

Change = Callable[[Tensors], Tensors]

SPELLINGS: dict[str, Change] = {
    "one tensor per expert": dict,
    "fused": fused,
    "fused with .weight": lambda tensors: fused(tensors, ".weight"),
    "no prefix": lambda tensors: prefixed(tensors, "", ""),
    "language_model.": lambda tensors: prefixed(tensors, "language_model.", ""),
    "model.language_model.": lambda tensors: prefixed(tensors, "model.language_model.", ""),
    "language_model.model.": lambda tensors: prefixed(tensors, "language_model.model.", "language_model."),
    "fused, with a prefix": lambda tensors: prefixed(fused(tensors), "language_model.model.", "language_model."),
    "f32": lambda tensors: {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
}


def respelled(source: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def records(path: Path) -> list[bytes]:
    """The SHA-256 of every record."""
    with open_package(path) as package:
        return [*package.dense.table.digests, *package.experts.table.digests]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, olmoe_checkpoint: CheckpointFactory) -> list[bytes]:
    output = tmp_path_factory.mktemp("usual") / "model.emoe"
    build(olmoe_checkpoint("base"), output)
    return records(output)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_same_experts_in_every_spelling_are_the_same_records(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, usual: list[bytes], spelling: str
) -> None:
    source = respelled(olmoe_checkpoint("base"), tmp_path / "checkpoint", SPELLINGS[spelling])
    build(source, tmp_path / "model.emoe")
    assert records(tmp_path / "model.emoe") == usual


def source_values(folder: Path) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Every stored tensor of a checkpoint: of the layers, and of each expert."""
    with open_checkpoint(folder) as checkpoint:
        found = family_of(checkpoint.config).read(checkpoint.config, None).resolve(checkpoint)
        experts = [
            found.expert(layer, expert)
            for layer, count in enumerate(found.model.expert_counts)
            for expert in range(count)
        ]
        return [
            {name: source.read(checkpoint) for name, source in sources.items()} for sources in (*found.layers, *experts)
        ]


def check_same_tensors(one: Path, other: Path) -> None:
    for mine, theirs in zip(source_values(one), source_values(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("family", sorted(families.FAMILIES.keys() - {"gpt_oss", "granitemoe"}))
def test_every_family_takes_fused_experts_too(tmp_path: Path, family: str) -> None:
    usual = families.write_checkpoint(tmp_path / "usual", family)
    changed = respelled(
        usual, tmp_path / "fused", lambda tensors: prefixed(fused(tensors), "model.language_model.", "")
    )
    assert len(load_shapes(changed)) < len(load_shapes(usual))
    check_same_tensors(changed, usual)


def load_shapes(folder: Path) -> Mapping[str, object]:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tensors


def test_gpt_oss_is_the_same_in_mxfp4_and_in_bf16(tmp_path: Path) -> None:
    """In bf16 the stacks lie the other way round, under the name that the blocks go by without their ending."""

    def unpacked(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if name.endswith("_blocks")]:
            blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            values = codes.reshape(*scales.shape, 32) * np.exp2(scales[..., None].astype(np.float32) - 127)
            whole = values.reshape(*scales.shape[:2], -1)
            tensors[name.removesuffix("_blocks")] = whole.transpose(0, 2, 1).astype(BF16)
        return tensors

    usual = families.write_checkpoint(tmp_path / "usual", "gpt_oss")
    changed = respelled(usual, tmp_path / "bf16", unpacked)
    config = json.loads((changed / "config.json").read_text())
    del config["quantization_config"]
    (changed / "config.json").write_text(json.dumps(config))
    check_same_tensors(changed, usual)


# The rest looks at weight maps of a model that has one layer, or as many as are asked for.

HIDDEN, WIDTH, VOCABULARY = 8, 6, 10


def model(layers: int = 1, width: int = WIDTH, experts: int = 3) -> ModelDescription:
    router = Router(family="softmax-topk", top_k=1)
    return ModelDescription(
        family="tiny",
        hidden=HIDDEN,
        vocabulary=VOCABULARY,
        context_length=16,
        norm_epsilon=1e-5,
        layers=(Layer(attention=0, experts=0),) * layers,
        attentions=(Attention(heads=2, key_value_heads=2, head_dim=4, rotary=Rotary(theta=1e4)),),
        expert_blocks=(ExpertBlock(experts=experts, intermediate=width, router=router),),
        tied_head=True,
    )


def weight_map(
    described: ModelDescription, *experts: ExpertSpelling, extra: Mapping[str, Place] | None = None, **settings: Any
) -> WeightMap:
    """Only norms, experts, and what is asked for: a map need not be of a whole model to be looked up."""
    groups: tuple[Group, ...] = () if extra is None else ((extra,),)
    usual = names.weight_map(described, names.norms, experts or None, lambda _, layer: () if layer else groups)
    return replace(usual, **settings)


def values(*shape: int, start: float = 0) -> npt.NDArray[np.float32]:
    return (np.arange(np.prod(shape), dtype=np.float32) + np.float32(start)).reshape(shape)


def frame(layers: int = 1) -> Tensors:
    """What every checkpoint here has."""
    tensors: Tensors = {"model.embed_tokens.weight": values(VOCABULARY, HIDDEN), "model.norm.weight": values(HIDDEN)}
    for layer in range(layers):
        for norm in ("input", "post_attention"):
            tensors[f"model.layers.{layer}.{norm}_layernorm.weight"] = values(HIDDEN)
    return tensors


def one_by_one(layer: int = 0, experts: int = 3, width: int = WIDTH) -> Tensors:
    tensors: Tensors = {}
    for expert in range(experts):
        start = f"model.layers.{layer}.mlp.experts.{expert}."
        tensors[f"{start}gate_proj.weight"] = values(width, HIDDEN, start=1000 * expert)
        tensors[f"{start}up_proj.weight"] = values(width, HIDDEN, start=1000 * expert + 200)
        tensors[f"{start}down_proj.weight"] = values(HIDDEN, width, start=1000 * expert + 400)
    return tensors


def write(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], config: Mapping[str, object] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def experts_of(folder: Path, wanted: WeightMap, block: int | None = None) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Every expert's tensors of layer 0, read whole or some weights at a time."""
    with open_checkpoint(folder) as checkpoint:
        found = wanted.resolve(checkpoint)
        each = [found.expert(0, expert) for expert in range(wanted.model.expert_counts[0])]
        if block is None:
            return [{name: source.read(checkpoint) for name, source in sources.items()} for sources in each]
        return [
            {
                name: np.concatenate([part for _, part in source.blocks(checkpoint, block)], axis=-1)
                for name, source in sources.items()
            }
            for sources in each
        ]


def stacks(experts: list[dict[str, npt.NDArray[np.float32]]], *, interleaved: bool, transposed: bool) -> Tensors:
    """What `names.fused` describes, made of experts as they are stored."""
    both = []
    for expert in experts:
        gate, up = expert["gate"].T, expert["up"].T
        pair = np.stack([gate, up], axis=1).reshape(2 * len(gate), -1) if interleaved else np.concatenate([gate, up])
        both.append(pair.T if transposed else pair)
    downs = [expert["down"] if transposed else expert["down"].T for expert in experts]
    return {"model.layers.0.both": np.stack(both), "model.layers.0.down": np.stack(downs)}


@pytest.mark.parametrize("width", [WIDTH, HIDDEN])  # square matrices fit both ways
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_are_read_as_the_family_declares_them(
    tmp_path: Path, *, width: int, interleaved: bool, transposed: bool
) -> None:
    described = model(width=width)
    usual = write(tmp_path / "usual", frame() | one_by_one(width=width))
    expected = experts_of(usual, weight_map(described))
    tensors = frame() | stacks(expected, interleaved=interleaved, transposed=transposed)
    layout = "in-out" if transposed else "out-in"
    both, down = "model.layers.{layer}.both", "model.layers.{layer}.down"
    spelling = names.fused(described, both, down, layout=layout, interleaved=interleaved)  # type: ignore[arg-type]
    stacked = write(tmp_path / "stacked", tensors)
    for block in (None, 1, 20, 10_000):
        for expert, wanted in zip(experts_of(stacked, weight_map(described, spelling), block), expected, strict=True):
            assert expert.keys() == wanted.keys()
            for name, value in expert.items():
                np.testing.assert_array_equal(value, wanted[name])


def test_a_square_stack_declared_the_other_way_round_is_another_model(tmp_path: Path) -> None:
    described = model(width=HIDDEN)
    expected = experts_of(write(tmp_path / "usual", frame() | one_by_one(width=HIDDEN)), weight_map(described))
    stacked = write(tmp_path / "stacked", frame() | stacks(expected, interleaved=False, transposed=True))
    both, down = "model.layers.{layer}.both", "model.layers.{layer}.down"
    right = experts_of(stacked, weight_map(described, names.fused(described, both, down, layout="in-out")))[2]["down"]
    # Gate and up have another shape, so the other declaration is refused unless it is of the square stack alone.
    down_only = Place(down.format(layer=0), (3, HIDDEN, HIDDEN), "out-in", 2)
    with open_checkpoint(stacked) as checkpoint:
        wrong = TensorSource(down_only, None, 0).read(checkpoint)
    np.testing.assert_array_equal(wrong, right.T)
    assert not np.array_equal(wrong, right)
    with pytest.raises(PackError, match=r"'model.layers.0.both' has \[3, 8, 16\], expected \[3, 16, 8\]"):
        experts_of(stacked, weight_map(described, names.fused(described, both, down, layout="out-in")))


def test_a_stack_that_lies_the_other_way_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = fused(frame() | one_by_one())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))
    with pytest.raises(PackError, match=r"gate_up_proj' has \[3, 8, 12\], expected \[3, 12, 8\]"):
        experts_of(write(tmp_path, tensors), weight_map(model()))


def test_biases_follow_their_matrices(tmp_path: Path) -> None:
    described = model()
    tensors = frame() | {
        "model.layers.0.both": values(3, 12, 8),
        "model.layers.0.down": values(3, 8, 6),
        "model.layers.0.both_bias": values(3, 12),
        "model.layers.0.down_bias": values(3, 8),
    }
    ends = ("both", "down", "both_bias", "down_bias")
    both, down, both_bias, down_bias = (f"model.layers.{{layer}}.{end}" for end in ends)
    spelling = names.fused(described, both, down, interleaved=True, biases=(both_bias, down_bias))
    expert = experts_of(write(tmp_path, tensors), weight_map(described, spelling))[1]
    np.testing.assert_array_equal(expert["gate.bias"], tensors["model.layers.0.both_bias"][1, 0::2])
    np.testing.assert_array_equal(expert["up.bias"], tensors["model.layers.0.both_bias"][1, 1::2])
    np.testing.assert_array_equal(expert["down.bias"], tensors["model.layers.0.down_bias"][1])


def test_selections_name_rows_in_any_order() -> None:
    everything = slice(None)
    assert Selection.span(3, 4).positions(everything).tolist() == [3, 4, 5, 6]
    assert Selection.span(3, 4).positions(slice(1, 3)).tolist() == [4, 5]
    assert halves(6) == (0, 2, 4, 1, 3, 5)
    # Two heads of 3 plain and 4 rotated channels: rotated ones first, pairs turned into halves.
    rotated_first = (*(3 + place for place in halves(4)), 0, 1, 2)
    heads = Selection(2, 7, rotated_first, start=1)
    assert heads.count == 14
    assert heads.positions(everything).tolist() == [4, 6, 5, 7, 1, 2, 3, 11, 13, 12, 14, 8, 9, 10]
    assert heads.positions(slice(5, 9)).tolist() == [2, 3, 11, 13]


@pytest.mark.parametrize("block", [1, 17, 1000])
def test_selected_rows_come_in_their_order_and_multiplied(tmp_path: Path, block: int) -> None:
    whole, taps, wide = values(15, 8), values(8, 1, 3), values(1, 3)
    selection = Selection(2, 7, (3, 5, 4, 6, 0, 1, 2), start=1)
    extra = {
        "q": Place("q.weight", (15, 8), "out-in", outputs=selection, multiplier=0.5),
        "taps": Place("conv.weight", (8, 1, 3), "out-in"),
        "selection_bias": Place("bias", (1, 3), index=0, multiplier=2.0),
        "none": Place("q.weight", (15, 8), "out-in", outputs=Selection.span(4, 0)),
    }
    tensors = frame() | one_by_one() | {"q.weight": whole, "conv.weight": taps, "bias": wide}
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        found = weight_map(model(), extra=extra).resolve(checkpoint).layers[0]
        q = np.concatenate([part for _, part in found["q"].blocks(checkpoint, block)], axis=1)
        np.testing.assert_array_equal(q, whole[[4, 6, 5, 7, 1, 2, 3, 11, 13, 12, 14, 8, 9, 10]].T / 2)
        assert found["q"].shape == (14, 8)
        np.testing.assert_array_equal(found["taps"].read(checkpoint), taps[:, 0].T)
        np.testing.assert_array_equal(found["selection_bias"].read(checkpoint), wide[0] * 2)
        assert found["selection_bias"].shape == (3,)
        assert found["none"].read(checkpoint).shape == (8, 0)


def test_a_multiplier_that_leaves_f32_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"v": Place("v", (2,), multiplier=10.0)}
    tensors = frame() | one_by_one() | {"v": np.array([1, 3e38], np.float32)}
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        source = weight_map(model(), extra=extra).resolve(checkpoint).layers[0]["v"]
        with pytest.raises(PackError, match="'v' leaves the range of f32 when multiplied by 10"):
            source.read(checkpoint)


def test_only_the_rows_of_the_expert_wanted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = fused(frame() | one_by_one())
    read: list[tuple[int, int]] = []
    whole = InputFile.read_into

    def watched(self: InputFile, target: memoryview, offset: int) -> None:
        read.append((offset, len(target)))
        whole(self, target, offset)

    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        up = weight_map(model()).resolve(checkpoint).expert(0, 2)["up"]
        monkeypatch.setattr(InputFile, "read_into", watched)
        up.read(checkpoint, slice(1, 3))
        begin = checkpoint.tensors[up.name].begin
    assert read == [(begin + (2 * 12 + 6 + 1) * HIDDEN * 4, 2 * HIDDEN * 4)]
    assert up.length == WIDTH * HIDDEN * 4


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, fused(frame() | one_by_one()))) as checkpoint:
        found = weight_map(model()).resolve(checkpoint)
        source = found.expert(0, 1)["down"]
        copy = pickle.loads(pickle.dumps(source))
        assert copy == source
        np.testing.assert_array_equal(copy.read(checkpoint), source.read(checkpoint))


def refusal(folder: Path, tensors: Tensors, wanted: WeightMap) -> str:
    with open_checkpoint(write(folder, tensors)) as checkpoint, pytest.raises(PackError) as caught:
        wanted.resolve(checkpoint)
    return caught.value.message


def test_layers_of_two_spellings_are_refused(tmp_path: Path) -> None:
    tensors = frame(2) | fused(one_by_one(0)) | one_by_one(1)
    message = refusal(tmp_path, tensors, weight_map(model(2)))
    assert "9 missing tensors ('model.layers.0.mlp.experts.0.gate_proj.weight'" in message
    assert "2 tensors that are there in two spellings ('model.layers.0.mlp.experts.gate_up_proj'" in message


def test_two_spellings_of_the_same_experts_are_refused(tmp_path: Path) -> None:
    tensors = frame() | fused(one_by_one()) | one_by_one()
    message = refusal(tmp_path, tensors, weight_map(model()))
    assert "missing" not in message
    assert "2 tensors that are there in two spellings" in message


def test_what_is_missing_is_named_in_the_spelling_that_is_there(tmp_path: Path) -> None:
    tensors = frame(2) | fused(one_by_one(0)) | fused(one_by_one(1))
    del tensors["model.layers.1.mlp.experts.down_proj"]
    tensors["model.layers.1.mlp.extra.weight"] = values(1)
    message = refusal(tmp_path, tensors, weight_map(model(2)))
    assert "1 missing tensors ('model.layers.1.mlp.experts.down_proj')" in message
    assert "1 superfluous tensors ('model.layers.1.mlp.extra.weight')" in message


def test_under_a_prefix_the_names_of_the_checkpoint_are_told(tmp_path: Path) -> None:
    tensors = prefixed(frame() | one_by_one(), "model.language_model.", "")
    del tensors["model.language_model.norm.weight"]
    message = refusal(tmp_path, tensors, weight_map(model()))
    assert "1 missing tensors ('model.language_model.norm.weight')" in message


def test_a_group_takes_the_spelling_that_is_there(tmp_path: Path) -> None:
    described = model()
    groups = (({"router": Place("old", (3, 8), "out-in")}, {"router": Place("new", (3, 8), "out-in")}),)
    wanted = weight_map(described)
    wanted = WeightMap(
        model=described,
        embedding=wanted.embedding,
        layers=((*wanted.layers[0], *groups),),
        experts=wanted.experts,
        final=wanted.final,
        tied_head=wanted.tied_head,
    )
    for name in ("old", "new"):
        with open_checkpoint(write(tmp_path / name, frame() | one_by_one() | {name: values(3, 8)})) as checkpoint:
            assert wanted.resolve(checkpoint).layers[0]["router"].name == name
    both = frame() | one_by_one() | {"old": values(3, 8), "new": values(3, 8)}
    assert "two spellings ('new')" in refusal(tmp_path / "both", both, wanted)
    assert "1 missing tensors ('old')" in refusal(tmp_path / "none", frame() | one_by_one(), wanted)


def test_draft_layers_are_left_out_with_a_notice_where_the_family_says_so(tmp_path: Path) -> None:
    tensors = frame() | one_by_one() | {"model.layers.1.eh_proj.weight": values(2), "mtp.norm.weight": values(2)}
    folder = write(tmp_path, prefixed(tensors, "language_model.model.", "language_model."))
    with open_checkpoint(folder) as checkpoint:
        found: WeightSources = weight_map(model(), skipped=("model.layers.1.", "mtp.")).resolve(checkpoint)
        assert found.notices == (
            "1 tensors of model.layers.1.* are left out: the package computes without them",
            "1 tensors of mtp.* are left out: the package computes without them",
        )
        assert all("layers.1" not in source.name for source in found.sources())
        with pytest.raises(PackError, match="2 superfluous tensors"):
            weight_map(model()).resolve(checkpoint)


def test_a_package_says_what_was_left_out(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    def padded(tensors: Tensors) -> Tensors:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.concatenate([tensors[name], tensors[name][:5]])
        return tensors

    source = respelled(olmoe_checkpoint("base"), tmp_path / "checkpoint", padded)
    notices = build(source, tmp_path / "model.emoe", BuildOptions()).notices
    assert [notice for notice in notices if "past vocab_size" in notice and notice.startswith("5 rows")]


def test_a_fused_checkpoint_names_the_expert_that_is_not_finite(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    def spoiled(tensors: Tensors) -> Tensors:
        tensors = fused(tensors)
        tensors["model.layers.1.mlp.experts.gate_up_proj"][EXPERTS - 2, 40, 5] = np.nan
        return tensors

    source = respelled(olmoe_checkpoint("base"), tmp_path / "checkpoint", spoiled)
    with pytest.raises(PackError) as caught:
        build(source, tmp_path / "model.emoe")
    message = "1 tensors with numbers that are not finite (tensor 'model.layers.1.mlp.experts.gate_up_proj' has nan"
    assert f"{message} at index [{EXPERTS - 2}, 40, 5]" in caught.value.message
    assert not (tmp_path / "model.emoe").exists()
