"""Editing in place. Proves EMOE-EDT-001 to EMOE-EDT-004, and of readers EMOE-RDR-004.

Nothing that stops an edit, a killed process, lost or torn writes, or a device that fails, may leave anything but the
old package or the new one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from estream_loader import Package, open_package
from estream_loader.integrity import check_padding, notices, verify
from estream_packer.configuring import configure_changes
from estream_packer.editing import MAX_GENERATION, Changes, NewSection, edit_package, plan_edit
from estream_packer.schedules import programs_for
from estream_spec import limits
from estream_spec.constants import SUPERBLOCK_OFFSETS, SectionFlag, SectionType
from estream_spec.container import Container
from estream_spec.errors import FormatError, LinkError, PackError
from estream_spec.manifest import DeviceConfiguration
from estream_spec.messagepack import encode
from estream_spec.records import DirectoryEntry
from fixtures.edits import die_at_every_write, edited, failing
from fixtures.packages import Draft, Section

CHOICE = DeviceConfiguration(name="phone", arena_bytes=1 << 20, group_size=1, prefetch_depth=1)
ADDED = NewSection(type=SectionType.DEVICE_CONFIGURATION, id=0, data=encode(CHOICE))
SECTOR = 512
Content = dict[tuple[int, int], bytes]


def add_one(package: Package) -> Changes:
    return Changes(add=[ADDED])


def replace_all(package: Package) -> Changes:
    """Take all local configurations away, programs too, and add one configuration."""
    kinds = SectionType.DEVICE_CONFIGURATION, SectionType.SCHEDULE
    old = [entry for entry in package.container.entries if entry.type in kinds]
    return Changes(add=[ADDED], remove=old)


def content(source: Path | bytes) -> Content:
    """All sections in use of a package that is proven, every byte of it."""
    with open_package(source) as package:
        verify(package)
        check_padding(package)
        entries = [entry for entry in package.container.entries if entry.type != SectionType.FREE]
        return {(entry.type, entry.id): stored(package, entry) for entry in entries}


def stored(package: Package, entry: DirectoryEntry) -> bytes:
    buffer = bytearray(entry.stored_length)
    package.source.read_into(memoryview(buffer), entry.offset)
    return bytes(buffer)


def generation(source: Path | bytes) -> int:
    with open_package(source) as package:
        return package.container.superblock.generation


OLD = Draft().seal()
OTHER = Draft(page_shift=13).seal()
EDITED = {**content(OLD), (ADDED.type, ADDED.id): ADDED.data}
SEVERAL = (
    DeviceConfiguration(name="phone", arena_bytes=1 << 20, group_size=1, prefetch_depth=0, policy="on-demand"),
    DeviceConfiguration(name="phone", arena_bytes=1 << 16, group_size=2, prefetch_depth=1, lanes=3, prompt_tokens=512),
    DeviceConfiguration(
        name="phone", arena_bytes=1 << 20, group_size=3, prefetch_depth=1, policy="resident", prompt_tokens=8
    ),
)
"""A device that has other programs for three lengths of the prompt, and two of them have one to decode in common."""


def configured(choices: Sequence[DeviceConfiguration]) -> Content:
    """What configuring a device makes of the package: the configurations have programs, and the first is the latest."""
    with open_package(OLD) as package:
        programs = [each for choice in choices for each in programs_for(package.expert_shape, choice, predicts=False)]
    return {
        **content(OLD),
        **{(SectionType.SCHEDULE, number): each.encode() for number, each in enumerate(dict.fromkeys(programs))},
        **{(SectionType.DEVICE_CONFIGURATION, n): encode(each) for n, each in enumerate(reversed(choices))},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(OLD)
    return path


def starts() -> dict[str, bytes]:
    """Packages in each state that an edit may find, and an editor that died may have left."""
    first = edited(OLD, add_one)
    return {
        "as built": OLD,
        "bytes behind the end": OLD + b"left by an editor that died" * 200,
        "first twin behind": OLD[:128] + first[128:],
        "second twin behind": first[:16384] + OLD[16384:16512] + first[16512:],
        "first twin damaged": bytes(128) + OLD[128:],
        "second twin damaged": OLD[:16400] + b"\1" + OLD[16401:],
    }


STARTS = starts()


def test_a_section_is_added_and_all_else_stays(path: Path) -> None:
    container, changes = edit_package(path, add_one)
    assert changes == Changes(add=[ADDED])
    assert content(path) == EDITED
    with open_package(path) as package:
        assert package.container == container
        assert package.device_configurations[0] == CHOICE
        assert notices(package) == []
        with open_package(OLD) as before:
            assert package.file_id == before.file_id
            assert package.manifest.content_id == before.manifest.content_id
    assert generation(path) == 2


def test_nothing_is_written_where_nothing_changes(path: Path) -> None:
    container, changes = edit_package(path, lambda package: Changes())
    assert not changes
    assert container.superblock.generation == 1
    assert path.read_bytes() == OLD


@pytest.mark.parametrize("start", STARTS)
def test_nothing_is_written_below_the_old_end_but_the_twins(path: Path, start: str) -> None:
    """EMOE-EDT-001, and whatever an edit that died left is made good."""
    path.write_bytes(STARTS[start])
    before, old_generation = content(path), generation(path)
    with open_package(path) as package:
        end = package.container.superblock.file_length
    edit_package(path, replace_all)
    data = path.read_bytes()
    assert [data[at : at + 128] for at in SUPERBLOCK_OFFSETS] == [data[:128]] * 2
    for begin, stop in ((128, 16384), (16384 + 128, end)):
        assert data[begin:stop] == STARTS[start][begin:stop]
    assert content(path) == {**before, (ADDED.type, ADDED.id): ADDED.data}
    assert generation(path) == old_generation + 1
    with open_package(path) as package:
        assert notices(package) == []


def test_an_open_reader_keeps_seeing_the_old_package(path: Path) -> None:
    edit_package(path, add_one)
    before = content(path)
    with open_package(path) as reader:
        for _ in range(3):
            edit_package(path, replace_all)
        verify(reader)
        entries = [entry for entry in reader.container.entries if entry.type != SectionType.FREE]
        assert {(entry.type, entry.id): stored(reader, entry) for entry in entries} == before


def test_removed_sections_become_free_and_the_directory_does_not_grow(path: Path) -> None:
    edit_package(path, add_one)
    counts = []
    for _ in range(5):
        edit_package(path, replace_all)
        with open_package(path) as package:
            counts.append(len(package.container.entries))
    assert len(set(counts)) == 1
    assert content(path) == EDITED
    edit_package(path, lambda package: replace(replace_all(package), add=()))
    assert content(path) == content(OLD)
    assert generation(path) == 8


def test_unknown_sections_are_kept() -> None:
    """EMOE-EDT-003: only sections outside the file id change, so the others stay, whatever their flags."""
    draft = Draft()
    for number, flags in enumerate((0, SectionFlag.SAFE_TO_COPY, SectionFlag.UNSIGNED)):
        draft.sections.append(Section(99, b"unknown" * 9, id=number, flags=flags, codec=5))
    data = draft.seal()
    assert content(edited(data, add_one)) == {**content(data), (ADDED.type, ADDED.id): ADDED.data}


def test_the_last_generation_is_not_passed(path: Path) -> None:
    """EMOE-EDT-004."""
    draft = Draft()
    draft.superblock["generation"] = MAX_GENERATION - 1
    path.write_bytes(draft.seal())
    edit_package(path, add_one)
    last = path.read_bytes()
    assert generation(path) == MAX_GENERATION
    with pytest.raises(PackError, match=f"its generation is {MAX_GENERATION}, the last there is") as refusal:
        edit_package(path, replace_all)
    assert refusal.value.hint == "pack it again"
    assert path.read_bytes() == last


def too_many(section_type: SectionType, most: int) -> Changes:
    return Changes(add=[NewSection(type=section_type, id=number, data=b"x") for number in range(most + 1)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (too_many(SectionType.SIGNATURE, 16), "17 SIGNATURE sections, the limit is 16"),
        (too_many(SectionType.DEVICE_CONFIGURATION, 64), "65 DEVICE_CONFIGURATION sections, the limit is 64"),
        (too_many(SectionType.SIGNATURE, 4096), "directory of 328736 bytes, the limit is 327696"),
        (Changes(add=[ADDED, ADDED]), "second section of type 13 and id 0, expected one"),
        (Changes(add=[replace(ADDED, data=b"")]), "section of 0 bytes, expected at least 1"),
    ],
)
def test_an_edit_that_would_break_the_package_is_refused_before_anything_is_written(
    path: Path, changes: Changes, reason: str
) -> None:
    with pytest.raises(PackError, match=f"package cannot be edited, the result would be refused: {reason}"):
        edit_package(path, lambda package: changes)
    assert path.read_bytes() == OLD


def test_the_longest_package_there_may_be_is_not_made_longer() -> None:
    with open_package(OLD) as package:
        superblock, entries = package.container.superblock, package.container.entries
    offset, length = superblock.directory_offset, limits.MAX_FILE_LENGTH - superblock.directory_offset - (1 << 16)
    huge = DirectoryEntry(SectionType.FREE, 0, 0, 0, 6, offset, length, length, bytes(32))
    start = offset + length
    longest = replace(superblock, directory_offset=start, file_length=start + superblock.directory_length)
    plan_edit(Container(longest, (*entries, huge)), Changes(add=[ADDED]))
    with pytest.raises(PackError, match=r"file length \d+, the limit is 17592186044416"):
        plan_edit(Container(longest, (*entries, huge)), Changes(add=[replace(ADDED, data=bytes(1 << 16))]))


def test_a_bad_package_is_refused_and_not_touched(path: Path) -> None:
    bad = OLD[:-1] + b"\1" + b"trailing"
    path.write_bytes(bad)
    with pytest.raises(FormatError):
        edit_package(path, add_one)
    assert path.read_bytes() == bad


def test_what_the_caller_raises_ends_the_edit(path: Path) -> None:
    def decide(package: Package) -> Changes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        edit_package(path, decide)
    assert path.read_bytes() == OLD
    edit_package(path, add_one)  # the lock is gone


def test_one_edit_at_a_time(path: Path) -> None:
    def decide(package: Package) -> Changes:
        with pytest.raises(PackError, match="another edit of the package is at work") as refusal:
            edit_package(path, add_one)
        assert refusal.value.hint == "try again when it is done"
        return add_one(package)

    edit_package(path, decide)
    assert (content(path), generation(path)) == (EDITED, 2)


@pytest.mark.parametrize("there", [OLD[:40_000], bytes(len(OLD)), OTHER])
def test_a_package_that_another_program_changes_meanwhile_is_left_alone(path: Path, there: bytes) -> None:
    def decide(package: Package) -> Changes:
        with path.open("r+b") as file:
            file.write(there)
            file.truncate(len(there))
        return add_one(package)

    with pytest.raises(PackError, match="replaced, cut off or written over"):
        edit_package(path, decide)
    assert path.read_bytes() == there


def test_a_file_that_cannot_be_locked_is_not_edited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(PackError, match="package cannot be locked: no locks available"):
        edit_package(path, add_one)
    assert path.read_bytes() == OLD


def test_a_package_replaced_meanwhile_is_left_alone(path: Path) -> None:
    other = path.with_name("other.emoe")
    other.write_bytes(OLD)

    def decide(package: Package) -> Changes:
        other.replace(path)
        return add_one(package)

    with pytest.raises(PackError, match="package was replaced, cut off or written over by another program"):
        edit_package(path, decide)
    assert path.read_bytes() == OLD


def test_links_are_followed_and_the_mode_is_kept(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link.emoe")
    link.symlink_to(path.name)
    before = path.stat()
    edit_package(link, add_one)
    after = path.stat()
    assert link.is_symlink()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert content(path) == EDITED


def test_places_that_cannot_be_edited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PackError, match="package cannot be edited: no such file or directory"):
        edit_package(path.with_name("absent"), add_one)
    with pytest.raises(PackError, match="package cannot be edited: is a directory"):
        edit_package(path.parent, add_one)
    with pytest.raises(PackError, match="package cannot be edited: embedded null"):
        edit_package(Path("a\0b"), add_one)
    os.mkfifo(path.with_name("pipe"))
    with pytest.raises(LinkError, match="not a regular file"):
        edit_package(path.with_name("pipe"), add_one)

    def read_only(*_: object) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(PackError, match="package cannot be edited: permission denied") as refusal:
        edit_package(path, add_one)
    assert (refusal.value.path, refusal.value.hint) == (str(path), "edit a copy in a folder you own")


def test_short_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:50], offset))
    edit_package(path, add_one)
    assert content(path) == EDITED


@pytest.mark.parametrize("choices", [(CHOICE,), SEVERAL], ids=["one configuration", "several"])
def test_killed_at_every_write(path: Path, choices: Sequence[DeviceConfiguration]) -> None:
    """A process that dies leaves a package, and the next edit can begin with it."""
    path.write_bytes(STARTS["bytes behind the end"])
    new, outcomes = configured(choices), []
    for copy in die_at_every_write(path, configure_changes, choices):
        found = content(copy)
        assert found in (content(OLD), new)
        outcomes.append("new" if found == new else "old")
        edit_package(copy, replace_all)
        assert content(copy) == EDITED
    assert outcomes == ["old"] * 5 + ["new"] * 4


Operation = tuple[str, int, bytes]
"""`pwrite` at an offset, or `ftruncate` to it."""


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Operation]]:
    """What an edit does, in the batches between one `fsync` and the next."""
    batches: list[list[Operation]] = [[]]
    write, truncate, sync = os.pwrite, os.ftruncate, os.fsync

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        batches[-1].append(("pwrite", offset, bytes(data)))
        return write(descriptor, data, offset)

    def ftruncate(descriptor: int, length: int) -> None:
        batches[-1].append(("ftruncate", length, b""))
        truncate(descriptor, length)

    def fsync(descriptor: int) -> None:
        batches.append([])
        sync(descriptor)

    with monkeypatch.context() as patched:
        for call in (pwrite, ftruncate, fsync):
            patched.setattr(os, call.__name__, call)
        edit_package(path, replace_all)
    return batches


def applied(data: bytes, operations: list[Operation]) -> bytes:
    body = bytearray(data)
    for kind, offset, written in operations:
        if kind == "ftruncate":
            del body[offset:]
        else:
            body += bytes(max(offset - len(body), 0))
            body[offset : offset + len(written)] = written
    return bytes(body)


def lost(batch: list[Operation]) -> Iterator[list[Operation]]:
    """What may have reached the disk of a batch: a beginning, all but one, or a part of one write."""
    for index, (kind, offset, data) in enumerate(batch):
        before, after = batch[:index], batch[index + 1 :]
        yield before
        yield [*before, *after]
        cuts = range(-offset % SECTOR, len(data), SECTOR) if len(data) > SECTOR else range(0, len(data), 16)
        for cut in cuts:
            for part in ((kind, offset, data[:cut]), (kind, offset + cut, data[cut:])):
                yield [*before, part]
                yield [*before, part, *after]
    yield batch


@pytest.mark.parametrize("start", STARTS)
def test_lost_and_torn_writes(path: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMOE-EDT-002: nothing begins before the step before it is durable, so any crash leaves one of the two packages.

    Between two `fsync` anything may be lost; a superblock may be torn anywhere, since EMOE-RDR-004 has readers trust
    the intact twin with the highest generation.
    """
    path.write_bytes(STARTS[start])
    old = content(path)
    new = {**old, (ADDED.type, ADDED.id): ADDED.data}
    data, found = STARTS[start], dict[bytes, int]()
    old_generation = generation(path)
    for batch in recorded(path, monkeypatch):
        for operations in lost(batch):
            if (crashed := applied(data, operations)) not in found:
                found[crashed] = generation(crashed) - old_generation
                assert content(crashed) == (new if found[crashed] else old)
        data = applied(data, batch)
    assert data == path.read_bytes()
    assert set(found.values()) == {0, 1}
    assert (found[STARTS[start]], found[data]) == (0, 1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_device_that_fails_once(path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: int) -> None:
    """The calls: fsync, cut, append, fsync, first twin, fsync, second twin, fsync."""
    path.write_bytes(OLD + b"left by an editor that died")
    with monkeypatch.context() as patched:
        failing(patched, number, error)
        with pytest.raises(PackError) as refusal:
            edit_package(path, replace_all)
    reason = os.strerror(error).lower()
    untouched = f"package cannot be edited and is as it was: {reason}"
    done = f"package is edited, but its second superblock cannot be written: {reason}"
    assert refusal.value.message == (untouched if number <= 6 else done)
    assert refusal.value.path == str(path)
    assert refusal.value.hint == ("free some space there" if error == errno.ENOSPC else None)
    assert content(path) == (content(OLD) if number <= 6 else EDITED)
    if number <= 4:
        assert path.read_bytes() == OLD
    edit_package(path, replace_all)
    assert content(path) == EDITED


@pytest.mark.parametrize("number", range(1, 9))
def test_a_device_that_fails_for_good(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path.write_bytes(OLD + b"left by an editor that died")
    with monkeypatch.context() as patched:
        failing(patched, number, errno.EIO, lasting=True)
        with pytest.raises(PackError) as refusal:
            edit_package(path, replace_all)
    messages = {
        1: "package cannot be edited and is as it was",
        5: "package may be edited or as it was, the device does not say which",
        7: "package is edited, but its second superblock cannot be written",
    }
    stage = max(each for each in messages if each <= number)
    assert refusal.value.message == f"{messages[stage]}: input/output error"
    assert content(path) in (content(OLD), EDITED)
    edit_package(path, replace_all)
    assert content(path) == EDITED
