"""OLMoE checkpoints: what a configuration becomes, which tensors belong to it, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from estream_packer.checkpoint import open_checkpoint
from estream_packer.families import WeightMap, family_of
from estream_packer.families.olmoe import read
from estream_packer.families.weights import tokenizer_size
from estream_spec.errors import PackError
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router

Tensors = dict[str, NDArray[Any]]

CONFIG: dict[str, object] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "clip_qkv": None,
    "eos_token_id": 7,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256,
}
ABSENT = object()


def changed(**keys: object) -> dict[str, object]:
    return {key: value for key, value in (CONFIG | keys).items() if value is not ABSENT}


def describe(config: dict[str, object], generation: dict[str, object] | None = None) -> ModelDescription:
    return read(config, generation).model


def tensors_of(config: dict[str, object]) -> Tensors:
    """Every tensor at its own constant, by Hugging Face's names."""
    hidden, width, rows, keys = 64, 32, 256, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (rows, hidden)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for name, outputs in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            shapes[prefix + f"self_attn.{name}_proj.weight"] = (outputs, hidden)
        shapes |= {prefix + "self_attn.q_norm.weight": (hidden,), prefix + "self_attn.k_norm.weight": (keys,)}
        shapes[prefix + "mlp.gate.weight"] = (12, hidden)
        for expert in range(12):
            for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                shapes[prefix + f"mlp.experts.{expert}.{name}_proj.weight"] = shape
    return {name: np.full(shape, number, np.float16) for number, (name, shape) in enumerate(sorted(shapes.items()))}


def tokenizer_of(size: int) -> bytes:
    return Tokenizer(WordLevel({f"t{token}": token for token in range(size)}, "t0")).to_str().encode()


def write(folder: Path, config: dict[str, object], tensors: Tensors, tokenizer: bytes | None = None) -> WeightMap:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    return read(config)


def check(folder: Path, map_: WeightMap) -> None:
    with open_checkpoint(folder) as checkpoint:
        map_.resolve(checkpoint)


def test_a_configuration_becomes_a_description() -> None:
    assert describe(CONFIG) == ModelDescription(
        family="olmoe",
        hidden=64,
        vocabulary=256,
        context_length=512,
        norm_epsilon=1e-6,
        layers=(Layer(attention=0, experts=0), Layer(attention=0, experts=0)),
        attentions=(Attention(heads=4, key_value_heads=2, head_dim=16, rotary=Rotary(theta=10000.0), qk_norm="full"),),
        expert_blocks=(ExpertBlock(experts=12, intermediate=32, router=Router(family="softmax-topk", top_k=3)),),
        end_tokens=(7,),
    )


@pytest.mark.parametrize(
    ("value", "family"),
    [(False, "softmax-topk"), (True, "softmax-topk-renormalise"), (ABSENT, "softmax-topk"), (None, "softmax-topk")],
)
def test_whether_top_k_is_renormalised_is_recorded(value: object, family: str) -> None:
    assert describe(changed(norm_topk_prob=value)).expert_blocks[0].router.family == family


@pytest.mark.parametrize(
    ("key", "value", "same_as"),
    [
        ("num_key_value_heads", ABSENT, 4),
        ("num_key_value_heads", None, 4),
        ("rms_norm_eps", ABSENT, 1e-5),
        ("rms_norm_eps", None, 1e-5),
        ("clip_qkv", ABSENT, None),
        ("clip_qkv", 8, 8.0),
        ("attention_bias", ABSENT, False),
        ("hidden_act", ABSENT, "silu"),
        ("tie_word_embeddings", ABSENT, False),
        ("eos_token_id", ABSENT, None),
        ("eos_token_id", [], None),
        ("eos_token_id", [7, 7], 7),
        ("head_dim", 16, ABSENT),
        ("num_local_experts", 12, ABSENT),
        ("bos_token_id", 1, None),
        ("use_cache", "anything", True),
    ],
)
def test_spellings_of_the_same_model(key: str, value: object, same_as: object) -> None:
    assert describe(changed(**{key: value})) == describe(changed(**{key: same_as}))


