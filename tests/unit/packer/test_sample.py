from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from estream_packer import sample
from estream_packer.build import build
from estream_packer.sample import FILES, write_sample
from estream_spec.errors import PackError
from fixtures.olmoe import CheckpointFactory, write_checkpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny checkpoint in the place of the one that comes with the program."""
    folder = write_checkpoint(tmp_path / "shipped", "base")
    (folder / "README.md").write_text("card")
    (folder / "held-out.txt").write_text("text")
    (folder / "calibration.txt").write_text("other text")
    with monkeypatch.context() as patch:
        patch.setattr(sample, "sample_files", lambda: folder)
        yield folder


def test_the_sample_is_written_to_a_new_or_an_empty_folder(tmp_path: Path, shipped: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "deep" / "new"):
        write_sample(folder)
        assert names(folder) == sorted(FILES)
        assert all((folder / name).read_bytes() == (shipped / name).read_bytes() for name in FILES)


def test_the_sample_can_be_packed(tmp_path: Path, shipped: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    write_sample(tmp_path / "sample")
    results = [build(folder, tmp_path / "model.emoe") for folder in (tmp_path / "sample", olmoe_checkpoint("base"))]
    assert results[0].file_id == results[1].file_id


@pytest.mark.usefixtures("shipped")
def test_a_folder_with_anything_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    for path in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        with pytest.raises(PackError, match="not an empty folder"):
            write_sample(path)
    assert names(tmp_path / "mine") == ["config.json"]
    assert (tmp_path / "mine" / "config.json").read_text() == "mine"


@pytest.mark.usefixtures("shipped")
def test_nothing_is_left_when_the_sample_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample.shutil, "copyfileobj", fail)  # type: ignore[attr-defined]
    with pytest.raises(PackError, match="cannot be written: no space left on device"):
        write_sample(tmp_path / "sample")
    assert not (tmp_path / "sample").exists()


def test_an_installation_without_the_sample_says_so(tmp_path: Path, shipped: Path) -> None:
    (shipped / "model.safetensors").unlink()
    with pytest.raises(PackError, match=r"lacks the sample's model\.safetensors"):
        write_sample(tmp_path / "sample")
    assert not (tmp_path / "sample").exists()
