"""Adds to a package in place and takes from it, never writing over what a reader may be using. FORMAT.md section 3.3.

New sections and a new directory go behind the package's end; writing one superblock then makes them count, so that
whatever stops an edit leaves the old package or the new one. `plan_edit` computes all bytes and judges the package they
would make; `edit_package` writes them. An edit that changes nothing but sections outside the file id keeps every other
one, its type known or not, and signatures stay true. Any other edit makes another file: signatures over the old one go,
and so do sections of unknown types that are not flagged as safe to copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from estream_loader import Package
from estream_loader.source import FileSource, available, read
from estream_spec.constants import (
    FLAGS,
    KNOWN_SECTIONS,
    MIN_SECTION_ALIGNMENT_SHIFT,
    SUPERBLOCK_OFFSETS,
    Codec,
    SectionFlag,
    SectionType,
)
from estream_spec.container import Container, check_superblock, decode_container
from estream_spec.errors import FormatError, PackError, reason
from estream_spec.layout import round_up
from estream_spec.manifest import decode_manifest
from estream_spec.records import DirectoryEntry, Superblock, encode_directory
from estream_spec.rules import check_manifest

MAX_GENERATION: Final = (1 << 64) - 1
UNTOUCHED: Final = "package cannot be edited and is as it was"
HINTS: Final = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EFBIG: "the file system or a limit of this process allows no file of this size",
    errno.EACCES: "edit a copy in a folder you own",
    errno.EPERM: "edit a copy in a folder you own",
    errno.EROFS: "edit a copy in another place",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSection:
    """A section to add, stored as it is: its type, its id and its bytes."""

    type: SectionType
    id: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What an edit does.

    Attributes:
        add: sections to add, in the order in which they will lie.
        remove: entries of the package whose sections to give up.
    """

    add: Sequence[NewSection] = ()
    remove: Collection[DirectoryEntry] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.add or self.remove)


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit in bytes.

    Attributes:
        appended: what follows the package's old end: padding, new sections, the new directory.
        container: the new superblock and directory.
    """

    appended: bytes
    container: Container


def with_given_up(container: Container, changes: Changes) -> Changes:
    """Changes with all that they take away: signatures of the old file, and what nobody says is safe to copy.

    Where they are about sections outside the file id alone, that is nothing.
    """
    flags = [*(FLAGS[each.type] for each in changes.add), *(each.flags for each in changes.remove)]
    if all(each & SectionFlag.UNSIGNED for each in flags):
        return changes
    given_up = [
        entry
        for entry in container.entries
        if entry.type == SectionType.SIGNATURE
        or (entry.type not in KNOWN_SECTIONS and not entry.flags & SectionFlag.SAFE_TO_COPY)
    ]
    return replace(changes, remove=[*changes.remove, *given_up])


def plan_edit(container: Container, changes: Changes) -> Edit:
    """Compute the bytes of an edit and judge the package they make.

    Args:
        container: the package as it is.
        changes: all there is to do, see `with_given_up`.

    Raises:
        PackError: there is no generation left, or readers would refuse the result: too many sections, for example.
    """
    old = container.superblock
    if old.generation == MAX_GENERATION:
        message = f"package cannot be edited: its generation is {MAX_GENERATION}, the last there is"
        raise PackError(message, hint="pack it again")
    kept = [
        _free(each.offset, each.stored_length, each.alignment_shift) if each in changes.remove else each
        for each in container.entries
    ]
    directory_extent = _free(old.directory_offset, old.directory_length, MIN_SECTION_ALIGNMENT_SHIFT)
    entries = _merge_free([*kept, directory_extent])
    appended = bytearray()
    for section in changes.add:
        offset = _pad(appended, old.file_length)
        entries.append(_entry(section, offset))
        appended += section.data
    directory = encode_directory(tuple(entries))
    offset = _pad(appended, old.file_length)
    appended += directory
    superblock = replace(
        old,
        generation=old.generation + 1,
        file_length=offset + len(directory),
        directory_offset=offset,
        directory_length=len(directory),
        directory_sha256=sha256(directory).digest(),
    )
    try:
        check_superblock(superblock, superblock.file_length)
        container = decode_container(superblock, directory)
        for section in changes.add:
            if section.type == SectionType.MANIFEST:
                check_manifest(decode_manifest(section.data), container)
        return Edit(bytes(appended), container)
    except FormatError as fault:
        raise PackError(f"package cannot be edited, the result would be refused: {fault.message}") from fault


def _entry(section: NewSection, offset: int) -> DirectoryEntry:
    """The entry of a section that will lie at an offset."""
    return DirectoryEntry(
        type=section.type,
        id=section.id,
        flags=FLAGS[section.type],
        codec=Codec.NONE,
        alignment_shift=MIN_SECTION_ALIGNMENT_SHIFT,
        offset=offset,
        stored_length=len(section.data),
        length=len(section.data),
        sha256=sha256(section.data).digest(),
    )


def _free(offset: int, length: int, alignment_shift: int) -> DirectoryEntry:
    """The entry of an extent that is no longer in use."""
    return DirectoryEntry(
        type=SectionType.FREE,
        id=0,
        flags=FLAGS[SectionType.FREE],
        codec=Codec.NONE,
        alignment_shift=alignment_shift,
        offset=offset,
        stored_length=length,
        length=length,
        sha256=bytes(32),
    )


def _merge_free(entries: Sequence[DirectoryEntry]) -> list[DirectoryEntry]:
    """Free extents that follow each other as one, so that the directory does not grow with the number of edits."""
    merged = [entries[0]]
    for entry in entries[1:]:
        last = merged[-1]
        if entry.type == last.type == SectionType.FREE:
            length = entry.end - last.offset
            merged[-1] = replace(last, stored_length=length, length=length)
        else:
            merged.append(entry)
    return merged


def _pad(appended: bytearray, start: int) -> int:
    """Add zeros up to where the next section or directory begins; returns its offset.

    Args:
        appended: bytes so far.
        start: offset of the first of them.
    """
    end = start + len(appended)
    begin = round_up(end, 1 << MIN_SECTION_ALIGNMENT_SHIFT)
    appended += bytes(begin - end)
    return begin


def edit_package(path: Path, decide: Callable[[Package], Changes]) -> tuple[Container, Changes]:
    """Edit a package in place; no other edit of it can begin meanwhile.

    Args:
        path: the package; a link is followed.
        decide: given the package, opened, says what to change. What it raises ends the edit, with nothing touched.

    Returns:
        Superblock and directory as they are now, and what was changed.

    Raises:
        FormatError: the package is refused.
        PackError: it cannot be written, another edit is at work, or the result would be refused. Unless the message
            says something else, the package is what it was.
    """
    with _locked(path) as descriptor:
        source = FileSource(descriptor, name=str(path), owned=False)
        with Package(source, "paged") as package:
            if not (changes := with_given_up(package.container, decide(package))):
                return package.container, changes
            edit = plan_edit(package.container, changes)
            _write_edit(path, descriptor, source, package.container.superblock, edit)
    return edit.container, changes


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for reading and writing, under a lock that ends with this process if not before."""
    with _refused(path, "package cannot be edited"):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with _refused(path, "package cannot be locked"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = "another edit of the package is at work"
                raise PackError(message, path=str(path), hint="try again when it is done") from None
        yield descriptor
    finally:
        os.close(descriptor)


def _write_edit(path: Path, descriptor: int, source: FileSource, old: Superblock, edit: Edit) -> None:
    """Append, make durable, commit with the twin that is not trusted, then write the other one."""
    with _refused(path, UNTOUCHED):
        same = os.path.samestat(os.fstat(descriptor), path.stat())
    slots = {}
    if same and available(source) >= old.file_length:
        slots = {offset: read(source, offset, Superblock.SIZE) for offset in SUPERBLOCK_OFFSETS}
    if old.encode() not in slots.values():  # whoever did this minds no lock
        message = "package was replaced, cut off or written over by another program while it was edited"
        raise PackError(message, path=str(path), hint="look at what is there now, and edit that")
    first, second = sorted(SUPERBLOCK_OFFSETS, key=lambda offset: slots[offset] == old.encode())
    superblock = edit.container.superblock.encode()
    with _refused(path, UNTOUCHED):
        _append(descriptor, edit.appended, old.file_length, available(source))
    with _refused(path, UNTOUCHED):
        _commit(descriptor, superblock, first, slots[first])
    with _refused(path, "package is edited, but its second superblock cannot be written"):
        _write(descriptor, superblock, second)
        os.fsync(descriptor)


def _append(descriptor: int, data: bytes, end: int, length: int) -> None:
    """Put data behind a package's end, durably; what a dead editor left there goes."""
    try:
        if length > end:
            # A commit may have been taken back, and must stay so before the bytes it counted on are cut off.
            os.fsync(descriptor)
            os.ftruncate(descriptor, end)
        _write(descriptor, data, end)
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


def _commit(descriptor: int, superblock: bytes, offset: int, before: bytes) -> None:
    """Write the superblock that makes an edit count, durably.

    Where that fails, the slot gets back what stood `before` in it. The bytes behind the old end stay: a reader may have
    seen the new superblock and be reading them. The next edit cuts them off.
    """
    try:
        _write(descriptor, superblock, offset)
        os.fsync(descriptor)
    except BaseException:
        try:
            _write(descriptor, before, offset)
            os.fsync(descriptor)
        except OSError as error:
            message = f"package may be edited or as it was, the device does not say which: {reason(error)}"
            raise PackError(message, hint="it is whole either way; look with 'inspect'") from error
        raise


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of the data, however many writes that takes."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def _refused(path: Path, what: str) -> Iterator[None]:
    """Turn what the operating system refuses into one kind of error."""
    try:
        yield
    except (OSError, ValueError) as error:  # the second for a zero byte in the path
        hint = HINTS.get(getattr(error, "errno", None) or 0)
        raise PackError(f"{what}: {reason(error)}", path=str(path), hint=hint) from error
