"""The manifest: the one typed document of a package, and its only canonical encoding. FORMAT.md section 6.

MessagePack, maps with keys in the order of the fields, keys at their default left out.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from estream_spec import limits
from estream_spec.constants import CONTENT_ID_CONTEXT
from estream_spec.messagepack import decode_canonical, encode
from estream_spec.model import Described, Dimension, ModelDescription, share_defaults
from estream_spec.records import RecordTable
from estream_spec.weights import Encoding

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME)]
Text = Annotated[str, Meta(max_length=limits.MAX_TEXT)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Offset = Annotated[int, Meta(ge=0, le=limits.MAX_FILE_LENGTH)]

Activations = Literal["f32", "dynamic-int8"]
"""What enters a matrix product: f32, or each token quantised to 8 bits on the spot."""
GraphWeights = Literal["f32", "int8", "uint8"]
"""What a graph takes as a matrix: f32, int8 with a scale per column, or that plus 128 as uint8."""
GraphRole = Literal["qkv", "attend", "convolve", "out", "expert", "dense", "head"]
BinaryTarget = Literal["htp"]
"""Accelerators that binaries are compiled for: `htp` is the Hexagon tensor processor, by way of Qualcomm's QNN."""
PolicyName = Literal["on-demand", "post-routing", "pre-routing", "resident"]
"""When groups are read, in words: see `estream_spec.schedule.Policy`."""

LANES: Final = 2
"""Reads outstanding at a time unless said otherwise: with so many, storage of phones is as fast as it gets."""

SDK_PATTERN: Final = r"^[0-9]{1,18}(\.[0-9]{1,18}){0,7}\Z"
"""Numbers joined by dots: they are compared one by one."""

POLICY: Final[PolicyName] = "pre-routing"
"""The policy unless said otherwise."""


class Tensor(Described, frozen=True, kw_only=True):
    """One tensor inside a record.

    Attributes:
        name: unique in its layout; what the graphs call it, with a suffix for the parts of a quantised matrix.
        dtype: `f32`, `i8` or `u8`, little-endian.
        shape: in elements, row-major.
        offset: bytes from the record's start, a multiple of 128.
    """

    name: Name
    dtype: Literal["f32", "i8", "u8"]
    shape: Annotated[tuple[Dimension, ...], Meta(min_length=1, max_length=2)]
    offset: Offset

    @property
    def length(self) -> int:
        """Bytes the tensor takes."""
        elements = 1
        for dimension in self.shape:
            elements *= dimension
        return elements * (4 if self.dtype == "f32" else 1)


class Matrix(Described, frozen=True, kw_only=True):
    """A matrix that several tensors of a layout make up. FORMAT.md section 7.

    Attributes:
        name: what the graphs call it.
        encoding: `f32`, `w8`, `w4g32` or `w4g64`.
        rows: logical rows; stored ones are rounded up to whole groups.
        columns: columns.
    """

    name: Name
    encoding: Encoding
    rows: Dimension
    columns: Dimension


class RecordLayout(Described, frozen=True, kw_only=True):
    """What a record holds, said once for all records alike.

    Attributes:
        kind: 1, row-major tensors one behind the other. Other numbers are for layouts of later versions.
        payload_length: bytes from the record's start to the end of its last tensor; padding follows.
        matrices: the matrices in the record.
        tensors: every tensor in the record, by offset.
    """

    payload_length: Annotated[int, Meta(ge=1, le=limits.MAX_RECORD_LENGTH)]
    matrices: Annotated[tuple[Matrix, ...], Meta(max_length=limits.MAX_TENSORS)]
    tensors: Annotated[tuple[Tensor, ...], Meta(min_length=1, max_length=limits.MAX_TENSORS)]
    kind: Literal[1] = 1


class Graph(Described, frozen=True, kw_only=True):
    """One compiled graph, kept in a section of its own.

    Attributes:
        section: id of its `GRAPH` section.
        target: where it runs; `portable` is ONNX for any ONNX Runtime.
        role: which interface of FORMAT.md section 10 it has.
        shape_class: index into the role's shape classes, see `estream_spec.graph_interface`.
        weights: what it takes as matrices.
        activations: what enters its matrix products.
    """

    section: Annotated[int, Meta(ge=0, lt=1 << 32)]
    target: Literal["portable"]
    role: GraphRole
    shape_class: Annotated[int, Meta(ge=0, lt=limits.MAX_LAYERS)]
    weights: GraphWeights
    activations: Activations


class BinaryGraph(Described, frozen=True, kw_only=True):
    """One graph inside a binary, for a fixed number of rows. FORMAT.md section 10.3.

    Attributes:
        name: what the binary calls it.
        role: what it is for.
        shape_class: index into the role's shape classes, see `estream_spec.graph_interface`.
        tokens: token rows that it takes, no more and no fewer: its tile.
        keys: keys that `attend` takes, its capacity; 0 for every other role.
        encodings: how the role's matrices are stored, in the role's order; it takes their parts as inputs.
    """

    name: Name
    role: GraphRole
    shape_class: Annotated[int, Meta(ge=0, lt=limits.MAX_LAYERS)]
    tokens: Dimension
    keys: Annotated[int, Meta(ge=0, le=limits.MAX_DIMENSION)] = 0
    encodings: Annotated[tuple[Encoding, ...], Meta(max_length=limits.MAX_TENSORS)] = ()


