"""An open package: its manifest at once, everything else when asked for.

Opening reads the two superblocks, the directory and the manifest and nothing else, whatever the package's size.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal, Self, get_args

import crc32c
import zstandard

from estream_loader.integrity import verify
from estream_loader.records import RecordPlace, RecordSection
from estream_loader.source import ByteSource, FileSource, MemorySource, available, read, read_exactly
from estream_loader.tokenizing import tokenizer_faults
from estream_spec.constants import SUPERBLOCK_OFFSETS, Codec, SectionType
from estream_spec.container import Container, check_superblock, choose_superblock, decode_container
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.manifest import Graph, Manifest, decode_manifest
from estream_spec.records import DirectoryEntry, RecordTable, Superblock
from estream_spec.rules import check_device_configurations, check_manifest, check_tables

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Integrity = Literal["open", "paged", "full"]
"""How much is proven, and when.

`open`: superblock, directory, and the digest of each section that is read whole. `paged` adds the checksum of each
record as it lands in memory, before anything computes with it. `full` adds the SHA-256 of everything, on opening.
"""


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
        place.check(crc32c.crc32c(buffer))

    def graph(self, graph: Graph) -> bytes:
        """The bytes of one graph."""
        return self.read_section(self.container.section(SectionType.GRAPH, graph.section))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, set to neither cut texts off nor fill them up, whatever its file asks for.

        Raises:
            LinkError: the package has none, or the `tokenizers` library cannot read it.
        """
        from tokenizers import Tokenizer

        if (data := self.tokenizer_json) is None:
            hint = "it was built from a checkpoint without tokenizer.json; only token ids, from Python, can be given"
            raise LinkError("the package has no tokenizer", path=self.source.name, hint=hint)
        with tokenizer_faults(self.source.name):
            tokenizer = Tokenizer.from_str(data.decode())
            tokenizer.no_truncation()
            tokenizer.no_padding()
        return tokenizer

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
    source: str | os.PathLike[str] | int | IO[bytes] | bytes | bytearray | memoryview | ByteSource,
    *,
    offset: int = 0,
    integrity: Integrity = "paged",
) -> Package:
    """Open a package.

    Args:
        source: a path, an open file or its descriptor (which stays the caller's and must stay open), the bytes
            themselves, or a byte source.
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
    elif isinstance(source, ByteSource):
        if offset:
            raise LinkError(f"offset {offset} with a byte source, which begins where it says", hint="leave it out")
        opened = source
    else:
        try:
            opened = FileSource(source.fileno(), base=offset, owned=False)
        except (AttributeError, OSError):
            message = f"a package cannot be read from {type(source).__name__!r}"
            raise LinkError(message, hint="give a path, an open file, a descriptor, bytes or a byte source") from None
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
    length = available(source)
    slots = [read(source, at, max(min(Superblock.SIZE, length - at), 0)) for at in SUPERBLOCK_OFFSETS]
    superblock = choose_superblock((slots[0], slots[1]))
    check_superblock(superblock, length)
    return decode_container(superblock, read(source, superblock.directory_offset, superblock.directory_length))


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
