"""Files that are not on this machine, by URL, through fsspec: `s3://bucket/model`, `gs://...`, `hf://...`, `memory://...`.

fsspec finds the library that knows a kind of place, and that library finds the user's credentials; both are loaded when
a URL is given, and not before. Whatever they raise becomes one kind of error: each library has classes of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from estream_packer.journal import StoppedError
from estream_spec.errors import PackError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SEPARATOR: Final = "://"
STAMPS: Final = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
    "last_modified",
    "modified",
    "created",
    "generation",
    "blob_id",
)
"""What file systems call that which differs after a file was written anew."""
UPLOAD_SUFFIX: Final = ".partial"


class RemotePath:
    """A file or folder by URL. As much of a path as checkpoints and packages need; may be sent to other machines.

    Attributes:
        url: the whole of it.
    """

    def __init__(self, url: str):
        """Look up the file system; nothing is read yet.

        Raises:
            PackError: no library here knows such URLs.
        """
        self.url = url
        try:
            from fsspec.core import url_to_fs

            self._fs: AbstractFileSystem
            self._fs, self._path = url_to_fs(url)
        except ImportError as error:
            raise PackError(f"library for such URLs is missing: {error}", path=url, hint="install it") from None
        except Exception as error:
            raise PackError(f"URL cannot be used: {_said(error)}", path=url) from None

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self._fs, self._path) == (other._fs, other._path)

    def __hash__(self) -> int:
        return hash(self._path)

    def __reduce__(self) -> tuple[type[RemotePath], tuple[str]]:
        return RemotePath, (self.url,)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._path.rstrip("/").rpartition("/")[2] or "package"

    @property
    def suffix(self) -> str:
        """What the name ends in, from its last dot on."""
        return Path(self.name).suffix

    @property
    def local(self) -> Path | None:
        """The path on this machine, where the URL is of one."""
        protocols = self._fs.protocol
        return Path(self._path) if "file" in ([protocols] if isinstance(protocols, str) else protocols) else None

    def names(self) -> list[str]:
        """Names in a folder, sorted.

        Raises:
            PackError: it cannot be listed.
        """
        with self._told("folder cannot be read"):
            found = self._fs.ls(self._path, detail=False)
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def exists(self) -> bool:
        """Whether something is there.

        Raises:
            PackError: that cannot be known.
        """
        with self._told("file cannot be looked up"):
            return bool(self._fs.exists(self._path))

    def status(self) -> tuple[int, str]:
        """Length in bytes, and what differs when the file was written anew.

        Raises:
            PackError: there is no such file, or its length is not known.
        """
        with self._told("file cannot be opened"):
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.info(self._path)
        if found.get("type") != "file":
            raise PackError("not a regular file", path=self.url)
        if not isinstance(found.get("size"), int):
            raise PackError("file of unknown length", path=self.url, hint="download it first")
        return found["size"], " ".join(str(found[key]) for key in STAMPS if found.get(key) is not None)

    def read(self, begin: int, end: int) -> bytes:
        """Bytes from `begin` to `end`; fewer where the file ends before.

        Raises:
            PackError: they cannot be read.
        """
        with self._told("file cannot be read"):
            data: bytes = self._fs.cat_file(self._path, start=begin, end=end)
        return data

    def check_writable(self) -> None:
        """Refuse a name that no package can take, and a place where nothing can be written.

        Raises:
            PackError: it is a folder, or nothing can be written beside it.
        """
        with self._told("package cannot be written"):
            folder = self._fs.isdir(self._path)
        if folder:
            raise PackError("output is a folder", path=self.url, hint="give the name of the .emoe file to write")
        # A build takes hours: that its output is not allowed is told before.
        with self._beside() as beside:
            self._fs.pipe_file(beside, b"")

    def upload(self, file: Path) -> None:
        """Put a file of this machine here, first under another name: until all of it is there, nothing is seen.

        Raises:
            PackError: it cannot be written.
        """
        with self._beside() as beside:
            self._fs.put_file(os.fspath(file), beside)
            self._fs.mv(beside, self._path)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[str]:
        """A name beside this one, gone in the end."""
        beside = f"{self._path}.{secrets.token_hex(4)}{UPLOAD_SUFFIX}"
        try:
            with self._told("package cannot be written"):
                yield beside
        finally:
            with contextlib.suppress(Exception):  # what matters was told, and this may be why
                if self._fs.exists(beside):
                    self._fs.rm_file(beside)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise StoppedError(f"{what}: {_said(error)}", path=self.url) from error


Location = Path | RemotePath
"""A file or folder, here or elsewhere."""


def location(text: str) -> Location:
    """A path from text, or from a URL, which may be of this machine.

    Raises:
        PackError: no library here knows such URLs.
    """
    if SEPARATOR not in text:
        return Path(text)
    remote = RemotePath(text)
    return remote.local or remote


def _said(error: Exception) -> str:
    """What an error of a foreign library says, in one line."""
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
