"""Dense weights: whole records, and embedding rows read one by one."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace as set_fields

from estream_loader import open_package
from estream_loader.dense import EmbeddingRows, load_records
from estream_loader.records import tensors
from estream_spec.errors import IntegrityError
from estream_spec.weights import Encoding
from fixtures.packages import ENCODINGS, MODEL, Draft
from fixtures.sources import CountingSource

ENCODING: tuple[Encoding, ...] = ("f32", "w8")


def test_record_in_memory_of_its_own() -> None:
    data = Draft().seal()
    with open_package(data) as package:
        place = package.dense.place(2)
        record = load_records(package, [place])[0]
    assert record == data[place.offset : place.offset + place.length]
    assert np.frombuffer(record, np.uint8).ctypes.data % 4096 == 0


@pytest.mark.parametrize("encoding", ENCODING)
def test_rows_are_those_of_the_whole_embedding(encoding: Encoding) -> None:
    with open_package(Draft(encodings={**ENCODINGS, "embedding": encoding}).seal()) as package:
        views = tensors(package.dense.place(0).layout, load_records(package, [package.dense.place(0)])[0])
        whole = views["embedding"].astype(np.float32)
        if encoding == "w8":
            whole *= views["embedding.scale"][:, None]
        rows = EmbeddingRows(package)
        for ids in ([0], [15], [3, 3, 0, 15, 1]):
            gathered = rows.gather(np.array(ids))
            assert gathered.dtype == np.float32
            np.testing.assert_array_equal(gathered, whole[ids])


def test_only_the_rows_asked_for_are_read() -> None:
    source = CountingSource(Draft(model=set_fields(MODEL, vocabulary=4096)).seal())
    with open_package(source) as package:
        rows = EmbeddingRows(package)
        place = package.dense.place(0)
        source.reads.clear()
        rows.gather(np.array([5, 3000]))
    piece = 16384
    assert source.reads == [(place.offset, piece), (place.offset + 3000 * 32 // piece * piece, piece)]


def test_embedding_is_proven_before_its_first_row() -> None:
    data = bytearray(Draft().seal())
    with open_package(bytes(data)) as package:
        place = package.dense.place(0)
    data[place.offset + 200] ^= 1
    with open_package(bytes(data)) as package, pytest.raises(IntegrityError, match="record has checksum") as caught:
        EmbeddingRows(package)
    error = caught.value
    assert (error.rule, error.path, error.offset) == ("EMOE-REC-001", "dense[0][0]", place.offset)
    with open_package(bytes(data), integrity="open") as package:
        EmbeddingRows(package).gather(np.array([1]))


def test_damaged_dense_record() -> None:
    data = bytearray(Draft().seal())
    with open_package(bytes(data)) as package:
        place = package.dense.place(3)
    data[place.offset + place.length - 1] ^= 1
    with open_package(bytes(data)) as package, pytest.raises(IntegrityError) as caught:
        load_records(package, [package.dense.place(3)])[0]
    assert (caught.value.rule, caught.value.path) == ("EMOE-REC-001", "dense[3][0]")


def test_embedding_rows_that_change_after_they_were_proven() -> None:
    """Bytes that are others when a row is read again · refused, and under `open` not looked at."""
    for integrity, refused in (("paged", True), ("open", False)):
        data = bytearray(Draft().seal())
        with open_package(data, integrity=integrity) as package:  # type: ignore[arg-type]
            rows = EmbeddingRows(package)
            before = rows.gather(np.array([3, 0]))
            place = package.dense.place(0)
            data[place.offset + 3 * 32] ^= 1
            if refused:
                with pytest.raises(IntegrityError, match=r"has changed since it was proven.*\[EMOE-REC-001\]"):
                    rows.gather(np.array([3]))
            else:
                assert not np.array_equal(rows.gather(np.array([3, 0])), before)
