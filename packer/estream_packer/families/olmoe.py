"""OLMoE: every layer has experts, a softmax over all of them, and query and key norms that span all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import names
from estream_packer.families.config import Config
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router

MODEL_TYPE: Final = "olmoe"
ARCHITECTURE: Final = "OlmoeForCausalLM"

# What transformers takes where config.json says nothing. The published OLMoE leaves out the epsilon.
_NORM_EPSILON: Final = 1e-5
_ROPE_THETA: Final = 10000.0
_NORMALISE_TOP_K: Final = False

_ROPE_SECTIONS: Final = ("rope_parameters", "rope_scaling")
"""Where newer and older transformers keep rotary settings; the oldest kept the base at top level."""
_ROPE_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def describe(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that an OLMoE configuration describes.

    Args:
        config: `config.json`.
        generation: `generation_config.json`; its end tokens win, as they do in transformers.

    Raises:
        PackError: a key is missing, of a wrong type, out of range, or asks for something this family does not do.
    """
    keys = Config(config)
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    hidden = keys.integer("hidden_size", 1, limits.MAX_DIMENSION)
    vocabulary = keys.integer("vocab_size", 1, limits.MAX_DIMENSION)
    layers = keys.integer("num_hidden_layers", 1, limits.MAX_LAYERS)
    generation_keys = Config(generation or {}, "generation_config.json")
    if keys.has("bos_token_id"):  # checked only: what is put before a prompt is the tokenizer's business
        keys.integer("bos_token_id", 0, vocabulary - 1)
    return ModelDescription(
        family=MODEL_TYPE,
        hidden=hidden,
        vocabulary=vocabulary,
        context_length=keys.integer("max_position_embeddings", 1, limits.MAX_DIMENSION),
        norm_epsilon=keys.number("rms_norm_eps", 0, 1) if keys.has("rms_norm_eps") else _NORM_EPSILON,
        layers=(Layer(attention=0, experts=0),) * layers,
        attentions=(_attention(keys, hidden),),
        expert_blocks=(_expert_block(keys, layers),),
        tied_head=keys.flag("tie_word_embeddings", default=False),
        end_tokens=_end_tokens(generation_keys if generation_keys.has("eos_token_id") else keys, vocabulary),
    )


def weights(model: ModelDescription) -> WeightMap:
    """Where each tensor of a described OLMoE lies in its checkpoint."""
    return WeightMap(
        model=model,
        embedding=names.embedding(model),
        layers=tuple(
            (({**names.norms(model, layer), **names.attention(model, layer), **names.router(model, layer)},),)
            for layer in range(len(model.layers))
        ),
        experts=names.expert_spellings(model),
        final=names.final(model),
        tied_head=names.tied_head(model),
    )


def _attention(keys: Config, hidden: int) -> Attention:
    heads = keys.integer("num_attention_heads", 1, hidden)
    if hidden % heads:
        raise keys.refusal("num_attention_heads", f"a divisor of hidden_size {hidden}")
    head_dim = hidden // heads
    if head_dim % 2:
        raise keys.refusal("num_attention_heads", f"heads of even width, hidden_size {hidden} gives {head_dim}")
    keys.only("head_dim", head_dim)
    key_value_heads = keys.integer("num_key_value_heads", 1, heads) if keys.has("num_key_value_heads") else heads
    if heads % key_value_heads:
        raise keys.refusal("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    return Attention(
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        rotary=Rotary(theta=_rope_theta(keys)),
        qk_norm="full",
        clip_qkv=keys.number("clip_qkv", 0, 1e30) if keys.has("clip_qkv") else None,
    )


def _rope_theta(keys: Config) -> float:
    """The rotary base, wherever it stands. Only plain rotation is known."""
    places = [keys, *(keys.section(name) for name in _ROPE_SECTIONS)]
    for place in places[1:]:
        for key in ("rope_type", "type"):
            place.only(key, "default")
        for key in sorted(place.values.keys() - _ROPE_KEYS):
            place.only(key)
    theta: float | None = None
    for place in places:
        place.only("partial_rotary_factor", 1, 1.0)
        if place.has("rope_theta"):
            found = place.number("rope_theta", 0, 1e30)
            if theta is not None and found != theta:
                raise place.refusal("rope_theta", f"{theta:g} as elsewhere in the file")
            theta = found
    return _ROPE_THETA if theta is None else theta


def _expert_block(keys: Config, layers: int) -> ExpertBlock:
    given = [name for name in ("num_experts", "num_local_experts") if keys.has(name)] or ["num_experts"]
    experts = keys.integer(given[0], 1, min(limits.MAX_EXPERTS, limits.MAX_RECORDS // layers))
    for name in given[1:]:
        keys.only(name, experts)
    renormalise = keys.flag("norm_topk_prob", default=_NORMALISE_TOP_K)
    return ExpertBlock(
        experts=experts,
        intermediate=keys.integer("intermediate_size", 1, limits.MAX_DIMENSION),
        router=Router(
            family="softmax-topk-renormalise" if renormalise else "softmax-topk",
            top_k=keys.integer("num_experts_per_tok", 1, experts),
        ),
    )


def _end_tokens(keys: Config, vocabulary: int) -> tuple[int, ...]:
    """The end tokens, each once. One, several or none may be given."""
    key = "eos_token_id"
    found = keys.values.get(key)
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        hint = f"set {key} in {keys.place} to the tokenizer's end token, or to null"
        raise keys.refusal(key, f"ids below vocab_size {vocabulary}", hint)
    if len(set(tokens)) > limits.MAX_END_TOKENS:
        raise keys.refusal(key, f"at most {limits.MAX_END_TOKENS} ids")
    return tuple(dict.fromkeys(tokens))
