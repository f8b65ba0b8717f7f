"""Memory that devices read into and kernels compute from."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final, Literal, Protocol, get_args

ArenaKind = Literal["ordinary", "rpcmem"]
"""What an arena is made of: memory of this process alone, or memory that it shares with an NPU, see `rpcmem`."""
ARENA_KINDS: Final[tuple[ArenaKind, ...]] = get_args(ArenaKind)


class Allocator(Protocol):
    """Gives memory. The system has it back when the last view of it is gone, and never before."""

    def __call__(self, length: int) -> memoryview:
        """Memory that begins at a page of the system's, writable.

        Args:
            length: bytes, at least 1.

        Raises:
            OSError: the memory cannot be had.
            OverflowError: no memory is so large.
            ValueError: the length is not positive.
            LinkError: this kind of memory cannot be had here.
        """


def page_aligned(length: int) -> memoryview:
    """Memory of zeros, in large pages where the system grants them; an `Allocator`, but for `LinkError`.

    Large pages are fewer: a read into them asks the device for longer stretches, and processors find them faster.
    """
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every system has them, nor every Python a word for them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
