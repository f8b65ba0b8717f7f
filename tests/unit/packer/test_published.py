"""What the configurations of published models are read as."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from estream_packer.families import family_of
from estream_packer.families.weights import WeightMap
from estream_spec.model import DenseBlock, Latent, ModelDescription
from estream_spec.shapes import SHAPES
from fixtures.published import GENERATION, PARAMETERS, PUBLISHED, Config, parameters


def read(name: str, **changes: object) -> WeightMap:
    config: Config = PUBLISHED[name] | changes
    return family_of(config).read(config, GENERATION.get(name))


def described(name: str, **changes: object) -> ModelDescription:
    return read(name, **changes).model


def without_scaled_rotation(model: ModelDescription) -> ModelDescription:
    attentions = (replace(each, rotary=replace(each.rotary, frequencies=(), scale=1.0)) for each in model.attentions)
    return replace(model, attentions=tuple(attentions))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name: str) -> None:
    assert parameters(described(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_the_published_model(name: str) -> None:
    assert SHAPES[name] == without_scaled_rotation(described(name))


def routed(model: ModelDescription) -> list[int]:
    return [number for number, layer in enumerate(model.layers) if layer.experts is not None]


@pytest.mark.parametrize(
    ("name", "first", "count", "dense"),
    [
        ("qwen2-57b-a14b", 0, 28, (DenseBlock(intermediate=20480, share=True),)),
        ("deepseek-v2-lite", 1, 27, (DenseBlock(intermediate=2816), DenseBlock(intermediate=10944))),
        ("deepseek-v2", 1, 60, (DenseBlock(intermediate=3072), DenseBlock(intermediate=12288))),
        ("deepseek-v3", 3, 61, (DenseBlock(intermediate=2048), DenseBlock(intermediate=18432))),
        ("moonlight-16b-a3b", 1, 27, (DenseBlock(intermediate=2816), DenseBlock(intermediate=11264))),
        ("ernie-4.5-21b-a3b", 1, 28, (DenseBlock(intermediate=3072), DenseBlock(intermediate=12288))),
        ("lfm2-8b-a1b", 2, 24, (DenseBlock(intermediate=7168),)),
    ],
)
def test_dense_layers_come_first_each_kind_of_its_own_width(
    name: str, first: int, count: int, dense: tuple[DenseBlock, ...]
) -> None:
    model = described(name)
    assert (len(model.layers), routed(model)) == (count, list(range(first, count)))
    assert model.dense_blocks == dense
    assert all(layer.dense == len(dense) - 1 for layer in model.layers[:first])


def test_deepseek_v2_limits_groups_by_their_largest_and_does_not_renormalise() -> None:
    router = described("deepseek-v2").expert_blocks[0].router
    assert (router.family, router.groups, router.top_groups, router.group_score) == ("softmax-topk", 8, 3, "largest")
    assert (router.top_k, router.scale) == (6, 16.0)
    router = described("deepseek-v2-lite").expert_blocks[0].router
    assert (router.groups, router.scale) == (1, 1.0)


def test_deepseek_v3_limits_groups_by_their_two_largest() -> None:
    router = described("deepseek-v3").expert_blocks[0].router
    assert (router.family, router.groups, router.top_groups) == ("sigmoid-topk-renormalise", 8, 4)
    assert (router.group_score, router.selection_bias, router.scale, router.epsilon) == (
        "two-largest",
        True,
        2.5,
        1e-20,
    )
    router = described("moonlight-16b-a3b").expert_blocks[0].router
    assert (router.groups, router.top_groups, router.scale) == (1, 1, 2.446)


@pytest.mark.parametrize(
    ("name", "multiplier"),
    [("deepseek-v2-lite", 1.5896), ("deepseek-v2", 1.5896), ("deepseek-v3", 1.8739)],
)
def test_deepseek_stretches_rotation_and_sharpens_scores(name: str, multiplier: float) -> None:
    attention = described(name).attentions[0]
    assert attention.score_scale == pytest.approx(192**-0.5 * multiplier, rel=1e-4)
    assert (attention.rotary.width, len(attention.rotary.frequencies), attention.rotary.scale) == (64, 32, 1.0)
    # The fastest is kept, the slowest is stretched by the whole factor.
    assert attention.rotary.frequencies[0] == 1.0
    assert attention.rotary.frequencies[-1] == pytest.approx(10000 ** (-62 / 64) / 40, rel=1e-6)


def test_latent_norms_have_an_epsilon_of_their_own() -> None:
    model = described("moonlight-16b-a3b")
    assert model.norm_epsilon == 1e-5
    assert model.attentions[0].latent == Latent(rank=512, norm_epsilon=1e-6)
    assert described("deepseek-v3").attentions[0].latent == Latent(rank=512, norm_epsilon=1e-6, query_rank=1536)


def test_gpt_oss_stretches_rotation_without_moving_its_bounds_to_whole_numbers() -> None:
    model = described("gpt-oss-20b")
    rotary = model.attentions[0].rotary
    assert rotary.scale == 0.1 * math.log(32) + 1
    assert (
        rotary.frequencies
        != described("gpt-oss-20b", rope_scaling=PUBLISHED["gpt-oss-20b"]["rope_scaling"] | {"truncate": True})
        .attentions[0]
        .rotary.frequencies
    )
    assert [layer.window for layer in model.layers] == [128, None] * 12
    assert model.attentions[0].score_scale == 0.125


def test_gpt_oss_has_its_own_scaling_where_none_is_given() -> None:
    assert described("gpt-oss-20b", rope_scaling=None) == described("gpt-oss-20b")
    plain = described("gpt-oss-20b", rope_scaling=None, rope_parameters={}).attentions[0].rotary
    assert (plain.frequencies, plain.scale) == ((), 1.0)


def test_phi_takes_short_factors_and_ends_where_they_do() -> None:
    model = described("phi-3.5-moe")
    rotary = model.attentions[0].rotary
    assert (rotary.scale, model.context_length) == (1.243163121016122, 4096)
    assert rotary.frequencies[1] == pytest.approx(10000 ** (-1 / 64) / (1 + 1 / 64), rel=1e-6)
    assert model.layers[0].window is None
    assert model.expert_blocks[0].router.tolerance == 0.01


def test_granite_folds_what_it_multiplies_by() -> None:
    found = read("granite-3.0-1b-a400m")
    assert found.embedding.multiplier == 12.0
    assert found.final["final_norm"].multiplier == pytest.approx(1 / 6 / 12)
    assert found.experts[0](0, 0)["down"].multiplier == 0.22
    assert found.layers[0][0][0]["o"].multiplier == 0.22
    assert found.model.attentions[0].score_scale == 0.015625
    untied = read("granite-3.0-1b-a400m", tie_word_embeddings=False)
    assert untied.final["final_norm"].multiplier == pytest.approx(1 / 6)


def test_layers_that_draft_tokens_are_left_out_as_many_as_there_are() -> None:
    assert read("deepseek-v3").skipped == ("model.layers.61.",)
    assert read("deepseek-v3", num_nextn_predict_layers=None).skipped == ("model.layers.61.",)
    assert read("deepseek-v3", num_nextn_predict_layers=2).skipped == ("model.layers.61.", "model.layers.62.")
    assert read("moonlight-16b-a3b").skipped == ()
    assert read("deepseek-v2").skipped == ()
    assert read("ernie-4.5-21b-a3b").skipped == ("model.mtp_",)


@pytest.mark.parametrize(
    ("name", "newer"),
    [
        ("mixtral-8x7b", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "head_dim": None}),
        ("lfm2-8b-a1b", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "tie_embedding": True}),
        ("ernie-4.5-21b-a3b", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "dtype": "bfloat16"}),
        ("moonlight-16b-a3b", {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}, "head_dim": 64}),
        ("granite-3.0-1b-a400m", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
        ("qwen1.5-moe-a2.7b", {"layer_types": ["full_attention"] * 24, "mlp_only_layers": [], "qkv_bias": True}),
    ],
)
def test_a_model_that_newer_tools_saved_is_the_same(name: str, newer: Config) -> None:
    older = ("rope_theta", "torch_dtype", "rope_scaling", "auto_map") if "rope_parameters" in newer else ()
    config = {key: value for key, value in PUBLISHED[name].items() if key not in older} | newer
    assert family_of(config).read(config, None).model == described(name)


def test_early_mixtrals_have_a_window() -> None:
    assert {layer.window for layer in described("mixtral-8x7b", sliding_window=4096).layers} == {4096}
