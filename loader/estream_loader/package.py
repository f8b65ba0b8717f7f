"""An open package: its manifest at once, everything else when asked for.

Opening reads the two superblocks, the directory and the manifest and nothing else, whatever the package's size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal, Self, get_args

import crc32c

from estream_loader.records import RecordPlace, RecordSection
from estream_loader.sections import check_digest, decompress, section_path
from estream_loader.source import ByteSource, FileSource, MemorySource, available, read, read_exactly
from estream_loader.tokenizing import tokenizer_faults, tokenizer_text
from estream_loader.trust import SignaturePolicy, check_signatures, decode_detached
from estream_spec.constants import SUPERBLOCK_OFFSETS, Codec, SectionType
from estream_spec.container import Container, check_superblock, choose_superblock, decode_container
from estream_spec.devices import of_device
from estream_spec.errors import LinkError, located
from estream_spec.manifest import (
    Binary,
    DeviceConfiguration,
    Graph,
    Manifest,
    decode_device_configuration,
    decode_manifest,
)
from estream_spec.prefetch_router import PrefetchRouter, check_prefetch_router, decode_prefetch_router
from estream_spec.records import DirectoryEntry, RecordTable, Signature, Superblock, decode_signature
from estream_spec.rules import (
    check_device_configuration,
    check_device_configurations,
    check_manifest,
    check_tables,
)
from estream_spec.schedule import ExpertShape, Phase, Program
from estream_spec.schedule_verifier import verify_program

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Integrity = Literal["open", "paged", "full"]
"""How much is proven, and when.

`open`: superblock, directory, and the digest of each section that is read whole. `paged` adds the checksum of each
record as it lands in memory, before anything computes with it. `full` adds the SHA-256 of everything, on opening.
"""


class Package:
    """One open package. Use it as a context manager; after closing, only what was already read may be used."""

    def __init__(self, source: ByteSource, integrity: Integrity, policy: SignaturePolicy | None = None):
        self.source, self.integrity = source, integrity
        self.container = read_container(source)
        if policy is not None:  # before anything is read that only a signature vouches for
            signatures = [*self.signatures(), *decode_detached(policy.detached)]
            check_signatures(policy, signatures, self.file_id, self.container.superblock.directory_offset)
        entry = self.container.section(SectionType.MANIFEST)
        with located(entry.offset):
            self.manifest: Manifest = decode_manifest(self.read_section(entry))
            check_manifest(self.manifest, self.container)
        if integrity == "full":
            from estream_loader.integrity import verify  # which others need not wait for

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
        stored = read(self.source, entry.offset, entry.stored_length)
        check_digest(entry, sha256(stored).digest())
        return stored if entry.codec == Codec.NONE else decompress(stored, entry)

    @cached_property
    def _tables(self) -> tuple[RecordSection, RecordSection]:
        """Dense and expert records; both tables are judged together."""
        dense, experts = self._table(SectionType.DENSE_TABLE), self._table(SectionType.EXPERT_TABLE)
        with located(self.container.section(SectionType.MANIFEST).offset):
            check_tables(self.manifest, self.container, dense, experts)
            check_device_configurations(self.manifest, experts)
        layouts = self.manifest.layouts
        return (
            RecordSection(self.container.section(SectionType.DENSE), dense, layouts, "dense"),
            RecordSection(self.container.section(SectionType.EXPERTS), experts, layouts, "experts"),
        )

    @cached_property
    def device_configurations(self) -> tuple[DeviceConfiguration, ...]:
        """How to run on kinds of devices, the default's first: those added on a device, latest first, then the others.

        Raises:
            FormatError: one that was added is at fault.
        """
        return (*self._added_configurations, *self.manifest.device_configurations)

    def device(self, name: str | None = None) -> tuple[DeviceConfiguration, ...]:
        """The device configurations of one device, which differ in the length of the prompt they are for.

        Args:
            name: the device; None takes the default.

        Raises:
            LinkError: there is no such device.
            FormatError: a device configuration that was added is at fault.
        """
        return of_device(self._added_configurations, self.manifest.device_configurations, name)

    @cached_property
    def _added_configurations(self) -> tuple[DeviceConfiguration, ...]:
        """The device configurations added where the package is used, latest first."""
        added = list[tuple[int, DeviceConfiguration]]()
        for entry in self._all(SectionType.DEVICE_CONFIGURATION):
            with located(entry.offset):
                path = section_path(entry)
                choice = decode_device_configuration(self.read_section(entry), path)
                check_device_configuration(choice, [other for _, other in added], self.experts.table, path)
            added.append((entry.id, choice))
        latest_first = sorted(added, key=lambda each: each[0], reverse=True)
        return tuple(choice for _, choice in latest_first)

    @cached_property
    def expert_shape(self) -> ExpertShape:
        """What programs for this package depend on."""
        return ExpertShape.of(self.manifest.model, self.experts.table)

    @cached_property
    def schedules(self) -> dict[DirectoryEntry, Program]:
        """The programs in the package by their section, in the order of the directory, all of them proven.

        Raises:
            FormatError: one that is at fault.
        """
        shape, found = self.expert_shape, {}
        for entry in self._all(SectionType.SCHEDULE):
            with located(entry.offset):
                path = section_path(entry)
                program = Program.decode(self.read_section(entry), path=path)
                verify_program(program, shape, path)
            found[entry] = program
        return found

    def program(self, choice: DeviceConfiguration, phase: Phase) -> Program | None:
        """The package's program for a device configuration, or None; the one of the highest section id counts.

        Raises:
            FormatError: a program is at fault, this one or another.
        """
        fitting = [(entry.id, each) for entry, each in self.schedules.items() if each.matches(choice)]
        of_phase = [pair for pair in fitting if pair[1].phase == phase]
        return max(of_phase, key=lambda pair: pair[0])[1] if of_phase else None

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

    def binary(self, binary: Binary) -> bytes:
        """The bytes of one binary. Whoever hands them on compares chip and SDK first: FORMAT.md section 10.3.

        Raises:
            IntegrityError: its digest differs, or the stored bytes do not decode to the stated length.
        """
        return self.read_section(self.container.section(SectionType.BINARY, binary.section))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, set to neither cut texts off nor fill them up, whatever its file asks for.

        Raises:
            LinkError: the package has none, a token is too long, or the `tokenizers` library cannot read it.
        """
        from tokenizers import Tokenizer

        if (data := self.tokenizer_json) is None:
            hint = "only token ids, from Python, can be given"
            raise LinkError("the package has no tokenizer", path=self.source.name, hint=hint)
        with tokenizer_faults(self.source.name):
            tokenizer = Tokenizer.from_str(tokenizer_text(data, self.source.name))
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

    @cached_property
    def prefetch_router(self) -> PrefetchRouter | None:
        """What predicts experts, or None; proven to be for this model, but for the bytes of its routers: see `full`.

        Raises:
            FormatError: it is at fault, or for another model.
        """
        if (entry := self.container.find(SectionType.PREFETCH_ROUTER)) is None:
            return None
        with located(entry.offset):
            path = section_path(entry)
            router = decode_prefetch_router(self.read_section(entry), path)
            check_prefetch_router(router, self.manifest, path)
        return router

    @property
    def file_id(self) -> bytes:
        """SHA-256 that names this very file, what a signature covers."""
        return self.container.file_id()

    def signatures(self) -> list[Signature]:
        """The signatures in the package, whether they verify or not, without those of unknown algorithms.

        Raises:
            IntegrityError: a section that was damaged.
            MalformedError: one that is no signature.
        """
        found = []
        for entry in self._all(SectionType.SIGNATURE):
            data = self.read_section(entry)
            if (signature := decode_signature(data, path=section_path(entry), offset=entry.offset)) is not None:
                found.append(signature)
        return found

    def _all(self, section_type: SectionType) -> Iterator[DirectoryEntry]:
        return (entry for entry in self.container.entries if entry.type == section_type)

    def _table(self, section_type: SectionType) -> RecordTable:
        entry = self.container.section(section_type)
        with located(entry.offset):
            return RecordTable.decode(self.read_section(entry), path=section_type.name.lower())

    def _optional(self, section_type: SectionType) -> bytes | None:
        entry = self.container.find(section_type)
        return None if entry is None else self.read_section(entry)


