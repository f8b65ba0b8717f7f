"""Prefetch routers: what is refused, what they are bound to, and what they predict."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from estream_spec.errors import FormatError, InvalidError, MalformedError
from estream_spec.manifest import Provenance, Source
from estream_spec.messagepack import encode
from estream_spec.model import ExpertBlock, ModelDescription, Router
from estream_spec.prefetch_predictor import LayerPredictor, Ranked, features
from estream_spec.prefetch_router import (
    PrefetchLayer,
    PrefetchRouter,
    check_prefetch_router,
    check_router,
    decode_prefetch_router,
    encode_prefetch_router,
    feature_count,
    model_digest,
    router_digest,
)
from estream_spec.weights import Floats
from fixtures.models import MIXED, PLAIN
from fixtures.prefetching import Tensors, prefetch_router


class Origin(NamedTuple):
    """What a prefetch router is bound to."""

    model: ModelDescription
    provenance: Provenance


TENSORS: dict[int, Tensors] = {
    layer: {"router": np.full((48, 6), layer, np.float32), "expert_norm": np.ones(48, np.float32)} for layer in range(6)
}
SOURCES = tuple(Source(name=name, length=1, sha256=sha256(name.encode()).digest()) for name in ("config", "tensors"))
ORIGIN = Origin(PLAIN, Provenance(writer="tests", sources=SOURCES))
SOUND = prefetch_router(ORIGIN, TENSORS)


def changed(**changes: Any) -> PrefetchRouter:
    """The sound one but for its last layer."""
    return replace(SOUND, layers=(*SOUND.layers[:-1], replace(SOUND.layers[-1], **changes)))


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def refused(router: PrefetchRouter) -> FormatError:
    """How it is refused, though its bytes can be read."""
    assert decode_prefetch_router(encode_prefetch_router(router), "router") == router
    with pytest.raises(FormatError) as error:
        check_prefetch_router(router, ORIGIN, "router")
    return error.value


def test_it_survives_its_bytes() -> None:
    data = encode_prefetch_router(SOUND)
    assert data.startswith(b"EMOEPRE\0")
    assert decode_prefetch_router(data, "router") == SOUND
    check_prefetch_router(SOUND, ORIGIN, "router")


def test_a_model_of_several_shape_classes_has_layers_of_several_sizes() -> None:
    origin = Origin(MIXED, ORIGIN.provenance)
    router = prefetch_router(origin, TENSORS)
    assert [each.layer for each in router.layers] == [1, 2, 3, 5]
    check_prefetch_router(decode_prefetch_router(encode_prefetch_router(router), "router"), origin, "router")


@pytest.mark.parametrize("data", [b"", b"EMOEPRE", b"EMOEPRG\0" + encode(SOUND), encode(SOUND)])
def test_other_bytes_are_no_prefetch_router(data: bytes) -> None:
    with pytest.raises(MalformedError, match="not a prefetch router: it starts with") as error:
        decode_prefetch_router(data, "file.bin")
    assert (error.value.rule, error.value.path) == ("EMOE-PRE-001", "file.bin")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda data: data[:-1], "EMOE-MAN-001"),
        (lambda data: data + b"\0", "EMOE-MAN-001"),
        (lambda data: data.replace(b"\xa5extra\xcb", b"\xa5extrb\xcb"), "EMOE-MAN-002"),
        (lambda data: data.replace(b"\xa6tokens\xcd\x03\xe8", b"\xa6tokens\xce\x00\x00\x03\xe8"), "EMOE-MAN-003"),
    ],
    ids=["short", "long", "unknown key", "long integer"],
)
def test_bytes_behind_the_magic_are_one_canonical_document(change: Any, rule: str) -> None:
    with pytest.raises(FormatError) as error:
        decode_prefetch_router(change(encode_prefetch_router(SOUND)), "router")
    assert error.value.rule == rule


@pytest.mark.parametrize("target", [0.0, -0.5, 1.001, math.nan])
def test_a_target_is_a_share_above_nothing(target: float) -> None:
    with pytest.raises(InvalidError):
        decode_prefetch_router(encode_prefetch_router(changed(target=target)), "router")


def test_one_for_another_model_is_refused_by_both_digests() -> None:
    other = Origin(replace(PLAIN, norm_epsilon=2e-5), ORIGIN.provenance)
    with pytest.raises(FormatError, match="prefetch router is for another model") as error:
        check_prefetch_router(SOUND, other, "router")
    assert error.value.rule == "EMOE-PRE-002"
    assert model_digest(ORIGIN).hex() in str(error.value)
    assert model_digest(other).hex() in str(error.value)
    assert "train-prefetch" in (error.value.hint or "")


def test_the_model_digest_is_over_the_description_and_the_tensors() -> None:
    context = b"EMOE prefetch\0" + sha256(encode(PLAIN)).digest()
    assert model_digest(ORIGIN) == sha256(context + sha256(b"tensors").digest()).digest()
    nothing = Origin(PLAIN, Provenance(writer="tests", sources=SOURCES[:1]))
    assert model_digest(nothing) == sha256(context + bytes(32)).digest()


@pytest.mark.parametrize(
    "layers", [SOUND.layers[:1], SOUND.layers[::-1], (*SOUND.layers, SOUND.layers[1]), (SOUND.layers[0],) * 2]
)
def test_layers_are_those_with_experts(layers: tuple[PrefetchLayer, ...]) -> None:
    fault = refused(replace(SOUND, layers=layers))
    assert (fault.rule, fault.path) == ("EMOE-PRE-003", "router.layers")
    assert "those with experts are 0, 1" in str(fault)


@pytest.mark.parametrize("name", ["weights", "bias", "confidence", "thresholds", "needed"])
@pytest.mark.parametrize("longer", [-1, 1])
def test_arrays_are_as_long_as_the_model_says(name: str, longer: int) -> None:
    data = getattr(SOUND.layers[-1], name)
    fault = refused(changed(**{name: data[:-1] if longer < 0 else data + b"\0"}))
    assert (fault.rule, fault.path) == ("EMOE-PRE-004", f"router.layers[1].{name}")
    assert f"{name} of {len(data) + longer} bytes, expected {len(data)}" in str(fault)


@pytest.mark.parametrize("name", ["weights", "bias", "confidence", "thresholds", "needed"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(name: str, number: float) -> None:
    width = "<f2" if name == "weights" else "<f4"
    data = getattr(SOUND.layers[-1], name)
    odd = np.array([number], width).tobytes()
    fault = refused(changed(**{name: data[: -len(odd)] + odd}))
    assert (fault.rule, fault.path) == ("EMOE-PRE-005", f"router.layers[1].{name}")
    assert f"{name} has {number}, expected finite numbers" in str(fault)


def test_thresholds_do_not_fall() -> None:
    check_prefetch_router(changed(thresholds=floats(1, 1, 2, 2, 2)), ORIGIN, "router")
    fault = refused(changed(thresholds=floats(1, 2, 1.5, 3, 4)))
    assert fault.rule == "EMOE-PRE-006"
    assert "thresholds fall from 2.0 to 1.5" in str(fault)


@pytest.mark.parametrize("number", [-0.001, 1.001])
def test_how_often_a_rank_is_needed_is_a_share(number: float) -> None:
    fault = refused(changed(needed=floats(1, 1, 0.5, 0, 0, number)))
    assert fault.rule == "EMOE-PRE-007"
    assert "needed has" in str(fault)


def test_every_expert_may_be_chosen() -> None:
    block = ExpertBlock(experts=2, intermediate=21, router=Router(family="softmax-topk", top_k=2))
    origin = Origin(replace(PLAIN, expert_blocks=(block,)), ORIGIN.provenance)
    router = prefetch_router(origin, TENSORS)
    check_prefetch_router(router, origin, "router")
    predictor = LayerPredictor.of(router.layers[0], origin.model)
    ranked = predictor.rank(np.ones((3, 48), np.float32))
    assert predictor.extras(ranked).tolist() == [0] * 3


def test_a_layer_is_bound_to_its_router() -> None:
    check_router(SOUND.layers[1], TENSORS[1], "router")
    with pytest.raises(FormatError, match="prefetch router is for another router of layer 1") as error:
        check_router(SOUND.layers[1], TENSORS[0], "router")
    assert error.value.rule == "EMOE-PRE-008"


def test_the_router_digest_is_over_what_decides_the_experts_in_one_order() -> None:
    names = ["expert_norm", "expert_norm.bias", "router", "router.bias", "selection_bias"]
    tensors = {name: np.full((2, 3), number, np.float32) for number, name in enumerate(names)}
    digest = sha256(b"".join(each.astype("<f4").tobytes() for each in tensors.values())).digest()
    assert router_digest(dict(reversed(tensors.items())) | {"k": np.ones(4, np.float32)}) == digest
    for name in names:
        assert router_digest({each: tensor for each, tensor in tensors.items() if each != name}) != digest


def expected_ranking(layer: PrefetchLayer, model: ModelDescription, row: Floats) -> tuple[list[int], list[float], int]:
    """What annex A.7 says of one row, in f64 and expert by expert."""
    block = model.expert_block(layer.layer)
    count, top_k = block.experts, block.router.top_k
    weights = np.frombuffer(layer.weights, "<f2").astype(float).reshape(-1, count)
    bias, confidence = (np.frombuffer(each, "<f4").astype(float) for each in (layer.bias, layer.confidence))
    normed = row / math.sqrt(float(np.mean(row.astype(float) ** 2)) + model.norm_epsilon)
    scores = [float(normed @ weights[:, expert]) + bias[expert] for expert in range(count)]
    ranking = sorted(range(count), key=lambda expert: (-scores[expert], expert))
    total = sum(math.exp(score) for score in scores)
    shares = [math.exp(scores[expert]) / total for expert in ranking]
    by_id = [shares[ranking.index(expert)] for expert in range(count)]
    logarithms = [math.log(max(share, 2**-30)) for share in (*shares[: top_k + 8], *by_id)]
    score = sum(weight * each for weight, each in zip(confidence, [*logarithms, *by_id], strict=True))
    sure = [1 / (1 + math.exp(score - threshold)) for threshold in np.frombuffer(layer.thresholds, "<f4")]
    return ranking, shares, next((d for d, each in enumerate(sure) if each >= layer.target), count - top_k)


@pytest.mark.parametrize("model", [PLAIN, MIXED])
def test_prediction_is_what_the_annex_says(model: ModelDescription) -> None:
    origin = Origin(model, ORIGIN.provenance)
    extras = set[int]()
    for seed in range(5):
        for layer in prefetch_router(origin, TENSORS, seed).layers:
            predictor = LayerPredictor.of(layer, model)
            rows = np.random.default_rng(seed).standard_normal((20, model.hidden), np.float32) * 0.05
            ranked = predictor.rank(rows)
            assert ranked.experts.dtype == np.int32
            found = predictor.extras(ranked)
            assert found.dtype == np.int32
            for number, row in enumerate(rows):
                ranking, shares, extra = expected_ranking(layer, model, row)
                assert ranked.experts[number].tolist() == ranking
                np.testing.assert_allclose(ranked.probabilities[number], shares, rtol=2e-5, atol=1e-12)
                assert found[number] == extra
                extras.add(extra)
    assert len(extras) >= 3


def test_a_row_alone_is_ranked_as_among_others() -> None:
    predictor = LayerPredictor.of(SOUND.layers[0], PLAIN)
    rows = np.random.default_rng(0).standard_normal((8, PLAIN.hidden), np.float32)
    together = predictor.rank(rows)
    for number in range(8):
        alone = predictor.rank(rows[number : number + 1])
        assert alone.experts[0].tolist() == together.experts[number].tolist()


def test_equal_scores_go_to_the_lower_id() -> None:
    layer = replace(SOUND.layers[0], weights=bytes(2 * 48 * 6), bias=floats(1, 3, 2, 3, 1, 3))
    ranked = LayerPredictor.of(layer, PLAIN).rank(np.ones((1, 48), np.float32))
    assert ranked.experts.tolist() == [[1, 3, 5, 2, 0, 4]]


def test_scores_that_overflow_still_rank_every_expert() -> None:
    layer = replace(SOUND.layers[0], bias=floats(*[3.4e38] * 6), confidence=floats(*[3.4e38] * 18))
    predictor = LayerPredictor.of(layer, PLAIN)
    ranked = predictor.rank(np.full((1, 48), 3e38, np.float32))
    assert sorted(ranked.experts[0].tolist()) == list(range(6))
    assert 0 <= predictor.extras(ranked)[0] <= 4


@pytest.mark.parametrize(("target", "extra"), [(1e-300, 0), (1.0, 4)])
def test_the_target_decides_how_many_more(target: float, extra: int) -> None:
    predictor = LayerPredictor.of(replace(SOUND.layers[0], target=target), PLAIN)
    ranked = predictor.rank(np.ones((1, 48), np.float32))
    assert predictor.extras(ranked).tolist() == [extra]


def test_features_are_logarithms_by_rank_then_logarithms_and_probabilities_by_id() -> None:
    ranked = Ranked(np.array([[2, 0, 1, 3]], np.int32), np.array([[0.5, 0.5, 0, 0]], np.float32))
    found = features(ranked, 1)
    assert found.shape == (1, feature_count(4, 1)) == (1, 12)
    half, none = math.log(0.5), math.log(2**-30)
    expected = [[half, half, none, none, half, none, half, none, 0.5, 0, 0.5, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
