"""Memory that is shared with an NPU: had from a library that may lack anything, and given back exactly once."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from estream_loader import open_package, rpcmem
from estream_loader.arena import Arena
from estream_loader.memory import page_aligned
from estream_loader.pager import Pager
from estream_loader.reading import Reader
from estream_spec.errors import LinkError
from fixtures.cdsprpc import Account, StandIn
from fixtures.packed import PackageFactory

GIB = 1 << 30
Library = Callable[..., StandIn]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """`library(*without)`: a stand-in that is found as the system's library is."""

    def found(*without: str) -> StandIn:
        stand_in = StandIn(tmp_path, without)
        monkeypatch.setattr(rpcmem, "LIBRARY", str(stand_in.path))
        return stand_in

    return found


@pytest.mark.parametrize("allocate", [page_aligned, rpcmem.allocate])
def test_memory_of_each_kind_begins_at_a_page_and_can_be_written(
    allocate: Callable[[int], memoryview], library: Library
) -> None:
    library()
    memory = allocate(3 * mmap.PAGESIZE)
    assert (memory.format, memory.nbytes, memory.readonly) == ("B", 3 * mmap.PAGESIZE, False)
    assert np.frombuffer(memory, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    memory[-3:] = b"end"
    assert bytes(memory[-3:]) == b"end"


def test_memory_is_given_back_once_when_the_last_view_is_gone(library: Library) -> None:
    stand_in = library()
    memory = rpcmem.allocate(1 << 16)
    array = np.frombuffer(memory[4096:8192], np.uint8)
    memory.release()
    del memory
    assert stand_in.account == Account(inits=1, allocations=1, allocations2=0, frees=0, bad_frees=0)
    array[:] = 7  # would end the process, had the memory gone
    assert array.sum() == 7 * 4096
    del array
    assert stand_in.account == Account(inits=1, allocations=1, allocations2=0, frees=1, bad_frees=0)
    gc.collect()
    assert stand_in.account.frees == 1


def test_arena_that_is_closed_twice_is_given_back_once(library: Library) -> None:
    stand_in = library()
    arena = Arena(4 * 4096, "rpcmem")
    arena.divide(2, 8192)
    arena.divide(4, 4096)
    memory = arena.banks[3].memory
    arena.close()
    arena.close()
    assert stand_in.account.frees == 0
    memory[:] = b"\x05" * 4096
    del memory
    assert (stand_in.account.frees, stand_in.account.bad_frees) == (1, 0)


def test_closing_a_pager_gives_its_arena_back_while_it_is_still_referred_to(
    library: Library, packed: PackageFactory
) -> None:
    stand_in = library()
    with open_package(packed()) as package:
        pager = Pager(package, arena_bytes=package.expert_shape.bank_bytes(4) * 2, arena_kind="rpcmem")
        pager.divide(2, 4)
        pager.fill(0, 0, 0)
        pager.fill(0, 1, 1)  # both are under way
        assert stand_in.account.frees == 0
        pager.close()
        assert (stand_in.account.frees, stand_in.account.bad_frees) == (1, 0)


def test_pager_without_threads_gives_its_arena_back(
    library: Library, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = library()

    def no_threads(*_: object, **__: object) -> None:
        raise LinkError("cannot start 2 reading threads")

    monkeypatch.setattr(Reader, "__init__", no_threads)
    with open_package(packed()) as package, pytest.raises(LinkError, match="reading threads"):
        Pager(package, arena_bytes=1 << 16, arena_kind="rpcmem")
    assert stand_in.account == Account(inits=1, allocations=1, allocations2=0, frees=1, bad_frees=0)


@pytest.mark.parametrize(("length", "functions"), [(2 * GIB - 1, (1, 0)), (2 * GIB, (0, 1))])
def test_more_than_an_int_holds_is_asked_for_as_newer_libraries_have_it(
    length: int, functions: tuple[int, int], library: Library
) -> None:
    stand_in = library()
    memory = rpcmem.allocate(length)
    memory[-1] = 1
    assert memory.nbytes == length
    account = stand_in.account
    assert (account.allocations, account.allocations2) == functions
    del memory
    assert stand_in.account.frees == 1


def test_older_library_gives_less_than_2_gib(library: Library) -> None:
    stand_in = library("ALLOC2")
    with pytest.raises(
        LinkError,
        match=r"cannot allocate 2147483648 bytes: it has no function 'rpcmem_alloc2', at most 2147483647",
    ) as caught:
        Arena(2 * GIB, "rpcmem")
    assert caught.value.hint == "ask for a smaller arena"
    Arena(4096, "rpcmem").close()
    assert (stand_in.account.allocations, stand_in.account.frees) == (1, 1)


def test_library_that_needs_no_initialisation(library: Library) -> None:
    stand_in = library("INIT")
    Arena(4096, "rpcmem").close()
    assert stand_in.account == Account(inits=0, allocations=1, allocations2=0, frees=1, bad_frees=0)


def test_library_that_only_allocates_is_not_used(library: Library) -> None:
    stand_in = library("FREE")
    with pytest.raises(LinkError, match=r"libcdsprpc\.so has no function 'rpcmem_free'") as caught:
        Arena(4096, "rpcmem")
    assert caught.value.hint is not None
    assert "arena kind 'ordinary'" in caught.value.hint
    assert stand_in.account.allocations == 0


@pytest.mark.parametrize(
    ("fault", "message", "frees"),
    [
        ("null", "cannot allocate 12288 bytes: rpcmem_alloc returned null", 0),
        ("misaligned", r"gave 12288 bytes of memory at address 0x\w+40, expected a multiple of \d+, which direct", 1),
        ("no descriptor", "gave 12288 bytes of memory without a file descriptor", 1),
    ],
)
def test_memory_that_is_of_no_use_is_refused_and_given_back(
    fault: str, message: str, frees: int, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = library()
    monkeypatch.setenv("CDSPRPC_FAULT", fault)
    with pytest.raises(LinkError, match=message) as caught:
        Arena(3 * 4096, "rpcmem")
    assert caught.value.hint is not None
    assert "arena kind 'ordinary'" in caught.value.hint
    assert stand_in.account == Account(inits=1, allocations=1, allocations2=0, frees=frees, bad_frees=0)


@pytest.mark.parametrize("length", [0, 1 << 62, 1 << 64])
def test_memory_that_cannot_be_had(length: int, library: Library) -> None:
    stand_in = library()
    with pytest.raises(LinkError, match=rf"cannot allocate .*{length} bytes: "):
        Arena(length, "rpcmem")
    assert stand_in.account.frees == 0


def test_without_the_library_there_is_ordinary_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpcmem, "LIBRARY", "libcdsprpc-absent.so")
    with pytest.raises(
        LinkError, match=r"no memory to share with an NPU: libcdsprpc-absent\.so: cannot open shared object file"
    ) as caught:
        Arena(4096, "rpcmem")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("only Snapdragon devices have this kind of memory")
    Arena(4096).close()
