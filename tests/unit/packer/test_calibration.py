from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader import open_package
from estream_loader.progress import Quiet
from estream_packer.build import build
from estream_packer.calibration import (
    PRIOR_ROWS,
    CalibrationSummary,
    Moment,
    Moments,
    Unreached,
    read_calibration_text,
    unreached_notices,
)
from estream_packer.recipe import BuildOptions, CalibrationTable
from estream_packer.running import observe_text
from estream_spec.errors import EmoeError, PackError
from estream_spec.weights import Floats
from fixtures.olmoe import EXPERTS, HIDDEN, IDLE_EXPERTS, INTERMEDIATE, LAYERS, VARIANTS, CheckpointFactory, weights
from fixtures.packed import UNQUANTISED, PackageFactory

TEXT = "The experts that the text reaches are stored by what they are asked, the others by their weights alone. "
TOKENS = 64


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


def calibrated(text: Path, tokens: int = TOKENS) -> BuildOptions:
    return BuildOptions(calibration=CalibrationTable(text=str(text), tokens=tokens))


def test_means_of_few_rows_begin_at_that_of_all_channels() -> None:
    squares = np.array([0, 1, 3, 4], np.float32)
    importance = Moment(PRIOR_ROWS, squares * PRIOR_ROWS).importance()
    assert importance is not None
    np.testing.assert_allclose(importance, [0.5, 0.75, 1.25, 1.5])
    many = Moment(1 << 20, squares * (1 << 20)).importance()
    assert many is not None
    np.testing.assert_allclose(many, squares / 2, atol=1e-4)
    assert (many > 0).all()


def test_silent_channels_say_nothing() -> None:
    assert Moment(9, np.zeros(4, np.float32)).importance() is None


