"""Backends: what the interpreter asks to run graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_loader.package import Package
from estream_runtime.backends.protocol import Array, Backend, GraphKey, MatrixForm
from estream_runtime.native.library import paths_here, why_none
from estream_spec.errors import LinkError
from estream_spec.model import ModelDescription

GRAPH_BACKENDS: Final = ("native", "portable", "reference")
"""Backends that run the portable graphs, or compute what those mean."""
BACKENDS: Final = (*GRAPH_BACKENDS, "htp")

__all__ = [
    "BACKENDS",
    "GRAPH_BACKENDS",
    "Array",
    "Backend",
    "GraphKey",
    "MatrixForm",
    "default_backend",
    "fallback_notice",
    "open_backend",
    "open_graph_backend",
]


def default_backend() -> str:
    """`native` where the kernel was compiled, otherwise `portable`."""
    return "native" if paths_here() else "portable"


def fallback_notice() -> str | None:
    """What to tell whoever asked for no backend where the default is not the fast one; None where it is."""
    if default_backend() == "native":
        return None
    return f"{why_none()}, so ONNX Runtime computes, which is slower"


def open_backend(name: str, package: Package, threads: int) -> Backend:
    """Opens a backend over a package.

    Args:
        name: one of `BACKENDS`; `htp` may be followed by a colon and a chip, see `estream_spec.chips.chip_named`.
        package: the open package.
        threads: threads a graph may use, at least 1.

    Raises:
        LinkError: there is no such backend, it does not run here, or the package has no binary that does.
        FormatError: the package turns out to be faulty.
    """
    kind, colon, chip = name.partition(":")
    if kind == "htp":
        from estream_runtime.backends.htp_choice import open_htp

        return open_htp(package, chip if colon else None)
    manifest = package.manifest
    graphs = {GraphKey(each.role, each.shape_class, each.weights): package.graph(each) for each in manifest.graphs}
    return open_graph_backend(name, manifest.model, graphs, threads)


def open_graph_backend(name: str, model: ModelDescription, graphs: Mapping[GraphKey, bytes], threads: int) -> Backend:
    """Opens a backend over portable graphs.

    Args:
        name: one of `GRAPH_BACKENDS`.
        model: what the graphs must fit.
        graphs: ONNX models by name.
        threads: threads a graph may use, at least 1.

    Raises:
        LinkError: there is no such backend, or it does not run here.
    """
    # Imported when asked for: no backend needs the library of another.
    match name:
        case "native":
            from estream_runtime.backends.native import NativeBackend

            return NativeBackend(model, graphs, threads)
        case "portable":
            from estream_runtime.backends.portable import PortableBackend

            return PortableBackend(model, graphs, threads)
        case "reference":
            from estream_runtime.backends.reference import ReferenceBackend

            return ReferenceBackend(model, graphs, threads)
        case _:
            raise LinkError(f"unknown backend {name!r}, expected one of: {', '.join(BACKENDS)}")
