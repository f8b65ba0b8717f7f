"""Past the page cache: where it works that is proven, and where it does not the bytes come all the same."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from estream_loader import direct
from estream_loader.direct import DirectFile
from estream_loader.reading import Reader
from estream_loader.source import FileSource, MemorySource
from estream_loader.uncached import UncachedSource
from estream_spec.errors import IntegrityError, LinkError
from fixtures.sources import CountingSource

SIZE = 1 << 20
PIECE = 1 << 16
DATA = os.urandom(SIZE)

CACHED = "the pages were cached before, or the system does not tell whether they are"
THROUGH = "buffered: the file system accepts direct reads, but they go through the page cache"


def aligned(length: int) -> memoryview:
    return memoryview(mmap.mmap(-1, length))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that stands on the disk and not in memory only."""
    path = tmp_path / "a.emoe"
    with path.open("wb") as file:
        file.write(DATA)
        file.flush()
        os.fsync(file.fileno())
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate()), open_descriptors()
    yield
    assert (set(threading.enumerate()), open_descriptors()) == before


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def read_all(source: FileSource | MemorySource, buffer: memoryview | None = None) -> str:
    """Read everything in pieces over three lanes, compare, close; the mode at the end."""
    buffer = aligned(SIZE) if buffer is None else buffer
    with Reader(source, 3, piece=PIECE) as reader:
        for start in range(0, SIZE, 4 * PIECE):
            reader.submit(start, buffer[start : start + 4 * PIECE]).wait()
        mode = reader.mode
    assert buffer == DATA
    source.close()
    return mode