class Binary(Described, frozen=True, kw_only=True):
    """Graphs compiled for one chip, kept in a section of their own. FORMAT.md section 10.3.

    Attributes:
        section: id of its `BINARY` section.
        target: the kind of accelerator.
        soc_model: number that the vendor's SDK gives the chip.
        architecture: version of the accelerator: 75 for Hexagon v75.
        sdk: build of the SDK that made it, numbers joined by dots such as `2.51.0.260929181845`.
        compiler: name and version of the program that made it.
        options: what the compiler was told, for people.
        graphs: what is in it.
    """

    section: Annotated[int, Meta(ge=0, lt=1 << 32)]
    target: BinaryTarget
    soc_model: Annotated[int, Meta(ge=1, lt=1 << 32)]
    architecture: Annotated[int, Meta(ge=1, lt=1 << 16)]
    sdk: Annotated[str, Meta(pattern=SDK_PATTERN, max_length=limits.MAX_NAME)]
    compiler: Name
    graphs: Annotated[tuple[BinaryGraph, ...], Meta(min_length=1, max_length=limits.MAX_BINARY_GRAPHS)]
    options: Text = ""


class DeviceConfiguration(Described, frozen=True, kw_only=True):
    """How to run on one kind of device; what is chosen here changes speed and memory, never a result.

    A device may have several of its name, each for other lengths of the prompt.

    Attributes:
        name: the device it was made for; `generic` fits any.
        arena_bytes: memory for experts.
        group_size: experts read together.
        prefetch_depth: groups read ahead; the arena has one bank more.
        lanes: reads outstanding at a time.
        policy: when groups are read.
        prompt_tokens: tokens of the longest prompt it was made for; 0 for any.
    """

    name: Name
    arena_bytes: Offset
    group_size: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    prefetch_depth: Annotated[int, Meta(ge=0, le=limits.MAX_EXPERTS)]
    lanes: Annotated[int, Meta(ge=1, le=limits.MAX_LANES)] = LANES
    policy: PolicyName = POLICY
    prompt_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_DIMENSION)] = 0

    def __post_init__(self) -> None:
        """See `share_defaults`."""
        share_defaults(self)


class Source(Described, frozen=True, kw_only=True):
    """A file the package was made from, or, as `tensors`, all tensors of the checkpoint together."""

    name: Text
    length: Offset
    sha256: Digest


class Provenance(Described, frozen=True, kw_only=True):
    """Where the package came from.

    Attributes:
        writer: name and version of the program that wrote it.
        licence: SPDX expression of the weights' licence; empty where it is not known.
        sources: the checkpoint's documents by name, then its tensors.
    """

    writer: Name
    licence: Text = ""
    sources: Annotated[tuple[Source, ...], Meta(max_length=limits.MAX_SOURCES)] = ()


class Manifest(Described, frozen=True, kw_only=True):
    """Everything but bytes.

    Attributes:
        name: the model's name, for people.
        content_id: digest of the logical content, see `content_id`.
        model: what the model computes.
        layouts: record layouts, named by index in the tables.
        graphs: compiled graphs.
        device_configurations: the first one's name is that of the default device.
        provenance: where the package came from.
        binaries: graphs compiled for accelerators.
        extensions: other parties' data by reverse domain name; readers ignore what they do not know.
    """

    name: Name
    content_id: Digest
    model: ModelDescription
    layouts: Annotated[tuple[RecordLayout, ...], Meta(min_length=1, max_length=limits.MAX_SHAPE_CLASSES * 4)]
    graphs: Annotated[tuple[Graph, ...], Meta(min_length=1, max_length=limits.MAX_GRAPHS)]
    device_configurations: Annotated[
        tuple[DeviceConfiguration, ...], Meta(min_length=1, max_length=limits.MAX_DEVICE_CONFIGURATIONS)
    ]
    provenance: Provenance
    binaries: Annotated[tuple[Binary, ...], Meta(max_length=limits.MAX_BINARIES)] = ()
    extensions: Annotated[dict[Name, bytes], Meta(max_length=limits.MAX_EXTENSIONS)] = msgspec.field(
        default_factory=dict
    )


_manifest = msgspec.msgpack.Decoder(Manifest)
_device_configuration = msgspec.msgpack.Decoder(DeviceConfiguration)


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest and prove that its bytes are the canonical ones.

    Raises:
        MalformedError: not MessagePack.
        InvalidError: another structure, a value outside its range, or not canonical.
    """
    return decode_canonical(_manifest, data, "manifest")


def decode_device_configuration(data: bytes, path: str) -> DeviceConfiguration:
    """Parse a device configuration that has a section of its own. Raises as `decode_manifest` does."""
    return decode_canonical(_device_configuration, data, path)


def content_id(
    model: ModelDescription,
    layouts: tuple[RecordLayout, ...],
    dense: RecordTable,
    experts: RecordTable,
    documents: tuple[bytes, ...],
) -> bytes:
    """SHA-256 of the logical content: the same for every page size, order of sections, codec and configuration.

    Args:
        model: the model description.
        layouts: record layouts; how they are numbered does not matter, which range with records has which does.
        dense: the table of dense records.
        experts: the table of expert records.
        documents: tokenizer, then chat template, decoded; empty bytes where there is none.

    Spec: FORMAT.md section 9.
    """
    parts = [encode(model)]
    for table in (dense, experts):
        parts.append(encode([layouts[each.layout] for each in table.ranges if each.count]))
        parts.append(b"".join(table.digests))
    digest = sha256(CONTENT_ID_CONTEXT)
    for part in [*parts, *documents]:
        digest.update(sha256(part).digest())
    return digest.digest()
