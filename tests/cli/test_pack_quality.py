from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.conftest import Built, Pack
from estream_loader import open_package
from fixtures.olmoe import IDLE_EXPERTS, LAYERS, CheckpointFactory
from fixtures.packed import UNQUANTISED, PackageFactory

TEXT = "A package is judged by what it predicts, beside the checkpoint that it was made from. " * 3
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_packages_are_compared_with_their_checkpoint(
    built: Built, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack
) -> None:
    paths = built(), built(experts="w8")
    options = ("--text", text, "--tokens", "100")
    status, out, err = pack("verify", "--quality", olmoe_checkpoint(), *paths, *options, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["reference"], found["text"]) == (str(olmoe_checkpoint()), str(text))
    assert (found["tokens"], found["window"]) == (99, 512)
    four, eight = found["packages"]
    for each, path in zip((four, eight), paths, strict=True):
        with open_package(path) as package:
            assert (each["package"], each["file_id"]) == (str(path), package.file_id.hex())
        assert each["file_length"] == path.stat().st_size
        assert each["comparison"]["reference_perplexity"] == found["perplexity"]
        assert each["comparison"]["perplexity_ratio_error"] > 0
    assert 4 < four["expert_bits_per_weight"] < 6 < 8 < eight["expert_bits_per_weight"] < 10
    assert four["comparison"]["mean_kl"] > eight["comparison"]["mean_kl"] > 0

    status, out, err = pack("verify", "--quality", olmoe_checkpoint(), *paths, *options)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "mean KL" in lines[0]
    assert [line.split()[0] for line in lines[1:3]] == [str(path) for path in paths]
    assert f"99 tokens of {text} predicted, each from at most 512 before it" in out
    assert f"reference: {olmoe_checkpoint()} in f32, perplexity {found['perplexity']:.4f}" in out


def test_an_unquantised_package_stands_for_the_checkpoint(
    built: Built, packed: PackageFactory, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack
) -> None:
    results = []
    for reference in (packed("base", UNQUANTISED), olmoe_checkpoint()):
        status, out, _ = pack("verify", built(), "--quality", reference, "--text", text, "--tokens", "60", "--json")
        assert status == 0
        results.append(json.loads(out)["packages"])
    assert results[0] == results[1]


def test_a_picture(built: Built, packed: PackageFactory, text: Path, tmp_path: Path, pack: Pack) -> None:
    reference, svg = packed("base", UNQUANTISED), tmp_path / "quality.svg"
    paths = built(), built(experts="w8"), reference
    status, out, _ = pack("verify", "--quality", reference, *paths, "--text", text, "--tokens", "40", "--svg", svg)
    assert (status, out.splitlines()[-1]) == (0, f"wrote {svg}")
    drawn = ElementTree.parse(svg).getroot()
    said = [each.text or "" for each in drawn.iter(f"{SVG}text")]
    for path in paths:
        assert any(each.startswith(f"{path.name}: ") for each in said)
    marks = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in drawn.iter(f"{SVG}circle")]
    four, eight, same = marks
    assert four[0] < eight[0] < same[0]
    assert four[1] < eight[1] < same[1]
    assert all(0 < x < float(drawn.get("width", "")) and 0 < y < float(drawn.get("height", "")) for x, y in marks)


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        (("base", "w4g32"), "reference has weights stored as w4g32, w8, expected f32 alone", "--experts f32"),
        (("clipped", "f32"), "its model is not the reference's", "give the checkpoint the package was made from"),
    ],
)
def test_references_that_are_none(
    reference: tuple[str, str], message: str, hint: str, built: Built, packed: PackageFactory, text: Path, pack: Pack
) -> None:
    variant, experts = reference
    path = packed("clipped", UNQUANTISED) if experts == "f32" else built(variant, experts)
    status, out, err = pack("verify", built(), "--quality", path, "--text", text)
    assert (status, out) == (1, "refused: pack\n")
    assert message in err
    assert hint in err


def test_another_checkpoint(built: Built, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack) -> None:
    status, out, err = pack("verify", built(), "--quality", olmoe_checkpoint("clipped"), "--text", text)
    assert (status, out) == (1, "refused: pack\n")
    assert "the checkpoint's model is not the package's" in err


def test_a_damaged_package_is_refused_before_it_runs(
    built: Built, packed: PackageFactory, tmp_path: Path, text: Path, pack: Pack
) -> None:
    data = bytearray(built().read_bytes())
    with open_package(built()) as package:
        place = list(package.experts.places())[3]
    data[place.offset + 9] ^= 1
    damaged = tmp_path / "damaged.emoe"
    damaged.write_bytes(data)
    reference = packed("base", UNQUANTISED)
    status, out, err = pack("verify", "--quality", reference, built(), damaged, "--text", text)
    assert (status, out) == (1, "refused: integrity\n")
    assert "experts[0][3]" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--svg", "x.svg"], "--svg needs --quality"),
        (["second.emoe", "third.emoe"], "compare them with --quality CHECKPOINT"),
        (["--quality", "checkpoint", "--graphs"], "--quality goes with neither --graphs nor signatures"),
        (["--quality", "checkpoint", "--key", "0" * 64], "--quality goes with neither --graphs nor signatures"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, built: Built, pack: Pack) -> None:
    status, out, err = pack("verify", built(), *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_build_with_calibration_tells_what_it_saw(
    tmp_path: Path, text: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    status, out, err = pack(
        "build", olmoe_checkpoint("idle"), "-o", tmp_path / "flag.emoe", "--calibrate", text, "--json"
    )
    assert status == 0
    found = json.loads(out)
    assert 100 < found["calibration"]["tokens"] <= len(TEXT)
    unreached = {each["layer"]: each["experts"] for each in found["calibration"]["unreached"]}
    assert all(set(IDLE_EXPERTS) <= set(unreached[layer]) for layer in range(LAYERS))
    [notice] = found["notices"]
    assert err == f"notice: {notice}\n"
    assert f"stored without it: layer 0: {', '.join(map(str, unreached[0]))}; layer 1: " in notice
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[source]\ncheckpoint = "{olmoe_checkpoint("idle")}"\n[calibration]\ntext = "text.txt"\n')
    assert pack("build", recipe, "-o", tmp_path / "recipe.emoe")[0] == 0
    assert (tmp_path / "flag.emoe").read_bytes() == (tmp_path / "recipe.emoe").read_bytes()
    assert names(tmp_path) == ["flag.emoe", "recipe.emoe", "recipe.toml", "text.txt"]


def test_a_calibration_text_that_is_none_leaves_no_output(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    arguments = "build", olmoe_checkpoint(), "-o", tmp_path / "a.emoe", "--calibrate", tmp_path / "absent.txt"
    status, out, err = pack(*arguments)
    assert (status, out) == (1, "")
    assert "file cannot be opened: no such file or directory" in err
    assert names(tmp_path) == []
