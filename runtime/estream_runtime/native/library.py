"""The compiled kernel, called through ctypes. What it computes is written in FORMAT.md, sections 7 and 10 and annex A.

Calls release Python's lock. What a call is given is asserted here, since C takes it as it comes; that shapes fit each
other is proven when a package is opened, by the rules of FORMAT.md section 7.3.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from estream_runtime.host_processors import usable_processors
from estream_runtime.native.paths import PATHS, PLAIN, KernelPath
from estream_spec.errors import LinkError, printable
from estream_spec.weights import Floats

Array = npt.NDArray[Any]

HERE: Final = Path(__file__).parent


class _Matrix(ctypes.Structure):
    """`matrix` of rows.h."""

    _fields_ = (
        ("weights", c_void_p),
        ("multipliers", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("group", c_int32),
    )


class _Expert(ctypes.Structure):
    """`expert` of few_products.h."""

    _fields_ = (("gate", _Matrix), ("up", _Matrix), ("down", _Matrix))


class _Norm(ctypes.Structure):
    """`norm` of kernel.c."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float))


_MATRIX: Final = POINTER(_Matrix)
_NORM: Final = POINTER(_Norm)
_EXPERT: Final = POINTER(_Expert)
_SIGNATURES: Final[Mapping[str, tuple[Any, ...]]] = {
    "kernel_runs_on": (c_int32, c_char_p),
    "kernel_open": (c_void_p, c_int32),
    "kernel_close": (None, c_void_p),
    "kernel_row_bytes": (c_int64, c_int32, c_int64),
    "kernel_quantise": (None, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p),
    "kernel_product": (c_int32, c_void_p, c_void_p, c_void_p, c_int64, _MATRIX, c_void_p),
    "kernel_row": (c_int32, c_void_p, c_void_p, _NORM, c_int64, POINTER(_MATRIX), c_void_p),
    "kernel_row_out": (
        c_int32,
        *(c_void_p, c_void_p, _MATRIX, c_void_p, _NORM, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    ),
    "kernel_expert": (
        c_int32,
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, _EXPERT, c_float, c_void_p),
    ),
    "kernel_experts": (c_int32, c_void_p, c_void_p, c_int64, POINTER(_EXPERT), c_void_p, c_float, c_void_p),
    "kernel_norm": (None, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "kernel_rotate": (None, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p),
    "kernel_attend": (
        c_int32,
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_int64, c_float, c_void_p),
    ),
    "kernel_mix": (None, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
}
"""Of each function what it returns, then what it takes."""


@cache
def library(path: KernelPath) -> ctypes.CDLL | None:
    """The compiled library of a path; None where it was not compiled or does not load."""
    try:
        return _load(path)
    except (OSError, AttributeError):
        return None


def why_none() -> str:
    """Why no path is at hand, in words."""
    if not (HERE / PLAIN.library).exists():
        return "the native kernel was not compiled when estream-pack was installed"
    try:
        _load(PLAIN)
    except (OSError, AttributeError) as error:
        return f"the native kernel does not load: {printable(str(error))}"
    return "the native kernel does not run here"


def _load(path: KernelPath) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(HERE / path.library))
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def paths_here() -> tuple[KernelPath, ...]:
    """The paths that were compiled and run on this processor, the fastest first; none without a compiled kernel."""
    plain = library(PLAIN)
    if plain is None:
        return ()
    return tuple(path for path in PATHS if plain.kernel_runs_on(path.name.encode()) and library(path) is not None)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as it lies in a record, at any address, and what is added to its products.

    Attributes:
        weights: int8 `[K, N]`, or nibbles uint8 `[K' / 2, N]`, C-contiguous.
        multipliers: int8 `[K' / group, N]`; None for int8 weights.
        scale: f32 `[N]`.
        bias: f32 `[N]`, added to every product; None where there is none.
    """

    weights: Array
    multipliers: Array | None
    scale: Array
    bias: Array | None = None

    @classmethod
    def of(cls, name: str, parts: Mapping[str, Array]) -> Self:
        """The matrix of that name among the parts of a record, with its bias if it has one."""
        scale, bias = parts[f"{name}.scale"], parts.get(f"{name}.bias")
        if name in parts:
            return cls(parts[name], None, scale, bias)
        return cls(parts[f"{name}.nibbles"], parts[f"{name}.multipliers"], scale, bias)

    @property
    def group(self) -> int:
        """Rows that share a multiplier; 0 for int8 weights."""
        return 0 if self.multipliers is None else 2 * len(self.weights) // len(self.multipliers)

    @property
    def columns(self) -> int:
        """N."""
        return int(self.weights.shape[1])

    def for_c(self, rows: int) -> _Matrix:
        """What C takes, for `rows` = K; valid as long as the matrix is."""
        stored = rows if self.multipliers is None else -(-rows // self.group) * self.group // 2
        assert self.weights.shape[0] == stored, (self.weights.shape, rows)
        multipliers = None if self.multipliers is None else _address(self.multipliers, np.int8)
        weights = _address(self.weights, np.int8 if self.multipliers is None else np.uint8)
        assert self.bias is None or self.bias.shape == (self.columns,)
        vectors = _address(self.scale), None if self.bias is None else _address(self.bias)
        return _Matrix(weights, multipliers, *vectors, rows, self.columns, self.group)


class StoredExpert:
    """The matrices of an expert, or of a dense block, ready for the kernel for as long as they lie where they do.

    Args:
        gate: matrix `[hidden, inner]`.
        up: likewise.
        down: matrix `[inner, hidden]`.

    Attributes:
        hidden: numbers in a row.
        packed: whether gate and whether up are nibbles.
    """

    def __init__(self, gate: StoredMatrix, up: StoredMatrix, down: StoredMatrix):
        assert gate.columns == up.columns
        self.hidden, self.packed = down.columns, (bool(gate.group), bool(up.group))
        self._matrices = gate, up, down  # which C reads
        made = gate.for_c(self.hidden), up.for_c(self.hidden), down.for_c(gate.columns)
        self.pointer = ctypes.pointer(_Expert(*made))

    @classmethod
    def of(cls, parts: Mapping[str, Array], names: Sequence[str] = ("gate", "up", "down")) -> Self:
        """The expert in the parts of a record, by the names of its matrices."""
        return cls(*(StoredMatrix.of(name, parts) for name in names))


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over rows, or layer norm.

    Attributes:
        weight: f32 `[N]`.
        epsilon: what is added to the mean square.
        bias: f32 `[N]` of a layer norm; None for an RMS norm.
    """

    weight: Floats
    epsilon: float
    bias: Floats | None = None

    def for_c(self) -> _Norm:
        """What C takes; valid as long as the norm is."""
        return _Norm(_address(self.weight), None if self.bias is None else _address(self.bias), self.epsilon)


