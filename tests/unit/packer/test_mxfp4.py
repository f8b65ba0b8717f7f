"""Checkpoints in MXFP4: two codes a byte, a power of two for each 32, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from estream_packer.checkpoint import open_checkpoint
from estream_packer.checkpoint.problems import Problems
from estream_packer.families.places import Place, Selection
from estream_packer.families.quantisation import quantisation_of
from estream_packer.families.sources import TensorSource
from estream_spec.errors import PackError
from fixtures.spellings import write_tensors

Array = npt.NDArray[Any]
NAME = "experts.gate_up_proj_blocks"
SCALES = "experts.gate_up_proj_scales"


def write(folder: Path, tensors: Mapping[str, Array], method: str = "mxfp4") -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def read(folder: Path, place: Place, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
    with open_checkpoint(folder) as checkpoint:
        problems = Problems()
        coding = quantisation_of(checkpoint.config).coding(place.name, checkpoint.tensors, problems)
        problems.refuse("scales", str(folder))
        assert coding is not None
        assert coding.shape(checkpoint.tensors[place.name]) == place.shape
        return TensorSource(place, coding, 0).read(checkpoint, rows)


def test_the_low_nibble_comes_first_and_every_code_has_its_value(tmp_path: Path) -> None:
    blocks = np.arange(16, dtype=np.uint8).reshape(1, 1, 1, 16) | np.uint8(0x50)
    folder = write(tmp_path, {NAME: blocks, SCALES: np.full((1, 1, 1), 127, np.uint8)})
    values = read(folder, Place(NAME, (1, 1, 32), index=0))[0]
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert expected[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(values[0::2], expected)
    np.testing.assert_array_equal(values[1::2], np.full(16, 3.0))


@pytest.mark.parametrize(
    ("exponent", "scale"), [(127, 1.0), (130, 8.0), (120, 2.0**-7), (0, 2.0**-127), (254, 2.0**127)]
)
def test_scales_are_powers_of_two(tmp_path: Path, exponent: int, scale: float) -> None:
    blocks = np.full((1, 1, 1, 16), 0x12, np.uint8)  # 1 and 0.5
    folder = write(tmp_path, {NAME: blocks, SCALES: np.full((1, 1, 1), exponent, np.uint8)})
    assert read(folder, Place(NAME, (1, 1, 32), index=0))[0, :2].tolist() == [scale, scale / 2]


def test_gate_and_up_of_one_expert_take_turns(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = random.integers(120, 134, (3, 10, 2), np.uint8)
    folder = write(tmp_path, {NAME: blocks, SCALES: scales})
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, 10, 2, 32)
    whole = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * 2.0 ** (
        scales[..., None].astype(np.float32) - 127
    )
    whole = whole.reshape(3, 10, 64)
    for first in (0, 1):
        place = Place(NAME, (3, 10, 64), "out-in", 2, Selection(5, 2, (first,)))
        np.testing.assert_array_equal(read(folder, place), whole[2, first::2].T)
        np.testing.assert_array_equal(read(folder, place, slice(2, 4)), whole[2, first::2][2:4].T)


@pytest.mark.parametrize(
    ("code", "exponent", "message"),
    [
        (0x22, 255, r"gate_up_proj_blocks' has nan at index \[1, 3, 32\]"),
        (0x00, 255, r"gate_up_proj_blocks' has nan at index \[1, 3, 32\]"),
        (0x74, 254, r"gate_up_proj_blocks' has inf at index \[1, 3, 32\]"),
    ],
)
def test_what_is_no_finite_number_is_refused_by_name(tmp_path: Path, code: int, exponent: int, message: str) -> None:
    blocks, scales = np.zeros((2, 4, 2, 16), np.uint8), np.full((2, 4, 2), 127, np.uint8)
    blocks[1, 3, 1], scales[1, 3, 1] = code, exponent
    folder = write(tmp_path, {NAME: blocks, SCALES: scales})
    with pytest.raises(PackError, match=message):
        read(folder, Place(NAME, (2, 4, 64), index=1), slice(1, 4))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NAME: np.zeros((2, 4, 2, 16), np.uint8)}, "1 missing scales ('experts.gate_up_proj_scales')"),
        (
            {NAME: np.zeros((2, 4, 2, 16), np.uint8), SCALES: np.zeros((2, 4, 1), np.uint8)},
            "'experts.gate_up_proj_scales' has [2, 4, 1], expected [2, 4, 2]",
        ),
        (
            {NAME: np.zeros((2, 4, 2, 8), np.uint8), SCALES: np.zeros((2, 4, 2), np.uint8)},
            "'experts.gate_up_proj_blocks' has [2, 4, 2, 8], expected blocks of 16 bytes",
        ),
        (
            {NAME: np.zeros((2, 4, 2, 16), np.uint8), SCALES: np.zeros((2, 4, 2), np.int8)},
            "'experts.gate_up_proj_scales' has I8, expected U8",
        ),
    ],
)
def test_scales_and_blocks_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Array], message: str) -> None:
    with pytest.raises(PackError) as caught:
        read(write(tmp_path, tensors), Place(NAME, (2, 4, 64), index=0))
    assert message in caught.value.message


def test_codes_count_only_where_the_configuration_says_so(tmp_path: Path) -> None:
    tensors = {NAME: np.zeros((2, 4, 2, 16), np.uint8), "plain": np.zeros(1, np.uint8)}
    with open_checkpoint(write(tmp_path, tensors, "fp8")) as checkpoint:
        assert not quantisation_of(checkpoint.config).applies(NAME, checkpoint.tensors[NAME])
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        found = quantisation_of(checkpoint.config)
        assert found.applies(NAME, checkpoint.tensors[NAME])
        assert not found.applies("plain", checkpoint.tensors["plain"])
