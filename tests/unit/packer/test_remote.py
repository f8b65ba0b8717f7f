from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from estream_loader import open_package
from estream_packer import journal, remote
from estream_packer.build import build
from estream_packer.checkpoint import files, open_checkpoint
from estream_packer.checkpoint.files import InputFile
from estream_packer.journal import StoppedError
from estream_packer.recipe import BuildOptions, read_recipe
from estream_packer.remote import RemotePath, location
from estream_spec.errors import PackError
from fixtures.olmoe import CheckpointFactory
from fixtures.packed import PackageFactory

SOURCE = "memory://models/tiny"
OUTPUT = "memory://packages/tiny.emoe"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MemoryFileSystem]:
    """An empty file system in memory, with a folder for packages; partial files go to a folder of this test."""
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True)
    system.mkdir("/packages")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield system
    system.rm("/", recursive=True)


@pytest.fixture
def uploaded(memory: MemoryFileSystem, olmoe_checkpoint: CheckpointFactory) -> str:
    """The URL of a checkpoint in three shards."""
    memory.put(str(olmoe_checkpoint("base", 3)), "/models/tiny", recursive=True)
    return SOURCE


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_and_a_package_by_url_give_the_same_bytes(
    tmp_path: Path, memory: MemoryFileSystem, uploaded: str, packed: PackageFactory
) -> None:
    memory.pipe("/packages/tiny.emoe", b"older")
    result = build(location(uploaded), location(OUTPUT))
    assert memory.cat("/packages/tiny.emoe") == packed("base").read_bytes()
    assert result.output == OUTPUT
    assert [entry.rpartition("/")[2] for entry in memory.ls("/packages", detail=False)] == ["tiny.emoe"]
    assert names(tmp_path / "temporary") == []


def test_a_file_url_is_a_path(tmp_path: Path, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory) -> None:
    assert location(f"file://{tmp_path}") == location(str(tmp_path)) == tmp_path
    source, output = location(f"file://{olmoe_checkpoint('base')}"), location(f"file://{tmp_path}/model.emoe")
    build(source, output)
    assert (tmp_path / "model.emoe").read_bytes() == packed("base").read_bytes()
    with pytest.raises(PackError, match="output is a file of the checkpoint"):
        build(source, location(f"file://{olmoe_checkpoint('base')}/config.json"))


def test_a_recipe_may_name_a_url(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f'[source]\ncheckpoint = "{SOURCE}"\n')
    assert read_recipe(tmp_path / "recipe.toml")[0] == RemotePath(SOURCE)


def test_a_location_may_be_sent_elsewhere() -> None:
    sent = pickle.loads(pickle.dumps(location(SOURCE) / "config.json"))
    assert str(sent) == f"{SOURCE}/config.json"
    assert (sent.name, sent.suffix) == ("config.json", ".json")