class RowProducts:
    """Matrices that one row meets together, ready for the kernel for as long as they lie where they do.

    Args:
        matrices: `[K, N]` each, at most three.
        rows: K.
        norm: what the row goes through before; None for nothing.
    """

    def __init__(self, matrices: Sequence[StoredMatrix], rows: int, norm: Norm | None):
        assert 1 <= len(matrices) <= 3
        assert norm is None or norm.weight.shape == (rows,)
        self.rows, self.count = rows, len(matrices)
        self.ends = list(accumulate((each.columns for each in matrices), initial=0))
        self.norm = None if norm is None else ctypes.pointer(norm.for_c())
        self.pointers = (_MATRIX * self.count)(*(ctypes.pointer(each.for_c(rows)) for each in matrices))
        self._held = matrices, norm  # which C reads


class RowOut:
    """What one row meets at the end of an attention block, ready likewise.

    Args:
        matrix: `[K, hidden]`.
        rows: K.
        norm: over what experts take.
        router: f32 `[hidden, experts]`; None where there is none.
        bias: f32 `[experts]`, added to scores; None for nothing.
    """

    def __init__(
        self, matrix: StoredMatrix, rows: int, norm: Norm, router: Floats | None = None, bias: Floats | None = None
    ):
        assert norm.weight.shape == (matrix.columns,)
        assert router is None or len(router) == matrix.columns
        assert bias is None or (router is not None and bias.shape == router.shape[1:])
        self.rows, self.hidden, self.experts = rows, matrix.columns, 0 if router is None else router.shape[1]
        self.matrix, self.norm = ctypes.pointer(matrix.for_c(rows)), ctypes.pointer(norm.for_c())
        self.router, self.bias = (None if each is None else _address(each) for each in (router, bias))
        self._held = matrix, norm, router, bias  # which C reads


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Token rows as integers, in a form of the path's own. FORMAT.md annex A.

    Attributes:
        data: uint8 `[T, ...]`.
        scale: f32 `[T]`.
        columns: K.
        packed: whether they are for nibbles or for int8 weights.
    """

    data: Array
    scale: Floats
    columns: int
    packed: bool


class Kernel:
    """The kernel on one path, with threads of its own, for one caller at a time.

    Args:
        threads: threads that compute, the caller among them, at least 1; no more than processors.
        path: the path to take; None takes the fastest.

    Attributes:
        path: the name of the path.

    Raises:
        LinkError: the kernel was not compiled or does not load, the path does not run here, or memory is wanting.
            Every call raises it once the kernel is closed.
    """

    def __init__(self, threads: int, path: KernelPath | None = None):
        here = paths_here()
        if not here:
            hint = "install a C compiler and then estream-pack anew, or use the portable backend"
            raise LinkError(why_none(), hint=hint)
        chosen = path or here[0]
        loaded = library(chosen)
        if chosen not in here or loaded is None:
            names = ", ".join(each.name for each in here)
            raise LinkError(f"the native kernel's path {chosen.name!r} does not run here, expected one of: {names}")
        self.path, self._library = chosen.name, loaded
        self._guard = threading.Lock()  # whoever closes it waits for a call of another thread
        # More threads than processors would only wait for each other.
        self._pool = loaded.kernel_open(min(threads, usable_processors()))
        if not self._pool:
            raise LinkError(f"no memory for {threads} threads of the native kernel")

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the pool.

        Raises:
            LinkError: the kernel was closed, or memory is wanting.
        """
        with self._guard:
            if not self._pool:
                raise LinkError("the native kernel was closed")
            failed = getattr(self._library, name)(self._pool, *arguments)
        if failed:
            raise LinkError("no memory for what the native kernel keeps between its steps")

    def close(self) -> None:
        """End the threads and give memory back; closing twice is harmless."""
        with self._guard:
            pool, self._pool = self._pool, None
            if pool:
                self._library.kernel_close(pool)

    def quantise(self, x: Floats, packed: bool) -> QuantisedRows:
        """Round each row to integers, as `estream_spec.weights.quantise_activations` does.

        Args:
            x: f32 `[T, K]`. A row that is not finite makes every product of it not a number.
            packed: whether the rows shall meet nibbles or int8 weights.
        """
        tokens, columns = x.shape
        group = 32 if packed else 0
        data = np.empty((tokens, self._library.kernel_row_bytes(group, columns)), np.uint8)
        scale = np.empty(tokens, np.float32)
        self._call("kernel_quantise", _address(x), tokens, columns, group, _address(data, np.uint8), _address(scale))
        return QuantisedRows(data, scale, columns, packed)

    def product(self, rows: QuantisedRows, matrix: StoredMatrix) -> Floats:
        """`rows @ matrix`, f32 `[T, N]`, equal to `estream_spec.weights.integer_product` bit for bit; and its bias."""
        assert rows.packed == bool(matrix.group)
        y = np.empty((len(rows.scale), matrix.columns), np.float32)
        self._call(
            "kernel_product",
            _address(rows.data, np.uint8),
            _address(rows.scale),
            len(rows.scale),
            byref(matrix.for_c(rows.columns)),
            _address(y),
        )
        return y

    def row_products(self, products: RowProducts, row: Floats) -> list[Floats]:
        """What a row `[1, K]` gives with each of the matrices, f32 `[1, N]`: what `norm` and `product` give.

        Raises:
            LinkError: memory is wanting.
        """
        assert row.shape == (1, products.rows)
        ends = products.ends
        y = np.empty((1, ends[-1]), np.float32)
        self._call("kernel_row", _address(row), products.norm, products.count, products.pointers, _address(y))
        return [y[:, begin:end] for begin, end in pairwise(ends)]

    def row_out(self, out: RowOut, attended: Floats, residual: Floats) -> tuple[Floats, Floats, Floats]:
        """What a row becomes at the end of an attention block: what `product`, `norm` and `mix` give.

        Args:
            out: what it meets.
            attended: f32 `[1, K]`.
            residual: f32 `[1, hidden]`, added to the product.

        Returns:
            f32 `[1, hidden]` and that normed, and router scores f32 `[1, experts]`.

        Raises:
            LinkError: memory is wanting.
        """
        assert attended.shape == (1, out.rows)
        assert residual.shape == (1, out.hidden)
        x, normed, scores = (np.empty((1, size), np.float32) for size in (out.hidden, out.hidden, out.experts))
        given = _address(attended), out.matrix, _address(residual), out.norm, out.router, out.bias, out.experts
        self._call("kernel_row_out", *given, _address(x), _address(normed), _address(scores))
        return x, normed, scores

    def add_expert(
        self,
        rows: QuantisedRows,
        up_rows: QuantisedRows,
        chosen: npt.NDArray[np.int64],
        shares: Floats,
        expert: StoredExpert,
        limit: float | None,
        total: Floats,
    ) -> None:
        """Add what an expert makes of some rows, times their shares, to those rows of a total.

        Args:
            rows: all token rows, as gate meets them.
            up_rows: the same rows as up meets them.
            chosen: which of them, `[t]`, none twice.
            shares: what each counts, `[t]`.
            expert: the expert.
            limit: of the activation `clamped-swiglu`; None for `silu`.
            total: f32 `[T, hidden]`, added to.

        Raises:
            LinkError: memory is wanting.
        """
        assert (rows.packed, up_rows.packed) == expert.packed
        assert rows.columns == up_rows.columns == expert.hidden
        assert total.shape == (len(rows.scale), expert.hidden)
        assert len(up_rows.scale) == len(rows.scale)
        assert len(chosen) == len(shares)
        assert len(chosen) == 0 or 0 <= chosen.min() <= chosen.max() < len(total)
        self._call(
            "kernel_expert",
            _address(rows.data, np.uint8),
            _address(rows.scale),
            _address(up_rows.data, np.uint8),
            _address(chosen, np.int64),
            _address(shares),
            len(chosen),
            expert.pointer,
            limit or 0.0,
            _address(total),
        )

    def experts(
        self, row: Floats, experts: Sequence[StoredExpert], shares: Floats, limit: float | None, out: Floats
    ) -> None:
        """What some experts make of one row, times their shares: what `add_expert` adds of each to zeros.

        Args:
            row: f32 `[1, hidden]`.
            experts: n of them, whose gates are all nibbles or all int8, and so are the others.
            shares: f32 `[n]`.
            limit: of the activation `clamped-swiglu`; None for `silu`.
            out: f32 `[n, hidden]`, overwritten.

        Raises:
            LinkError: memory is wanting.
        """
        count = len(experts)
        assert shares.shape == (count,)
        assert row.shape == (1, out.shape[1])
        assert len(out) == count
        assert all(each.hidden == out.shape[1] and each.packed == experts[0].packed for each in experts)
        pointers = (_EXPERT * count)(*(each.pointer for each in experts))
        self._call("kernel_experts", _address(row), count, pointers, _address(shares), limit or 0.0, _address(out))

    def norm(self, x: Floats, weight: Floats, epsilon: float, bias: Floats | None = None) -> Floats:
        """RMS norm of each row `[T, N]`, times weight `[N]`; or layer norm, if there is a bias `[N]`."""
        assert weight.shape == x.shape[1:]
        assert bias is None or bias.shape == weight.shape
        y, added = np.empty_like(x), None if bias is None else _address(bias)
        self._call("kernel_norm", _address(x), _address(weight), added, epsilon, *x.shape, _address(y))
        return y

    def heads_first(self, x: Floats, heads: int, tables: tuple[Floats, Floats] | None = None) -> Floats:
        """Rows `[T, heads * D]` as `[heads, T, D]`.

        Args:
            x: f32, the rows.
            heads: how many.
            tables: cosines and sines `[T, R]` by which the first R numbers of each head are rotated; None for none.
        """
        tokens, width = len(x), x.shape[1] // heads
        if tokens == 1 and tables is None:
            return x.reshape(heads, 1, width)
        y = np.empty((heads, tokens, width), np.float32)
        rotated = 0 if tables is None else tables[0].shape[1]
        assert tables is None or all(each.shape == (tokens, rotated) for each in tables)
        assert rotated <= width
        cosine, sine = (None, None) if tables is None else map(_address, tables)
        self._call("kernel_rotate", _address(x), cosine, sine, tokens, heads, width, rotated, _address(y))
        return y

    def attend(
        self, queries: Floats, keys: Floats, values: Floats, mask: Floats, scale: float, sinks: Floats | None = None
    ) -> Floats:
        """Attention of a block of rows.

        Args:
            queries: f32 `[heads, T, D]`.
            keys: f32 `[key_value_heads, S, D]`; each head's part contiguous.
            values: f32 `[key_value_heads, S, V]`, likewise.
            mask: f32 `[T, S]`, added to scores.
            scale: what scores are multiplied by before.
            sinks: f32 `[heads]`, scores that have no value; None for none.

        Returns:
            f32 `[T, heads * V]`.

        Raises:
            LinkError: memory is wanting.
        """
        heads, tokens, width = queries.shape
        shared, length, value_width = values.shape
        assert keys.shape == (shared, length, width)
        assert mask.shape == (tokens, length)
        assert keys.dtype == values.dtype == np.float32
        assert (keys.strides[1:], values.strides[1:]) == ((4 * width, 4), (4 * value_width, 4))
        assert heads % shared == 0
        assert sinks is None or sinks.shape == (heads,)
        y = np.empty((tokens, heads * value_width), np.float32)
        self._call(
            "kernel_attend",
            _address(queries),
            keys.ctypes.data,
            values.ctypes.data,
            _address(mask),
            None if sinks is None else _address(sinks),
            *(heads, shared, tokens, length, width, value_width, keys.strides[0] // 4, values.strides[0] // 4),
            scale,
            _address(y),
        )
        return y

    def mix(self, x: Floats, matrix: Floats) -> Floats:
        """`x @ matrix` in f32: `[T, K]` by `[K, N]`."""
        assert x.shape[1] == matrix.shape[0]
        y = np.empty((len(x), matrix.shape[1]), np.float32)
        self._call("kernel_mix", _address(x), _address(matrix), len(x), *matrix.shape, _address(y))
        return y


def _address(array: Array, dtype: npt.DTypeLike = np.float32) -> int:
    """Where an array lies that C is to take as it is."""
    assert array.dtype == dtype, array.dtype
    assert array.flags.c_contiguous, (array.shape, array.strides)
    try:
        return ctypes.addressof(c_char.from_buffer(array.data))  # three times as quick as asking the array
    except (TypeError, ValueError):  # it is read-only, or empty
        return int(array.ctypes.data)
