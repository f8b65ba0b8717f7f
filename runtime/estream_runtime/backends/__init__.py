"""Backends: what the interpreter asks to run graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_runtime.backends.protocol import Array, Backend, GraphKey
from estream_spec.errors import LinkError
from estream_spec.model import ModelDescription

BACKENDS: Final = ("portable", "reference")

__all__ = ["BACKENDS", "Array", "Backend", "GraphKey", "open_backend"]


def open_backend(name: str, model: ModelDescription, graphs: Mapping[GraphKey, bytes], threads: int) -> Backend:
    """Opens a backend over the graphs of one package.

    Args:
        name: one of `BACKENDS`.
        model: what the graphs must fit.
        graphs: ONNX models by name.
        threads: threads a graph may use, at least 1.

    Raises:
        LinkError: there is no such backend.
    """
    # Imported when asked for: neither backend needs the library of the other.
    match name:
        case "portable":
            from estream_runtime.backends.portable import PortableBackend

            return PortableBackend(model, graphs, threads)
        case "reference":
            from estream_runtime.backends.reference import ReferenceBackend

            return ReferenceBackend(model, graphs, threads)
        case _:
            raise LinkError(f"unknown backend {name!r}, expected one of: {', '.join(BACKENDS)}")
