"""Dense weights: whole records, and embedding rows read one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as set_fields
from numpy.typing import NDArray

from estream_loader import Package, open_package
from estream_loader.dense import DenseRecords, EmbeddingRows
from estream_loader.records import RecordPlace, tensors
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.weights import Encoding
from fixtures.packages import ENCODINGS, MODEL, Draft
from fixtures.sources import CountingSource, FaultySource, GatedSource, fails_at, free_descriptor

ENCODING: tuple[Encoding, ...] = ("f32", "w8")
DATA = Draft().seal()


def places_of(data: bytes) -> list[RecordPlace]:
    with open_package(data) as package:
        return list(package.dense.places())


PLACES = places_of(DATA)
EMBEDDING, *LAYERS = PLACES


def whole_embedding(package: Package) -> NDArray[np.float32]:
    record = memoryview(bytearray(package.dense.place(0).length))
    package.read_record(package.dense.place(0), record)
    views = tensors(package.dense.place(0).layout, record)
    scale = views.get("embedding.scale", np.ones(1, np.float32))
    whole: NDArray[np.float32] = views["embedding"].astype(np.float32) * scale.reshape(-1, 1)
    return whole


@contextmanager
def gated(data: bytes = DATA) -> Iterator[tuple[Package, GatedSource]]:
    """An open package of which nothing further is read until the test lets it."""
    with open_package(data) as package:
        _ = package.dense
        package.source = source = GatedSource(data)
        try:
            yield package, source
        finally:
            source.let_all()


def test_records_in_memory_of_their_own() -> None:
    with open_package(DATA) as package, DenseRecords(package, PLACES) as records:
        taken = [records.take(number) for number in range(len(PLACES))]
    for record, place in zip(taken, PLACES, strict=True):
        assert record == DATA[place.offset : place.offset + place.length]
        assert np.frombuffer(record, np.uint8).ctypes.data % 4096 == 0


def test_a_record_is_there_before_those_after_it() -> None:
    with gated() as (package, source), DenseRecords(package, LAYERS[:2]) as records:
        assert source.arrived(2) == {place.offset for place in LAYERS[:2]}
        source.let(LAYERS[0].offset)
        assert records.take(0) == DATA[LAYERS[0].offset : LAYERS[0].offset + LAYERS[0].length]
        assert [records.is_there(number) for number in range(2)] == [True, False]
        source.let_all()
        records.settle()
        assert records.is_there(1)


def test_what_is_postponed_is_read_shortly_before_it_is_taken() -> None:
    """Two reads are under way and others wait · those are read once the record before them is taken, or all at once."""
    with gated() as (package, source):
        places = [*LAYERS, *list(package.experts.places())[:4]]
        with DenseRecords(package, places) as records:
            assert source.arrived(2) == {place.offset for place in places[:2]}
            records.postpone()
            source.let_all()
            for number in range(2):
                records.take(number)
            assert source.arrived(2) == {place.offset for place in places[2:4]}
            assert source.nothing_arrived()
            records.settle()
            assert all(records.is_there(number) for number in range(len(places)))
            assert len(source.reads) == len(places)


def test_a_damaged_record_is_told_to_whoever_takes_it() -> None:
    data = bytearray(DATA)
    bad = LAYERS[2]
    data[bad.offset + bad.length - 1] ^= 1
    with open_package(bytes(data)) as package, DenseRecords(package, LAYERS) as records:
        for _ in range(2):
            with pytest.raises(IntegrityError) as caught:
                records.take(2)
            assert (caught.value.rule, caught.value.path) == ("EMOE-REC-001", "dense[3][0]")
        assert len(records.take(1)) == LAYERS[1].length


def test_a_record_comes_once_the_device_reads_again() -> None:
    source = FaultySource(DATA, lambda call, offset, length: None)
    with open_package(source) as package:
        source.fault = fails_at(LAYERS[1].offset)
        with DenseRecords(package, LAYERS) as records:
            records.settle()
            source.fault = lambda call, offset, length: None
            with pytest.raises(LinkError, match="reading failed: Input/output error: got 0 of"):
                records.take(1)
            assert records.take(1) == DATA[LAYERS[1].offset : LAYERS[1].offset + LAYERS[1].length]


def test_closing_ends_reading(tmp_path: Path) -> None:
    """Closed while every lane reads and all else waits · no further read begins, no thread and no file are left."""
    threads, lowest = threading.active_count(), free_descriptor()
    with gated() as (package, source):
        records, rows = DenseRecords(package, LAYERS * 4), EmbeddingRows(package)
        begun = source.arrived(3)
        assert EMBEDDING.offset in begun
        closing = [threading.Thread(target=each.close) for each in (records, rows)]
        for thread in closing:
            thread.start()
        with pytest.raises(LinkError, match="the reader was closed before a read was done"):
            records.take(len(LAYERS) * 4 - 1)
        source.let_all()
        for thread in closing:
            thread.join()
        assert len(source.reads) == 3
        for each in (records, rows):
            each.close()
    assert (threading.active_count(), free_descriptor()) == (threads, lowest)


@pytest.mark.parametrize("encoding", ENCODING)
def test_rows_are_those_of_the_whole_embedding(encoding: Encoding, tmp_path: Path) -> None:
    path = tmp_path / "a.emoe"
    path.write_bytes(Draft(encodings={**ENCODINGS, "embedding": encoding}).seal())
    for source in (path, path.read_bytes()):
        with open_package(source) as package, EmbeddingRows(package) as rows:
            whole = whole_embedding(package)
            for ids in ([0], [15], [3, 3, 0, 15, 1]):
                gathered = rows.gather(np.array(ids))
                assert gathered.dtype == np.float32
                np.testing.assert_array_equal(gathered, whole[ids])
                rows.prove()


def test_only_the_rows_asked_for_are_read() -> None:
    source = CountingSource(Draft(model=set_fields(MODEL, vocabulary=4096)).seal())
    with open_package(source) as package, EmbeddingRows(package) as rows:
        place = package.dense.place(0)
        rows.gather(np.array([0]))  # the scales, too, which are read once
        rows.prove()
        source.reads.clear()
        rows.gather(np.array([5, 3000]))
    piece = 16384
    assert source.reads == [(place.offset, piece), (place.offset + 3000 * 32 // piece * piece, piece)]


def test_rows_can_be_had_before_the_embedding_is_proven() -> None:
    with gated() as (package, source), EmbeddingRows(package) as rows:
        assert source.arrived(1) == {EMBEDDING.offset}
        package.source = CountingSource(DATA)  # rows come from here, the proof still waits
        gathered = rows.gather(np.array([7, 2]))
        assert not rows.proven
        np.testing.assert_array_equal(gathered, whole_embedding(package)[[7, 2]])
        source.let_all()
        rows.prove()
        assert rows.proven


def test_a_damaged_embedding_is_told_to_whoever_asks_for_the_proof() -> None:
    data = bytearray(DATA)
    data[EMBEDDING.offset + 200] ^= 1
    with open_package(bytes(data)) as package, EmbeddingRows(package) as rows:
        rows.gather(np.array([1]))
        for _ in range(2):
            with pytest.raises(IntegrityError, match="record has checksum") as caught:
                rows.prove()
            error = caught.value
            assert (error.rule, error.path, error.offset) == ("EMOE-REC-001", "dense[0][0]", EMBEDDING.offset)
            assert not rows.proven
    with open_package(bytes(data), integrity="open") as package, EmbeddingRows(package) as rows:
        assert rows.proven
        rows.gather(np.array([1]))
        rows.prove()


def test_the_embedding_is_proven_once_the_device_reads_again() -> None:
    source = FaultySource(DATA, lambda call, offset, length: None)
    with open_package(source) as package:
        source.fault = fails_at(EMBEDDING.offset)
        with EmbeddingRows(package) as rows:
            with pytest.raises(LinkError, match="reading failed: Input/output error: got 0 of"):
                rows.prove()
            source.fault = lambda call, offset, length: None
            rows.prove()
            assert rows.proven


def test_embedding_rows_that_change_after_they_were_proven() -> None:
    """Bytes that are others when a row is read again · refused, and under `open` not looked at."""
    for integrity, refused in (("paged", True), ("open", False)):
        data = bytearray(DATA)
        with (
            open_package(data, integrity=integrity) as package,  # type: ignore[arg-type]
            EmbeddingRows(package) as rows,
        ):
            before = rows.gather(np.array([3, 0]))
            rows.prove()
            data[EMBEDDING.offset + 3 * 32] ^= 1
            if refused:
                with pytest.raises(IntegrityError, match=r"has changed since it was proven.*\[EMOE-REC-001\]"):
                    rows.gather(np.array([3]))
            else:
                assert not np.array_equal(rows.gather(np.array([3, 0])), before)


def test_embedding_rows_that_were_others_before_the_proof() -> None:
    """A row that is read before the embedding is proven, with other bytes than the proof finds · refused by it."""
    with gated() as (package, source), EmbeddingRows(package) as rows:
        assert source.arrived(1) == {EMBEDDING.offset}
        other = bytearray(DATA)
        other[EMBEDDING.offset + 3 * 32] ^= 1
        package.source = CountingSource(bytes(other))
        rows.gather(np.array([3]))
        source.let_all()
        with pytest.raises(IntegrityError, match=r"has changed since it was proven.*\[EMOE-REC-001\]"):
            rows.prove()


def test_scales_that_were_others_before_the_proof_are_read_again() -> None:
    """Scales of the embedding's rows, read before the proof with other bytes · refused once, and then not used."""
    [scale] = [each for each in EMBEDDING.layout.tensors if each.name == "embedding.scale"]
    with open_package(DATA) as package:
        whole = whole_embedding(package)
    with gated() as (package, source), EmbeddingRows(package) as rows:
        assert source.arrived(1) == {EMBEDDING.offset}
        other = bytearray(DATA)
        other[EMBEDDING.offset + scale.offset + 3 * 4] ^= 1
        package.source = CountingSource(bytes(other))
        rows.gather(np.array([3]))
        package.source = source
        source.let_all()
        with pytest.raises(IntegrityError, match=r"has changed since it was proven.*\[EMOE-REC-001\]"):
            rows.prove()
        assert np.array_equal(rows.gather(np.array([3])), whole[[3]])
        rows.prove()
