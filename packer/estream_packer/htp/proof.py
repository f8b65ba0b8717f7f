"""Proves compiled graphs: what the simulator makes of them against the reference. FORMAT.md section 10.3.

A compiler may accept an operator and compute something else with it, so nothing is taken for granted. A graph runs once
on all its rows, which are of four kinds in turn: random, zero, large, and one large number among zeros. Its weights
use all integers that their encoding has, and scales that fp16 has, zero among them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from estream_loader.progress import Progress
from estream_packer.children import begin, child_processes, result_of
from estream_packer.graphs import build_graph
from estream_runtime.backends.htp import HtpBackend
from estream_runtime.backends.protocol import GraphKey
from estream_runtime.backends.reference import ReferenceBackend
from estream_runtime.host_processors import usable_processors
from estream_runtime.npu.contents import check_contents
from estream_runtime.npu.qnn import HINT, simulated
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.binary_interface import HIDDEN, label_of
from estream_spec.chips import Chip, chip_numbered
from estream_spec.errors import LinkError, PackError
from estream_spec.graph_interface import Value, interface, role_shape
from estream_spec.manifest import Binary, BinaryGraph
from estream_spec.matching import sdk_numbers
from estream_spec.model import ModelDescription
from estream_spec.weights import GROUP_SIZES, MAX_MULTIPLIER, NIBBLE_ZERO, Encoding, expand_nibbles

MOST_ERROR: Final = 1e-2
"""How far a row may be from the reference, as a share of its size; fp16 alone makes 1e-3 of it."""
LEAST_SIZE: Final = 1e-2
"""A row smaller than this share of the largest is judged as if it had that size: rounding may be all it is."""
USUAL_SIZE: Final = 0.5
"""And one smaller than this share of the median, which happens where rows have few numbers that cancel."""
LARGE: Final = 100.0
"""Large activations: some hidden channels of trained models are that far from the others."""
LARGE_QUERY: Final = 8.0
"""Large queries: scores of 64 and more have but four digits behind the binary point in fp16, whoever computes them."""
KINDS: Final = 4

Array = npt.NDArray[Any]
Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Proof:
    """What the proof of one graph found.

    Attributes:
        graph: the graph.
        output: which of its outputs is the furthest from the reference.
        error: the largest difference of a row of it, as a share of the row's size; infinite if it is no number.
    """

    graph: BinaryGraph
    output: str
    error: float


def prove_binary(binary: Binary, data: bytes, model: ModelDescription, progress: Progress) -> list[Proof]:
    """Proves the graphs of a context binary, in processes of their own.

    Args:
        binary: what the manifest says of it.
        data: the binary.
        model: what its graphs belong to.
        progress: told of each graph.

    Returns:
        A proof for each graph, in their order.

    Raises:
        LinkError: the simulator does not run here, is older than what made the binary, or refuses it, or the binary is
            not what the manifest says.
        PackError: a graph is further from the reference than `MOST_ERROR`, or ended the process.
    """
    chip = chip_numbered(binary.soc_model, binary.architecture)
    check_simulator()
    _check_sdk(binary, chip)
    check_contents(binary, data, model)
    progress.begin(f"proving for {chip.name}", len(binary.graphs))
    found = []
    # The largest ones first, so that none is left for the end.
    ordered = sorted(binary.graphs, key=lambda graph: -_size(graph, model))
    with closing(_proofs(ordered, data, model, chip)) as proofs:
        for proof in proofs:
            _judge(proof, chip)
            found.append(proof)
            progress.advance(1)
    return sorted(found, key=lambda proof: binary.graphs.index(proof.graph))


def _proofs(
    graphs: Sequence[BinaryGraph], data: bytes, model: ModelDescription, chip: Chip
) -> Generator[Proof, None, None]:
    """Proofs of graphs in their order, as they are made.

    Where a child ends without a result, nobody knows at which graph. What is left is then proven one by one: the one
    that ends it again is named, and where it was memory there may be enough for one.
    """
    done = 0
    with child_processes(usable_processors()) as children:
        try:
            for begun in [begin(children, prove_here, data, graph, model, chip) for graph in graphs]:
                yield begun.result()
                done += 1
        except BrokenProcessPool:
            pass
    for graph in graphs[done:]:
        with child_processes(1) as child:
            begun = begin(child, prove_here, data, graph, model, chip)
            yield result_of(begun, f"proving graph {label_of(graph)} for {chip.name}")


def check_simulator() -> None:
    """Refuse to begin what the simulator has to prove where there is none.

    Raises:
        LinkError: onnxruntime-qnn is not installed, or has no simulator for this machine.
    """
    if not installed_sdk():
        raise LinkError("compiling and proving graphs needs onnxruntime-qnn, which is not installed", hint=HINT)
    if not simulated():
        message = "compiling and proving graphs needs Qualcomm's simulator, which there is for x86-64 alone"
        raise LinkError(message, hint="do it on such a machine")


def _check_sdk(binary: Binary, chip: Chip) -> None:
    """Refuse to prove with an SDK older than the one that made the binary."""
    here = installed_sdk()
    if sdk_numbers(binary.sdk) > sdk_numbers(here):
        message = f"the binary for {chip} was made by SDK {binary.sdk}, which is newer than the one here, {here}"
        raise LinkError(message, hint=f"install onnxruntime-qnn with SDK {binary.sdk} or later to prove it")


def prove_here(data: bytes, graph: BinaryGraph, model: ModelDescription, chip: Chip) -> Proof:
    """Proves one graph in this process, which that may end. Errors as for `prove_binary`."""
    stored, plain = inputs_of(graph, model)
    backend = HtpBackend(model, data, [graph], chip)
    found = backend.run(graph.role, graph.shape_class, stored)
    backend.close()
    return compare(graph, found, expected_of(graph, model, plain))


def expected_of(graph: BinaryGraph, model: ModelDescription, plain: Mapping[str, Array]) -> dict[str, Array]:
    """What the reference backend makes of f32 weights."""
    key = GraphKey(graph.role, graph.shape_class, "f32")
    portable = build_graph(graph.role, model, graph.shape_class, "f32", "f32")
    return ReferenceBackend(model, {key: portable}, 1).run(graph.role, graph.shape_class, plain)


def compare(graph: BinaryGraph, found: Mapping[str, Array], expected: Mapping[str, Array]) -> Proof:
    """Compares what a graph makes with what it should make, row by row."""
    errors = {name: _error(found[name], right) for name, right in expected.items()}
    furthest = max(errors, key=errors.__getitem__)
    return Proof(graph, furthest, errors[furthest])


def _judge(proof: Proof, chip: Chip) -> None:
    """Refuse a graph that is too far off."""
    if proof.error > MOST_ERROR:
        found = f"output {proof.output!r} is off by {proof.error:.2g} of a row's size, expected at most {MOST_ERROR:g}"
        hint = "the compiler computes something else; try another SDK, or report it to its vendor"
        raise PackError(found, path=f"graph {label_of(proof.graph)} for {chip.name}", hint=hint)


def _error(found: Array, right: Array) -> float:
    """The largest difference of a row, as a share of its size."""
    with np.errstate(invalid="ignore", over="ignore"):
        differences = _sizes(found.astype(np.float64) - right)
        sizes = _sizes(right.astype(np.float64))
        floor = max(LEAST_SIZE * float(sizes.max()), USUAL_SIZE * float(np.median(sizes)), 1e-30)
        off = differences / np.maximum(sizes, floor)
    return float(np.where(np.isfinite(off), off, np.inf).max())


def _sizes(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Euclidean size of each row."""
    sizes: npt.NDArray[np.float64] = np.linalg.norm(rows, axis=-1)
    return sizes


