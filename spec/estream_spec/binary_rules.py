"""What the manifest may say of binaries. FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Iterable

from estream_spec.graph_interface import class_count, role_shape
from estream_spec.manifest import Binary, BinaryGraph, Manifest
from estream_spec.model import ModelDescription
from estream_spec.rulebook import refusal


def check_binaries(manifest: Manifest, sections: Iterable[int]) -> None:
    """Judge the binaries of a manifest.

    Args:
        manifest: its model is sound.
        sections: ids of all `BINARY` sections.

    Raises:
        InvalidError: sections and binaries that do not pair off, two binaries for one chip, a graph that fits no role
            of the model, or two graphs that are alike or share a name.
    """
    path = "manifest.binaries"
    named, there = sorted(binary.section for binary in manifest.binaries), sorted(sections)
    if named != there:
        odd = next(each for each in sorted({*named, *there}) if named.count(each) != 1 or each not in there)
        message = f"binaries and BINARY sections do not pair off, first at section id {odd}, expected each exactly once"
        raise refusal("EMOE-BIN-001", message, path=path)
    chips = set[tuple[str, int, int]]()
    for index, binary in enumerate(manifest.binaries):
        where = f"{path}[{index}]"
        chip = binary.target, binary.soc_model, binary.architecture
        if chip in chips:
            message = (
                f"second binary for {binary.target} of chip {binary.soc_model}, v{binary.architecture}, expected one"
            )
            raise refusal("EMOE-BIN-002", message, path=where)
        chips.add(chip)
        _check_graphs(binary, manifest.model, f"{where}.graphs")


def _check_graphs(binary: Binary, model: ModelDescription, path: str) -> None:
    kinds, names = set[tuple[object, ...]](), set[str]()
    for index, graph in enumerate(binary.graphs):
        where = f"{path}[{index}]"
        if (fault := _misfit(graph, model)) is not None:
            raise refusal("EMOE-BIN-003", fault, path=where)
        kind = graph.role, graph.shape_class, graph.tokens, graph.keys, graph.encodings
        if kind in kinds:
            message = (
                f"second graph of role {graph.role!r}, shape class, tokens, keys and encodings alike, expected one"
            )
            raise refusal("EMOE-BIN-004", message, path=where)
        if graph.name in names:
            raise refusal("EMOE-BIN-005", f"second graph of the name {graph.name!r}, expected one", path=where)
        kinds.add(kind)
        names.add(graph.name)


def _misfit(graph: BinaryGraph, model: ModelDescription) -> str | None:
    """Why a graph serves nothing in a model, or None."""
    if graph.shape_class >= (count := class_count(graph.role, model)):
        return f"shape class {graph.shape_class} of role {graph.role!r}, the model has {count}"
    if len(graph.encodings) != (count := len(role_shape(graph.role, model, graph.shape_class).matrices)):
        return f"{len(graph.encodings)} encodings for role {graph.role!r}, which has {count} matrices"
    if (graph.keys > 0) != (graph.role == "attend"):
        wanted = "at least 1" if graph.role == "attend" else "0"
        return f"{graph.keys} keys for role {graph.role!r}, expected {wanted}"
    return None
