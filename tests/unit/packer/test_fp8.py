"""Checkpoints in FP8: values of every code, scales by block, by channel and by tensor, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.checkpoint import open_checkpoint
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import SafetensorsFile
from estream_packer.families import family_of
from estream_packer.families.places import Place
from estream_packer.families.quantisation import quantisation_of
from estream_packer.families.sources import TensorSource
from estream_spec.errors import PackError
from fixtures.olmoe import CheckpointFactory
from fixtures.spellings import BF16, E4M3, E8M0, Tensors, write_tensors

Array = npt.NDArray[Any]
FP8: Final = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GRID: Final = np.array([[1, 2], [3, 4]], np.float32)


def codes(*shape: int, code: int = 0x38) -> Array:
    return np.full(shape, code, np.uint8).view(E4M3)


def write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, object] | None = FP8) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def read(folder: Path, place: Place, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
    """What a place of a checkpoint holds, in the layout of the checkpoint."""
    with open_checkpoint(folder) as checkpoint:
        problems = Problems()
        coding = quantisation_of(checkpoint.config).coding(place.name, checkpoint.tensors, problems)
        problems.refuse("scales", str(folder))
        return TensorSource(place, coding, 0).read(checkpoint, rows)


def fault(folder: Path) -> str:
    with pytest.raises(PackError) as caught:
        read(folder, Place("w", (130, 130)))
    return caught.value.message


def test_every_code_has_its_value(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for dtype, not_numbers in ((E4M3, (0x7F, 0xFF)), (E8M0, (0xFF,))):
        good = np.array([code for code in range(256) if code not in not_numbers], np.uint8)
        write_tensors(path, {"a": good.view(dtype)})
        file = SafetensorsFile(path)
        np.testing.assert_array_equal(file.read("a"), good.view(dtype).astype(np.float32))
        file.close()


def test_the_values_of_some_codes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a": np.array([0x38, 0xB8, 0x7E, 0x01, 0x80], np.uint8).view(E4M3)})
    file = SafetensorsFile(path)
    values = file.read("a")
    assert values.tolist() == [1.0, -1.0, 448.0, 2.0**-9, 0.0]
    assert np.signbit(values[4])
    file.close()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, E8M0])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_blocks_are_cut_off_at_the_edges(tmp_path: Path, suffix: str, dtype: np.dtype[Any]) -> None:
    grid = GRID if dtype != E8M0 else np.array([[1, 2], [4, 8]], np.float32)
    folder = write(tmp_path, {"w.weight": codes(130, 130), f"w.weight{suffix}": grid.astype(dtype)})
    values = read(folder, Place("w.weight", (130, 130)))
    assert [values[0, 0], values[0, 129], values[129, 0], values[129, 129]] == grid.ravel().tolist()
    np.testing.assert_array_equal(values, np.repeat(np.repeat(grid, 128, 0), 128, 1)[:130, :130])
    np.testing.assert_array_equal(read(folder, Place("w.weight", (130, 130)), slice(126, 129)), values[126:129])
    assert read(folder, Place("w.weight", (130, 130)), slice(3, 3)).shape == (0, 130)


def test_a_stack_of_matrices_has_a_grid_for_each(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    stack = random.integers(0, 0x7F, (2, 130, 140), np.uint8).view(E4M3)
    scales = random.random((2, 2, 2), np.float32)
    folder = write(tmp_path, {"w": stack, "w_scale_inv": scales})
    expected = stack.astype(np.float32) * np.repeat(np.repeat(scales, 128, 1), 128, 2)[:, :130, :140]
    np.testing.assert_array_equal(read(folder, Place("w", stack.shape, index=1)), expected[1])
    columns = read(folder, Place("w", stack.shape, "in-out", index=1), slice(120, 135))
    np.testing.assert_array_equal(columns, expected[1, :, 120:135])


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((4, 6), np.float32(2)),
        ((4, 6), np.array([2], np.float32)),
        ((4, 6), np.array([1, 2, 3, 4], np.float32)),
        ((4, 6), np.array([[1], [2], [3], [4]], np.float32)),
        ((3, 4, 6), np.array([1, 2, 3], np.float32)),
        ((3, 4, 6), np.array([[[1]], [[2]], [[3]]], np.float32)),
        ((3, 4, 6), np.arange(12, dtype=np.float32).reshape(3, 4)),
        ((3, 4, 6), np.arange(12, dtype=np.float32).reshape(3, 4, 1)),
    ],
)
def test_without_a_block_size_a_scale_is_of_a_tensor_or_a_channel(
    tmp_path: Path, shape: tuple[int, ...], scales: Array
) -> None:
    folder = write(tmp_path, {"w": codes(*shape), "w_scale": np.asarray(scales)}, FP8 | {"weight_block_size": None})
    index = 2 if len(shape) == 3 else None
    mine = np.asarray(scales) if index is None else np.asarray(scales)[index]
    expected = np.broadcast_to(mine.reshape(-1, 1), (4, 6))
    np.testing.assert_array_equal(read(folder, Place("w", shape, index=index)), expected)
    np.testing.assert_array_equal(read(folder, Place("w", shape, index=index), slice(1, 3)), expected[1:3])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w_scale_inv": np.ones((1, 2), np.float32)}, "'w_scale_inv' has [1, 2], expected [2, 2]"),
        ({"w_scale_inv": np.ones((3, 2), np.float32)}, "'w_scale_inv' has [3, 2], expected [2, 2]"),
        ({"w_scale_inv": np.ones(1, np.float32)}, "'w_scale_inv' has [1], expected [2, 2]"),
        ({"w_scale_inv": np.ones((2, 2), np.uint8)}, "'w_scale_inv' has U8, expected one of F32, F16, BF16, F8_E8M0"),
        ({}, "1 missing scales ('w_scale_inv')"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, tensors: Tensors, message: str) -> None:
    assert message in fault(write(tmp_path, {"w": codes(130, 130), **tensors}))


def test_codes_of_a_vector_are_refused(tmp_path: Path) -> None:
    tensors = {"w": codes(4), "w_scale": np.ones(1, np.float32)}
    assert "'w' has [4], expected a matrix" in fault(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (0x7F, 0x7F, r"'w' has nan at index \[3, 5\]"),
        (0xFF, 0x7F, r"'w' has nan at index \[3, 5\]"),
        (0x38, 0xFF, r"'w_scale' has nan at index \[0, 0\]"),
        (0x7E, 0xFE, r"'w' has inf at index \[3, 5\]"),
    ],
)
def test_what_is_no_finite_number_is_refused_by_name(tmp_path: Path, weight: int, scale: int, message: str) -> None:
    tensor = np.zeros((4, 6), np.uint8)
    tensor[3, 5] = weight
    scales = np.array([[scale]], np.uint8).view(E8M0)
    folder = write(tmp_path, {"w": tensor.view(E4M3), "w_scale": scales})
    with pytest.raises(PackError, match=message):
        read(folder, Place("w", (4, 6)), slice(2, 4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method is absent, expected 'fp8' or 'mxfp4'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq', expected 'fp8' or 'mxfp4'"),
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": ["fp8"]}, "quant_method is ['fp8']"),
        (FP8 | {"bits": 8}, "bits is 8, expected it not to be set"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is [128], expected two whole numbers"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size is 128"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme is 'none'"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', expected a list"),
        ({"quant_method": "mxfp4", "weight_block_size": [1, 32]}, "weight_block_size is [1, 32], expected it not"),
        ("fp8", "quantization_config is 'fp8', expected an object"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    olmoe_checkpoint: CheckpointFactory, config: object, message: str
) -> None:
    whole = json.loads((olmoe_checkpoint("base") / "config.json").read_text()) | {"quantization_config": config}
    with pytest.raises(PackError) as caught:
        family_of(whole)
    assert message in caught.value.message
    assert "config.json" in str(caught.value)
    if "quant_method is" in message:
        assert "before it was quantised" in (caught.value.hint or "")


def records(path: Path) -> list[bytes]:
    with open_package(path) as package:
        return [*package.dense.table.digests, *package.experts.table.digests]


def test_an_fp8_checkpoint_packs_as_the_numbers_it_stands_for(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    block = 24  # divides neither side of any matrix
    random = np.random.default_rng(2)
    shutil.copytree(olmoe_checkpoint("base"), plain)
    held, expected, stored = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in held.items():
        expected[name] = stored[name] = tensor
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            scales = 2.0 ** random.integers(-6, -2, (-(-rows // block), -(-columns // block)))
            grid = np.repeat(np.repeat(scales, block, 0), block, 1)[:rows, :columns].astype(np.float32)
            stored[name] = (tensor.astype(np.float32) / grid).astype(E4M3)
            stored[f"{name}_scale_inv"] = scales.astype(np.float32)
            expected[name] = stored[name].astype(np.float32) * grid
    shutil.copytree(plain, coded)
    write_tensors(plain / "model.safetensors", expected)
    stored["model.layers.0.self_attn.q_proj.input_scale"] = np.ones(1, np.float32)
    write_tensors(coded / "model.safetensors", stored)
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] = FP8 | {"weight_block_size": [block, block], "activation_scheme": "static"}
    (coded / "config.json").write_text(json.dumps(config))
    build(plain, tmp_path / "plain.emoe")
    result = build(coded, tmp_path / "coded.emoe")
    assert records(tmp_path / "coded.emoe") == records(tmp_path / "plain.emoe")
    assert any(notice.startswith("1 scales of activations are left out") for notice in result.notices)

    del config["quantization_config"]
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(PackError) as caught:
        build(coded, tmp_path / "coded.emoe")
    assert "has F8_E4M3, expected one of F32, F16, BF16" in caught.value.message
    assert "superfluous tensors" in caught.value.message