def _size(graph: BinaryGraph, model: ModelDescription) -> int:
    """What a graph takes to compute, roughly."""
    return sum(prod(_shape(value, graph)) for value in interface(graph.role, model, graph.shape_class, "f32").inputs)


def _shape(value: Value, graph: BinaryGraph) -> tuple[int, ...]:
    """The shape of an input with the graph's numbers for symbolic dimensions."""
    numbers = {"T": graph.tokens, "S": graph.keys}
    return tuple(numbers[size] if isinstance(size, str) else size for size in value.shape)


def inputs_of(graph: BinaryGraph, model: ModelDescription) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs as they are stored, and in f32; always the same for one graph."""
    random = np.random.default_rng([*label_of(graph).encode()])
    fixed = interface(graph.role, model, graph.shape_class, "f32")
    names = role_shape(graph.role, model, graph.shape_class).matrix_names
    encodings = dict(zip(names, graph.encodings, strict=True))
    stored, plain = dict[str, Array](), dict[str, Array]()
    for value in fixed.inputs:
        shape = _shape(value, graph)
        if value.name in encodings:
            parts, matrix = _MATRICES[encodings[value.name]](random, value.name, *shape)
            stored |= parts
            plain[value.name] = matrix
        else:
            made = _vector_or_rows(random, value, shape)
            stored[value.name] = plain[value.name] = made
    return stored, plain


def _vector_or_rows(random: Random, value: Value, shape: tuple[int, ...]) -> Array:
    match value.name:
        case "mask":
            mask = np.zeros(shape, np.float32)
            mask[np.arange(shape[1]) > np.arange(shape[0])[:, None] + shape[1] // 2] = HIDDEN
            return mask
        case "cos" | "sin":
            return np.asarray(np.sin(random.uniform(-4, 4, shape)), np.float32)
        case "router" | "share":
            return np.asarray(random.standard_normal(shape) / np.sqrt(shape[0]), np.float32)
        case "keys" | "values" | "sinks":
            return np.asarray(random.standard_normal(shape), np.float32)
        case name if name.endswith(".bias"):
            return np.asarray(random.standard_normal(shape), np.float32)
    if "T" not in value.shape:  # the weight of a norm
        return np.asarray(random.uniform(0.5, 2, shape), np.float32)
    rows = random.standard_normal(shape)
    kinds = np.arange(shape[-2]) % KINDS
    rows[..., kinds == 1, :] = 0
    large = LARGE_QUERY if value.name == "queries" else LARGE
    rows[..., kinds == 2, :] *= large / np.abs(rows[..., kinds == 2, :]).max(axis=-1, keepdims=True)
    alone = np.zeros(shape[-1])
    alone[shape[-1] // 2] = large
    rows[..., kinds == 3, :] = alone
    return np.asarray(rows, np.float32)


def _scales(random: Random, rows: int, columns: int, largest: int) -> npt.NDArray[np.float32]:
    """Scales such that products of rows of ones have the size of one; some are zero."""
    scales = random.uniform(0.2, 2, columns) / (largest * np.sqrt(rows))
    scales[:: max(columns // 4, 2)] = 0
    return np.asarray(scales, np.float32)


def _f32(random: Random, name: str, rows: int, columns: int) -> tuple[dict[str, Array], Array]:
    matrix = (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
    return {name: matrix}, matrix


def _w8(random: Random, name: str, rows: int, columns: int) -> tuple[dict[str, Array], Array]:
    integers = random.integers(-127, 128, (rows, columns), np.int8)
    scales = _scales(random, rows, columns, 127)
    return {name: integers, f"{name}.scale": scales}, integers * scales


def _w4(group: int) -> Callable[[Random, str, int, int], tuple[dict[str, Array], Array]]:
    def made(random: Random, name: str, rows: int, columns: int) -> tuple[dict[str, Array], Array]:
        groups = -(-rows // group)
        values = random.integers(0, 16, (groups, 2, group // 2, columns), np.uint8)
        values.reshape(-1, columns)[rows:] = NIBBLE_ZERO
        nibbles = (values[:, 0] | values[:, 1] << 4).reshape(-1, columns)
        multipliers = random.integers(1, MAX_MULTIPLIER + 1, (groups, columns), np.int8)
        multipliers *= random.choice(np.array([-1, 1], np.int8), (groups, columns))
        scales = _scales(random, rows, columns, 8 * MAX_MULTIPLIER)
        integers = np.empty((rows, columns), np.int8)
        expand_nibbles(nibbles, multipliers, group, rows, out=integers, unsigned=False)
        parts = {f"{name}.nibbles": nibbles, f"{name}.multipliers": multipliers, f"{name}.scale": scales}
        return parts, integers * scales

    return made


_MATRICES: Final[Mapping[Encoding, Callable[[Random, str, int, int], tuple[dict[str, Array], Array]]]] = {
    "f32": _f32,
    "w8": _w8,
    **{encoding: _w4(group) for encoding, group in GROUP_SIZES.items()},
}