def open_package(
    source: str | os.PathLike[str] | int | IO[bytes] | bytes | bytearray | memoryview | ByteSource,
    *,
    offset: int = 0,
    integrity: Integrity | None = None,
    policy: SignaturePolicy | None = None,
) -> Package:
    """Open a package.

    With a policy everything is proven on opening unless `integrity` says otherwise. Under `paged` records are held to a
    CRC-32C alone, which can be forged: who can write the file could change the weights of a signed package unnoticed.

    Args:
        source: a path, an open file or its descriptor (which stays the caller's and must stay open), the bytes
            themselves, or a byte source.
        offset: where the package begins in the file or the bytes; a byte source begins where it says.
        integrity: what is proven and when, see `Integrity`; None is `full` with a policy and `paged` without.
        policy: who must have signed it; None asks for no signature.

    Raises:
        FormatError: the package is refused, with the reason.
        TrustError: it is not signed as the policy asks.
        LinkError: there is no such file, or it cannot be read.
    """
    if integrity is None:
        integrity = "paged" if policy is None else "full"
    if integrity not in get_args(Integrity):
        raise LinkError(f"integrity policy {integrity!r}, expected one of {', '.join(get_args(Integrity))}")
    if offset < 0:
        raise LinkError(f"package at offset {offset}, expected 0 or more")
    opened: ByteSource
    if isinstance(source, int):
        opened = FileSource(source, base=offset, owned=False)
    elif isinstance(source, (str, os.PathLike)):
        if (path := Path(source)).is_dir():
            hint = "make a package of a checkpoint with 'estream-pack build' first"
            raise LinkError("is a folder, expected a package", path=str(path), hint=hint)
        opened = FileSource.open(path, base=offset)
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
        package = Package(opened, integrity, policy)
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
