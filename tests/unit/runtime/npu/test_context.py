"""Contexts that come and go in one process, sound ones and others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader import open_package
from estream_runtime.backends.htp import HtpBackend
from estream_runtime.npu.context import open_context
from estream_spec.errors import LinkError
from estream_spec.manifest import BinaryGraph
from estream_spec.model import ModelDescription
from fixtures.compiled import CHIP, Array, case, head_runs

Graphs = Sequence[BinaryGraph]
Opened = tuple[ModelDescription, bytes, Graphs]
CLOSE = 1e-2


@pytest.fixture(scope="module")
def binary(compiled_package: Path) -> Opened:
    """The binary of a package, with the model and the graphs that its manifest gives."""
    with open_package(compiled_package) as package:
        [binary] = package.manifest.binaries
        return package.manifest.model, package.binary(binary), binary.graphs


def test_packages_open_at_once_and_again_and_again(binary: Opened, backend: HtpBackend) -> None:
    """One that stays open, and one that comes and goes, twice at a time."""
    model, data, graphs = binary
    [head] = [graph for graph in graphs if graph.role == "head"]
    given, other = case("head", 0, head.encodings, 5, model=model).stored, case("out", 1, ("w8",), 7).stored
    results, others = list[Array](), list[Array]()
    for _ in range(2):
        one, same = (HtpBackend(model, data, graphs, CHIP) for _ in range(2))
        others.append(backend.run("out", 1, other)["x"])
        results.append(one.run("head", 0, given)["logits"])
        one.close()
        results.append(same.run("head", 0, given)["logits"])
        same.close()
        others.append(backend.run("out", 1, other)["x"])
    assert all(np.array_equal(each, results[0]) for each in results)
    assert all(np.array_equal(each, others[0]) for each in others)


def test_threads_that_open_packages_wait_for_each_other(binary: Opened) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert all(error < CLOSE for error in threads.map(lambda _: head_runs(*binary), range(2)))


def _first(graphs: Graphs) -> Graphs:
    return [replace(graphs[0], name="nothing"), *graphs[1:]]


def _last(graphs: Graphs) -> Graphs:
    return [*graphs[:-1], replace(graphs[-1], name="nothing")]


def _alone(graphs: Graphs) -> Graphs:
    return _first(graphs)[:1]


def _all(graphs: Graphs) -> Graphs:
    return [replace(graph, name=f"nothing_{number}") for number, graph in enumerate(graphs)]


@pytest.mark.parametrize("change", [_first, _last, _alone, _all])
def test_graphs_that_are_not_in_a_binary(change: Callable[[Graphs], Graphs], binary: Opened) -> None:
    """They are refused, and what the binary has instead is in nobody's way."""
    model, data, graphs = binary
    with pytest.raises(LinkError, match="the binary does not load"):
        open_context(data, change(graphs), model, CHIP)
    assert head_runs(*binary) < CLOSE


def test_graphs_that_a_manifest_leaves_out_are_in_nobodys_way(binary: Opened) -> None:
    model, data, graphs = binary
    for some in (graphs[:2], graphs[-2:], graphs[:1]):
        assert len(open_context(data, some, model, CHIP)) == len(some)
        assert head_runs(*binary) < CLOSE


def test_bytes_that_are_no_binary(compiled_package: Path) -> None:
    """They are refused, even where graphs of their names were left behind, and the next binary opens."""
    command = [sys.executable, "-m", "fixtures.faulty_contexts", str(compiled_package)]
    path = ":".join(filter(None, sys.path))
    found = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
    lines = [line.partition(": ") for line in found.stderr.splitlines()]
    assert [name for name, _, _ in lines] == [
        "empty",
        "garbage",
        "text",
        "half",
        "all but the last",
        "a package",
        "garbage under names that were left",
    ]
    for name, _, told in lines:
        raised, _, error = told.partition("; then ")
        assert raised == "the binary does not load", name
        assert float(error) < CLOSE, name
