"""What can be told of a context binary without the library that reads it, whose format the vendor does not publish."""

from __future__ import annotations

import re
from mmap import mmap
from typing import Final

from estream_spec.binary_interface import interface_of, label_of, tensor_name
from estream_spec.chips import chip_numbered
from estream_spec.errors import LinkError
from estream_spec.manifest import Binary
from estream_spec.matching import sdk_numbers
from estream_spec.model import ModelDescription

_BUILD: Final = re.compile(rb"(?<![0-9A-Za-z_.])v([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{6,18})(?![0-9.])")
"""How the SDK writes its build into each graph, such as `v2.51.0.260929181845`, to which some add `_99241`."""

_NAME: Final = re.compile(rb"[0-9A-Za-z_]{4,256}(?=\0)")
"""What may be the name of a tensor."""


def builds_in(data: bytes | mmap) -> list[str]:
    """The builds of the SDK that the bytes name, such as `2.51.0.260929181845`; one where they are a context binary."""
    return sorted({found.group(1).decode() for found in _BUILD.finditer(data)})


def holds_name(data: bytes, name: str) -> bool:
    """Whether a context binary holds a name, of a graph or a tensor. Names stand in it as they are, ended by a zero."""
    return name.encode() + b"\0" in data


def check_contents(binary: Binary, data: bytes, model: ModelDescription) -> None:
    """Compare a binary with what the manifest says of it, as far as its bytes tell.

    Whether it is sound they do not tell: of one that was made to do harm, the vendor's library has to find out.

    Args:
        binary: its entry in the manifest.
        data: the binary.
        model: what its graphs belong to.

    Raises:
        LinkError: it is none, made by another build of the SDK, or lacks a graph or a tensor of one; names of tensors
            tell rows, keys and encodings.
    """
    path = f"binary for {chip_numbered(binary.soc_model, binary.architecture).name}"
    builds = builds_in(data)
    if not builds:
        raise LinkError(f"{len(data):,} bytes that name no build of the QNN SDK, expected a context binary", path=path)
    if [sdk_numbers(build) for build in builds] != [sdk_numbers(binary.sdk)]:
        found = " and ".join(builds)
        raise LinkError(f"it was made by SDK {found}, the manifest says {binary.sdk}", path=path)
    names = {found.group().decode() for found in _NAME.finditer(data)}
    for graph in binary.graphs:
        if not holds_name(data, graph.name):
            raise LinkError(f"it has no graph {graph.name!r}, which the manifest lists", path=path)
        values = interface_of(graph, model)
        tensors = {tensor_name(label_of(graph), each.name) for each in (*values.inputs, *values.outputs)}
        if missing := sorted(tensors - names):
            raise LinkError(f"it has no tensor {missing[0]!r}, which a graph that the manifest lists takes", path=path)
