from __future__ import annotations

import shutil
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest

from estream_loader import open_package
from estream_loader.progress import Progress
from estream_loader.records import tensors
from estream_packer import random_weights
from estream_packer.favourites import MAX_SKEW, MOST, leans, shares
from estream_packer.proving import prove
from estream_packer.random_weights import MAX_SEED
from estream_packer.recipe import BuildOptions, DenseEncoding
from estream_packer.synth import SynthResult, synthesise
from estream_runtime import Session
from estream_spec.errors import PackError
from estream_spec.model import Attention, DenseBlock, ExpertBlock, Layer, ModelDescription, Rotary, Router
from estream_spec.weights import Encoding

LAYERS: Final = 4
EXPERTS: Final = 16
TINY: Final = ModelDescription(
    family="tiny",
    hidden=96,
    vocabulary=300,
    context_length=512,
    norm_epsilon=1e-5,
    layers=(Layer(attention=0, experts=0),) * LAYERS,
    attentions=(Attention(heads=4, key_value_heads=2, head_dim=24, rotary=Rotary(theta=10000.0), qk_norm="full"),),
    # 40 rows of down are more than a group of 32, and less than one of 64: padding in either nibble.
    expert_blocks=(ExpertBlock(experts=EXPERTS, intermediate=40, router=Router(family="softmax-topk", top_k=4)),),
)

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools as small against the tiny model as the true ones are against true models, which are drawn in no time."""
    monkeypatch.setattr(random_weights, "BYTES", 65_521)
    monkeypatch.setattr(random_weights, "FLOATS", 16_381)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("experts", "dense"),
    [("f32", "f32"), ("w8", "w8"), ("w4g32", "w8"), ("w4g32", "w4g32"), ("w4g64", "w8")],
)
@pytest.mark.parametrize("norm", ["none", "full"])
def test_a_synthetic_package_is_sound_and_routes_evenly(
    tmp_path: Path, experts: Encoding, dense: DenseEncoding, norm: str
) -> None:
    attention = msgspec.structs.replace(TINY.attentions[0], qk_norm=norm)
    model = msgspec.structs.replace(TINY, attentions=(attention,))
    output = tmp_path / "model.emoe"
    synthesise(model, output, BuildOptions(experts=experts, dense=dense, page_shift=12), seed=7)
    counts = np.zeros((LAYERS, EXPERTS), np.int64)

    def on_route(layer: int, expert_ids: np.ndarray, _: np.ndarray) -> None:
        counts[layer] += np.bincount(expert_ids.ravel(), minlength=EXPERTS)

    with open_package(output) as package:
        prove(package)
        with Session(package) as session:
            logits = session.forward(np.random.default_rng(1).integers(0, TINY.vocabulary, 512), on_route)
    assert counts.max() <= 2 * counts.mean()
    assert counts.min() >= counts.mean() / 4
    assert 0.8 <= logits.std() <= 1.25


def test_a_synthetic_package_has_everything_a_model_can_have(tmp_path: Path) -> None:
    """Biases and what works like one are no common direction, which would be some expert's favourite."""
    attention = msgspec.structs.replace(TINY.attentions[0], qk_norm="none", bias=True, out_bias=True, sinks=True)
    block = msgspec.structs.replace(
        TINY.expert_blocks[0], router=Router(family="sigmoid-topk", top_k=4, bias=True, selection_bias=True)
    )
    model = msgspec.structs.replace(
        TINY,
        layers=(Layer(attention=0, dense=1),) + (Layer(attention=0, experts=0, dense=0),) * (LAYERS - 1),
        attentions=(attention,),
        expert_blocks=(block,),
        dense_blocks=(DenseBlock(intermediate=24, share=True), DenseBlock(intermediate=80)),
        norm="layer",
        head_bias=True,
    )
    synthesise(model, tmp_path / "model.emoe", BuildOptions(page_shift=12))
    counts = np.zeros((LAYERS, EXPERTS), np.int64)

    def on_route(layer: int, expert_ids: np.ndarray, _: np.ndarray) -> None:
        counts[layer] += np.bincount(expert_ids.ravel(), minlength=EXPERTS)

    with open_package(tmp_path / "model.emoe") as package:
        prove(package)
        with Session(package) as session:
            session.forward(np.random.default_rng(1).integers(0, TINY.vocabulary, 512), on_route)
            assert len(list(session.generate(np.arange(5), 8))) == 8
    assert counts[0].sum() == 0
    assert counts.max() <= 2 * counts[1:].mean()
    assert counts[1:].min() >= counts[1:].mean() / 4


@pytest.mark.parametrize(("experts", "dense"), [("f32", "f32"), ("w4g32", "w8"), ("w4g32", "w4g32")])
def test_experts_are_chosen_by_the_law_that_a_skew_asks_for(
    tmp_path: Path, experts: Encoding, dense: DenseEncoding
) -> None:
    # With so few channels as in the tiny model, what a layer adds to them is much.
    model = msgspec.structs.replace(TINY, hidden=384)
    output = tmp_path / "model.emoe"
    result = synthesise(model, output, BuildOptions(experts=experts, dense=dense, page_shift=12), seed=7, skew=1)
    assert result.skew == 1
    counts = np.zeros((LAYERS, EXPERTS), np.int64)

    def on_route(layer: int, expert_ids: np.ndarray, _: np.ndarray) -> None:
        counts[layer] += np.bincount(expert_ids.ravel(), minlength=EXPERTS)

    with open_package(output) as package:
        prove(package)
        assert package.manifest.provenance.writer.endswith("synthetic weights of seed 7, skew 1")
        with Session(package) as session:
            logits = session.forward(np.random.default_rng(1).integers(0, TINY.vocabulary, 512), on_route)
    found = -np.sort(-counts) / 512
    assert np.abs(found - shares(EXPERTS, 4, 1)).max() <= 0.15
    assert len({tuple(np.argsort(-each)[:3]) for each in counts}) == LAYERS, "each layer has favourites of its own"
    assert 0.8 <= logits.std() <= 1.25


