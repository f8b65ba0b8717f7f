"""The compiler on this machine: that of onnxruntime-qnn, which comes with Qualcomm's SDK. FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from msgspec.structs import replace

from estream_loader.progress import Progress
from estream_packer.children import begin, child_processes, result_of
from estream_packer.htp.compiler import Compiled, Tile
from estream_packer.htp.context import sdk_build
from estream_packer.htp.joined import join, names_in_context
from estream_runtime.npu.qnn import quiet, session_options
from estream_spec.chips import Chip
from estream_spec.errors import PackError

OPTIONS: Final = {
    "enable_htp_fp16_precision": "1",
    "enable_htp_prepare_only": "1",
    "htp_graph_finalization_optimization_mode": "1",
}
"""What the provider is told besides the chip: compile f32 as fp16, do not run, and do not search for the best graph.
For a head of 50,000 columns the modes that do take a hundred times as long and make a hundred times as many bytes."""


class LocalCompiler:
    """Compiles in a process of its own, see `estream_packer.htp.compiler.Compiler`."""

    def compile(self, tiles: Sequence[Tile], chip: Chip, progress: Progress) -> Compiled:
        """Compiles all tiles into one context.

        Args:
            tiles: what to compile.
            chip: for which chip.
            progress: told when it is done.

        Raises:
            LinkError: onnxruntime-qnn is not installed.
            PackError: it refuses a tile, or ended without a result.
        """
        progress.begin(f"compiling for {chip.name}", len(tiles))
        # The folder is this process's: it goes though the child may be ended.
        with TemporaryDirectory(prefix="estream-compile-") as folder, child_processes(1) as children:
            begun = begin(children, compile_here, tiles, chip, Path(folder))
            compiled = result_of(begun, f"compiling for {chip.name}")
        progress.advance(len(tiles))
        return compiled

    def forget(self) -> None:
        """Does nothing: no run leaves anything to the next."""


def compile_here(tiles: Sequence[Tile], chip: Chip, folder: Path) -> Compiled:
    """Compiles in this process, which that may end, by way of an empty folder; see `LocalCompiler.compile`."""
    with quiet():
        wrapper = folder / "context.onnx"
        entries = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": str(wrapper),
        }
        _compile(join(tiles), session_options(chip, entries, OPTIONS), chip)
        binaries = list(folder.glob("*.bin"))
        if not wrapper.is_file() or len(binaries) != 1:
            raise PackError(f"compiling for {chip} made {len(binaries)} contexts, expected one")
        names = names_in_context(wrapper.read_bytes(), tiles)
        data = binaries[0].read_bytes()
    return Compiled(
        data=data,
        graphs=tuple(replace(tile.graph, name=names[tile.label]) for tile in tiles),
        sdk=sdk_build(data),
        compiler=f"onnxruntime-qnn {version('onnxruntime-qnn')}",
        options=" ".join(f"{key}={value}" for key, value in OPTIONS.items()),
    )


def _compile(model: bytes, options: object, chip: Chip) -> None:
    from estream_runtime.onnx_runtime import onnxruntime

    # What ONNX Runtime would change could hang together what is kept apart.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # type: ignore[attr-defined]
    try:
        onnxruntime.InferenceSession(model, options, enable_fallback=False)
    except Exception as error:  # what ONNX Runtime raises has no common base of its own
        raise PackError(f"the compiler for {chip} failed: {str(error)!r}") from error