def test_optional_values_are_kept() -> None:
    model = describe(changed(clip_qkv=8.0, tie_word_embeddings=True, eos_token_id=[9, 3]))
    assert (model.attentions[0].clip_qkv, model.tied_head, model.end_tokens) == (8.0, True, (9, 3))
    assert model.begin_token is None


def test_the_number_of_experts_has_two_names() -> None:
    assert describe(changed(num_experts=ABSENT, num_local_experts=12)) == describe(CONFIG)
    with pytest.raises(PackError, match="num_local_experts is 13, expected 12"):
        describe(changed(num_local_experts=13))


def test_end_tokens_of_the_generation_configuration_win() -> None:
    assert describe(CONFIG, {"eos_token_id": [1, 2]}).end_tokens == (1, 2)
    assert describe(CONFIG, {"eos_token_id": None}).end_tokens == (7,)
    with pytest.raises(PackError, match="eos_token_id is 300") as caught:
        describe(CONFIG, {"eos_token_id": 300})
    assert caught.value.path == "generation_config.json"


MILLION = 1_000_000.0


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": MILLION},
        {"rope_theta": 1_000_000},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": MILLION, "rope_type": "default"}},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 1_000_000}},
        {"rope_theta": ABSENT, "rope_scaling": {"rope_theta": MILLION, "type": "default"}},
        {"rope_theta": MILLION, "rope_parameters": {"rope_theta": 1_000_000, "partial_rotary_factor": 1}},
        {"rope_theta": MILLION, "rope_scaling": {}},
    ],
)
def test_the_rotary_base_is_found_wherever_it_stands(keys: dict[str, object]) -> None:
    assert describe(changed(**keys)) == describe(changed(rope_theta=MILLION))
    assert describe(changed(**keys)).attentions[0].rotary.theta == MILLION


def test_without_a_rotary_base_the_family_default_is_recorded() -> None:
    assert describe(changed(rope_theta=ABSENT, rope_scaling=ABSENT)).attentions[0].rotary.theta == 10000.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0, expected 10000 as elsewhere"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4}}, "rope_type is 'dynamic', expected 'default' or"),
        ({"rope_scaling": {"type": "longrope"}}, "type is 'longrope', expected 'default' or 'linear'"),
        ({"rope_scaling": {"factor": 2.0}}, "factor is 2.0, expected it not to be set"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', expected an object"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', expected a number"),
    ],
)
def test_other_rotations_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(PackError) as caught:
        describe(changed(**keys))
    assert message in caught.value.message
    assert "config.json" in str(caught.value)


def test_every_key_in_every_wrong_form_packs_or_is_refused_by_name() -> None:
    for key in [*CONFIG, "rope_parameters", "num_local_experts", "head_dim", "quantization_config"]:
        for value in (ABSENT, None, "text", 0, -1, 2**40, 1.5, True, [], {}, [None], 10**400, "x" * 10_000):
            config = changed(**{key: value})
            told = None
            try:
                family_of(config).read(config, None)
            except PackError as error:
                told = str(error)
            assert told is None or (key in told and len(told) < 600)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("value", [ABSENT, None, "64", 0, -1, 2**40, 64.0, True])
