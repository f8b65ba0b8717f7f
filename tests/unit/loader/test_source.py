"""Reading: wherever a package stands, however its bytes come, and what is said when they do not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from estream_loader import open_package
from estream_loader.integrity import verify
from estream_loader.source import FileSource, MemorySource, read, read_exactly
from estream_spec.errors import EmoeError, IntegrityError, LinkError, MalformedError
from fixtures.packages import Draft
from fixtures.sources import CountingSource, FaultySource, fails_at

PACKAGE = Draft().seal()
OFFSETS = (0, 1, 63, 4095, 4096, 65537)


def free_descriptor() -> int:
    """The number the next file to be opened would get."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


class TestPlaces:
    @pytest.mark.parametrize("offset", OFFSETS)
    def test_inside_another_file(self, tmp_path: Path, offset: int) -> None:
        path = tmp_path / "bundle.apk"
        path.write_bytes(b"\xff" * offset + PACKAGE + b"\xff" * 999)
        with open_package(path, offset=offset, integrity="full") as package:
            assert package.manifest.name == "tiny"
        with open_package(str(path), offset=offset) as package:
            verify(package)

    @pytest.mark.parametrize("offset", OFFSETS)
    def test_descriptor_stays_the_callers(self, tmp_path: Path, offset: int) -> None:
        path = tmp_path / "bundle.apk"
        path.write_bytes(b"\xff" * offset + PACKAGE)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with open_package(descriptor, offset=offset, integrity="full") as package:
                assert package.manifest.name == "tiny"
            assert os.fstat(descriptor).st_size == offset + len(PACKAGE)
            assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        finally:
            os.close(descriptor)

    @pytest.mark.parametrize("offset", OFFSETS)
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_in_memory(self, offset: int, kind: type) -> None:
        with open_package(kind(b"\xff" * offset + PACKAGE + b"\xff"), offset=offset, integrity="full") as package:
            assert package.manifest.name == "tiny"

    def test_memory_of_other_elements(self) -> None:
        words = memoryview(PACKAGE.ljust(-(-len(PACKAGE) // 8) * 8, b"\0")).cast("Q")
        with open_package(words, integrity="full") as package:
            assert package.manifest.name == "tiny"

    def test_at_the_wrong_offset(self) -> None:
        for offset in (1, len(PACKAGE) + 5):
            with pytest.raises(MalformedError, match=r"\[EMOE-SUP-001\]"):
                open_package(PACKAGE, offset=offset)
        with pytest.raises(LinkError, match="offset -1"):
            open_package(PACKAGE, offset=-1)

    def test_beyond_the_end_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "short.emoe"
        path.write_bytes(b"abc")
        with pytest.raises(MalformedError, match=r"starts with b''.*\[EMOE-SUP-001\]"):
            open_package(path, offset=99)


class TestNoPackage:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(LinkError, match="file cannot be opened: no such file"):
            open_package(tmp_path / "none.emoe")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(LinkError, match="is a folder, expected a package") as caught:
            open_package(tmp_path)
        assert caught.value.path == str(tmp_path)
        assert "estream-pack build" in (caught.value.hint or "")

    def test_fifo_is_refused_and_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(LinkError, match="not a regular file"):
            open_package(tmp_path / "pipe")

    def test_pipe_as_descriptor(self) -> None:
        ends = os.pipe()
        try:
            with pytest.raises(LinkError, match="not a regular file"):
                open_package(ends[0])
        finally:
            os.close(ends[0])
            os.close(ends[1])

    def test_closed_descriptor(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        os.close(descriptor)
        with pytest.raises(LinkError):
            open_package(descriptor)

    def test_descriptor_open_for_writing_only(self, tmp_path: Path) -> None:
        path = tmp_path / "a.emoe"
        path.write_bytes(PACKAGE)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            with pytest.raises(LinkError, match="Bad file descriptor"):
                open_package(descriptor)
        finally:
            os.close(descriptor)

    def test_zero_byte_in_the_path(self) -> None:
        with pytest.raises(LinkError, match="null"):
            open_package("a\0b")

    def test_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty.emoe").touch()
        with pytest.raises(MalformedError, match=r"\[EMOE-SUP-001\]"):
            open_package(tmp_path / "empty.emoe")

    def test_no_descriptor_is_left_open(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.emoe"
        path.write_bytes(PACKAGE[:-1])
        lowest = free_descriptor()
        for _ in range(3):
            with pytest.raises(IntegrityError, match=r"\[EMOE-SUP-011\]"):
                open_package(path)
            with pytest.raises(LinkError):
                open_package(tmp_path)
        assert free_descriptor() == lowest


class TestDelivery:
    @pytest.mark.parametrize("most", [1, 2, 7, 127, 4095, 4097])
    def test_short_reads(self, most: int) -> None:
        source = FaultySource(PACKAGE, lambda call, offset, length: most)
        buffer = bytearray(b"\xaa" * 9000)
        read_exactly(source, memoryview(buffer), 30000)
        assert buffer == PACKAGE[30000:39000]

    @pytest.mark.parametrize("most", [97, 1000])
    def test_short_reads_of_a_whole_package(self, most: int) -> None:
        with open_package(FaultySource(PACKAGE, lambda call, offset, length: most), integrity="full") as package:
            assert package.manifest.name == "tiny"

    def test_interrupted_every_third_call(self) -> None:
        def fault(call: int, offset: int, length: int) -> int:
            if call % 3 == 0:
                raise InterruptedError(errno.EINTR, "Interrupted system call")
            return 5000

        with open_package(FaultySource(PACKAGE, fault), integrity="full") as package:
            assert package.manifest.name == "tiny"

    @pytest.mark.parametrize("position", [0, 16400, 40000, 60000, len(PACKAGE) - 300, len(PACKAGE) - 1])
    def test_one_byte_cannot_be_read(self, position: int) -> None:
        source = FaultySource(PACKAGE, fails_at(position))
        with pytest.raises(LinkError, match="reading failed: Input/output error: got 0 of") as caught:
            open_package(source, integrity="full")
        assert (caught.value.rule, caught.value.path) == (None, "package in memory")
        assert caught.value.offset is not None
        assert source.closed == 1

    def test_error_without_text(self) -> None:
        def fault(call: int, offset: int, length: int) -> int:
            raise OSError(errno.ENODEV, None)

        with pytest.raises(LinkError, match="ENODEV"):
            open_package(FaultySource(PACKAGE, fault))

    def test_end_before_what_was_promised(self) -> None:
        source = FaultySource(PACKAGE, lambda call, offset, length: 0 if offset > 40000 else 1000)
        with pytest.raises(IntegrityError, match="ends early: got 0 of") as caught:
            open_package(source)
        assert caught.value.rule == "EMOE-SUP-011"
        assert caught.value.offset is not None
        assert caught.value.offset > 40000

    def test_nothing_to_read_reads_nothing(self) -> None:
        source = CountingSource(PACKAGE)
        assert read(source, 10, 0) == b""
        assert source.reads == []

    def test_file_that_shrinks_while_open(self, tmp_path: Path) -> None:
        path = tmp_path / "a.emoe"
        path.write_bytes(PACKAGE)
        with open_package(path) as package:
            place = package.experts.place(1, 2)
            os.truncate(path, place.offset + 10)
            with pytest.raises(IntegrityError, match="ends early: got 10 of 4096") as caught:
                package.read_record(place, memoryview(bytearray(place.length)))
            assert (caught.value.rule, caught.value.offset) == ("EMOE-SUP-011", place.offset + 10)
            path.write_bytes(PACKAGE)
            package.read_record(place, memoryview(bytearray(place.length)))


class TestClosing:
    def test_twice_is_harmless(self, tmp_path: Path) -> None:
        path = tmp_path / "a.emoe"
        path.write_bytes(PACKAGE)
        package = open_package(path)
        package.close()
        package.close()
        with pytest.raises(LinkError, match="Bad file descriptor"):
            package.read_section(package.container.entries[4])

    def test_late_read_does_not_reach_another_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.emoe"
        path.write_bytes(PACKAGE)
        source = FileSource.open(path)
        source.close()
        (tmp_path / "other").write_bytes(b"secret")
        with (tmp_path / "other").open("rb"), pytest.raises(LinkError):
            read(source, 0, 6)

    def test_memory_source_reads_nothing_past_its_end(self) -> None:
        source = MemorySource(b"abc")
        assert source.read_into(memoryview(bytearray(4)), 2) == 1
        assert source.read_into(memoryview(bytearray(4)), 99) == 0


def edges() -> list[int]:
    with open_package(PACKAGE) as package:
        places = [*package.dense.places(), *package.experts.places()]
        entries = package.container.entries
        bounds = {0, 8, 124, 128, 16384, 16392, 16512, 32768, package.container.superblock.directory_offset}
        bounds |= {bound for entry in entries for bound in (entry.offset, entry.end)}
        bounds |= {place.offset + place.length for place in places} | {len(PACKAGE)}
    return sorted({edge + step for edge in bounds for step in (-1, 0, 1) if 0 <= edge + step < len(PACKAGE)})


@pytest.mark.parametrize("length", edges())
def test_truncated(length: int) -> None:
    with pytest.raises(EmoeError) as caught:
        open_package(PACKAGE[:length])
    expected = "EMOE-SUP-001" if length < 8 else "EMOE-SUP-003" if length < 128 else "EMOE-SUP-011"
    assert caught.value.rule == expected
    assert type(caught.value) is (MalformedError if length < 128 else IntegrityError)


@pytest.mark.parametrize("extra", [1, 64, 16384])
def test_trailing_bytes_are_ignored(extra: int) -> None:
    with open_package(PACKAGE + b"\x01" * extra, integrity="full") as package:
        assert package.manifest.name == "tiny"
