"""Arithmetic of accelerators that compute in fp16 and take matrices as they are stored. FORMAT.md section 10.3.

What differs from f32 is the range: 65504 is the largest number and below 6.1e-5 digits are lost. So sums of many terms
are kept small on the way, by exact powers of two where one will do, and by the largest number of a row where not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from estream_packer.graphs.builder import Builder
from estream_spec.model import SWIGLU_SLOPE
from estream_spec.weights import GROUP_SIZES, NIBBLE_ZERO, Encoding

SHRINK: Final = 128.0
"""Integers enter products divided by this, exactly, and scales make up for it: sums stay in the range of fp16."""
FAR: Final = 32.0
"""Beyond this a sigmoid is 0 or 1 in fp16, and e^-x is 0; of 20,000 some processors make something else."""
SMALLEST: Final = 2.0**-12
"""A row is divided by its largest number, or by this if that is smaller: a quarter of it has all digits still."""


class HalfArithmetic:
    """Products with stored matrices, norms and scores in fp16.

    Args:
        graph: where they are added.
        matrices: encoding and rows of the graph's matrices, by name.
    """

    def __init__(self, graph: Builder, matrices: Mapping[str, tuple[Encoding, int]]):
        self._graph, self._matrices = graph, matrices
        self._split: dict[tuple[str, int, int], tuple[str, str]] = {}

    def product(self, rows: str, matrix: str, result: str | None = None) -> str:
        """The product of rows with one matrix."""
        graph, (encoding, count) = self._graph, self._matrices[matrix]
        if encoding == "f32":
            return graph.add("MatMul", rows, matrix, result=result)
        if encoding == "w8":
            sums = graph.add("MatMul", rows, self._shrunk(matrix))
        else:
            sums = self._by_halves(rows, matrix, GROUP_SIZES[encoding], count)
        scale = graph.add("Mul", f"{matrix}.scale", graph.number(SHRINK))
        return graph.add("Mul", sums, scale, result=result)

    def products(self, rows: str, *matrices: str) -> Sequence[str]:
        """The products of rows with several matrices."""
        return [self.product(rows, matrix) for matrix in matrices]

    def norm(self, value: str, weight: str, epsilon: float, result: str | None = None) -> str:
        """RMS norm over the last axis, of rows divided by their largest number: their squares fit.

        With m the divisor, `x / sqrt(mean(x²) + e)` is `(x / m) / sqrt(mean((x / m)²) + (sqrt(e) / m)²)`.
        """
        graph = self._graph
        small, quarter = self._by_largest(value, SMALLEST)
        mean = graph.add("ReduceMean", graph.add("Mul", small, small), axes=[-1], keepdims=1)
        share = graph.add("Div", graph.number(epsilon**0.5 / 4), quarter)
        root = graph.add("Sqrt", graph.add("Add", mean, graph.add("Mul", share, share)))
        return graph.add("Mul", graph.add("Div", small, root), weight, result=result)

    def scores(self, queries: str, keys: str, scale: float) -> str:
        """`queries keys scale`; queries are multiplied first, which keeps the sums small."""
        graph = self._graph
        return graph.add("MatMul", graph.add("Mul", queries, graph.number(scale)), keys)

    def gated(self, gate: str, up: str, matrix: str, result: str | None = None) -> str:
        """The product of `silu(gate) * up` with one matrix; `up` is divided by its row's largest number on the way."""
        graph = self._graph
        silu = graph.add("Mul", gate, self.sigmoid(gate))
        small, quarter = self._by_largest(up, 1)
        product = self.product(graph.add("Mul", silu, small), matrix)
        return graph.add("Mul", graph.add("Mul", product, quarter), graph.number(4), result=result)

    def clamped(self, gate: str, up: str, limit: float, matrix: str, result: str | None = None) -> str:
        """The product of `clamped-swiglu` of gate and up with one matrix; up and its 1 are divided by `limit` + 1."""
        graph = self._graph
        gate = graph.add("Min", gate, graph.number(limit))
        up = graph.add("Clip", up, graph.number(-limit), graph.number(limit))
        share = self.sigmoid(graph.add("Mul", gate, graph.number(SWIGLU_SLOPE)))
        small = graph.add("Mul", graph.add("Add", up, graph.number(1)), graph.number(1 / (limit + 1)))
        inner = graph.add("Mul", graph.add("Mul", gate, share), small)
        return graph.add("Mul", self.product(inner, matrix), graph.number(limit + 1), result=result)

    def sigmoid(self, value: str) -> str:
        """`1 / (1 + exp(-x))`, 0 or 1 where `FAR` is passed."""
        graph = self._graph
        return graph.add("Sigmoid", graph.add("Clip", value, graph.number(-FAR), graph.number(FAR)))

    def exponential(self, value: str) -> str:
        """`exp(x)` of numbers not above 0; 0 where `FAR` is passed, as it is where keys are hidden."""
        graph = self._graph
        return graph.add("Exp", graph.add("Max", value, graph.number(-FAR)))

    def _by_largest(self, rows: str, least: float) -> tuple[str, str]:
        """Rows divided by their largest number, or by `least` if that is smaller, and a quarter of the divisors.

        Processors multiply by what 1 divided by the divisor is, which is 0 to them beyond 16384: so a quarter divides.
        """
        graph = self._graph
        largest = graph.add("ReduceMax", graph.add("Abs", rows), axes=[-1], keepdims=1)
        quarter = graph.add("Max", graph.add("Mul", largest, graph.number(0.25)), graph.number(least / 4))
        return graph.add("Mul", graph.add("Div", rows, quarter), graph.number(0.25)), quarter

    def _shrunk(self, integers: str) -> str:
        """Signed bytes divided by `SHRINK`.

        Not by `Cast`: from int8 compilers refuse it, and from uint8 some take it and compute something else.
        """
        graph = self._graph
        return graph.add("DequantizeLinear", integers, graph.number(1 / SHRINK), graph.signed_byte(0))

    def _by_halves(self, rows: str, matrix: str, group: int, count: int) -> str:
        """The product of rows with a matrix of nibbles divided by `SHRINK`, its scale still to come.

        Low and high nibbles are rows half a group apart. Rather than to put the matrix together, what multiplies it is
        taken apart: `[T, K]` into what meets low and what meets high nibbles. Nibbles are told apart by exact
        arithmetic: with d the byte less 128, divided by 16, high - 8 is `floor(d)` and (low - 8) / 16 is `d - floor(d)
        - 1/2`.
        """
        graph = self._graph
        byte_rows, columns = graph.sizes(f"{matrix}.nibbles")
        half = group // 2
        groups = byte_rows // half
        # Once only: compilers keep one zero point for each input, whatever a second operator says.
        pairs = graph.add("DequantizeLinear", f"{matrix}.nibbles", graph.number(1 / 16), graph.byte(16 * NIBBLE_ZERO))
        high = graph.add("Floor", pairs)
        low = graph.add("Sub", graph.add("Sub", pairs, high), graph.number(NIBBLE_ZERO / 16))
        multipliers = graph.reshape(self._shrunk(f"{matrix}.multipliers"), groups, 1, columns)
        sums = []
        halves = self._halves(rows, groups, half, count)
        larger = graph.add("Mul", multipliers, graph.number(16))
        for part, nibbles, factors in zip(halves, (low, high), (larger, multipliers), strict=True):
            weights = graph.add("Mul", graph.reshape(nibbles, groups, half, columns), factors)
            sums.append(graph.add("MatMul", part, graph.reshape(weights, byte_rows, columns)))
        return graph.add("Add", *sums)

    def _halves(self, rows: str, groups: int, half: int, count: int) -> tuple[str, str]:
        """What of rows `[T, K]` meets low nibbles, and what meets high ones, each `[T, groups * half]`.

        Where the last group is not full, its padding meets the first number of the row: stored padding is 0, and zeros
        in place of it, which `Pad` would make, are what was in memory before in some processors.
        """
        graph = self._graph
        key = rows, groups, half
        if key not in self._split:
            if count == 2 * groups * half:
                parts = graph.split_half(graph.reshape(rows, -1, groups, 2, half), axis=2)
                low, high = (graph.reshape(part, -1, groups * half) for part in parts)
            else:
                met = np.arange(2 * groups * half).reshape(groups, 2, half)
                met[met >= count] = 0
                low, high = (graph.columns(rows, met[:, part].ravel().tolist()) for part in (0, 1))
            self._split[key] = low, high
        return self._split[key]
