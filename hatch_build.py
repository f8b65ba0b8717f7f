"""Compiles the native kernel while a wheel is built, and puts it in.

Without a C compiler the wheel is the same without the kernel, and serves every machine.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

_NATIVE = "runtime/estream_runtime/native"
_IN_WHEEL = "estream_runtime/native"


class KernelHook(BuildHookInterface[Any]):
    """Builds the kernel into the wheel, or for an editable installation beside its source."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written.

        Args:
            version: `editable` or `standard`.
            build_data: what the builder goes by; gets the libraries and the tag of the wheel.
        """
        if version == "editable":
            self._compile(Path(self.root, _NATIVE))
            return
        # Not beside the source, where an editable installation may have left others.
        self._folder = tempfile.TemporaryDirectory()
        self._compile(Path(self._folder.name))
        libraries = sorted(Path(self._folder.name).iterdir())
        if libraries:
            build_data["force_include"] |= {str(library): f"{_IN_WHEEL}/{library.name}" for library in libraries}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"  # the kernel knows nothing of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel now."""
        if version != "editable":
            self._folder.cleanup()

    def _compile(self, folder: Path) -> None:
        """Compile every path of this machine into a folder; nothing is there afterwards if that fails."""
        paths, compiling = self._load("paths"), self._load("compiling")
        try:
            # An older kernel must not stay where none can be compiled now.
            for library in folder.glob("kernel-*.so"):
                library.unlink()
            compiler = compiling.find_compiler()
            refused = compiling.compile_paths(paths.paths_of(platform.machine()), folder, compiler)
        except OSError as error:
            self.app.display_warning(
                "the native kernel is not compiled, so models will run on ONNX Runtime, which is slower; "
                f"with a C compiler, install again: {error}"
            )
            return
        for path, told in refused.items():
            self.app.display_warning(
                f"the native kernel is compiled without {path}, which the compiler refused: {told}"
            )

    def _load(self, name: str) -> ModuleType:
        """A module of the kernel by itself: what its package imports is not installed yet."""
        spec = importlib.util.spec_from_file_location(f"_{name}", Path(self.root, _NATIVE, f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _platform() -> str:
    """The platform of a wheel that was compiled here, such as `linux_x86_64`.

    The wider names, such as `manylinux_2_17_x86_64`, are for those who have checked what their libraries need.
    """
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
