"""FastRPC shared memory: what a Hexagon NPU computes with where it lies, without a copy.

It comes from `libcdsprpc.so`, which the systems of Snapdragon devices have. Its functions, heap and flags are those of
`rpcmem.h` of the Hexagon SDK, which is also in https://github.com/qualcomm/fastrpc.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from ctypes import c_int, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Final

from estream_spec.errors import LinkError, printable

LIBRARY: Final = "libcdsprpc.so"
"""Found as the system finds libraries."""
_SYSTEM_HEAP: Final = 25
"""`RPCMEM_HEAP_ID_SYSTEM`: pages from anywhere in memory, for processors that have a memory management unit."""
_DEFAULT_FLAGS: Final = 1
"""`RPCMEM_DEFAULT_FLAGS`: cached memory."""
_MOST: Final = (1 << 31) - 1
"""Bytes that `rpcmem_alloc` can be asked for; older libraries have nothing for more."""
_NEEDED: Final = ("rpcmem_alloc", "rpcmem_free", "rpcmem_to_fd")
_INSTEAD: Final = "only Snapdragon devices have this kind of memory; elsewhere ask for the arena kind 'ordinary'"


def allocate(length: int) -> memoryview:
    """Memory that processor and NPU share, an `estream_loader.memory.Allocator`.

    Args:
        length: bytes, at least 1.

    Raises:
        LinkError: there is no such library, it lacks a function, it gives no memory, or none that begins at a page.
        OverflowError: no memory is so large.
        ValueError: the length is negative.
    """
    library, array = _load(LIBRARY), ctypes.c_ubyte * length
    address = _allocated(library, length)
    # Every view refers to the memory it is a view of, so that it goes when the last of them has gone. What is left when
    # the process ends goes with it: threads may still be reading into it.
    memory = array.from_address(address)
    release = weakref.finalize(memory, library.rpcmem_free, address)
    release.atexit = False
    if fault := _fault(library, address):
        release()
        raise LinkError(f"{LIBRARY} gave {length} bytes of memory {fault}", hint=_INSTEAD)
    return memoryview(memory).cast("B")


def _allocated(library: ctypes.CDLL, length: int) -> int:
    """Address of so many bytes.

    Raises:
        LinkError: they cannot be had.
    """
    function = "rpcmem_alloc" if length <= _MOST else "rpcmem_alloc2"
    if not hasattr(library, function):
        message = f"{LIBRARY} cannot allocate {length} bytes: it has no function '{function}', at most {_MOST} are had"
        raise LinkError(message, hint="ask for a smaller arena")
    address: int | None = getattr(library, function)(_SYSTEM_HEAP, _DEFAULT_FLAGS, length)
    if not address:
        hint = "ask for a smaller arena or for the arena kind 'ordinary', or let this process use the NPU's drivers"
        raise LinkError(f"{LIBRARY} cannot allocate {length} bytes: {function} returned null", hint=hint)
    return address


def _fault(library: ctypes.CDLL, address: int) -> str | None:
    """What makes memory useless, in words; None where nothing does."""
    if address % mmap.PAGESIZE:
        return f"at address {address:#x}, expected a multiple of {mmap.PAGESIZE}, which direct reads need"
    if library.rpcmem_to_fd(address) < 0:
        return "without a file descriptor, by which an NPU would share it"
    return None


@cache
def _load(name: str) -> ctypes.CDLL:
    """The library, ready for use.

    Raises:
        LinkError: it does not load, or lacks a function.
    """
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise LinkError(f"no memory to share with an NPU: {printable(str(error))}", hint=_INSTEAD) from None
    missing = next((each for each in _NEEDED if not hasattr(library, each)), None)
    if missing is not None:
        raise LinkError(f"no memory to share with an NPU: {name} has no function '{missing}'", hint=_INSTEAD)
    signatures = {
        "rpcmem_init": (None, ()),
        "rpcmem_alloc": (c_void_p, (c_int, c_uint32, c_int)),
        "rpcmem_alloc2": (c_void_p, (c_int, c_uint32, c_size_t)),
        "rpcmem_free": (None, (c_void_p,)),
        "rpcmem_to_fd": (c_int, (c_void_p,)),
    }
    for function, (result, arguments) in signatures.items():
        if hasattr(library, function):
            getattr(library, function).restype, getattr(library, function).argtypes = result, arguments
    if hasattr(library, "rpcmem_init"):  # newer ones do by themselves what it does
        library.rpcmem_init()
    return library
