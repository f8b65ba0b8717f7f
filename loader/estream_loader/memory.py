"""Memory that devices read into and kernels compute from."""

from __future__ import annotations

import mmap
from contextlib import suppress


def page_aligned(length: int) -> mmap.mmap:
    """Memory of zeros that begins at a page, in large pages where the system grants them.

    Large pages are fewer: a read into them asks the device for longer stretches, and processors find them faster.

    Args:
        length: bytes, at least 1.

    Raises:
        OSError: the memory cannot be had.
        OverflowError: no memory is so large.
        ValueError: the length is not positive.
    """
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every system has them, nor every Python a word for them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
