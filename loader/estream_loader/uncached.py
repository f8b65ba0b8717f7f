"""Read a package past the page cache where that works, and as any other source where it does not.

That it works is proven and not believed: a read of pages that were not cached must leave them so. That it does not is
no error; the reason is kept, and everything from then on is read through the cache.
"""

from __future__ import annotations

import errno
import threading
from typing import Final

from estream_loader.direct import DirectFile
from estream_loader.source import ByteSource, FileSource

_REFUSALS: Final = {errno.EINVAL, errno.EOPNOTSUPP}
"""With these a file system turns direct reads down, at any time."""

_ROUNDS: Final = 3
"""Reads of one range that must all be found cached before that is held against them: once may be the readahead of
another reader next to it."""

_ATTEMPTS: Final = 64
"""Ranges looked at for a proof. Where all of them were cached and stayed so, the whole file probably is."""


class UncachedSource:
    """A byte source over another one, which stays the caller's to close.

    Safe to read from several threads.
    """

    def __init__(self, source: ByteSource):
        self.name, self._source = source.name, source
        self._direct: DirectFile | None = None
        self._refusal: str | None = None
        self._doubt: str | None = "nothing was read yet"
        self._looking = threading.Lock()
        self._attempts = _ATTEMPTS
        self._worked = False
        if not isinstance(source, FileSource):
            self._refusal = "the package is not read from a file"
            return
        try:
            self._direct = source.open_direct()
        except OSError as error:
            self._refusal = f"{error.strerror or error}"

    @property
    def mode(self) -> str:
        """How bytes are read: `direct`, `direct, unproven: REASON`, or `buffered: REASON`."""
        if self._refusal is not None:
            return f"buffered: {self._refusal}"
        return "direct" if self._doubt is None else f"direct, unproven: {self._doubt}"

    def available(self) -> int:
        """See `ByteSource.available`."""
        return self._source.available()

    def require_alignment(self, buffer: memoryview, offset: int) -> None:
        """Give up direct reads for good where this one, about to begin, is not aligned as they need it."""
        if self._direct is not None and len(buffer) and not self._direct.suits(buffer, offset):
            size = self._direct.alignment
            self._refuse(f"address, length or offset of {len(buffer)} bytes at {offset} are no multiples of {size}")

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """See `ByteSource.read_into`."""
        direct = self._direct
        # What a short read leaves over may have any length.
        if direct is None or self._refusal is not None or not direct.suits(buffer, offset):
            return self._source.read_into(buffer, offset)
        try:
            count = self._read_direct(direct, buffer, offset)
            self._worked = True
            return count
        except OSError as error:
            # Before any has worked, it may be the system that forbids them, or the memory, as buffers shared with other
            # devices do; where it is the device that fails, it fails in the read through the cache, too.
            if self._worked and error.errno not in _REFUSALS:
                raise
            self._refuse(f"direct reads are refused: {error.strerror}")
            return self._source.read_into(buffer, offset)

    def close(self) -> None:
        """Release what this source opened itself; reads must be over."""
        if self._direct is not None:
            self._direct.close()

    def _read_direct(self, direct: DirectFile, buffer: memoryview, offset: int) -> int:
        """Read, and look what that does to the page cache as long as this is in doubt."""
        if self._doubt is not None and self._attempts and self._looking.acquire(blocking=False):
            try:
                return self._read_and_look(direct, buffer, offset)
            finally:
                self._looking.release()
        return direct.read_into(buffer, offset)

    def _refuse(self, reason: str) -> None:
        if self._refusal is None:
            self._refusal = reason

    def _read_and_look(self, direct: DirectFile, buffer: memoryview, offset: int) -> int:
        """Read, and prove by it that the page cache stays empty, or that it does not."""
        count = 0
        for _ in range(_ROUNDS):
            direct.drop_cached(offset, len(buffer))
            cached_before = direct.is_cached(offset, len(buffer))
            count = direct.read_into(buffer, offset)
            if cached_before:
                self._attempts -= 1
                self._doubt = "the pages were cached before, or the system does not tell whether they are"
                return count
            if not direct.is_cached(offset, len(buffer)):
                self._doubt = None
                return count
        self._refuse("the file system accepts direct reads, but they go through the page cache")
        return count
