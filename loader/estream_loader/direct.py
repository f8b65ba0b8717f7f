"""One file opened past the page cache (O_DIRECT), and what the system tells about that.

The kernel may refuse such a descriptor when it is opened, refuse it at the first read, or accept it and fill the page
cache all the same. The first is judged here; `uncached` judges the others.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from contextlib import suppress
from typing import Final

import numpy as np

from estream_spec.layout import round_up

DEFAULT_ALIGNMENT: Final = 4096
"""Bytes. Where the kernel does not tell, no device in use asks for more."""

_IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems by the number statfs(2) gives: new kernels accept O_DIRECT there, where there is nothing to bypass."""

_LARGEST_FOLIO: Final = 2 << 20
"""Bytes. The kernel keeps pages in aligned blocks of up to this size and forgets a block as a whole or not at all."""

_STATX_DIOALIGN: Final = 0x2000
_AT_EMPTY_PATH: Final = 0x1000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class DirectFile:
    """The file behind a descriptor, opened once more with O_DIRECT; a package begins at its byte `base`.

    Attributes:
        alignment: what addresses, offsets and lengths have to be multiples of, in bytes.

    Raises:
        OSError: the system refuses; its `strerror` says why.
    """

    def __init__(self, descriptor: int, base: int):
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
        if (kind := _file_system(descriptor)) in _IN_MEMORY:
            raise OSError(errno.EOPNOTSUPP, f"{_IN_MEMORY[kind]} keeps files in memory")
        self.alignment = _alignment(descriptor)
        if base % self.alignment:
            raise OSError(errno.EINVAL, f"the package begins at byte {base}, no multiple of {self.alignment}")
        self._base = base
        # Through the descriptor and not the path, under which another file may stand by now.
        try:
            self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            reason = f"the system refuses to open the file so: {error.strerror}"
            raise OSError(error.errno, reason) from None

    def suits(self, buffer: memoryview, offset: int) -> bool:
        """Whether a read of this place into this memory has the alignment needed."""
        if not len(buffer):
            return False
        return (_address(buffer) | offset | len(buffer)) % self.alignment == 0

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """As `ByteSource.read_into`, of what `suits`."""
        return os.preadv(self._descriptor, [buffer], self._base + offset)

    def drop_cached(self, offset: int, length: int) -> None:
        """Ask the system to forget cached pages of a range, as far as they are clean and nobody maps them."""
        start = self._base + offset
        first = start - start % _LARGEST_FOLIO
        length = round_up(start + length, _LARGEST_FOLIO) - first
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, first, length, os.POSIX_FADV_DONTNEED)

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether the page cache holds any page of a range.

        The kernel tells only those who may write to the file; to others it says yes, and so does this where it cannot
        ask, as for a range beyond the end.
        """
        start = self._base + offset
        first = start - start % mmap.ALLOCATIONGRANULARITY
        length += start - first
        try:
            mapped = mmap.mmap(self._descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first)
        except (OSError, ValueError):
            return True
        with mapped:
            pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
            if _LIBC.mincore(ctypes.c_void_p(_address(mapped)), ctypes.c_size_t(length), pages):
                return True
            return any(page & 1 for page in pages.raw)

    def close(self) -> None:
        """Close the descriptor; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _address(buffer: mmap.mmap | memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _file_system(descriptor: int) -> int:
    """The number of the file system's type; 0 where the system does not tell."""
    # `struct statfs` begins with that number and is never longer than this.
    buffer = ctypes.create_string_buffer(512)
    if _LIBC.fstatfs(ctypes.c_int(descriptor), buffer):
        return 0
    return int.from_bytes(buffer.raw[:4], "little")


def _alignment(descriptor: int) -> int:
    """What direct reads of a file have to be aligned to, in bytes.

    Raises:
        OSError: the kernel says that this file cannot be read so.
    """
    # `struct statx`: a mask of what was filled in at byte 0; alignment in memory and in the file at byte 152.
    buffer = ctypes.create_string_buffer(256)
    statx = getattr(_LIBC, "statx", None)
    if statx is None or statx(ctypes.c_int(descriptor), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return DEFAULT_ALIGNMENT
    if not struct.unpack_from("=I", buffer)[0] & _STATX_DIOALIGN:
        return DEFAULT_ALIGNMENT
    alignment = max(struct.unpack_from("=2I", buffer, 152))
    if alignment == 0:
        raise OSError(errno.EOPNOTSUPP, "the file system does not read this file past the page cache")
    return int(alignment)
