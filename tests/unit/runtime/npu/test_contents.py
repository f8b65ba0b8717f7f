"""What a context binary tells without the library that reads it."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from estream_runtime.npu.contents import builds_in, check_contents, holds_name
from estream_spec.binary_interface import interface_of, label_of, tensor_name
from estream_spec.errors import LinkError
from estream_spec.manifest import Binary, BinaryGraph
from fixtures.compiled import MODEL
from fixtures.packages import binary

SDK = "2.51.0.260929181845"


def entry(**changes: object) -> Binary:
    """What a manifest says of `DATA`."""
    return binary(3, **{"sdk": SDK, **changes})


def tensors(graph: BinaryGraph) -> bytes:
    """Names of a graph's tensors, as a binary has them."""
    values = interface_of(graph, MODEL)
    return b"".join(
        tensor_name(label_of(graph), each.name).encode() + b"\0" for each in (*values.inputs, *values.outputs)
    )


[GRAPH] = entry().graphs
DATA = b"\x14\0\0\0v2.51.0.260929181845\0\0attend\0\0\0\0" + tensors(GRAPH)


def test_builds_are_told() -> None:
    assert builds_in(DATA * 2) == [SDK]
    assert builds_in(b"v2.51.0.260929\0v2.50.1.260101\0") == ["2.50.1.260101", "2.51.0.260929"]
    assert builds_in(b"2.51.0.260929181845") == []


def test_names_are_whole() -> None:
    data = b"\0expert_0_32\0expert_0_64_x\0"
    assert holds_name(data, "expert_0_32")
    assert not holds_name(data, "expert_0_64")


@pytest.mark.parametrize("sdk", [SDK, f"{SDK}.0", f"2.051.0.{SDK.rpartition('.')[2]}"])
def test_a_binary_that_is_what_the_manifest_says_passes(sdk: str) -> None:
    check_contents(entry(sdk=sdk), DATA, MODEL)


@pytest.mark.parametrize(
    ("data", "sdk", "message"),
    [
        (b"", SDK, "0 bytes that name no build of the QNN SDK, expected a context binary"),
        (b"ELF" * 1000, SDK, "3,000 bytes that name no build of the QNN SDK"),
        (DATA[:12], SDK, "12 bytes that name no build"),
        (DATA, "2.51.0.260929181844", f"it was made by SDK {SDK}, the manifest says 2.51.0.260929181844"),
        (DATA, "2.51", f"it was made by SDK {SDK}, the manifest says 2.51"),
        (DATA + b"v2.50.1.260101\0", SDK, f"it was made by SDK 2.50.1.260101 and {SDK}, the manifest says {SDK}"),
    ],
)
def test_a_binary_that_is_something_else_is_refused(data: bytes, sdk: str, message: str) -> None:
    with pytest.raises(LinkError, match=re.escape(message)) as refusal:
        check_contents(entry(sdk=sdk), data, MODEL)
    assert refusal.value.path == "binary for sm8650"


def test_a_graph_that_is_not_in_it_is_named() -> None:
    missing = replace(GRAPH, name="attend_2", tokens=64)
    with pytest.raises(LinkError, match="it has no graph 'attend_2', which the manifest lists"):
        check_contents(entry(graphs=(GRAPH, missing)), DATA, MODEL)


@pytest.mark.parametrize("changes", [{"tokens": 7}, {"keys": 1 << 24}])
def test_a_graph_of_other_numbers_is_told_by_its_tensors(changes: dict[str, int]) -> None:
    """What the library makes of names that are not there is the end of the process."""
    lie = replace(GRAPH, **changes)
    with pytest.raises(
        LinkError, match=rf"it has no tensor '{label_of(lie)}_\w+', which a graph that the manifest lists"
    ):
        check_contents(entry(graphs=(lie,)), DATA, MODEL)
