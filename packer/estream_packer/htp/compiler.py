"""What every compiler of graphs for the HTP takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from estream_loader.progress import Progress
from estream_spec.binary_interface import label_of
from estream_spec.chips import Chip
from estream_spec.manifest import BinaryGraph


@dataclass(frozen=True, slots=True)
class Tile:
    """One graph to compile.

    Attributes:
        graph: what it is, under the name it is to have; the compiler may give it another.
        onnx: the ONNX model. Its inputs and outputs are named as `estream_spec.binary_interface` says, all dimensions
            are fixed, and all names in it are unlike those of every other tile.
    """

    graph: BinaryGraph
    onnx: bytes

    @property
    def label(self) -> str:
        """What its inputs and outputs are named after."""
        return label_of(self.graph)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler made of tiles.

    Attributes:
        data: one context binary with all of them.
        graphs: the tiles by the names that the binary calls them, in the order in which they were given.
        sdk: build of the SDK that made it, such as `2.51.0.260929181845`.
        compiler: name and version of the compiler.
        options: what it was told, for people.
    """

    data: bytes
    graphs: tuple[BinaryGraph, ...]
    sdk: str
    compiler: str
    options: str


class Compiler(Protocol):
    """Compiles tiles into one context binary."""

    def compile(self, tiles: Sequence[Tile], chip: Chip, progress: Progress) -> Compiled:
        """Compiles.

        Args:
            tiles: what to compile.
            chip: for which chip.
            progress: told of the stages and how many tiles are done.

        Raises:
            LinkError: the compiler does not run here or cannot be reached.
            PackError: it refuses a tile, which the message names.
        """
        ...

    def forget(self) -> None:
        """Drops what it keeps for a later run to take up: what it made is in its place by now, or is no good."""
        ...
