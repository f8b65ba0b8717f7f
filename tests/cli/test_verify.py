from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import pytest
from safetensors.numpy import save_file

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_packer.checkpoint import open_checkpoint
from estream_spec.constants import SIGNATURE_MAGIC
from fixtures.olmoe import CheckpointFactory, weights
from fixtures.packages import Draft

TEXT = "The engine reads the experts of a layer from the disk while the others are at work. " * 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_every_byte(built: Built, pack: Pack) -> None:
    path = built()
    status, out, err = pack("verify", path)
    assert (status, err) == (0, "")
    assert "every digest and every checksum is right" in out
    with open_package(path) as package:
        assert f"file id {package.file_id.hex()}" in out


def test_json(built: Built, pack: Pack) -> None:
    status, out, _ = pack("verify", built(), "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["quality"], found["notices"]) == (None, [])
    assert found["bytes"] == built().stat().st_size


def test_what_is_odd_is_told(built: Built, tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "longer.emoe"
    path.write_bytes(built().read_bytes() + b"xy")
    status, out, _ = pack("verify", path)
    assert (status, out.splitlines()[-1]) == (0, "notice: 2 bytes follow the package's end")
    assert json.loads(pack("verify", path, "--json")[1])["notices"] == ["2 bytes follow the package's end"]


@pytest.mark.parametrize("what", ["dense", "experts"])
def test_damaged_weights(what: str, built: Built, tmp_path: Path, pack: Pack) -> None:
    data = bytearray(built().read_bytes())
    with open_package(built()) as package:
        place = getattr(package, what).place(1)
    data[place.offset + 9] ^= 1
    damaged = tmp_path / "damaged.emoe"
    damaged.write_bytes(data)
    assert pack("validate", damaged)[0] == 0
    status, out, err = pack("verify", damaged)
    assert (status, out) == (1, "refused: integrity\n")
    assert f"(at offset {place.offset:#x}, {what}[1][0]) [EMOE-REC-001]" in err


def test_a_refusal_as_json_is_that_of_validate(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "a.emoe"
    for data in (b"GGUF" * 99, Draft().seal()[:-1], None):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        status, out, err = pack("verify", path, "--json")
        assert (status, err) == (1, "")
        assert json.loads(out)["valid"] is False
        assert out == pack("validate", path, "--json")[1]


def test_a_signature_in_the_place_of_the_checkpoint(tmp_path: Path, pack: Pack) -> None:
    path, beside = tmp_path / "a.emoe", tmp_path / "a.sig"
    path.write_bytes(Draft().seal())
    beside.write_bytes(SIGNATURE_MAGIC + bytes(112))
    status, out, err = pack("verify", path, "--key", "0" * 64, beside)
    assert (status, out) == (1, "refused: pack\n")
    assert f"checkpoint is a signature, expected a folder (at {beside})" in err
    assert "hint: a signature goes behind --signature" in err


def test_a_package_in_the_place_of_the_checkpoint(built: Built, pack: Pack) -> None:
    status, out, err = pack("verify", built(), built("tied"))
    assert (status, out) == (1, "refused: pack\n")
    assert f"is a file, expected the folder of a checkpoint (at {built('tied')})" in err
    assert "hint: 'estream-pack diff' compares packages" in err


def test_damaged_padding(built: Built, tmp_path: Path, pack: Pack) -> None:
    data = bytearray(built().read_bytes())
    data[300] = 1
    damaged = tmp_path / "damaged.emoe"
    damaged.write_bytes(data)
    status, _, err = pack("verify", damaged)
    assert status == 1
    assert "offset 0x12c" in err
    assert "[EMOE-PAD-001]" in err


def test_unquantised_package_is_the_checkpoint(
    olmoe_checkpoint: CheckpointFactory, tmp_path: Path, text: Path, pack: Pack
) -> None:
    path = tmp_path / "f32.emoe"
    assert pack("build", olmoe_checkpoint(), "-o", path, "--experts", "f32", "--dense", "f32")[0] == 0
    status, out, err = pack("verify", path, olmoe_checkpoint(), "--text", text, "--json")
    assert (status, err) == (0, "")
    quality = json.loads(out)["quality"]
    assert quality["max_logit_difference"] == 0
    assert quality["mean_kl"] == 0
    assert quality["top1_agreement"] == 1
    assert quality["perplexity_ratio"] == 1
    assert quality["tokens"] > 100


def test_what_quantisation_costs(built: Built, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack) -> None:
    status, out, _ = pack("verify", built(), olmoe_checkpoint(), "--text", text, "--json", "--tokens", "50")
    quality = json.loads(out)["quality"]
    assert status == 0
    assert quality["tokens"] == 49
    assert 0 < quality["mean_kl"] < 1
    assert 0.3 < quality["top1_agreement"] <= 1
    assert quality["perplexity_ratio"] == pytest.approx(quality["perplexity"] / quality["reference_perplexity"])
    status, out, _ = pack("verify", built(), olmoe_checkpoint(), "--text", text)
    for words in ("mean KL divergence", "same likeliest token", "perplexity of the package", "ratio"):
        assert words in out


def test_another_checkpoint(built: Built, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack) -> None:
    status, out, err = pack("verify", built(), olmoe_checkpoint("clipped"), "--text", text)
    assert (status, out) == (1, "refused: pack\n")
    assert "the checkpoint's model is not the package's" in err
    assert "estream-pack: hint: give the checkpoint the package was made from" in err


def test_another_checkpoint_of_the_same_model(
    built: Built, olmoe_checkpoint: CheckpointFactory, tmp_path: Path, text: Path, pack: Pack
) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(olmoe_checkpoint(), tuned)
    tensors = weights("base")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, tuned / "model.safetensors")
    status, out, err = pack("verify", built(), tuned, "--text", text)
    assert (status, out) == (1, "refused: pack\n")
    digests = []
    for folder in (tuned, olmoe_checkpoint()):
        with open_checkpoint(folder) as checkpoint:
            digests.append(checkpoint.sources()[-1].sha256.hex())
    assert f"the checkpoint's tensors have digest {digests[0]}, those of the package have {digests[1]}" in err
    assert "estream-pack: hint: give the checkpoint the package was made from" in err


def test_text_must_be_given_for_another_tokenizer(
    built: Built, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    status, _, err = pack("verify", built(), olmoe_checkpoint())
    assert status == 2
    assert "--text" in err


def test_text_without_a_checkpoint(built: Built, text: Path, pack: Pack) -> None:
    status, _, err = pack("verify", built(), "--text", text)
    assert status == 2
    assert "--text needs CHECKPOINT" in err


@pytest.mark.parametrize(("data", "message"), [(b"\xff\xfe", "text is not UTF-8"), (b"", "text of 0 tokens")])
def test_texts_that_are_none(
    data: bytes, message: str, built: Built, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack
) -> None:
    text.write_bytes(data)
    status, _, err = pack("verify", built(), olmoe_checkpoint(), "--text", text)
    assert status == 1
    assert message in err


def test_nothing_is_left_behind(
    built: Built,
    olmoe_checkpoint: CheckpointFactory,
    text: Path,
    pack: Pack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert pack("verify", built(), olmoe_checkpoint(), "--text", text)[0] == 0
    assert pack("verify", built(), olmoe_checkpoint("clipped"), "--text", text)[0] == 1
    assert list(temporary.iterdir()) == []


def test_a_checkpoint_by_url(built: Built, olmoe_checkpoint: CheckpointFactory, text: Path, pack: Pack) -> None:
    system = fsspec.filesystem("memory")
    system.put(str(olmoe_checkpoint()), "/verified", recursive=True)
    choices = "--text", text, "--tokens", "50", "--json"
    try:
        found, quality = (
            pack("verify", built(), "memory://verified", *choices),
            pack("verify", built(), "--quality", "memory://verified", *choices),
        )
        assert (found.code, quality.code) == (0, 0)
        assert found.out == pack("verify", built(), olmoe_checkpoint(), *choices).out
        assert json.loads(quality.out)["reference"] == "memory://verified"
    finally:
        system.rm("/verified", recursive=True)
    status, _, err = pack("verify", "memory://packages/model.emoe")
    assert status == 1
    assert "package is on another machine" in err
