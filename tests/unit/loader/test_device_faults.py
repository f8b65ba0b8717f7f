"""A device that fails once, at every read there is: a clear refusal or the right bytes, and nothing left open."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader import Integrity, open_package
from estream_loader.dense import DenseRecords, EmbeddingRows
from estream_loader.integrity import check_padding, notices, verify
from estream_loader.source import FileSource
from estream_spec.errors import EmoeError, IntegrityError, LinkError
from fixtures.packages import MODEL, Draft
from fixtures.paging import divided_pager
from fixtures.sources import free_descriptor

_BLOCK = MODEL.expert_blocks[0]
SMALL = replace(
    MODEL,
    layers=MODEL.layers[:1],
    expert_blocks=(replace(_BLOCK, experts=2, router=replace(_BLOCK.router, top_k=1)),),
)
PACKAGE = Draft(model=SMALL).seal()

Fault = Callable[[Path, memoryview, int], int]
"""What a read does instead: takes the file, the buffer and the offset, returns how many bytes were read."""


class FailingOnce:
    """A file of which one read, counted over all threads, goes wrong."""

    def __init__(self, path: Path, number: int, fault: Fault):
        self.name, self._path, self._file = str(path), path, FileSource.open(path)
        self._number, self._fault, self._calls = number, fault, itertools.count(1)
        self.failed = False

    def available(self) -> int:
        return self._file.available()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if next(self._calls) != self._number:
            return self._file.read_into(buffer, offset)
        self.failed = True
        return self._fault(self._path, buffer, offset)

    def close(self) -> None:
        self._file.close()


def cannot_be_read(path: Path, buffer: memoryview, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def is_interrupted(path: Path, buffer: memoryview, offset: int) -> int:
    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))


def delivers_one_byte(path: Path, buffer: memoryview, offset: int) -> int:
    buffer[0] = PACKAGE[offset]
    return 1


def is_cut_off(path: Path, buffer: memoryview, offset: int) -> int:
    os.truncate(path, offset)
    return 0


def everything(source: FailingOnce, integrity: Integrity) -> str:
    """Open and prove a package and load all that a session loads; a digest of what was loaded."""
    digest = sha256()
    with open_package(source, integrity=integrity) as package:
        if integrity != "full":
            verify(package)
        check_padding(package)
        notices(package)
        for graph in package.manifest.graphs:
            digest.update(package.graph(graph))
        places = list(package.dense.places())
        with DenseRecords(package, places) as records:
            for number in range(len(places)):
                digest.update(records.take(number))
        with EmbeddingRows(package) as rows:
            digest.update(rows.gather(np.arange(MODEL.vocabulary)).tobytes())
            rows.prove()
        with divided_pager(package, bank_count=1, group_size=1) as pager:
            for expert in range(2):
                for instruction in (pager.fill, pager.await_):
                    instruction(0, expert, 0)
                digest.update(pager.record(pager.use(0), expert))
                pager.release(0)
    return digest.hexdigest()


def outcomes(folder: Path, fault: Fault, integrity: Integrity) -> Iterator[str | EmoeError]:
    """What comes of a fault at the first read, at the second, and so on to the last one."""
    path = folder / "a.emoe"
    threads, lowest = threading.active_count(), free_descriptor()
    for number in itertools.count(1):
        path.write_bytes(PACKAGE)
        source = FailingOnce(path, number, fault)
        outcome: str | EmoeError
        try:
            outcome = everything(source, integrity)
        except EmoeError as error:
            outcome = error
        assert (threading.active_count(), free_descriptor()) == (threads, lowest), number
        if not source.failed:
            assert number > 50
            assert outcome == everything(FailingOnce(path, 0, fault), "paged")
            return
        yield outcome


@pytest.mark.parametrize("integrity", ["paged", "full"])
@pytest.mark.parametrize(
    ("fault", "refusal", "message"),
    [
        (cannot_be_read, LinkError, "reading failed: Input/output error: got 0 of "),
        (is_cut_off, IntegrityError, "the package ends early: got 0 of "),
    ],
)
def test_fault_at_every_read_is_told(
    tmp_path: Path, fault: Fault, refusal: type[EmoeError], message: str, integrity: Integrity
) -> None:
    for outcome in outcomes(tmp_path, fault, integrity):
        assert type(outcome) is refusal
        assert outcome.message.startswith(message)
        assert outcome.path == str(tmp_path / "a.emoe")
        assert outcome.offset is not None


@pytest.mark.parametrize("fault", [is_interrupted, delivers_one_byte])
def test_fault_at_every_read_is_made_up_for(tmp_path: Path, fault: Fault) -> None:
    found = {str(outcome) for outcome in outcomes(tmp_path, fault, "paged")}
    (tmp_path / "b.emoe").write_bytes(PACKAGE)
    assert found == {everything(FailingOnce(tmp_path / "b.emoe", 0, fault), "paged")}