class TestFiles:
    """Real ones. Whether the disk under the tests can be read directly is its own affair; what is said must be so."""

    def test_what_is_said_of_a_file_is_so(self, path: Path) -> None:
        mode = read_all(FileSource.open(path))
        with path.open("rb") as file:
            if mode == "direct":
                assert not is_cached(file.fileno())
            elif mode == f"direct, unproven: {CACHED}":
                assert is_cached(file.fileno())
            else:
                assert mode.startswith("buffered: the ") or mode == "buffered: tmpfs keeps files in memory"

    def test_descriptor_of_the_caller_even_without_a_name(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        expected = read_all(FileSource(descriptor, owned=False))
        path.unlink()
        path.write_bytes(bytes(SIZE))
        assert read_all(FileSource(descriptor, owned=False)) == expected
        os.close(descriptor)

    @pytest.mark.parametrize("base", [1, 4095, 4096 + 64])
    def test_package_at_an_odd_offset(self, tmp_path: Path, base: int) -> None:
        path = tmp_path / "bundle.apk"
        path.write_bytes(bytes(base) + DATA)
        assert read_all(FileSource.open(path, base=base)).startswith("buffered: ")

    def test_package_inside_another_file(self, tmp_path: Path, path: Path) -> None:
        bundle = tmp_path / "bundle.apk"
        with bundle.open("wb") as file:
            file.write(bytes(4096) + DATA)
            os.fsync(file.fileno())
        expected = read_all(FileSource.open(path))
        assert read_all(FileSource.open(bundle, base=4096)) == expected

    def test_memory_that_is_not_aligned(self, path: Path) -> None:
        mode = read_all(FileSource.open(path), aligned(SIZE + 1)[1:])
        assert mode.startswith("buffered: ")

    def test_file_kept_in_memory(self) -> None:
        descriptor = os.memfd_create("package")
        os.write(descriptor, DATA)
        assert read_all(FileSource(descriptor, owned=True)) == "buffered: tmpfs keeps files in memory"

    def test_shared_memory(self) -> None:
        path = Path("/dev/shm", f"estream-{os.getpid()}")
        path.write_bytes(DATA)
        try:
            assert read_all(FileSource.open(path)) == "buffered: tmpfs keeps files in memory"
        finally:
            path.unlink()

    @pytest.mark.parametrize("source", [MemorySource(DATA), CountingSource(DATA)])
    def test_no_file(self, source: MemorySource) -> None:
        assert read_all(source) == "buffered: the package is not read from a file"

    def test_closed_source(self, path: Path) -> None:
        source = FileSource.open(path)
        source.close()
        with Reader(source, 1) as reader, pytest.raises(LinkError, match="Bad file descriptor"):
            reader.submit(0, aligned(PIECE)).wait()


def is_cached(descriptor: int) -> bool:
    file = DirectFile(descriptor, 0)
    try:
        return file.is_cached(0, SIZE)
    finally:
        file.close()


class PretendedFile(DirectFile):
    """Reads through the cache and says of it what a test wants."""

    def __init__(self, descriptor: int, cached: Callable[[int], bool], fault: Callable[[int], int | None]):
        self.alignment = 4096
        self._descriptor, self._cached, self._fault = os.dup(descriptor), cached, fault
        self.questions = self.reads = 0

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self.reads += 1
        most = self._fault(self.reads)
        return os.preadv(self._descriptor, [buffer[:most]], offset)

    def drop_cached(self, offset: int, length: int) -> None:
        pass

    def is_cached(self, offset: int, length: int) -> bool:
        self.questions += 1
        return self._cached(self.questions)


class PretendedSource(FileSource):
    """A file of which direct reads go as a test wants."""

    cached: Callable[[int], bool] = staticmethod(lambda question: False)
    fault: Callable[[int], int | None] = staticmethod(lambda read: None)
    opened: PretendedFile | None = None

    def open_direct(self) -> DirectFile:
        self.opened = PretendedFile(self._descriptor, self.cached, self.fault)
        return self.opened


def refuses(number: int, from_read: int = 1) -> Callable[[int], int | None]:
    def fault(read: int) -> int | None:
        if read >= from_read:
            raise OSError(number, os.strerror(number))
        return None

    return fault


class TestProof:
    @pytest.fixture
    def source(self, path: Path) -> PretendedSource:
        return PretendedSource.open(path)

    def test_nothing_is_claimed_before_the_first_read(self, source: PretendedSource) -> None:
        with Reader(source, 1) as reader:
            assert reader.mode == "direct, unproven: nothing was read yet"
        source.close()

    def test_pages_that_stay_away(self, source: PretendedSource) -> None:
        assert read_all(source) == "direct"
        assert source.opened is not None
        assert (source.opened.questions, source.opened.reads) == (2, SIZE // PIECE)

    def test_pages_that_come(self, source: PretendedSource) -> None:
        """As on a file system that takes the flag and ignores it."""
        source.cached = lambda question: question % 2 == 0
        assert read_all(source) == THROUGH

    def test_pages_that_came_once_with_another_reader(self, source: PretendedSource) -> None:
        source.cached = lambda question: question == 2
        assert read_all(source) == "direct"

    def test_pages_that_were_there_before(self, source: PretendedSource) -> None:
        source.cached = lambda question: question == 1
        assert read_all(source) == "direct"

    def test_pages_that_always_are_there(self, source: PretendedSource) -> None:
        source.cached = lambda question: True
        assert read_all(source) == f"direct, unproven: {CACHED}"

    def test_asking_comes_to_an_end(self, source: PretendedSource) -> None:
        source.cached = lambda question: True
        buffer = aligned(4096)
        uncached = UncachedSource(source)
        for _ in range(200):
            assert uncached.read_into(buffer, 0) == 4096
        assert source.opened is not None
        assert (source.opened.questions, source.opened.reads) == (64, 200)
        uncached.close()
        source.close()

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
    @pytest.mark.parametrize("from_read", [1, 4])
    def test_refused_at_a_read(self, source: PretendedSource, number: int, from_read: int) -> None:
        source.fault = refuses(number, from_read)
        assert read_all(source) == f"buffered: direct reads are refused: {os.strerror(number)}"

    @pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EIO, errno.EFAULT])
    def test_first_read_that_fails_is_a_refusal(self, source: PretendedSource, number: int) -> None:
        """As where the system forbids them; the bytes come through the cache."""
        source.fault = refuses(number)
        assert read_all(source) == f"buffered: direct reads are refused: {os.strerror(number)}"

    def test_device_that_fails_at_once_fails_through_the_cache_too(
        self, source: PretendedSource, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: FileSource, buffer: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        source.fault = refuses(errno.EIO)
        monkeypatch.setattr(FileSource, "read_into", broken)
        with Reader(source, 1) as reader, pytest.raises(LinkError, match="reading failed: Input/output error"):
            reader.submit(0, aligned(PIECE)).wait()
        source.close()

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.EPERM])
    def test_failing_device_is_no_refusal(self, source: PretendedSource, number: int) -> None:
        source.fault = refuses(number, from_read=2)
        with Reader(source, 1) as reader:
            reader.submit(0, aligned(PIECE)).wait()
            with pytest.raises(LinkError, match=f"reading failed: {os.strerror(number)}"):
                reader.submit(0, aligned(PIECE)).wait()
            assert reader.mode.startswith("direct")
        source.close()

    @pytest.mark.parametrize("most", [4096, 5000])
    def test_short_reads(self, source: PretendedSource, most: int) -> None:
        """Where one ends in the middle of a block, the rest of the piece is read through the cache."""
        source.fault = lambda read: most
        assert read_all(source) == "direct"

    def test_file_that_ends_in_the_middle_of_a_block(self, path: Path, source: PretendedSource) -> None:
        os.truncate(path, 4096 + 10)
        with Reader(source, 1) as reader, pytest.raises(IntegrityError, match="got 4106 of 65536"):
            reader.submit(0, aligned(PIECE)).wait()
        source.close()

    def test_not_aligned(self, source: PretendedSource) -> None:
        with Reader(source, 1) as reader:
            buffer = aligned(3 * 4096)
            reader.submit(0, buffer).wait()
            assert reader.mode == "direct"
            reader.submit(10, buffer).wait()
            assert buffer == DATA[10 : 10 + len(buffer)]
            expected = "address, length or offset of 12288 bytes at 10 are no multiples of 4096"
            assert reader.mode == f"buffered: {expected}"
            reader.submit(0, buffer).wait()
            assert reader.mode == f"buffered: {expected}"
        source.close()


