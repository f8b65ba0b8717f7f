"""What enters each layer, and what its router says, for many tokens: kept on disk, so that memory stays flat."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from estream_loader import Package
from estream_loader.progress import Progress
from estream_loader.values import read_tensor
from estream_packer.partial import create_scratch, remove_scratch
from estream_packer.prefetch.blocks import PURPOSES, Purpose, Window
from estream_packer.running import observe_layers, preferences
from estream_spec.errors import PackError, reason
from estream_spec.model import ModelDescription, Router
from estream_spec.prefetch_predictor import normalised
from estream_spec.prefetch_router import ROUTER_TENSORS
from estream_spec.weights import Floats

Halves = NDArray[np.float16]
Ids = NDArray[np.int32]
RouterTensors = Mapping[str, NDArray[Any]]
"""The tensors of a layer that decide its experts, f32, by the names in its record."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Some tokens at one layer, N of them.

    Attributes:
        rows: f16 `[N, hidden]`, what enters the attention block or convolution over its root mean square.
        preferences: f32 `[N, E]`, what experts were chosen by; minus infinity where one could not be.
        experts: int32 `[N, k]`, those that were routed to.
    """

    rows: Halves
    preferences: Floats
    experts: Ids


@dataclass(frozen=True, slots=True)
class Recording:
    """All tokens at all layers with experts.

    Attributes:
        tokens: how many there are for each purpose.
        layers: what was recorded, by layer and purpose, mapped from files.
        begins: bool `[N]`, which tokens of `test` begin a window.
    """

    tokens: Mapping[Purpose, int]
    layers: Mapping[int, Mapping[Purpose, Recorded]]
    begins: NDArray[np.bool_]


def router_tensors(package: Package, layer: int) -> RouterTensors:
    """What decides the experts of a layer, as the package stores it. Raises as reading a package does."""
    place = package.dense.place(layer + 1)
    return {
        each.name: read_tensor(package, place, each) for each in place.layout.tensors if each.name in ROUTER_TENSORS
    }


@contextmanager
def recorded(
    package: Package,
    tensors: Mapping[int, RouterTensors],
    windows: Mapping[Purpose, Sequence[Window]],
    output: Path,
    progress: Progress,
) -> Iterator[Recording]:
    """Run a package over windows of text and keep what a prefetch router is trained on.

    Args:
        package: the open package.
        tensors: what decides the experts of each layer with experts.
        windows: token ids by what they are for.
        output: beside it is room for files, removed in the end, or by a later writer where this one is killed.
        progress: told how far it is, in tokens.

    Raises:
        PackError: the disk has no room.
        TrapError: a value is not finite.
        FormatError: the package is faulty.
    """
    with ExitStack() as stack:
        with _refused(output):
            folder, lock = create_scratch(output)
            stack.callback(remove_scratch, folder, lock)
            recording = _record(package, tensors, windows, folder, output, progress)
        yield recording  # what fails from here on is no longer the recording


def _record(
    package: Package,
    tensors: Mapping[int, RouterTensors],
    windows: Mapping[Purpose, Sequence[Window]],
    folder: Path,
    output: Path,
    progress: Progress,
) -> Recording:
    """What `recorded` does, into a folder."""
    model = package.manifest.model
    counts = {purpose: sum(map(len, windows[purpose])) for purpose in PURPOSES}
    total = sum(counts.values())
    length = total * sum(_token_bytes(model, layer) for layer in model.expert_layers)
    free = shutil.disk_usage(folder).free
    if free < length:
        message = f"recording takes {length:,} bytes, the disk has room for {free:,}"
        raise PackError(message, path=str(output), hint="give fewer --tokens, or write to another disk")
    with ExitStack() as files:
        spools = {
            layer: _Spool.open(folder, model, layer, tensors[layer].get("selection_bias"), files)
            for layer in model.expert_layers
        }
        progress.begin("reading", total)
        ordered = [window for purpose in PURPOSES for window in windows[purpose]]
        observe_layers(package, ordered, lambda layer, *found: spools[layer].keep(*found), progress.advance)
    begins = np.concatenate([np.arange(len(window)) == 0 for window in windows["test"]])
    layers = {layer: _mapped(folder, model, layer, counts) for layer in model.expert_layers}
    return Recording(counts, layers, begins)


class _Spool:
    """Writes what is seen of one layer."""

    def __init__(self, files: Mapping[str, BinaryIO], router: Router, bias: Floats | None, epsilon: float):
        self._files, self._router, self._bias, self._epsilon = files, router, bias, epsilon

    @classmethod
    def open(cls, folder: Path, model: ModelDescription, layer: int, bias: Floats | None, files: ExitStack) -> _Spool:
        names = _arrays(model, layer)
        opened = {name: files.enter_context((folder / f"{layer}.{name}").open("xb")) for name in names}
        return cls(opened, model.expert_block(layer).router, bias, model.norm_epsilon)

    def keep(self, entered: Floats, scores: Floats, experts: Ids) -> None:
        """Add rows f32 `[T, hidden]`, their scores f32 `[T, E]`, and what they were routed to, int32 `[T, k]`."""
        found = {
            "rows": normalised(entered, self._epsilon).astype(np.float16),
            "preferences": preferences(scores, self._router, self._bias).astype(np.float32, copy=False),
            "experts": experts.astype(np.int32, copy=False),
        }
        for name, values in found.items():
            self._files[name].write(np.ascontiguousarray(values).data)


def _mapped(
    folder: Path, model: ModelDescription, layer: int, counts: Mapping[Purpose, int]
) -> dict[Purpose, Recorded]:
    """What was written of a layer, by purpose."""
    whole: dict[str, Any] = {
        name: np.memmap(folder / f"{layer}.{name}", dtype=dtype, mode="r").reshape(-1, width)
        for name, (dtype, width) in _arrays(model, layer).items()
    }
    found, begin = dict[Purpose, Recorded](), 0
    for purpose in PURPOSES:
        end = begin + counts[purpose]
        found[purpose] = Recorded(**{name: values[begin:end] for name, values in whole.items()})
        begin = end
    return found


def _arrays(model: ModelDescription, layer: int) -> dict[str, tuple[type[np.generic], int]]:
    """What is kept of a token at a layer: dtype, and how many numbers."""
    block = model.expert_block(layer)
    return {
        "rows": (np.float16, model.hidden),
        "preferences": (np.float32, block.experts),
        "experts": (np.int32, block.router.top_k),
    }


def _token_bytes(model: ModelDescription, layer: int) -> int:
    return sum(np.dtype(dtype).itemsize * width for dtype, width in _arrays(model, layer).values())


@contextmanager
def _refused(output: Path) -> Iterator[None]:
    """Say of what the operating system refuses meanwhile that recording failed."""
    try:
        yield
    except OSError as error:
        raise PackError(f"what is recorded cannot be written: {reason(error)}", path=str(output)) from error
