"""An open package: its manifest at once, everything else when asked for.

Opening reads the two superblocks, the directory and the manifest and nothing else, whatever the package's size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import crc32c
import numpy as np
import zstandard

from estream_loader.integrity import verify
from estream_loader.source import ByteSource, FileSource, MemorySource, read, read_exactly
from estream_spec.constants import SUPERBLOCK_OFFSETS, Codec, SectionType
from estream_spec.container import Container, check_superblock, choose_superblock, decode_container
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.manifest import Graph, Manifest, RecordLayout, decode_manifest
from estream_spec.records import DirectoryEntry, RecordTable, Superblock
from estream_spec.rules import check_device_configurations, check_manifest, check_tables

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Integrity = Literal["open", "paged", "full"]
"""How much is proven, and when.

`open`: superblock, directory, and the digest of each section that is read whole. `paged` adds the checksum of each
record as it lands in memory, before anything computes with it. `full` adds the SHA-256 of everything, on opening.
"""

_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "i8": np.dtype("i1"), "u8": np.dtype("u1")}


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """One record: where it is and what it must be."""

    number: int
    """Position in its table."""
    offset: int
    """Bytes from the package's start."""
    length: int
    """Bytes, padding included."""
    layout: RecordLayout
    checksum: int
    """crc32c over all its bytes."""
    digest: bytes
    """SHA-256 over its payload."""
    path: str
    """What messages call it."""


class RecordSection:
    """Records of one section through their table."""

    def __init__(self, entry: DirectoryEntry, table: RecordTable, layouts: tuple[RecordLayout, ...], name: str):
        self.entry, self.table, self._layouts, self._name = entry, table, layouts, name

    def place(self, range_index: int, index: int = 0) -> RecordPlace:
        """The record `index` of a range: of layer `range_index` for experts, of that block for dense weights."""
        record_range = self.table.ranges[range_index]
        number = self.table.first[range_index] + index
        return RecordPlace(
            number=number,
            offset=self.entry.offset + record_range.base + index * record_range.record_length,
            length=record_range.record_length,
            layout=self._layouts[record_range.layout],
            checksum=self.table.checksums[number],
            digest=self.table.digests[number],
            path=f"{self._name}[{range_index}][{index}]",
        )

    def places(self) -> Iterator[RecordPlace]:
        """Every record, in order."""
        for range_index, record_range in enumerate(self.table.ranges):
            for index in range(record_range.count):
                yield self.place(range_index, index)


