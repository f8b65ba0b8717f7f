"""Writes small files, such as keys, signatures, pictures and traces: they are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from estream_spec.constants import MAGIC, SUPERBLOCK_OFFSETS
from estream_spec.errors import PackError, reason


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not be there yet.

    Args:
        path: its name.
        data: its bytes.
        mode: permissions, from which the process's mask is taken.

    Raises:
        PackError: there is something of that name, or it cannot be written.
    """
    with _refused(path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            message = "there is a file of that name, which is never replaced"
            raise PackError(message, path=str(path), hint="give another name") from None
        _fill(path, descriptor, data)


def write_over(path: Path, data: bytes) -> None:
    """Write a file, replacing one of that name in one step.

    Args:
        path: its name.
        data: its bytes.

    Raises:
        PackError: there is a package of that name, or what is no regular file, or it cannot be written.
    """
    partial = _partial(path)
    with _refused(path):
        _require_replaceable(path)
        _fill(partial, os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), data)
        try:
            partial.replace(path)
        except BaseException:
            partial.unlink()
            raise


def require_writable(path: Path) -> None:
    """Say at once, before long work, whether `write_over` could write a file. Raises as it does."""
    partial = _partial(path)
    with _refused(path):
        _require_replaceable(path)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        partial.unlink()


def _require_replaceable(path: Path) -> None:
    """Refuse to lose what nobody wants to lose for a small file: a package, a device, a pipe, a link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        message = "there is something of that name that is no regular file, which is never replaced"
        raise PackError(message, path=str(path), hint="give another name")
    with path.open("rb") as file:
        for offset in SUPERBLOCK_OFFSETS:  # a package whose first twin is damaged is still one
            file.seek(offset)
            if file.read(len(MAGIC)) == MAGIC:
                message = "there is a package of that name, which is never replaced"
                raise PackError(message, path=str(path), hint="give another name")


def _partial(path: Path) -> Path:
    """A name beside a file's, for what is to replace it."""
    return path.parent / f".{secrets.token_hex(8)}.partial"


def _fill(path: Path, descriptor: int, data: bytes) -> None:
    """Write data durably into a file just made; it goes where that fails."""
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into one kind of error."""
    try:
        yield
    except (OSError, ValueError) as error:  # the second for a zero byte in the path
        hint = "make the folder first" if isinstance(error, FileNotFoundError) else None
        raise PackError(f"file cannot be written: {reason(error)}", path=str(path), hint=hint) from error
