from __future__ import annotations

import errno
import json
import os
import shutil
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import msgspec
import pytest

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_loader.progress import Quiet
from estream_packer.build import build
from estream_packer.prefetch import recording, training
from estream_packer.prefetch.blocks import BLOCK_CHARACTERS, LEAST_BLOCKS
from estream_packer.prefetch.picture import reliability_svg
from estream_packer.recipe import BuildOptions
from estream_spec.errors import PackError, TrapError
from estream_spec.prefetch_router import check_prefetch_router, check_router, decode_prefetch_router
from fixtures.olmoe import CheckpointFactory
from fixtures.packed import FamilyFactory

WORDS = [
    "the",
    "other",
    "of",
    "them",
    "had",
    "thought",
    "that",
    "path",
    "led",
    "there",
    "and",
    "neither",
    "then",
    "nor",
]


def prose(blocks: int) -> str:
    """Paragraphs that differ, as many as that many blocks take."""
    sentences = (" ".join(islice(cycle(WORDS[at % 13 :] + WORDS[: at % 7]), 9 + at % 13)) for at in range(10_000))
    text = ""
    for number, sentence in enumerate(sentences):
        text += f"{sentence} {number}.\n\n"
        if len(text) > (blocks + 1) * BLOCK_CHARACTERS:
            return text
    raise AssertionError


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "prose.txt"
    path.write_text(prose(LEAST_BLOCKS))
    return path


