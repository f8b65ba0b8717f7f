"""Partial files: packages on their way, beside their output under names of their own.

A lock that dies with its writer tells what a dead writer left behind from the file of a writer at work. The next writer
of the same package goes on from such a leaving where its journal says that it may, and removes all others. A journal
is made after its partial file and removed before it, so no journal is ever without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final

from estream_packer.journal import Entry, read_journal

PARTIAL_SUFFIX: Final = ".partial"
JOURNAL_SUFFIX: Final = ".journal"
MAX_PARTIAL_STEM: Final = 255 - len("..01234567") - len(PARTIAL_SUFFIX)
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
    stem = _partial_stem(output)
    while True:
        path = output.parent / f".{stem}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
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


def take_leaving(output: Path, binding: bytes | None) -> Leaving | None:
    """Remove what dead writers of this output left, but for the leaving that this writer can go on from.

    Args:
        output: the package.
        binding: digest of all that decides the bytes of records; None where nothing is to be gone on from.

    Returns:
        The leaving of the same binding that holds most records.
    """
    best: Leaving | None = None
    for path in _leavings(output):
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


def _leavings(output: Path) -> Iterator[Path]:
    """What could be partial files of the output, by name."""
    name = re.compile(rf"\.{re.escape(_partial_stem(output))}\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}")
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
