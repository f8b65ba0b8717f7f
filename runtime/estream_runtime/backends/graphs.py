"""What backends that run graphs have in common: what goes on around an expert's graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from estream_runtime.backends.protocol import Array, Backend, During, Floats


def add_expert_by_graph(
    backend: Backend,
    shape_class: int,
    normed: Floats,
    chosen: npt.NDArray[np.int64],
    shares: Floats,
    weights: Mapping[str, Array],
    total: Floats,
    during: During,
) -> None:
    """`Backend.add_expert` by way of the graph `expert`, for rows f32 `[T, hidden]`."""
    with during("gather"):
        rows = normed[chosen]
    with during("products"):
        added = backend.run("expert", shape_class, {"normed": rows, **weights})["y"]
    with during("scatter"):
        total[chosen] += shares[:, None] * added
