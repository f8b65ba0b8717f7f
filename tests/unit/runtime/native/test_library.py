"""The compiled kernel from Python, on the path that was chosen here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream_runtime.native import library
from estream_runtime.native.library import Kernel, StoredExpert, StoredMatrix, paths_here
from estream_runtime.native.paths import PATHS
from estream_spec.errors import LinkError
from estream_spec.weights import Floats, expand_nibbles, integer_product, pack_nibbles, quantise_activations

RANDOM = np.random.default_rng(1)
ROWS, COLUMNS = 70, 45


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    opened = Kernel(2)
    yield opened
    opened.close()


def stored(group: int, rows: int = ROWS, columns: int = COLUMNS) -> tuple[StoredMatrix, library.Array]:
    """A matrix as it is stored, and its int8 weights."""
    scale = RANDOM.random(columns, np.float32) / 1000
    if not group:
        weights = RANDOM.integers(-127, 128, (rows, columns), np.int8)
        return StoredMatrix(weights, None, scale), weights
    nibbles = pack_nibbles(RANDOM.integers(-8, 8, (rows, columns), np.int8), group)
    multipliers = RANDOM.integers(1, 16, (2 * len(nibbles) // group, columns)).astype(np.int8)
    return StoredMatrix(nibbles, multipliers, scale), expand_nibbles(nibbles, multipliers, group, rows)


@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("tokens", [1, 2, 7, 258])
def test_products_are_those_of_the_reference(kernel: Kernel, group: int, tokens: int) -> None:
    matrix, weights = stored(group)
    x = RANDOM.standard_normal((tokens, ROWS)).astype(np.float32)
    expected = integer_product(*quantise_activations(x), weights, matrix.scale)
    np.testing.assert_array_equal(kernel.product(kernel.quantise(x, bool(group)), matrix), expected)


@pytest.mark.parametrize("groups", [(0, 32), (32, 0), (32, 64), (0, 0)])
def test_an_expert_takes_matrices_of_any_kinds(kernel: Kernel, groups: tuple[int, int]) -> None:
    (gate, gate_weights), (up, up_weights) = (stored(group) for group in groups)
    down, down_weights = stored(32, COLUMNS, ROWS)
    x, total = RANDOM.standard_normal((5, ROWS)).astype(np.float32), np.ones((5, ROWS), np.float32)
    chosen, shares = np.array([4, 1]), np.array([0.25, 2], np.float32)
    rows, up_rows = (kernel.quantise(x, bool(group)) for group in groups)
    kernel.add_expert(rows, up_rows, chosen, shares, StoredExpert(gate, up, down), None, total)

    def product(x: Floats, weights: library.Array, matrix: StoredMatrix) -> Floats:
        return integer_product(*quantise_activations(x), weights, matrix.scale)

    hidden = product(x[chosen], gate_weights, gate)
    hidden = hidden / (1 + np.exp(-hidden)) * product(x[chosen], up_weights, up)
    expected = np.ones_like(total)
    expected[chosen] += shares[:, None] * product(hidden.astype(np.float32), down_weights, down)
    np.testing.assert_allclose(total, expected, rtol=1e-3, atol=1e-3 * np.abs(expected - 1).max())
    np.testing.assert_array_equal(total[[0, 2, 3]], 1)


def test_a_closed_kernel_says_so(kernel: Kernel) -> None:
    kernel.close()
    with pytest.raises(LinkError, match="the native kernel was closed"):
        kernel.norm(np.ones((1, 4), np.float32), np.ones(4, np.float32), 0.0)
    kernel.close()


def test_closing_waits_for_a_call_of_another_thread(kernel: Kernel) -> None:
    x, weight = np.ones((4000, 2048), np.float32), np.ones(2048, np.float32)
    refused = threading.Event()

    def call() -> None:
        try:
            while True:
                kernel.norm(x, weight, 1e-5)
        except LinkError:
            refused.set()

    caller = threading.Thread(target=call)
    caller.start()
    kernel.close()
    caller.join(60)
    assert refused.is_set()


def test_a_path_of_another_processor_is_refused() -> None:
    other = next(path for path in PATHS if path not in paths_here())
    with pytest.raises(LinkError, match=f"path '{other.name}' does not run here, expected one of: .*plain"):
        Kernel(1, other)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "was not compiled when"), (b"no library", "does not load: .*kernel-plain.so")]
)
def test_why_there_is_no_kernel_is_told(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "kernel-plain.so").write_bytes(content)
    monkeypatch.setattr(library, "HERE", tmp_path)
    monkeypatch.setattr(library, "paths_here", tuple)
    with pytest.raises(LinkError, match=f"the native kernel {reason}"):
        Kernel(1)
