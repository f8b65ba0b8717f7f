from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream_loader import open_package
from estream_packer import sample
from estream_packer.build import build
from estream_packer.prefetch.calibrating import ranks_of
from estream_packer.prefetch.recording import Ids
from estream_packer.prefetch.report import fixed_curve, fixed_extra, mean_curve, mean_of, measured
from estream_packer.recipe import BuildOptions
from estream_packer.running import encode_prompt, observe_layers
from estream_packer.sample import FILES, write_sample
from estream_spec.errors import PackError
from estream_spec.prefetch_predictor import LayerPredictor
from estream_spec.weights import Floats
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
    (folder / "model.prefetch").write_text("a prefetch router")
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


def test_the_shipped_prefetch_router_predicts_what_the_shipped_model_needs_on_held_out_text(tmp_path: Path) -> None:
    files = Path(str(sample.sample_files()))
    build(files, tmp_path / "sample.emoe", BuildOptions(prefetch=str(files / "model.prefetch")))
    seen = defaultdict[int, list[tuple[Ids, Ids]]](list)
    with open_package(tmp_path / "sample.emoe", integrity="full") as package:
        router, model = package.prefetch_router, package.manifest.model
        assert router is not None
        assert router.overlap >= 0.99
        predictors = {each.layer: LayerPredictor.of(each, model) for each in router.layers}

        def observe(layer: int, entered: Floats, scores: Floats, needed: Ids) -> None:
            ranked = predictors[layer].rank(entered)
            seen[layer].append((ranks_of(ranked.experts, needed), predictors[layer].extras(ranked)))

        tokens = encode_prompt(package, (files / "held-out.txt").read_text()[:8000])
        windows = [tokens[at : at + 512] for at in range(0, len(tokens), 512)]
        observe_layers(package, windows, observe, lambda count: None)
    assert len(tokens) > 2000
    layers = [tuple(map(np.concatenate, zip(*seen[layer], strict=True))) for layer in model.expert_layers]
    found = mean_of([measured(ranks, extras) for ranks, extras in layers])
    fixed = mean_curve([fixed_curve(ranks, model.expert_block(model.expert_layers[0]).experts) for ranks, _ in layers])
    assert found.overlap > 0.988
    assert found.extra < 0.75 * fixed_extra(fixed, found.overlap)  # 0.69 on all of that text, see the card