def test_small_reads_are_answered_from_large_requests(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "REQUEST_BYTES", 1000)
    data = bytes(range(256)) * 20
    memory.pipe("/file", data)
    requests = []
    fetch = memory.cat_file

    def counted(path: str, start: int, end: int) -> bytes:
        requests.append((start, end))
        found: bytes = fetch(path, start=start, end=end)
        return found

    monkeypatch.setattr(memory, "cat_file", counted)
    with InputFile(RemotePath("memory://file")) as file:
        got = bytearray(len(data))
        for begin in range(0, len(data), 300):
            file.read_into(memoryview(got)[begin : begin + 300], begin)
        assert got == data
        assert len(requests) == -(-len(data) // 1000)
        file.read_into(memoryview(got)[:3000], 100)
        assert requests[-1] == (100, 3100)
        assert got[:3000] == data[100:3100]


def test_a_remote_file_that_changes_or_shrinks_is_refused(
    tmp_path: Path, memory: MemoryFileSystem, uploaded: str
) -> None:
    class Meddler:
        def begin(self, stage: str, total: int) -> None: ...

        def advance(self, amount: int) -> None:
            memory.pipe("/models/tiny/config.json", memory.cat("/models/tiny/config.json"))

    with pytest.raises(PackError, match="file changed while it was packed"):
        build(location(uploaded), location(OUTPUT), progress=Meddler())
    assert memory.ls("/packages") == []
    with InputFile(RemotePath(f"{SOURCE}/config.json")) as file:
        memory.pipe("/models/tiny/config.json", b"{}")
        with pytest.raises(PackError, match=r"file ends .* bytes early"):
            file.read_all(1 << 20)


def test_what_is_missing_or_wrong_at_a_url_is_told(memory: MemoryFileSystem, uploaded: str) -> None:
    for url, message in (
        ("memory://absent", "folder cannot be read: no such file or folder"),
        ("memory://models", "folder has no config.json"),
        ("nosuch://models", "URL cannot be used: protocol not known"),
    ):
        with pytest.raises(PackError, match=message) as refusal:
            open_checkpoint(location(url))
        assert refusal.value.path == url
    memory.rm("/models/tiny/model-00002-of-00003.safetensors")
    with pytest.raises(PackError, match=r"1 missing files \('model-00002-of-00003"):
        open_checkpoint(location(uploaded))


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(PackError, match=r"library for such URLs is missing: .*s3fs"):
        location("s3://bucket/model")


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_made(
    memory: MemoryFileSystem, uploaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PackError, match="output is a folder"):
        build(location(uploaded), location("memory://packages"))
    with pytest.raises(PackError, match="output is a file of the checkpoint"):
        build(location(uploaded), location(f"{SOURCE}/config.json"))

    def denied(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(memory, "pipe_file", denied)
    with pytest.raises(PackError, match="package cannot be written: access Denied"):
        build(location(uploaded), location(OUTPUT))
    assert memory.ls("/packages") == []


def test_a_package_whose_upload_failed_is_kept_and_uploaded_by_the_next_build(
    tmp_path: Path, memory: MemoryFileSystem, uploaded: str, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEP_BYTES", 1)
    memory.pipe("/packages/tiny.emoe", b"older")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "put_file", fail)
        with pytest.raises(StoppedError, match="package cannot be written: connection reset") as stop:
            build(location(uploaded), location(OUTPUT))
    assert memory.cat("/packages/tiny.emoe") == b"older"
    [journal_file, partial] = names(tmp_path / "temporary")
    assert partial.startswith(".tiny.emoe~")
    assert partial in stop.value.__notes__[0]
    assert journal_file == f"{partial.removesuffix('.partial')}.journal"

    made: list[Any] = []
    monkeypatch.setattr("estream_packer.build.assemble", made.append)
    build(location(uploaded), location(OUTPUT), BuildOptions())
    assert made == []
    assert memory.cat("/packages/tiny.emoe") == packed("base").read_bytes()
    assert names(tmp_path / "temporary") == []


def test_packages_of_one_name_at_two_urls_are_not_confused(
    tmp_path: Path, memory: MemoryFileSystem, uploaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEP_BYTES", 1)

    class Stop:
        left = 3

        def begin(self, stage: str, total: int) -> None: ...

        def advance(self, amount: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(location(uploaded), location(OUTPUT), progress=Stop())
    kept = names(tmp_path / "temporary")
    assert len(kept) == 2
    build(location(uploaded), location("memory://elsewhere/tiny.emoe"))
    assert names(tmp_path / "temporary") == kept


def test_a_package_from_a_url_opens(tmp_path: Path, uploaded: str) -> None:
    build(location(uploaded), tmp_path / "model.emoe")
    with open_package(tmp_path / "model.emoe", integrity="full") as package:
        assert package.tokenizer_json


def test_a_checkpoint_whose_files_have_no_stamps_is_never_gone_on_with(
    tmp_path: Path, uploaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEP_BYTES", 1)

    class Stop:
        left = 3

        def begin(self, stage: str, total: int) -> None: ...

        def advance(self, amount: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    for stamps, left in ((remote.STAMPS, 2), ((), 0)):
        monkeypatch.setattr(remote, "STAMPS", stamps)
        with pytest.raises(KeyboardInterrupt):
            build(location(uploaded), location(OUTPUT), progress=Stop())
        assert len(names(tmp_path / "temporary")) == left
