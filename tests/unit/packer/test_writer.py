from __future__ import annotations

import errno
import io
import itertools
import os
import stat
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import crc32c
import pytest
import zstandard

from estream_loader import open_package
from estream_packer.writer import PackageWriter, PackedRecord
from estream_spec.constants import DATA_START, Codec, SectionType
from estream_spec.container import Container, check_entries
from estream_spec.errors import MalformedError, PackError
from estream_spec.records import RecordRange, Superblock

TEXT = b"the same words again and again, " * 40
NOISE = bytes(sha256(bytes([index])).digest()[0] for index in range(200))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def record(content: bytes, length: int) -> PackedRecord:
    data = content.ljust(length, b"\0")
    return PackedRecord(memoryview(data), crc32c.crc32c(data), sha256(content).digest())


def fill(writer: PackageWriter) -> None:
    """One small section of each kind; no valid package, but a valid container."""
    ranges = (RecordRange(0, 4096, 2, 0), RecordRange(8192, 8192, 1, 1))
    for section_type in (SectionType.DENSE, SectionType.EXPERTS):
        records = [record(b"a", 4096), record(b"b", 4096), record(b"c", 8192)]
        table = writer.add_records(section_type, ranges, iter(records))
        assert (table.first, table.digests[1]) == ((0, 2), sha256(b"b").digest())
    writer.add(SectionType.DENSE_TABLE, TEXT)
    writer.add(SectionType.EXPERT_TABLE, TEXT)
    writer.add(SectionType.GRAPH, TEXT, 0, compress=True)
    writer.add(SectionType.GRAPH, NOISE, 1, compress=True)
    writer.add(SectionType.TOKENIZER, bytes(1 << 20), compress=True)
    writer.add(SectionType.MANIFEST, TEXT)


def write(output: Path) -> Container:
    with PackageWriter(output, 12) as writer:
        fill(writer)
        container = writer.finish()
        writer.commit()
    return container


def test_a_package_is_laid_out_as_the_format_says(tmp_path: Path) -> None:
    output = tmp_path / "model.emoe"
    container = write(output)
    data = output.read_bytes()
    check_entries(container.superblock, container.entries)

    twins = [data[offset : offset + Superblock.SIZE] for offset in (0, 16384)]
    assert twins[0] == twins[1] == container.superblock.encode()
    assert container.superblock.file_length == len(data)
    assert not any(data[Superblock.SIZE : 16384] + data[16384 + Superblock.SIZE : DATA_START])

    covered = [(0, DATA_START), *((entry.offset, entry.end) for entry in container.entries)]
    covered.append((container.superblock.directory_offset, len(data)))
    for (_, end), (begin, _) in pairwise(covered):
        assert not any(data[end:begin])

    for entry in container.entries:
        stored = data[entry.offset : entry.end]
        if entry.type in (SectionType.DENSE, SectionType.EXPERTS):
            assert entry.offset % 4096 == 0
            assert entry.sha256 == sha256(b"".join(sha256(each).digest() for each in (b"a", b"b", b"c"))).digest()
        else:
            assert entry.sha256 == sha256(stored).digest()


def test_only_what_compression_helps_is_compressed(tmp_path: Path) -> None:
    container = write(tmp_path / "model.emoe")
    data = (tmp_path / "model.emoe").read_bytes()
    text, noise = container.section(SectionType.GRAPH, 0), container.section(SectionType.GRAPH, 1)
    assert (text.codec, text.length) == (Codec.ZSTD, len(TEXT))
    assert zstandard.get_frame_parameters(data[text.offset : text.end]).content_size == len(TEXT)
    assert zstandard.decompress(data[text.offset : text.end]) == TEXT
    assert (noise.codec, data[noise.offset : noise.end]) == (Codec.NONE, NOISE)
    # Denser than readers allow.
    assert container.section(SectionType.TOKENIZER).codec == Codec.NONE
    assert container.section(SectionType.EXPERT_TABLE).codec == Codec.NONE


def test_a_package_appears_when_it_is_committed_and_replaces_an_older_one(tmp_path: Path) -> None:
    output = tmp_path / "model.emoe"
    output.write_bytes(b"older")
    with PackageWriter(output, 12) as writer:
        fill(writer)
        writer.finish()
        assert output.read_bytes() == b"older"
        writer.commit()
    assert output.stat().st_size > DATA_START
    assert names(tmp_path) == ["model.emoe"]


def test_a_new_package_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "model.emoe")
    (tmp_path / "other").touch()
    assert (tmp_path / "model.emoe").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_when_writing_ends_early(tmp_path: Path, error: type[BaseException]) -> None:
    output = tmp_path / "model.emoe"
    output.write_bytes(b"older")
    with pytest.raises(error), PackageWriter(output, 12) as writer:  # noqa: PT012
        fill(writer)
        raise error
    assert (names(tmp_path), output.read_bytes()) == (["model.emoe"], b"older")


def test_an_unfinished_file_is_never_a_package(tmp_path: Path) -> None:
    output = tmp_path / "model.emoe"
    with PackageWriter(output, 12) as writer:
        [partial] = tmp_path.iterdir()
        assert partial.name.startswith(".model.emoe.")
        assert partial.suffix == ".partial"
        fill(writer)
        with pytest.raises(MalformedError, match=r"\[EMOE-SUP-001\]"):
            open_package(partial)