class Package:
    """One open package. Use it as a context manager; after closing, only what was already read may be used."""

    def __init__(self, source: ByteSource, integrity: Integrity):
        self.source, self.integrity = source, integrity
        self.container = read_container(source)
        entry = self.container.section(SectionType.MANIFEST)
        self.manifest: Manifest = decode_manifest(self.read_section(entry))
        check_manifest(self.manifest, self.container)
        if integrity == "full":
            verify(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self.source.close()

    def read_section(self, entry: DirectoryEntry) -> bytes:
        """A whole section, its digest checked and its codec undone.

        Raises:
            IntegrityError: the digest differs, or the stored bytes do not decode to the stated length.
        """
        path = f"{SectionType(entry.type).name.lower()} section {entry.id}"
        stored = read(self.source, entry.offset, entry.stored_length)
        if sha256(stored).digest() != entry.sha256:
            raise IntegrityError("section digest differs from the directory's", path=path, offset=entry.offset)
        return stored if entry.codec == Codec.NONE else _decompress(stored, entry, path)

    @cached_property
    def _tables(self) -> tuple[RecordSection, RecordSection]:
        """Dense and expert records; both tables are judged together."""
        dense = RecordTable.decode(self._whole(SectionType.DENSE_TABLE), path="dense_table")
        experts = RecordTable.decode(self._whole(SectionType.EXPERT_TABLE), path="expert_table")
        check_tables(self.manifest, self.container, dense, experts)
        check_device_configurations(self.manifest, experts)
        layouts = self.manifest.layouts
        return (
            RecordSection(self.container.section(SectionType.DENSE), dense, layouts, "dense"),
            RecordSection(self.container.section(SectionType.EXPERTS), experts, layouts, "experts"),
        )

    @property
    def dense(self) -> RecordSection:
        """Dense records: the embedding, each layer, the final norm with the head."""
        return self._tables[0]

    @property
    def experts(self) -> RecordSection:
        """Expert records: one range a layer, one record an expert."""
        return self._tables[1]

    def read_record(self, place: RecordPlace, buffer: memoryview) -> None:
        """Read a record into memory of exactly its length and check it as the integrity policy asks.

        Raises:
            IntegrityError: the checksum differs or bytes are missing.
            LinkError: the device failed.
        """
        read_exactly(self.source, buffer, place.offset)
        self.check_record(place, buffer)

    def check_record(self, place: RecordPlace, buffer: memoryview) -> None:
        """Check a record that has landed in memory, unless the policy is `open`.

        Raises:
            IntegrityError: the checksum differs.
        """
        if self.integrity == "open":
            return
        if (checksum := crc32c.crc32c(buffer)) != place.checksum:
            message = f"record has checksum {checksum:08x}, its table says {place.checksum:08x}"
            raise IntegrityError(message, path=place.path, offset=place.offset)

    def graph(self, graph: Graph) -> bytes:
        """The bytes of one graph."""
        return self.read_section(self.container.section(SectionType.GRAPH, graph.section))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            LinkError: the package has none, or the `tokenizers` library cannot read it.
        """
        from tokenizers import Tokenizer

        if (data := self.tokenizer_json) is None:
            raise LinkError("the package has no tokenizer", path=self.source.name, hint="give token ids")
        try:
            return Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare exceptions
            raise LinkError(f"the tokenizer cannot be used: {error}", path=self.source.name) from None

    @cached_property
    def tokenizer_json(self) -> bytes | None:
        """The tokenizer as stored, or None."""
        return self._optional(SectionType.TOKENIZER)

    @cached_property
    def chat_template(self) -> bytes | None:
        """The chat template as stored, Jinja in UTF-8, or None. Render it in a sandbox only."""
        return self._optional(SectionType.CHAT_TEMPLATE)

    @property
    def file_id(self) -> bytes:
        """SHA-256 that names this very file, what a signature covers."""
        return self.container.file_id()

    def _whole(self, section_type: SectionType) -> bytes:
        return self.read_section(self.container.section(section_type))

    def _optional(self, section_type: SectionType) -> bytes | None:
        entry = self.container.find(section_type)
        return None if entry is None else self.read_section(entry)


def open_package(
    source: str | os.PathLike[str] | int | bytes | bytearray | memoryview | ByteSource,
    *,
    offset: int = 0,
    integrity: Integrity = "paged",
) -> Package:
    """Open a package.

    Args:
        source: a path, an open file descriptor (which stays the caller's), the bytes themselves, or a byte source.
        offset: where the package begins in the file or the bytes; a byte source begins where it says.
        integrity: what is proven and when, see `Integrity`.

    Raises:
        FormatError: the package is refused, with the reason.
        LinkError: there is no such file, or it cannot be read.
    """
    if integrity not in get_args(Integrity):
        raise LinkError(f"integrity policy {integrity!r}, expected one of {', '.join(get_args(Integrity))}")
    if offset < 0:
        raise LinkError(f"package at offset {offset}, expected 0 or more")
    opened: ByteSource
    if isinstance(source, int):
        opened = FileSource(source, base=offset, owned=False)
    elif isinstance(source, (str, os.PathLike)):
        opened = FileSource.open(Path(source), base=offset)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        opened = MemorySource(memoryview(source).cast("B")[offset:])
    else:
        opened = source
    with ExitStack() as stack:
        stack.callback(opened.close)
        package = Package(opened, integrity)
        stack.pop_all()
        return package


def read_container(source: ByteSource) -> Container:
    """Superblock and directory of a package, judged.

    Raises:
        FormatError: the package is refused.
    """
    available = max(source.available(), 0)
    slots = [read(source, at, max(min(Superblock.SIZE, available - at), 0)) for at in SUPERBLOCK_OFFSETS]
    superblock = choose_superblock((slots[0], slots[1]))
    check_superblock(superblock, available)
    return decode_container(superblock, read(source, superblock.directory_offset, superblock.directory_length))


def tensors(layout: RecordLayout, record: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a record by name, as views: nothing is copied.

    Args:
        layout: what the record holds.
        record: the record's bytes.
    """
    return {
        tensor.name: np.frombuffer(
            record[tensor.offset : tensor.offset + tensor.length], dtype=_DTYPES[tensor.dtype]
        ).reshape(tensor.shape)
        for tensor in layout.tensors
    }


def _decompress(stored: bytes, entry: DirectoryEntry, path: str) -> bytes:
    try:
        if zstandard.get_frame_parameters(stored).content_size != entry.length:
            message = f"compressed section does not say that it holds {entry.length} bytes"
            raise IntegrityError(message, path=path, offset=entry.offset)
        # In one step, into memory of the stated size: a stream would also unpack what goes beyond it.
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        message = f"section is not one zstd frame of {entry.length} bytes: {error}"
        raise IntegrityError(message, path=path, offset=entry.offset) from None