class TestWhatTheSystemTells:
    @pytest.fixture
    def descriptor(self, path: Path) -> Iterator[int]:
        descriptor = os.open(path, os.O_RDONLY)
        yield descriptor
        os.close(descriptor)

    def tell(self, monkeypatch: pytest.MonkeyPatch, mask: int, *alignments: int) -> None:
        """Let the kernel say this of alignment."""

        def statx(descriptor: object, name: bytes, flags: int, wanted: int, buffer: object) -> int:
            filled = mask.to_bytes(4, "little").ljust(152, b"\0") + b"".join(
                n.to_bytes(4, "little") for n in alignments
            )
            buffer.raw = filled.ljust(256, b"\0")  # type: ignore[attr-defined]
            return 0

        libc = SimpleNamespace(statx=statx, fstatfs=lambda descriptor, buffer: -1, mincore=direct._LIBC.mincore)
        monkeypatch.setattr(direct, "_LIBC", libc)

    def test_pages_read_through_the_cache_are_seen(self, path: Path, descriptor: int) -> None:
        path.read_bytes()
        file = DirectFile(descriptor, 0)
        assert file.is_cached(0, SIZE)
        assert file.is_cached(4096, 4096)
        file.close()
        file.close()

    def test_range_beyond_the_end_counts_as_cached(self, descriptor: int) -> None:
        file = DirectFile(descriptor, 0)
        assert file.is_cached(SIZE, 4096)
        file.close()

    def test_alignment(self, monkeypatch: pytest.MonkeyPatch, descriptor: int) -> None:
        self.tell(monkeypatch, 0x2000, 4, 1 << 14)
        file = DirectFile(descriptor, 1 << 14)
        assert file.alignment == 1 << 14
        buffer = aligned(1 << 15)
        for start, stop, offset in [(0, 1 << 13, 0), (0, 1 << 14, 1 << 13), (1, 1 + (1 << 14), 0), (0, 0, 0)]:
            assert not file.suits(buffer[start:stop], offset)
        assert file.suits(buffer, 5 << 14) or direct._address(buffer) % (1 << 14)
        file.close()
        with pytest.raises(OSError, match="the package begins at byte 8192, no multiple of 16384"):
            DirectFile(descriptor, 8192)

    def test_no_word_of_alignment(self, monkeypatch: pytest.MonkeyPatch, descriptor: int) -> None:
        self.tell(monkeypatch, 0, 1, 1)
        file = DirectFile(descriptor, 0)
        assert file.alignment == 4096
        file.close()

    def test_file_that_cannot_be_read_so(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.tell(monkeypatch, 0x2000, 0, 0)
        expected = "buffered: the file system does not read this file past the page cache"
        assert read_all(FileSource.open(path)) == expected

    def test_refused_when_opened(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        source, real = FileSource.open(path), os.open

        def refusing(name: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(name, flags)

        monkeypatch.setattr(os, "open", refusing)
        self.tell(monkeypatch, 0)
        assert read_all(source) == "buffered: the system refuses to open the file so: Invalid argument"

    def test_system_without_it(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        monkeypatch.delattr(os, "O_DIRECT")
        assert read_all(FileSource.open(path)) == "buffered: this system has no O_DIRECT"
