"""Proving a package byte by byte: what the policy `full`, `validate` and `verify` do. FORMAT.md sections 4 and 9."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Final

import crc32c

from estream_loader.records import RecordPlace
from estream_loader.sections import check_digest, check_zero, section_path
from estream_loader.source import PIECE, available, read, read_pieces
from estream_loader.values import check_values, read_tensor
from estream_spec.constants import (
    DATA_START,
    KNOWN_SECTIONS,
    SUPERBLOCK_OFFSETS,
    SUPERBLOCK_SLOT,
    SectionFlag,
    SectionType,
)
from estream_spec.errors import FormatError, located
from estream_spec.manifest import content_id
from estream_spec.prefetch_router import ROUTER_TENSORS, check_router
from estream_spec.records import DirectoryEntry, Superblock, decode_signature
from estream_spec.rulebook import refusal

if TYPE_CHECKING:
    from estream_loader.package import Package

AHEAD: Final = 16
"""Tasks of proving records that are under way or wait."""


def verify(package: Package, advance: Callable[[int], None] = lambda length: None) -> None:
    """Prove every byte that carries meaning: each section, each record, the content id.

    Args:
        package: an open package.
        advance: told the length of every piece that is proven; `verify_length` gives their sum.

    Raises:
        FormatError: the first rule that is broken, in the order of FORMAT.md section 9.4.
    """
    for entry in package.container.entries:
        if not entry.flags & SectionFlag.RECORDS and entry.type != SectionType.FREE:
            verify_section(package, entry)
            advance(entry.stored_length)
    check_text(package)
    # Tables, configurations, programs and the prefetch router are judged as they are read.
    _ = package.dense, package.device_configurations, package.schedules, package.prefetch_router
    with ThreadPoolExecutor() as pool:
        try:
            for proof in _ahead(pool, package):
                advance(proof.result())
        finally:
            pool.shutdown(cancel_futures=True)
    check_routers(package)
    verify_content_id(package)


def _ahead(pool: ThreadPoolExecutor, package: Package) -> Iterator[Future[int]]:
    """Proofs of all records in their order; only a few are under way, so a bad record ends it soon."""
    under_way: deque[Future[int]] = deque()
    for places in _batches(chain(package.dense.places(), package.experts.places())):
        under_way.append(pool.submit(_prove, package, places))
        if len(under_way) > AHEAD:
            yield under_way.popleft()
    yield from under_way


def _batches(places: Iterable[RecordPlace]) -> Iterator[list[RecordPlace]]:
    """Records that are worth a task of their own, or several small ones."""
    batch, length = list[RecordPlace](), 0
    for place in places:
        batch.append(place)
        length += place.length
        if length >= PIECE:
            yield batch
            batch, length = [], 0
    yield batch


def _prove(package: Package, places: list[RecordPlace]) -> int:
    """Prove some records, the first one first; returns their length."""
    for place in places:
        verify_record(package, place)
        check_values(package, place)
    return sum(place.length for place in places)


def verify_length(package: Package) -> int:
    """Bytes that `verify` goes through."""
    records = package.dense.entry.stored_length + package.experts.entry.stored_length
    others = [entry for entry in package.container.entries if not entry.flags & SectionFlag.RECORDS]
    return records + sum(entry.stored_length for entry in others if entry.type != SectionType.FREE)


def verify_section(package: Package, entry: DirectoryEntry) -> None:
    """Prove one section that no table describes, its type known or not.

    Raises:
        IntegrityError: its digest differs or it does not decode.
    """
    if entry.type in KNOWN_SECTIONS:
        data = package.read_section(entry)
        if entry.type == SectionType.SIGNATURE:
            decode_signature(data, path=section_path(entry), offset=entry.offset)
        return
    digest = sha256()
    for piece in read_pieces(package.source, entry.offset, entry.end):
        digest.update(piece)
    check_digest(entry, digest.digest())


def check_text(package: Package) -> None:
    """Prove that the chat template is text.

    Raises:
        InvalidError: it is not UTF-8.
    """
    try:
        (package.chat_template or b"").decode()
    except UnicodeDecodeError as error:
        entry = package.container.section(SectionType.CHAT_TEMPLATE)
        message = f"byte {error.start} is {error.object[error.start]:#04x}, expected UTF-8"
        raise refusal("EMOE-SEC-020", message, path=section_path(entry), offset=entry.offset) from None


def verify_record(package: Package, place: RecordPlace) -> None:
    """Prove one record: checksum, digest, and zeros in its padding.

    Raises:
        IntegrityError: checksum or digest differ.
        InvalidError: padding other than zero.
    """
    payload = place.offset + place.layout.payload_length
    checksum, digest = 0, sha256()
    for piece in read_pieces(package.source, place.offset, payload):
        checksum = crc32c.crc32c(piece, checksum)
        digest.update(piece)
    padding = read(package.source, payload, place.offset + place.length - payload)
    place.check(crc32c.crc32c(padding, checksum))
    if digest.digest() != place.digest:
        message = f"record has digest {digest.hexdigest()}, its table says {place.digest.hex()}"
        raise refusal("EMOE-REC-002", message, path=place.path, offset=place.offset)
    check_zero(padding, "EMOE-REC-003", "padding of a record", place.path, payload)


def check_routers(package: Package) -> None:
    """Prove that the prefetch router, where there is one, was trained for the routers in the dense records.

    Raises:
        IntegrityError: the first layer for which it was not.
    """
    if (found := package.prefetch_router) is None:
        return
    entry = package.container.section(SectionType.PREFETCH_ROUTER)
    with located(entry.offset):
        for layer in found.layers:
            place = package.dense.place(layer.layer + 1)
            named = [tensor for tensor in place.layout.tensors if tensor.name in ROUTER_TENSORS]
            tensors = {tensor.name: read_tensor(package, place, tensor) for tensor in named}
            check_router(layer, tensors, section_path(entry))


def verify_content_id(package: Package) -> None:
    """Prove the manifest's content id.

    Raises:
        IntegrityError: it is another.
    """
    manifest = package.manifest
    documents = (package.tokenizer_json or b"", package.chat_template or b"")
    tables = package.dense.table, package.experts.table
    if (found := content_id(manifest.model, manifest.layouts, *tables, documents)) != manifest.content_id:
        message = f"content id is {found.hex()}, the manifest says {manifest.content_id.hex()}"
        offset = package.container.section(SectionType.MANIFEST).offset
        raise refusal("EMOE-IDN-001", message, path="manifest.content_id", offset=offset)


def check_padding(package: Package) -> None:
    """Prove that the bytes between superblocks, sections and directory are zero.

    Raises:
        InvalidError: a byte that is not.
    """
    gaps = [
        (offset + Superblock.SIZE, offset + SUPERBLOCK_SLOT, f"superblock[{index}]")
        for index, offset in enumerate(SUPERBLOCK_OFFSETS)
    ]
    end = DATA_START
    for index, entry in enumerate(package.container.entries):
        gaps.append((end, entry.offset, f"directory[{index}]"))
        end = entry.end
    gaps.append((end, package.container.superblock.directory_offset, "directory"))
    for start, stop, beside in gaps:
        check_zero(read(package.source, start, stop - start), "EMOE-PAD-001", "padding", beside, start)


def notices(package: Package) -> list[str]:
    """What is odd about a valid package: a twin that is damaged or behind, unknown sections, bytes after the end."""
    found = []
    trusted = package.container.superblock
    for index, offset in enumerate(SUPERBLOCK_OFFSETS):
        path = f"superblock[{index}]"
        try:
            twin = Superblock.decode(read(package.source, offset, Superblock.SIZE), path=path, offset=offset)
        except FormatError as fault:
            found.append(f"{path} is damaged: {fault}")
        else:
            if twin != trusted:
                found.append(f"{path} is of generation {twin.generation}, behind {trusted.generation}")
    for entry in package.container.entries:
        if entry.type not in KNOWN_SECTIONS:
            found.append(f"section of unknown type {entry.type} is skipped")
    if trailing := available(package.source) - trusted.file_length:
        found.append(f"{trailing} bytes follow the package's end")
    return found
