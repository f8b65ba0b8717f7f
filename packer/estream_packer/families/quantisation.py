"""Checkpoints that come quantised: what `quantization_config` may say, and which scales belong to which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from estream_packer.checkpoint import TensorInfo
from estream_packer.checkpoint.coding import MXFP4_BLOCK, BlockScaled, Coding, Mxfp4
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import PLAIN
from estream_packer.families.config import Config
from estream_spec import limits

KEY: Final = "quantization_config"
_EXCEPT_KEYS: Final = ("modules_to_not_convert", "ignored_layers")
"""Lists of modules left as they were. Not needed: the dtype of each tensor says it."""
_KNOWN: Final = {
    "fp8": {"quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "dequantize", *_EXCEPT_KEYS},
    "mxfp4": {"quant_method", "dequantize", *_EXCEPT_KEYS},
}
_SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
"""What follows a tensor's name in the name of its scales. Both multiply, whatever the first one's name says."""
ACTIVATION_SUFFIXES: Final = (".input_scale", ".activation_scale")
"""Scales of activations, which belong to a way of computing and not to the weights."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the checkpoint was quantised.

    Attributes:
        method: None where it was not.
        block: rows and columns of FP8 codes that share a scale; None for a scale per tensor or per output channel.
    """

    method: str | None = None
    block: tuple[int, int] | None = None

    def applies(self, name: str, tensor: TensorInfo) -> bool:
        """Whether a tensor is codes of this quantisation, so that it has scales."""
        if self.method == "mxfp4":
            return tensor.dtype == "U8" and name.endswith("_blocks")
        return self.method == "fp8" and tensor.dtype == "F8_E4M3"

    def coding(self, name: str, tensors: Mapping[str, TensorInfo], problems: Problems) -> Coding | None:
        """How a tensor of codes is read; None where its scales do not fit, which `problems` is told.

        Args:
            name: a key of `tensors` to which this quantisation applies.
            tensors: those of the checkpoint.
            problems: where faults go.
        """
        if self.method == "mxfp4":
            return _mxfp4(name, tensors, problems)
        return self._block_scaled(name, tensors, problems)

    def _block_scaled(self, name: str, tensors: Mapping[str, TensorInfo], problems: Problems) -> Coding | None:
        scales = next((name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in tensors), None)
        if scales is None:
            problems.add("missing scales", repr(name + _SCALE_SUFFIXES[0]))
            return None
        if len(tensors[name].shape) < 2:
            problems.add("tensors of another shape", f"{name!r} has {list(tensors[name].shape)}, expected a matrix")
            return None
        dtypes = (*PLAIN, "F8_E8M0")
        if tensors[scales].dtype not in dtypes:
            found = f"{scales!r} has {tensors[scales].dtype}, expected one of {', '.join(dtypes)}"
            problems.add("scales of another dtype", found)
            return None
        *stack, rows, columns = tensors[name].shape
        height, width = self.block or (1, columns)
        grid = (*stack, -(-rows // height), -(-columns // width))
        expected = [grid] if self.block else [grid, grid[:-1]]
        shape = tensors[scales].shape
        if not self.block and shape in ((), (1,), tuple(stack), (*stack, 1), (*stack, 1, 1)):
            return BlockScaled(scales, (rows, columns))
        if shape not in expected:
            problems.add("scales of another shape", f"{scales!r} has {list(shape)}, expected {list(expected[0])}")
            return None
        return BlockScaled(scales, (height, width))


def quantisation_of(config: Mapping[str, object]) -> Quantisation:
    """What a checkpoint's configuration says of its quantisation.

    Raises:
        PackError: the method is not known, or has a setting that is not.
    """
    if config.get(KEY) is None:
        return Quantisation()
    keys = Config(config).section(KEY)
    method = keys.values.get("quant_method")
    if not isinstance(method, str) or method not in _KNOWN:
        hint = "pack the checkpoint from before it was quantised"
        raise keys.refusal("quant_method", " or ".join(map(repr, _KNOWN)), hint)
    for key in sorted(keys.values.keys() - _KNOWN[method]):
        keys.only(key)
    for key in _EXCEPT_KEYS:
        names = keys.values.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise keys.refusal(key, "a list of names")
    keys.only("fmt", "e4m3")
    keys.only("activation_scheme", "dynamic", "static")
    keys.only("scale_fmt", "ue8m0", "float")
    keys.flag("dequantize", default=False)
    return Quantisation(method, _block(keys))


def _block(keys: Config) -> tuple[int, int] | None:
    key = "weight_block_size"
    found = keys.values.get(key)
    if found is None:
        return None
    if isinstance(found, list) and len(found) == 2:
        height, width = found
        if all(type(side) is int and 1 <= side <= limits.MAX_DIMENSION for side in found):
            return height, width
    raise keys.refusal(key, "two whole numbers, as in [128, 128]")


def _mxfp4(name: str, tensors: Mapping[str, TensorInfo], problems: Problems) -> Coding | None:
    scales = name.removesuffix("_blocks") + "_scales"
    if scales not in tensors:
        problems.add("missing scales", repr(scales))
        return None
    shape = tensors[name].shape
    if len(shape) < 3 or shape[-1] != MXFP4_BLOCK // 2:
        found = f"{name!r} has {list(shape)}, expected blocks of {MXFP4_BLOCK // 2} bytes"
        problems.add("tensors of another shape", found)
        return None
    if tensors[scales].dtype != "U8":
        problems.add("scales of another dtype", f"{scales!r} has {tensors[scales].dtype}, expected U8")
        return None
    if tensors[scales].shape != shape[:-1]:
        found = f"{scales!r} has {list(tensors[scales].shape)}, expected {list(shape[:-1])}"
        problems.add("scales of another shape", found)
        return None
    return Mxfp4(scales)