def test_sizes_are_required_and_bounded(key: str, value: object) -> None:
    with pytest.raises(PackError, match="expected a whole number from 1 to") as caught:
        describe(changed(**{key: value}))
    assert f"{key} is {'absent' if value is ABSENT else repr(value)}" in caught.value.message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13, expected a whole number from 1 to 12"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a divisor of hidden_size 64"),
        ({"num_attention_heads": 64}, "num_attention_heads is 64, expected heads of even width"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, expected a whole number from 1 to 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 32}, "head_dim is 32, expected 16"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"clip_qkv": 0}, "clip_qkv is 0, expected a number above 0"),
        ({"clip_qkv": 1e-50}, "clip_qkv is 1e-50, expected a number above 0"),
        ({"rms_norm_eps": 1e-50}, "rms_norm_eps is 1e-50, expected a number above 0"),
        ({"rope_theta": 1e-50}, "rope_theta is 1e-50, expected a number above 0"),
        ({"rope_theta": 1e39}, "rope_theta is 1e+39, expected a number above 0, at most 1e+30"),
        ({"rope_theta": math.nan}, "rope_theta is nan, expected a number above 0"),
        ({"clip_qkv": True}, "clip_qkv is True, expected a number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, expected a number above 0, at most 1"),
        ({"eos_token_id": 50279}, "eos_token_id is 50279, expected ids below vocab_size 256"),
        ({"eos_token_id": [1, 256]}, "eos_token_id is [1, 256], expected ids below vocab_size 256"),
        ({"eos_token_id": list(range(65))}, "expected at most 64 ids"),
        ({"bos_token_id": 256}, "bos_token_id is 256, expected a whole number from 0 to 255"),
        (
            {"num_hidden_layers": 1024, "num_experts": 129},
            "num_experts is 129, expected a whole number from 1 to 128",
        ),
    ],
)
def test_what_the_family_cannot_be_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(PackError) as caught:
        describe(changed(**keys))
    assert message in caught.value.message


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"architectures": ABSENT},
        {"architectures": None},
        {"architectures": []},
        {"model_type": ABSENT},
        {"auto_map": None},
    ],
)
def test_the_family_is_known_by_model_type_or_architecture(keys: dict[str, object]) -> None:
    assert family_of(changed(**keys)).model_type == "olmoe"


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        ({"model_type": "olmoee"}, "model_type is 'olmoee', expected one of olmoe, ", "mean 'olmoe'?"),
        ({"model_type": "llama"}, "model_type is 'llama', expected one of olmoe, qwen2_moe, ", ""),
        ({"model_type": 3}, "model_type is 3", ""),
        (
            {"model_type": ABSENT, "architectures": ["OlmoForCausalLM"]},
            "architectures is ['OlmoForCausalLM']",
            "mean 'OlmoeForCausalLM'?",
        ),
        ({"model_type": ABSENT, "architectures": ABSENT}, "model_type is absent", ""),
        ({"model_type": ABSENT, "architectures": []}, "model_type is absent", ""),
        ({"architectures": ["OlmoeModel"]}, "architectures is ['OlmoeModel'], expected ['OlmoeForCausalLM']", "olmoe"),
        ({"architectures": ["OlmoeForCausalLM", "X"]}, "expected a list of one name", ""),
        ({"architectures": "OlmoeForCausalLM"}, "expected a list of one name", ""),
        ({"architectures": [3]}, "expected a list of one name", ""),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "a checkpoint's own code is never run", "auto_map"),
    ],
)
def test_other_families_are_refused(keys: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(PackError) as caught:
        family_of(changed(**keys))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_tensors_are_read_as_they_are_stored(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    for expert in range(12):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        tensors[name] = (np.arange(64 * 32).reshape(64, 32) + expert).astype(np.float16)
    map_ = write(tmp_path, CONFIG, tensors)
    shapes = {
        "attention_norm": (64,),
        "q": (64, 64),
        "k": (64, 32),
        "v": (64, 32),
        "o": (64, 64),
        "q_norm": (64,),
        "k_norm": (32,),
        "expert_norm": (64,),
        "router": (64, 12),
    }
    with open_checkpoint(tmp_path) as checkpoint:
        found = map_.resolve(checkpoint)
        for layer in found.layers:
            assert {name: source.read(checkpoint).shape for name, source in layer.items()} == shapes
        assert found.embedding.read(checkpoint).shape == (256, 64)
        assert found.final["head"].read(checkpoint).shape == (64, 256)
        assert found.final["head"].read(checkpoint, slice(5, 15)).shape == (64, 10)
        assert found.final["final_norm"].read(checkpoint)[0] == tensors["model.norm.weight"][0]
        for expert in (2, 10):
            sources = found.expert(1, expert)
            assert {name: source.read(checkpoint).shape for name, source in sources.items()} == {
                "gate": (64, 32),
                "up": (64, 32),
                "down": (32, 64),
            }
            down = sources["down"].read(checkpoint)
            stored = tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
            np.testing.assert_array_equal(down, stored.T.astype(np.float32))
        norms = [tensors[f"model.layers.0.{name}_layernorm.weight"][0] for name in ("input", "post_attention")]
        assert [found.layers[0][name].read(checkpoint)[0] for name in ("attention_norm", "expert_norm")] == norms


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    for expert in range(12):
        del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float16)
    tensors["model.embed_tokens.weight"] = np.zeros((240, 64), np.float16)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.float16)  # of one head
    tensors["lm_head.weight"] = np.zeros((256, 64), np.int8)
    map_ = write(tmp_path, CONFIG, tensors, tokenizer_of(257))
    with pytest.raises(PackError) as caught:
        check(tmp_path, map_)
    message = caught.value.message
    assert "13 missing tensors ('model.layers.1.mlp.experts.0.up_proj.weight'" in message
    assert "and 5 more)" in message
    assert "1 superfluous tensors ('model.layers.0.self_attn.q_proj.bias')" in message
    assert "2 tensors of another shape ('model.embed_tokens.weight' has [240, 64], expected [256, 64]" in message
    assert "'model.layers.0.self_attn.q_norm.weight' has [16], expected [64]" in message
    assert "'lm_head.weight' has I8, expected one of F32, F16, BF16" in message
    assert "ids up to 256, but the embedding has 256 rows" in message
    assert str(tmp_path) in str(caught.value)


