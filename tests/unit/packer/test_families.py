"""Keys of every family's configuration: what may be left out, what is refused, and that it is refused by name."""

from __future__ import annotations

from typing import Any, Final

import pytest
from msgspec import convert, to_builtins

from estream_packer.families import family_of
from estream_packer.families.weights import WeightMap
from estream_spec.errors import PackError
from estream_spec.model import ModelDescription
from fixtures import families

ABSENT = object()
NAMES = tuple(name for name in families.FAMILIES if "-" not in name)


def changed(name: str, **keys: object) -> dict[str, Any]:
    return {key: value for key, value in (families.config(name) | keys).items() if value is not ABSENT}


def read(name: str, **keys: object) -> WeightMap:
    config = changed(name, **keys)
    return family_of(config).read(config, None)


def describe(name: str, **keys: object) -> ModelDescription:
    return read(name, **keys).model


def refusal(name: str, **keys: object) -> PackError:
    with pytest.raises(PackError) as caught:
        read(name, **keys)
    return caught.value


WRONG: Final[tuple[object, ...]] = (
    ABSENT,
    None,
    "text",
    "",
    0,
    -1,
    2**24,
    2**40,
    1.5,
    1e300,
    True,
    False,
    [],
    {},
    [None],
    {"x": None},
)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_key_in_every_wrong_form_packs_or_is_refused_by_name(name: str) -> None:
    for key in families.config(name):
        for value in WRONG:
            told = None
            try:
                model = describe(name, **{key: value})
                assert convert(to_builtins(model), ModelDescription) == model
            except PackError as error:
                told = str(error)
            assert told is None or (key in told and len(told) < 400), (key, value, told)


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logits_soft_cap", 30.0),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling_other.Other"}),
        ("eos_token_id", 2**23),
        ("num_hidden_layers", 1025),
    ],
)
def test_what_no_family_does_is_refused_by_name(name: str, key: str, value: object) -> None:
    assert key in str(refusal(name, **{key: value})).replace("rope_type", "rope_scaling")


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window is True, expected false"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 6}, "layer_types is ['sliding_attention'"),
        ("qwen2_moe", {"mlp_only_layers": [1, 3, 5]}, "mlp_only_layers is [1, 3, 5], expected some of the 6 layers"),
        ("qwen2_moe", {"mlp_only_layers": 0}, "mlp_only_layers is 0, expected a list of layers"),
        (
            "qwen2_moe",
            {"decoder_sparse_step": 7, "mlp_only_layers": []},
            "decoder_sparse_step is 7, expected some of the 6 layers",
        ),
        ("qwen3_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention', "),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True, expected False"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2, expected 1"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True, expected False"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected 'softmax'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', expected 'greedy' or"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 4"),
        ("deepseek_v2", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15, expected an even number"),
        (
            "deepseek_v2",
            {"first_k_dense_replace": 3},
            "first_k_dense_replace is 3, expected a whole number from 0 to 2",
        ),
        ("deepseek_v2-grouped", {"n_group": 3}, "n_group is 3, expected a divisor of the 16 experts"),
        ("deepseek_v2-grouped", {"topk_group": None}, "topk_group is None, expected a whole number from 1 to 4"),
        ("deepseek_v2-grouped", {"num_experts_per_tok": 9}, "topk_group is 2, expected a whole number from 3 to 4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False, expected True"),
        ("deepseek_v3", {"n_group": 16, "topk_group": 8}, "n_group is 16, expected groups of two experts or more"),
        ("mixtral", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention'"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, expected 1.702"),
        ("gpt_oss", {"experts_per_token": 4}, "experts_per_token is 4, expected 3"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention'"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling is 0, expected a number above 0"),
        ("lfm2_moe", {"conv_bias": True}, "conv_bias is True, expected False"),
        ("lfm2_moe", {"layer_types": ["conv"] * 5}, "layer_types is ['conv', 'conv'"),
        ("phimoe", {"num_local_experts": 1}, "num_local_experts is 1, expected two experts or more"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, expected 2"),
        (
            "phimoe",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "type is 'yarn', expected 'default' or 'longrope'",
        ),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, expected False"),
        ("ernie4_5_moe", {"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1, expected 1e-12"),
        ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free is False, expected True"),
        ("ernie4_5_moe", {"moe_layer_interval": 4}, "moe_layer_interval is 4, expected some of the 3 layers"),
        ("ernie4_5_moe", {"moe_layer_end_index": 0}, "moe_layer_end_index is 0, expected some of the 3 layers"),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_name(name: str, keys: dict[str, object], message: str) -> None:
    assert refusal(name, **keys).message.startswith(message)


def test_longrope_needs_both_of_its_scales() -> None:
    settings = families.config("phimoe-longrope")["rope_scaling"]
    for key in ("short_mscale", "long_mscale"):
        less = {name: value for name, value in settings.items() if name != key}
        assert f"{key} is absent" in refusal("phimoe-longrope", rope_scaling=less).message


@pytest.mark.parametrize(
    ("name", "theta"),
    [
        ("qwen2_moe", 1e4),
        ("deepseek_v2", 1e4),
        ("mixtral", 1e6),
        ("qwen3_moe", 1e4),
        ("gpt_oss", 150000.0),
        ("granitemoe", 1e4),
        ("lfm2_moe", 1e6),
        ("deepseek_v3", 1e4),
        ("phimoe", 1e6),
        ("ernie4_5_moe", 5e5),
    ],
)
def test_the_rotary_base_is_found_wherever_it_stands(name: str, theta: float) -> None:
    """The base goes anywhere, in any number's form; where there is none, the family's own is recorded."""
    scaling = families.config(name).get("rope_scaling") or {}
    old = describe(name, rope_theta=7e5, rope_scaling=scaling or None)
    assert old.attentions[0].rotary.theta == 7e5
    places: list[dict[str, object]] = [
        {"rope_theta": 700000, "rope_scaling": scaling},
        {"rope_theta": ABSENT, "rope_scaling": ABSENT, "rope_parameters": scaling | {"rope_theta": 7e5}},
        {"rope_theta": ABSENT, "rope_scaling": scaling | {"rope_theta": 700000}},
        {"rope_theta": 7e5, "rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 7e5}},
    ]
    for keys in places:
        assert describe(name, **keys) == old, keys
    twice = refusal(name, rope_theta=7e5, rope_scaling=None, rope_parameters=scaling | {"rope_theta": 8e5})
    assert twice.message.startswith("rope_theta is 800000.0, expected 700000 as elsewhere")
    assert describe(name, rope_theta=ABSENT).attentions[0].rotary.theta == theta


@pytest.mark.parametrize("name", NAMES)
def test_experts_and_dtype_have_old_and_new_names(name: str) -> None:
    usual = next(key for key in families.config(name) if key.endswith("experts") and "shared" not in key)
    count = families.config(name)[usual]
    for key in ("num_experts", "num_local_experts"):
        assert describe(name, **{usual: ABSENT, key: count}) == describe(name)
        assert describe(name, **{usual: count, key: count}) == describe(name)
    assert describe(name, torch_dtype=ABSENT, dtype="float32") == describe(name)
    other = next(key for key in ("num_experts", "num_local_experts") if key != usual)
    assert "experts" in refusal(name, **{other: count + 1}).message


def test_layers_are_dense_where_the_configuration_says() -> None:
    def routed(name: str, **keys: object) -> list[bool]:
        return [layer.experts is not None for layer in describe(name, **keys).layers]

    three = {"num_hidden_layers": 3}
    assert routed("qwen2_moe", **three, decoder_sparse_step=2, mlp_only_layers=[]) == [False, True, False]
    assert routed("qwen2_moe", **three, decoder_sparse_step=1, mlp_only_layers=[2, 9]) == [True, True, False]
    assert routed("deepseek_v2", first_k_dense_replace=2) == [False, False, True]
    assert routed("deepseek_v2", first_k_dense_replace=ABSENT) == [True, True, True]
    assert describe("deepseek_v2").dense_blocks[1].intermediate == 342
    assert routed("ernie4_5_moe", moe_layer_start_index=0, moe_layer_interval=2) == [False, True, False]
    assert routed("ernie4_5_moe", moe_layer_start_index=0, moe_layer_end_index=-1) == [True, True, True]
    assert routed("ernie4_5_moe", moe_layer_start_index=0, moe_layer_end_index=1) == [True, True, False]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_only_null_says_that_queries_have_no_narrow_row(name: str) -> None:
    """An absent key means what it means to transformers: a rank of 1536."""

    def rank(value: object) -> int | None:
        latent = describe(name, q_lora_rank=value).attentions[0].latent
        assert latent is not None
        return latent.query_rank

    assert (rank(None), rank(40), rank(ABSENT)) == (None, 40, 1536)
    assert read(name).layers[0][0][0]["q"].shape == (4 * (12 + 16), 64)
    assert refusal(name, q_lora_rank=0).message.startswith("q_lora_rank is 0, expected a whole number from 1 to")


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert {layer.window for layer in describe("mixtral", sliding_window=511).layers} == {511}
    assert {layer.window for layer in describe("mixtral", sliding_window=512).layers} == {None}
    windowed = describe("qwen3_moe", use_sliding_window=True, sliding_window=16)
    assert {layer.window for layer in windowed.layers} == {16}
    assert {layer.window for layer in describe("qwen3_moe", sliding_window=16).layers} == {None}


@pytest.mark.parametrize(("name", "default"), [("mixtral", None), ("phimoe", None), ("qwen3_moe", 4096)])
def test_a_window_that_is_absent_is_the_one_transformers_takes_and_null_is_none(name: str, default: int | None) -> None:
    keys = {"use_sliding_window": True, "max_position_embeddings": 8192}
    for value, window in ((ABSENT, default), (None, None), (8191, 8191)):
        assert {layer.window for layer in describe(name, sliding_window=value, **keys).layers} == {window}


@pytest.mark.parametrize("name", NAMES)
def test_the_family_is_known_by_model_type_or_by_the_one_architecture(name: str) -> None:
    architectures = families.config(name)["architectures"]
    for key, value in (("architectures", ABSENT), ("architectures", []), ("model_type", ABSENT), ("model_type", None)):
        assert describe(name, **{key: value}) == describe(name)
    nothing = refusal(name, model_type=ABSENT, architectures=ABSENT)
    assert nothing.message.startswith("model_type is absent, expected one of olmoe")
    two = refusal(name, architectures=architectures * 2)
    assert two.message.startswith(f"architectures is {architectures * 2}"[:60])
    other = refusal(name, architectures=["OlmoeForCausalLM"])
    assert other.message == f"architectures is ['OlmoeForCausalLM'], expected {architectures}"
    unknown = refusal(name, model_type=f"{name}x")
    assert unknown.hint == f"did you mean {name!r}?"