class Run(NamedTuple):
    """A prefetch router that was trained, and what was said of it."""

    router: Path
    picture: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def trained(built: Built, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("trained")
    router, picture = folder / "model.prefetch", folder / "reliability.svg"
    task = training.Task(package=built(), texts=(text,), output=router, tokens=200_000, target=0.9)
    report = training.train_prefetch(task, Quiet())
    assert left_over(folder) == ["model.prefetch"]
    picture.write_text(reliability_svg(report))
    return Run(router, picture, msgspec.to_builtins(report))


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_trained_prefetch_router_is_taken_in_by_packages_of_its_checkpoint_alone(
    trained: Run, built: Built, olmoe_checkpoint: CheckpointFactory, pack: Pack, text: Path, tmp_path: Path
) -> None:
    router = decode_prefetch_router(trained.router.read_bytes(), "router")
    with open_package(built(experts="f32")) as package:  # weights of other encodings, the same routers
        check_prefetch_router(router, package.manifest, "router")
        for layer in router.layers:
            check_router(layer, recording.router_tensors(package, layer.layer), "router")
    assert router.tokens == trained.report["tokens"]["train"]
    assert [source.name for source in router.sources] == [text.name]
    assert (router.overlap, router.extra) == (trained.report["found"]["overlap"], trained.report["found"]["extra"])
    taken = tmp_path / "with.emoe"
    assert pack("build", olmoe_checkpoint("base"), "-o", taken, "--prefetch", trained.router).code == 0
    with open_package(taken, integrity="full") as package:
        assert package.prefetch_router == router
    found = pack("build", olmoe_checkpoint("idle"), "-o", tmp_path / "other.emoe", "--prefetch", trained.router)
    assert found.code == 1
    assert "another model" in found.err
    assert left_over(tmp_path) == ["with.emoe"]


def test_the_report_says_what_was_measured_on_other_text(trained: Run) -> None:
    report = trained.report
    assert set(report["tokens"]) == {"train", "stop", "fit", "calibrate", "test"}
    assert all(count > 0 for count in report["tokens"].values())
    assert report["distribution"] == "the softmax of the router's scores"
    assert report["found"]["overlap"] > 0.85
    assert [each["overlap"] for each in report["others"]] == [0.95, 0.99, 0.995]
    for layer in report["layers"]:
        assert layer["loss"] <= layer["start_loss"]
        overlaps = [each["overlap"] for each in layer["fixed"]]
        assert len(overlaps) == layer["experts"] - layer["top_k"] + 1
        assert overlaps == sorted(overlaps)
        assert overlaps[-1] == 1
        assert layer["fixed"][0]["overlap"] > layer["shuffled"] * layer["top_k"] / (
            layer["top_k"] + layer["found"]["extra"]
        )
        assert 0 < layer["target"] <= 1
    extras = [each["found"]["extra"] for each in report["others"]]
    assert extras == sorted(extras)
    assert report["found"]["extra"] <= extras[0]


def test_the_picture_has_a_line_for_each_layer(trained: Run) -> None:
    root = ElementTree.fromstring(trained.picture.read_text())
    lines = [each for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 1 + len(trained.report["layers"])


def test_the_same_text_gives_the_same_file_and_people_see_tables(
    trained: Run, pack: Pack, built: Built, text: Path, tmp_path: Path
) -> None:
    again, picture = tmp_path / "again.prefetch", tmp_path / "again.svg"
    found = pack("train-prefetch", built(), "--text", text, "-o", again, "--target", "0.9", "--picture", picture)
    assert (found.code, found.err) == (0, "")
    for words in ("all covered", "fixed needs", "calibration error", "none in two of them", f"wrote {again}"):
        assert words in found.out
    assert again.read_bytes() == trained.router.read_bytes()
    assert picture.read_bytes() == trained.picture.read_bytes()
    assert left_over(tmp_path) == ["again.prefetch", "again.svg"]


@pytest.mark.parametrize(
    "name",
    ["deepseek_v2-grouped", "deepseek_v3", "lfm2_moe", "phimoe"],
)
def test_routers_of_every_kind_can_be_predicted(
    name: str, packed_family: FamilyFactory, pack: Pack, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "model.prefetch"
    test, seen = tmp_path / "test.txt", text.read_text()
    test.write_text(prose(LEAST_BLOCKS + 1)[len(seen) :])
    asked = ("--text", text, "--test", test, "-o", output, "--target", "0.9", "--json")
    found = pack("train-prefetch", packed_family(name), *asked)
    assert found.code == 0, found.err
    report = json.loads(found.out)
    assert report["test"] == test.name
    router = decode_prefetch_router(output.read_bytes(), "router")
    with open_package(packed_family(name)) as package:
        check_prefetch_router(router, package.manifest, "router")
    assert report["found"]["overlap"] > 0.85
    assert report["fixed"][0]["overlap"] > report["untrained"] - 0.02


def test_where_all_experts_are_needed_nothing_more_is(
    olmoe_checkpoint: CheckpointFactory, pack: Pack, text: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(olmoe_checkpoint("base"), tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": config["num_experts"]}))
    build(folder, tmp_path / "model.emoe", BuildOptions())
    found = pack("train-prefetch", tmp_path / "model.emoe", "--text", text, "-o", tmp_path / "out", "--json")
    assert found.code == 0, found.err
    report = json.loads(found.out)
    assert (report["found"]["overlap"], report["found"]["extra"], report["fixed_extra"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "text is empty"),
        (b"\xff\xfe", "text is not UTF-8"),
        (b"A short one.", "text is too short: 1 block of about"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(
    content: bytes, message: str, pack: Pack, built: Built, tmp_path: Path
) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(content)
    folder.mkdir()
    found = pack("train-prefetch", built(), "--text", text, "-o", folder / "model.prefetch")
    assert (found.code, found.out) == (1, "")
    assert message in found.err
    assert left_over(folder) == []


def test_a_text_that_is_there_twice_is_refused(
    pack: Pack, built: Built, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "recorded", None)
    copy = shutil.copy(text, tmp_path / "copy.txt")
    for given in (("--text", text), ("--text", copy), ("--test", text), ("--test", copy)):
        found = pack("train-prefetch", built(), "--text", text, *given, "-o", tmp_path / "model.prefetch")
        assert (found.code, found.out) == (1, "")
        assert f"text says the same as {text} (at {given[1]})" in found.err
    assert left_over(tmp_path) == ["copy.txt"]


def test_a_text_to_report_on_that_is_too_short_is_refused_before_anything_runs(
    pack: Pack, built: Built, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise PackError("recording begins")

    monkeypatch.setattr(training, "recorded", stop)
    test = tmp_path / "test.txt"
    refused = f"expected at least 256 (at {test})"
    for count, message in (
        (1, f"text to report on has 1 token, {refused}"),
        (255, f"text to report on has 255 tokens, {refused}"),
        (256, "recording begins"),
    ):
        test.write_text("7" * count)
        found = pack("train-prefetch", built(), "--text", text, "--test", test, "-o", tmp_path / "model.prefetch")
        assert (found.code, found.out) == (1, "")
        assert message in found.err
    assert left_over(tmp_path) == ["test.txt"]


def test_of_a_text_that_was_given_to_report_on_nothing_is_claimed(
    pack: Pack, built: Built, text: Path, tmp_path: Path
) -> None:
    test = tmp_path / "test.txt"
    test.write_text(text.read_text()[:BLOCK_CHARACTERS])
    found = pack("train-prefetch", built(), "--text", text, "--test", test, "-o", tmp_path / "model.prefetch")
    assert (found.code, found.err) == (0, "")
    assert "; test.txt is another text than the others, no more was checked" in found.out
    assert "none in two of them" not in found.out


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    pack: Pack, built: Built, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "recorded", None)
    own = tmp_path / "own.txt"
    own.write_text(text.read_text())
    for output, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "missing" / "file", "no such file or directory"),
        (own, "output is the text"),
    ):
        found = pack("train-prefetch", built(), "--text", own, "-o", output)
        assert found.code == 1
        assert message in found.err
    assert own.read_text() == text.read_text()
    for wrong in (("--picture", tmp_path / "a"), ("--target", "nan")):
        found = pack("train-prefetch", built(), "--text", own, "-o", tmp_path / "a", *wrong)
        assert found.code == 2


def test_a_package_without_tokenizer_is_refused(
    olmoe_checkpoint: CheckpointFactory, pack: Pack, text: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(olmoe_checkpoint("base"), tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    build(folder, tmp_path / "model.emoe", BuildOptions())
    found = pack("train-prefetch", tmp_path / "model.emoe", "--text", text, "-o", tmp_path / "out")
    assert found.code == 1
    assert f"training reads text, and the package has no tokenizer (at {tmp_path / 'model.emoe'})" in found.err
    assert "hint: train with one built from the same checkpoint and its tokenizer.json" in found.err
    assert left_over(tmp_path) == ["checkpoint", "model.emoe"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "cannot be written: no space left on device"),
        (TrapError("a logit is not finite"), 1, "a logit is not finite"),
    ],
)
def test_nothing_is_left_where_recording_ends_early(
    error: BaseException,
    code: int,
    words: str,
    pack: Pack,
    built: Built,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        assert len(left_over(tmp_path)) == 1  # the folder that holds what is recorded
        raise error

    monkeypatch.setattr(recording, "observe_layers", fail)
    found = pack("train-prefetch", built(), "--text", text, "-o", tmp_path / "model.prefetch")
    assert (found.code, found.out) == (code, "")
    assert words in found.err
    assert left_over(tmp_path) == []


def test_what_fails_behind_recording_is_not_blamed_on_it(
    pack: Pack, built: Built, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(training, "fit_linear", fail)
    found = pack("train-prefetch", built(), "--text", text, "-o", tmp_path / "model.prefetch")
    assert (found.code, found.out) == (1, "")
    assert found.err.endswith("estream-pack: error: input/output error\n")
    assert left_over(tmp_path) == []


def test_a_disk_without_room_is_refused_before_the_model_reads(
    pack: Pack, built: Built, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    monkeypatch.setattr(recording, "observe_layers", None)
    found = pack("train-prefetch", built(), "--text", text, "-o", tmp_path / "model.prefetch")
    assert found.code == 1
    assert "the disk has room for 1,000" in found.err
    assert left_over(tmp_path) == []