def test_a_value_that_is_not_finite_is_refused_naming_the_expert(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["model.layers.1.mlp.experts.10.gate_proj.weight"][3, 5] = np.inf
    map_ = write(tmp_path, CONFIG, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        found = map_.resolve(checkpoint)
        with pytest.raises(PackError, match=r"experts\.10\.gate_proj\.weight' has inf at index \[3, 5\]"):
            found.expert(1, 10)["gate"].read(checkpoint)


def test_old_rotary_buffers_carry_no_weights(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    check(tmp_path, write(tmp_path, CONFIG, tensors))


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    config = changed(tie_word_embeddings=True)
    map_ = write(tmp_path, config, tensors_of(config))
    assert set(map_.final) == {"final_norm"}
    check(tmp_path, map_)


@pytest.mark.parametrize("fault", ["none", "value", "shape"])
def test_a_tied_head_that_is_there_must_be_the_embedding(tmp_path: Path, fault: str) -> None:
    config = changed(tie_word_embeddings=True)
    tensors = tensors_of(config)
    head = tensors["model.embed_tokens.weight"].copy()
    if fault == "value":
        head[255, 63] += 1
    tensors["lm_head.weight"] = head[:240] if fault == "shape" else head
    map_ = write(tmp_path, config, tensors)
    if fault == "none":
        check(tmp_path, map_)
        return
    with pytest.raises(PackError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        check(tmp_path, map_)


@pytest.mark.parametrize("size", [250, 256])
def test_the_embedding_may_have_more_rows_than_the_tokenizer_has_ids(tmp_path: Path, size: int) -> None:
    check(tmp_path, write(tmp_path, CONFIG, tensors_of(CONFIG), tokenizer_of(size)))


def test_rows_past_the_vocabulary_are_left_out_with_a_notice(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.arange(256 * 64, dtype=np.float32).reshape(256, 64)
    map_ = write(tmp_path, changed(vocab_size=250), tensors, tokenizer_of(250))
    with open_checkpoint(tmp_path) as checkpoint:
        found = map_.resolve(checkpoint)
        np.testing.assert_array_equal(found.embedding.read(checkpoint), tensors["lm_head.weight"][:250])
        np.testing.assert_array_equal(found.final["head"].read(checkpoint), tensors["lm_head.weight"][:250].T)
    assert found.notices == (
        "6 rows of 'model.embed_tokens.weight' past vocab_size 250 belong to no token and are left out",
    )


def test_embedding_and_head_must_agree_on_the_rows_past_the_vocabulary(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["lm_head.weight"] = np.zeros((252, 64), np.float16)
    map_ = write(tmp_path, changed(vocab_size=250), tensors, tokenizer_of(251))
    with pytest.raises(
        PackError, match=r"'lm_head.weight' has 252 rows, 'model.embed_tokens.weight' has 256"
    ) as caught:
        check(tmp_path, map_)
    assert "ids up to 250, but the embedding has 250 rows" in caught.value.message


def test_the_size_of_a_tokenizer_counts_added_tokens() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 9}, "a"))
    tokenizer.add_special_tokens(["<end>"])
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    assert tokenizer_size(tokenizer.to_str().encode()) == largest + 1
    with pytest.raises(PackError, match="the tokenizer cannot be used"):
        tokenizer_size(b"{}")