def test_sums_add_up_however_rows_come() -> None:
    rows = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    whole, parts = Moments(), Moments()
    whole.observe(1, 2, {"gate": rows, "up": rows})
    for start in range(0, 300, 100):
        parts.observe(1, 2, {"gate": rows[start : start + 100]})
    np.testing.assert_allclose(whole.of(1, 2)["gate"].squares, np.square(rows).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(parts.of(1, 2)["gate"].squares, whole.of(1, 2)["up"].squares, rtol=1e-6)
    assert (whole.of(1, 2)["up"].rows, parts.of(1, 2)["gate"].rows) == (300, 300)
    assert whole.of(1, 3) == whole.of(0, 2) == whole.of(1) == {}


@pytest.mark.parametrize(
    ("layer", "expert", "place"), [(3, 7, "layer 3, expert 7"), (2, None, "layer 2"), (None, None, "head")]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_by_name(value: float, layer: int | None, expert: int | None, place: str) -> None:
    rows = np.ones((4, 3), np.float32)
    rows[2, 1] = value
    with pytest.raises(PackError, match="what meets matrix 'down' is not finite") as refusal:
        Moments().observe(layer, expert, {"down": rows})
    assert refusal.value.path == place


def test_a_notice_lists_experts_and_ends() -> None:
    few = CalibrationSummary(tokens=9, sha256="", unreached=(Unreached(layer=3, experts=(7,)),))
    assert unreached_notices(few) == [
        "no token of the calibration text reached 1 expert, stored without it: layer 3: 7"
    ]
    many = replace(few, unreached=tuple(Unreached(layer=layer, experts=(1, 2)) for layer in range(30)))
    [notice] = unreached_notices(many)
    assert "reached 60 experts" in notice
    assert notice.endswith("layer 7: 1, 2; and 22 more layers, see --json")
    assert unreached_notices(replace(few, unreached=())) == []


def test_every_product_is_observed_with_the_rows_that_enter_it(packed: PackageFactory) -> None:
    found: list[tuple[int | None, int | None, Mapping[str, Floats]]] = []
    with open_package(packed("base", UNQUANTISED)) as package:
        ids = np.array(package.tokenizer.encode(TEXT).ids[: TOKENS - 1])  # the last one is only predicted
        tokens = observe_text(package, TEXT, TOKENS, lambda *each: found.append(each), Quiet())
    assert tokens == TOKENS

    tensors = {name: tensor.astype(np.float32) for name, tensor in weights("base").items()}
    x = tensors["model.embed_tokens.weight"][ids]
    normed = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-5)
    normed *= tensors["model.layers.0.input_layernorm.weight"]
    first = next(rows for layer, _, rows in found if layer == 0)
    assert set(first) == {"q", "k", "v"}
    np.testing.assert_allclose(first["q"], normed, rtol=1e-4, atol=1e-5)

    reached = Counter[int | None]()
    for layer, expert, rows in found:
        if expert is None:
            continue
        reached[layer] += len(rows["gate"])
        assert rows["gate"] is rows["up"]
        at = f"model.layers.{layer}.mlp.experts.{expert}."
        gate, up = (rows[each] @ tensors[f"{at}{each}_proj.weight"].T for each in ("gate", "up"))
        np.testing.assert_allclose(rows["down"], gate / (1 + np.exp(-gate)) * up, rtol=1e-3, atol=1e-4)
    assert reached[0] == (TOKENS - 1) * VARIANTS["base"].top_k
    widths = {matrix: rows[matrix].shape[1] for _, _, rows in found for matrix in rows}
    assert widths.pop("down") == INTERMEDIATE
    assert widths == dict.fromkeys(("q", "k", "v", "o", "gate", "up", "head"), HIDDEN)


def test_a_calibrated_package_says_so_and_is_another(
    tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory, packed: PackageFactory
) -> None:
    result = build(olmoe_checkpoint("base"), tmp_path / "a.emoe", calibrated(text))
    source = read_calibration_text(text).source
    assert result.calibration is not None
    assert (result.calibration.tokens, result.calibration.sha256) == (TOKENS, source.sha256.hex())
    with open_package(tmp_path / "a.emoe", integrity="full") as package, open_package(packed("base")) as plain:
        assert package.manifest.provenance.sources == (*plain.manifest.provenance.sources, source)
        assert package.manifest.content_id != plain.manifest.content_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.emoe", "calibration.txt"]


def test_the_bytes_do_not_depend_on_jobs_or_the_place_of_the_text(
    tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    moved = tmp_path / "moved.txt"
    shutil.copy(text, moved)
    for path, name, jobs in ((text, "a.emoe", 1), (moved, "b.emoe", 3)):
        build(olmoe_checkpoint("base"), tmp_path / name, replace(calibrated(path), jobs=jobs))
    assert (tmp_path / "a.emoe").read_bytes() == (tmp_path / "b.emoe").read_bytes()


def test_experts_that_calibration_never_reached_are_stored_without_it(
    tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory, packed: PackageFactory
) -> None:
    result = build(olmoe_checkpoint("idle"), tmp_path / "a.emoe", calibrated(text))
    assert result.calibration is not None
    unreached = {(each.layer, expert) for each in result.calibration.unreached for expert in each.experts}
    assert unreached >= {(layer, expert) for layer in range(LAYERS) for expert in IDLE_EXPERTS}
    with open_package(tmp_path / "a.emoe") as package, open_package(packed("idle")) as plain:
        checksums, others = package.experts.table.checksums, plain.experts.table.checksums
        same = {number for number in range(LAYERS * EXPERTS) if checksums[number] == others[number]}
    assert same == {layer * EXPERTS + expert for layer, expert in unreached}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "calibration text is empty"),
        (b"abc\xff", r"calibration text is not UTF-8 \(at offset 0x3, "),
        (b"a", "text has 1 tokens, expected at least 2"),
        (None, "file cannot be opened: no such file or directory"),
    ],
)
def test_texts_that_cannot_calibrate_are_refused(
    data: bytes | None, message: str, tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    text.unlink()
    if data is not None:
        text.write_bytes(data)
    with pytest.raises(EmoeError, match=message):
        build(olmoe_checkpoint("base"), tmp_path / "a.emoe", calibrated(text))
    assert [path.name for path in tmp_path.iterdir() if path != text] == []


def test_calibration_without_a_tokenizer_is_refused(
    tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EmoeError, match="needs a tokenizer, and the checkpoint has none"):
        build(folder, tmp_path / "a.emoe", calibrated(text))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt", "checkpoint"]


def test_calibration_of_what_is_stored_as_it_is_is_refused(
    tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    options = replace(UNQUANTISED, calibration=CalibrationTable(text=str(text)))
    with pytest.raises(PackError, match="calibration has nothing to choose"):
        build(olmoe_checkpoint("base"), tmp_path / "a.emoe", options)


def test_the_text_is_never_replaced(text: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    with pytest.raises(PackError, match="output is the calibration text"):
        build(olmoe_checkpoint("base"), text, calibrated(text))
    assert text.read_text() == TEXT