@pytest.mark.parametrize(("count", "top_k"), [(2, 1), (8, 2), (64, 8), (60, 59), (512, 128), (201, 200)])
@pytest.mark.parametrize("skew", [0, 0.5, 1, MAX_SKEW])
def test_the_shares_of_a_law_add_up_and_follow_it_below_the_most_there_is(count: int, top_k: int, skew: float) -> None:
    law = shares(count, top_k, skew)
    assert sum(law) == pytest.approx(top_k)
    assert all(one >= other > 0 for one, other in pairwise(law))
    assert law[0] <= max(MOST, top_k / count)
    free = [(rank, share) for rank, share in enumerate(law, 1) if share < law[0]]
    assert all(share * rank**skew == pytest.approx(free[-1][1] * count**skew) for rank, share in free)
    assert (leans(count, top_k, skew) == pytest.approx([0] * count)) == (skew == 0 or top_k / count > MOST)


def test_a_layer_that_takes_all_experts_prefers_none() -> None:
    assert leans(4, 4, 1) == [0] * 4


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    results = [
        synthesise(TINY, tmp_path / f"{number}.emoe", BuildOptions(jobs=jobs), seed)
        for number, (jobs, seed) in enumerate([(1, 5), (3, 5), (3, 6), (3, MAX_SEED)])
    ]
    assert (tmp_path / "0.emoe").read_bytes() == (tmp_path / "1.emoe").read_bytes()
    assert len({result.content_id for result in results}) == 3


def test_no_two_records_are_alike(tmp_path: Path) -> None:
    synthesise(TINY, tmp_path / "model.emoe")
    with open_package(tmp_path / "model.emoe") as package:
        digests = [*package.dense.table.digests, *package.experts.table.digests]
    assert len(set(digests)) == len(digests) == LAYERS + 2 + LAYERS * EXPERTS


@pytest.mark.parametrize("dense", ["f32", "w8"])
def test_no_two_tokens_are_alike_where_the_embedding_is_larger_than_what_was_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: DenseEncoding
) -> None:
    monkeypatch.setattr(random_weights, "BYTES", 1009)
    monkeypatch.setattr(random_weights, "FLOATS", 1009)
    synthesise(TINY, tmp_path / "model.emoe", BuildOptions(dense=dense))
    with open_package(tmp_path / "model.emoe") as package:
        prove(package)
        place = package.dense.place(0)
        record = memoryview(bytearray(place.length))
        package.read_record(place, record)
        embedding = tensors(place.layout, record)["embedding"]
    assert len(np.unique(embedding, axis=0)) == TINY.vocabulary


def test_a_synthetic_package_says_what_it_is(tmp_path: Path) -> None:
    output = tmp_path / "model.emoe"
    result = synthesise(TINY, output, seed=12)
    with open_package(output) as package:
        manifest, tokenizer = package.manifest, package.tokenizer_json
    assert (manifest.name, manifest.model, tokenizer) == ("synthetic tiny", TINY, None)
    assert "synthetic weights of seed 12" in manifest.provenance.writer
    assert (manifest.provenance.sources, manifest.provenance.licence) == ((), "")
    assert [word for word in ("random", "no tokenizer") if not any(word in notice for notice in result.notices)] == []
    assert (result.seed, result.summary.file_length) == (12, output.stat().st_size)
    assert msgspec.json.decode(msgspec.json.encode(result), type=SynthResult) == result


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model.emoe"
    length = synthesise(TINY, output).summary.file_length
    output.write_bytes(b"older")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, length // 2))
    with pytest.raises(
        PackError, match=rf".* bytes are still to be written, the disk has room for {length // 2:,}"
    ) as refusal:
        synthesise(TINY, output)
    assert refusal.value.hint == "free some space there, or write to another place"
    assert (names(tmp_path), output.read_bytes()) == (["model.emoe"], b"older")


class Watch:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.total = 0
        self.done = [0]

    def begin(self, stage: str, total: int) -> None:
        self.total += total

    def advance(self, amount: int) -> None:
        self.done.append(self.done[-1] + amount)


def test_progress_goes_by_record_to_the_bytes_of_all(tmp_path: Path) -> None:
    watch = Watch()
    length = synthesise(TINY, tmp_path / "model.emoe", progress=watch).summary.file_length
    assert watch.done[-1] == watch.total <= length
    steps = [after - before for before, after in pairwise(watch.done)]
    assert len(steps) == LAYERS + 2 + LAYERS * EXPERTS
    assert min(steps) > 0


@pytest.mark.parametrize("after", [1, LAYERS + 2 + 5])
def test_an_interrupt_leaves_nothing(tmp_path: Path, after: int) -> None:
    class Impatient(Watch):
        def advance(self, amount: int) -> None:
            super().advance(amount)
            if len(self.done) > after:
                raise KeyboardInterrupt

    impatient: Progress = Impatient()
    with pytest.raises(KeyboardInterrupt):
        synthesise(TINY, tmp_path / "model.emoe", progress=impatient)
    assert names(tmp_path) == []


def test_an_option_no_package_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="option name"):
        synthesise(TINY, tmp_path / "model.emoe", BuildOptions(name="x" * 129))
    assert names(tmp_path) == []
