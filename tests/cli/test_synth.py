from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from cli.conftest import Pack
from estream_loader import open_package
from estream_packer.commands import synth
from estream_spec.model import Attention, ExpertBlock, Rotary, Router
from estream_spec.shapes import SHAPES

SHAPE: Final = "mixtral-8x7b"
TINY: Final = replace(
    SHAPES[SHAPE],
    hidden=64,
    vocabulary=100,
    layers=SHAPES[SHAPE].layers[:2],
    attentions=(Attention(heads=4, key_value_heads=2, head_dim=16, rotary=Rotary(theta=1e6)),),
    expert_blocks=(ExpertBlock(experts=8, intermediate=48, router=Router(family="softmax-topk-renormalise", top_k=2)),),
)

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the shape small that the command line calls by a large model's name."""
    monkeypatch.setattr(synth, "SHAPES", {SHAPE: TINY})


@pytest.mark.usefixtures("tiny_shape")
def test_synth_writes_a_package_that_verify_accepts(tmp_path: Path, pack: Pack) -> None:
    output = tmp_path / "model.emoe"
    status, out, err = pack("synth", "--shape", SHAPE, "-o", output)
    assert status == 0
    assert err.splitlines() == [
        "notice: the weights are random: good for measuring, and what the model says means nothing",
        "notice: a synthetic package has no tokenizer, so it takes token ids and no text",
    ]
    assert f"wrote {output}" in out
    assert "MB written in" in out
    assert pack("verify", output)[0] == 0
    status, out, _ = pack("inspect", output)
    assert status == 0
    assert f"synthetic {SHAPE}" in out
    assert "synthetic weights of seed 0" in out


@pytest.mark.usefixtures("tiny_shape")
def test_the_choices_and_the_seed_decide_the_package(tmp_path: Path, pack: Pack) -> None:
    flags = ["--experts", "w8", "--dense", "w4g32", "--activations", "f32", "--seed", "3", "--json"]
    first, second, other = (tmp_path / f"{name}.emoe" for name in ("first", "second", "other"))
    status, out, _ = pack("synth", "--shape", SHAPE, "-o", first, *flags)
    result = json.loads(out)
    assert (status, result["output"], result["seed"]) == (0, str(first), 3)
    with open_package(first, integrity="full") as package:
        assert package.file_id.hex() == result["file_id"]
        encodings = {matrix.name: matrix.encoding for layout in package.manifest.layouts for matrix in layout.matrices}
        assert {graph.activations for graph in package.manifest.graphs} == {"f32"}
    assert (encodings["gate"], encodings["q"], encodings["embedding"]) == ("w8", "w4g32", "w8")
    assert pack("synth", "--shape", SHAPE, "-o", second, *flags)[0] == 0
    assert pack("synth", "--shape", SHAPE, "-o", other, *flags, "--seed", "4")[0] == 0
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


@pytest.mark.usefixtures("tiny_shape")
def test_a_skew_changes_the_package_and_is_told(tmp_path: Path, pack: Pack) -> None:
    even, skewed = tmp_path / "even.emoe", tmp_path / "skewed.emoe"
    assert pack("synth", "--shape", SHAPE, "-o", even)[0] == 0
    status, out, _ = pack("synth", "--shape", SHAPE, "-o", skewed, "--skew", "1.5", "--json")
    assert (status, json.loads(out)["skew"]) == (0, 1.5)
    assert even.read_bytes() != skewed.read_bytes()
    assert "synthetic weights of seed 0, skew 1.5" in pack("inspect", skewed)[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_known_and_needs_its_room(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 12345))
    status, out, err = pack("synth", "--shape", shape, "-o", tmp_path / "model.emoe", "--dense", "w4g32")
    assert (status, out) == (1, "")
    assert "the disk has room for 12,345" in err
    assert "estream-pack: hint: free some space there" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.emoe"], "missing option '--shape'"),
        (["--shape", SHAPE], "missing option '-o'"),
        (["--shape", "gpt", "-o", "x.emoe"], "'gpt' is not one of 'olmoe-1b-7b'"),
        (["--shape", SHAPE, "-o", "x.emoe", "--seed", "-1"], "-1 is not in the range"),
        (["--shape", SHAPE, "-o", "x.emoe", "--skew", "-1"], "-1.0 is not in the range"),
        (["--shape", SHAPE, "-o", "x.emoe", "--skew", "nan"], "'nan' is not a finite number"),
        (["--shape", SHAPE, "-o", "x.emoe", "--dense", "w4g64"], "'w4g64' is not one of"),
    ],
)
def test_wrong_usage_exits_with_2(pack: Pack, arguments: list[str], message: str) -> None:
    status, out, err = pack("synth", *arguments)
    assert (status, out) == (2, "")
    assert message in err.lower()
    assert "estream-pack: hint: see 'estream-pack synth --help'" in err


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, pack: Pack) -> None:
    status, _, err = pack("synth", "--shape", SHAPE, "-o", tmp_path / "absent" / "model.emoe")
    assert (status, "hint: make the folder first" in err) == (1, True)