def test_files_of_dead_writers_are_removed_and_those_of_writers_at_work_are_not(tmp_path: Path) -> None:
    output = tmp_path / "model.emoe"
    dead, foreign = tmp_path / ".model.emoe.01234567.partial", tmp_path / ".other.emoe.01234567.partial"
    dead.write_bytes(b"left behind")
    foreign.write_bytes(b"another package's")
    with PackageWriter(output, 12) as first:
        assert not dead.exists()
        fill(first)
        write(output)
        earlier = output.read_bytes()
        first.finish()
        first.commit()
    assert output.read_bytes() == earlier
    assert names(tmp_path) == [foreign.name, output.name]


def test_only_leavings_of_the_very_output_are_removed(tmp_path: Path) -> None:
    files = [".model.emoe.notes.partial", ".model.emoe.2.emoe.01234567.partial", ".model.emoe.0123456X.partial"]
    for name in files:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / ".model.emoe.01234567.partial")
    (tmp_path / ".model.emoe.89abcdef.partial").symlink_to(tmp_path / files[0])
    before = names(tmp_path)
    write(tmp_path / "model.emoe")
    assert names(tmp_path) == sorted([*before, "model.emoe"])


@pytest.mark.parametrize("name", ["x" * 238, "x" * 255, "ü" * 127])
def test_every_name_a_file_may_have_can_be_written_and_cleaned_up_after(tmp_path: Path, name: str) -> None:
    other = tmp_path / f"{name[:-1]}y"
    write(tmp_path / name)
    with PackageWriter(other, 12):
        [partial] = tmp_path.glob(".*.partial")
        assert partial.name.startswith(f".{name[:100]}")
    for output, removed in ((tmp_path / name, False), (other, True)):
        partial.write_bytes(b"left behind by a writer of the other")
        write(output)
        assert partial.exists() != removed


def test_an_output_that_is_not_a_plain_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="output is a folder"):
        write(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackError, match="not a plain file"):
        write(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("place", "reason", "hint"),
    [
        ("absent/model.emoe", "no such file or directory", "make the folder first"),
        ("file/model.emoe", "not a directory", None),
        ("x" * 256, "file name too long", "give a shorter name"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_with_the_reason(
    tmp_path: Path, place: str, reason: str, hint: str | None
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PackError, match=f"package cannot be written: {reason}") as refusal:
        write(tmp_path / place)
    assert (refusal.value.path, refusal.value.hint) == (str(tmp_path / place), hint)
    assert names(tmp_path) == ["file"]


class FailingDisk:
    """Counts what a writer asks of the disk and refuses one request; raw writes may take only part of the data.

    Args:
        number: of the request that is refused, from 1 on; 0 refuses none.
        error: with what.
        most: bytes a raw write takes at most.
    """

    def __init__(self, patch: pytest.MonkeyPatch, number: int, error: int, most: int | None = None):
        self.asked: list[str] = []
        self._number, self._error, self._most = number, error, most
        disk = self

        class RawFile(io.FileIO):
            def write(self, data: Any, /) -> int:
                disk.ask("write")
                return super().write(memoryview(data)[: disk._most])

        patch.setattr(os, "fdopen", lambda descriptor, mode: io.BufferedWriter(RawFile(descriptor, mode)))
        real_open, real_sync, real_replace = os.open, os.fsync, os.replace

        def opening(path: str, flags: int, *more: Any, **names: Any) -> int:
            if flags & os.O_CREAT or flags & os.O_DIRECTORY:
                disk.ask("create" if flags & os.O_CREAT else "open folder")
            return real_open(path, flags, *more, **names)

        def syncing(descriptor: int) -> None:
            disk.ask("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync")
            real_sync(descriptor)

        def replacing(source: Path, target: Path) -> None:
            disk.ask("rename")
            real_replace(source, target)

        patch.setattr(os, "open", opening)
        patch.setattr(os, "fsync", syncing)
        patch.setattr(os, "replace", replacing)

    def ask(self, what: str) -> None:
        """Count a request; refuse it if it is the one."""
        self.asked.append(what)
        if len(self.asked) == self._number:
            raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_whatever_the_disk_refuses_leaves_the_older_package_or_the_whole_new_one(tmp_path: Path, error: int) -> None:
    output, lowest = tmp_path / "model.emoe", free_descriptor()
    write(output)
    whole = output.read_bytes()
    outcomes = []
    for number in itertools.count(1):
        output.write_bytes(b"older")
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, number, error)
            refusal = None
            try:
                write(output)
            except PackError as caught:
                refusal = caught
        assert names(tmp_path) == ["model.emoe"]
        assert free_descriptor() == lowest
        assert output.read_bytes() == (whole if refusal is None else b"older")
        if number > len(disk.asked):
            break
        outcomes.append((disk.asked[number - 1], refusal is None))
        if refusal is not None:
            assert refusal.message == f"package cannot be written: {os.strerror(error).lower()}"
            assert (refusal.path, refusal.hint is None) == (str(output), error == errno.EIO)
    # Once the new name is there, that it may not outlast a power failure is no reason to call the package unwritten.
    expected = {
        "create": False,
        "write": False,
        "sync": False,
        "rename": False,
        "open folder": True,
        "sync folder": True,
    }
    assert dict(outcomes) == expected


def test_short_writes_are_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.emoe")
    disk = FailingDisk(monkeypatch, 0, errno.EIO, most=1000)
    write(tmp_path / "other.emoe")
    assert disk.asked.count("write") > 100
    assert (tmp_path / "other.emoe").read_bytes() == (tmp_path / "model.emoe").read_bytes()


def free_descriptor() -> int:
    """The number the next file to be opened would get."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor
