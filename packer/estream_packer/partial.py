"""Partial files: packages on their way, beside their output under names of their own.

A lock that dies with its writer tells what a dead writer left behind from the file of a writer at work. The next writer
of the same package goes on from such a leaving where its journal says that it may, and removes all others. A journal
is made after its partial file and removed before it, so no journal is ever without one.

Folders for what a package is made with, such as a package to calibrate on, are named, locked and swept alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final

from estream_packer.journal import Entry, read_journal

PARTIAL_SUFFIX: Final = ".partial"
JOURNAL_SUFFIX: Final = ".journal"
SCRATCH_SUFFIX: Final = ".scratch"
MAX_PARTIAL_STEM: Final = 255 - len("..01234567") - max(len(PARTIAL_SUFFIX), len(SCRATCH_SUFFIX))
"""Bytes of the output's name that fit into that of a partial file, where a name may have 255."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a dead writer left behind, now locked by this process.

    Attributes:
        path: the partial file.
        file: the same, open for writing, at its beginning.
        entries: the records its journal says it holds, from the first on.
    """

    path: Path
    file: BinaryIO
    entries: tuple[Entry, ...]

    def remove(self) -> None:
        """Remove it and its journal. The names go first: the lock must be held for as long as they can be seen."""
        with self.file:
            remove_partial(self.path)


def journal_of(partial: Path) -> Path:
    """The journal of a partial file."""
    return partial.with_suffix(JOURNAL_SUFFIX)


def create_partial(output: Path) -> tuple[Path, BinaryIO]:
    """Make a locked file beside the output.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        path = _new_name(output, PARTIAL_SUFFIX)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb")
        with contextlib.suppress(OSError):  # some network file systems know no locks; then nothing is ever swept there
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another writer may have taken the new file for a leaving before it was locked.
        if os.fstat(descriptor).st_nlink > 0:
            return path, file
        file.close()


def remove_partial(path: Path) -> None:
    """Remove a partial file and its journal, as far as they are there and that is possible."""
    for each in (journal_of(path), path):
        with contextlib.suppress(OSError):
            each.unlink()


def create_scratch(output: Path) -> tuple[Path, int]:
    """Make a locked folder beside the output, after removing those of dead writers.

    Returns:
        The folder, and a descriptor that holds its lock.

    Raises:
        OSError: it cannot be made.
    """
    sweep_scratch(output)
    while True:
        path = _new_name(output, SCRATCH_SUFFIX)
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # another writer may have swept it before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.is_dir():
                return path, descriptor
            os.close(descriptor)


def remove_scratch(path: Path, descriptor: int) -> None:
    """Remove a folder as far as that is possible, then give its lock back."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def sweep_scratch(output: Path) -> None:
    """Remove the folders that dead writers of this output left."""
    for path in _named(output, SCRATCH_SUFFIX):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def take_leaving(output: Path, binding: bytes | None) -> Leaving | None:
    """Remove what dead writers of this output left, but for the leaving that this writer can go on from.

    Args:
        output: the package.
        binding: digest of all that decides the bytes of records; None where nothing is to be gone on from.

    Returns:
        The leaving of the same binding that holds most records.
    """
    sweep_scratch(output)
    best: Leaving | None = None
    for path in _named(output, PARTIAL_SUFFIX):
        with contextlib.suppress(OSError):
            found = _lock(path, binding)
            if best is None or len(found.entries) > len(best.entries):
                best, found = found, best
            if found is not None:
                found.remove()
    if best is not None and not best.entries:
        best.remove()
        return None
    return best


def _new_name(output: Path, suffix: str) -> Path:
    """A name of its own beside the output."""
    return output.parent / f".{_partial_stem(output)}.{secrets.token_hex(4)}{suffix}"


def _named(output: Path, suffix: str) -> Iterator[Path]:
    """What could be partial files or scratch folders of the output, by name."""
    name = re.compile(rf"\.{re.escape(_partial_stem(output))}\.[0-9a-f]{{8}}{re.escape(suffix)}")
    with contextlib.suppress(OSError):
        for path in sorted(output.parent.iterdir()):
            if name.fullmatch(path.name):
                yield path


def _lock(path: Path, binding: bytes | None) -> Leaving:
    """A regular file that nobody has locked. A pipe is not waited for, a link not followed.

    Raises:
        OSError: it is no such file.
    """
    # Only what is this user's own may be written to, and so gone on from: folders for temporary files are anybody's.
    own = path.lstat().st_uid == os.geteuid()
    descriptor = os.open(path, (os.O_RDWR if own else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_nlink == 0:
            raise FileNotFoundError(path)
        trusted = binding is not None and status.st_uid == os.geteuid()
        entries = read_journal(journal_of(path), binding) if binding is not None and trusted else ()
        return Leaving(path, os.fdopen(descriptor, "wb" if own else "rb"), entries)
    except BaseException:
        os.close(descriptor)
        raise


def _partial_stem(output: Path) -> str:
    """How partial files of the output are called: by its name, or where that is long, its beginning and digest."""
    name = os.fsencode(output.name)
    if len(name) <= MAX_PARTIAL_STEM:
        return output.name
    digest = sha256(name).hexdigest()[:16]
    return f"{name[: MAX_PARTIAL_STEM - len(digest) - 1].decode(errors='ignore')}~{digest}"
