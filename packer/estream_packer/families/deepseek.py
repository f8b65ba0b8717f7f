"""DeepSeek-V2 and the DeepSeek-V3 family: latent attention, shared experts, and groups of experts that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estream_packer.families import common, names, parts
from estream_packer.families.config import Config
from estream_packer.families.places import Place, Places, Selection, halves, vector
from estream_packer.families.rotary import RotarySettings
from estream_packer.families.weights import WeightMap
from estream_spec import limits
from estream_spec.model import Attention, DenseBlock, ExpertBlock, Latent, Layer, ModelDescription, Router

V2: Final = "deepseek_v2"
V3: Final = "deepseek_v3"
_NORM_EPSILON: Final = 1e-6
_LATENT_EPSILON: Final = 1e-6
"""Of the norms of narrow rows, whatever the configuration says of the others."""
_ROPE_THETA: Final = 10000.0
_QUERY_RANK: Final = 1536
"""Where the configuration says nothing; null says that there is none."""
_V3_EPSILON: Final = 1e-20


def describe_v2(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that a DeepSeek-V2 configuration describes. Raises as `olmoe.describe` does."""
    keys = Config(config)
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    keys.only("topk_method", "greedy", "group_limited_greedy")
    grouped = keys.values.get("topk_method") == "group_limited_greedy"
    return _describe(V2, keys, generation, first_dense=0, shared=2, router=_v2_router(keys, grouped))


def describe_v3(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelDescription:
    """The model that a configuration of the DeepSeek-V3 family describes. Raises as `olmoe.describe` does."""
    keys = Config(config)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    return _describe(V3, keys, generation, first_dense=3, shared=1, router=_v3_router(keys))


def weights(model: ModelDescription) -> WeightMap:
    """Where each tensor of a described DeepSeek-V2 or V3 lies in its checkpoint."""
    return WeightMap(
        model=model,
        embedding=names.embedding(model),
        layers=tuple(((_layer(model, layer),),) for layer in range(len(model.layers))),
        experts=names.expert_spellings(model),
        final=names.final(model),
        tied_head=names.tied_head(model),
        skipped=(f"model.layers.{len(model.layers)}.",),
    )


def _describe(
    family: str, keys: Config, generation: Mapping[str, object] | None, *, first_dense: int, shared: int, router: Router
) -> ModelDescription:
    parts.only_silu(keys)
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("moe_layer_freq", 1)
    keys.only("rope_interleave", True)
    count = parts.layer_count(keys)
    dense = parts.integer_or(keys, "first_k_dense_replace", first_dense, 0, count - 1)
    experts, width = _experts(keys, count), keys.integer("moe_intermediate_size", 1, limits.MAX_DIMENSION)
    shared = parts.integer_or(keys, "n_shared_experts", shared, 1, limits.MAX_EXPERTS)
    blocks = [DenseBlock(intermediate=width * shared)]
    if dense:
        blocks.append(DenseBlock(intermediate=keys.integer("intermediate_size", 1, limits.MAX_DIMENSION)))
    routed = Layer(attention=0, experts=0, dense=0)
    return parts.model(
        family,
        keys,
        generation,
        norm_epsilon=common.norm_epsilon(keys, _NORM_EPSILON),
        layers=(Layer(attention=0, dense=1),) * dense + (routed,) * (count - dense),
        attentions=(_attention(keys),),
        expert_blocks=(ExpertBlock(experts=experts, intermediate=width, router=router),),
        dense_blocks=tuple(blocks),
        tied_head=keys.flag("tie_word_embeddings", default=False),
    )


def _experts(keys: Config, layers: int) -> int:
    return common.expert_count(keys, layers)


def _attention(keys: Config) -> Attention:
    heads = keys.integer("num_attention_heads", 1, limits.MAX_DIMENSION)
    keys.only("num_key_value_heads", heads)
    rotated = keys.integer("qk_rope_head_dim", 2, limits.MAX_DIMENSION)
    plain = keys.integer("qk_nope_head_dim", 1, limits.MAX_DIMENSION)
    width = plain + rotated
    rotary = RotarySettings(keys, theta=_ROPE_THETA, kinds=parts.ROTARY_KINDS)
    scale = rotary.score_multiplier
    # Null says that queries are not made from a narrow row; a key that is absent does not.
    query_rank = None
    if keys.has("q_lora_rank") or "q_lora_rank" not in keys.values:
        query_rank = parts.integer_or(keys, "q_lora_rank", _QUERY_RANK, 1, limits.MAX_DIMENSION)
    return Attention(
        heads=heads,
        key_value_heads=heads,
        head_dim=width,
        rotary=rotary.rotary(width, rotated),
        value_dim=keys.integer("v_head_dim", 1, limits.MAX_DIMENSION),
        scale=None if scale == 1 else width**-0.5 * scale,
        latent=Latent(
            rank=keys.integer("kv_lora_rank", 1, limits.MAX_DIMENSION),
            norm_epsilon=_LATENT_EPSILON,
            query_rank=query_rank,
        ),
    )


def _v2_router(keys: Config, grouped: bool) -> Router:
    experts = _experts(keys, parts.layer_count(keys))
    return Router(
        family="softmax-topk",
        top_k=keys.integer("num_experts_per_tok", 1, experts),
        groups=keys.integer("n_group", 1, experts) if grouped else 1,
        top_groups=keys.integer("topk_group", 1, experts) if grouped else 1,
        scale=parts.number_or(keys, "routed_scaling_factor", 1.0),
    )


def _v3_router(keys: Config) -> Router:
    experts = _experts(keys, parts.layer_count(keys))
    groups = parts.integer_or(keys, "n_group", 8, 1, experts)
    renormalise = keys.flag("norm_topk_prob", default=True)
    return Router(
        family="sigmoid-topk-renormalise" if renormalise else "sigmoid-topk",
        top_k=parts.integer_or(keys, "num_experts_per_tok", 8, 1, experts),
        selection_bias=True,
        groups=groups,
        top_groups=parts.integer_or(keys, "topk_group", 4, 1, experts),
        group_score="largest" if groups == 1 else "two-largest",
        scale=parts.number_or(keys, "routed_scaling_factor", 2.5),
        epsilon=_V3_EPSILON if renormalise else 0.0,
    )


def _layer(model: ModelDescription, layer: int) -> Places:
    places = {**names.norms(model, layer), **_latent(model, layer)}
    if model.layers[layer].experts is None:
        return places | names.dense(model, layer)
    places |= {**names.router(model, layer), **names.dense(model, layer, "mlp.shared_experts")}
    if model.expert_block(layer).router.selection_bias:
        experts = model.expert_block(layer).experts
        places["selection_bias"] = vector(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", experts)
    return places


def _latent(model: ModelDescription, layer: int) -> dict[str, Place]:
    """The projections and norms of latent attention, rotated channels first in each head and as halves."""
    attention, hidden, at = model.attention(layer), model.hidden, f"model.layers.{layer}.self_attn"
    latent, heads, rotated, width = attention.latent, attention.heads, attention.rotated, attention.head_dim
    assert latent is not None
    plain, value = width - rotated, attention.value_width
    turned = Selection(heads, width, (*(plain + each for each in halves(rotated)), *range(plain)))
    rows = heads * width
    places: dict[str, Place] = {}
    if latent.query_rank is None:
        places["q"] = Place(f"{at}.q_proj.weight", (rows, hidden), "out-in", outputs=turned)
    else:
        rank = latent.query_rank
        places["query_latent"] = Place(f"{at}.q_a_proj.weight", (rank, hidden), "out-in")
        places["query_latent_norm"] = vector(f"{at}.q_a_layernorm.weight", rank)
        places["q"] = Place(f"{at}.q_b_proj.weight", (rows, rank), "out-in", outputs=turned)

    def narrow(part: Selection) -> Place:
        return Place(f"{at}.kv_a_proj_with_mqa.weight", (latent.rank + rotated, hidden), "out-in", outputs=part)

    def wide(pattern: range) -> Place:
        part = Selection(heads, plain + value, tuple(pattern))
        return Place(f"{at}.kv_b_proj.weight", (heads * (plain + value), latent.rank), "out-in", outputs=part)

    return places | {
        "latent_norm": vector(f"{at}.kv_a_layernorm.weight", latent.rank),
        "latent": narrow(Selection.span(0, latent.rank)),
        "k_rotated": narrow(Selection(1, rotated, halves(rotated), latent.rank)),
        "k": wide(range(plain)),
        "v": wide(range(plain, plain + value)),
        "o": Place(f"{at}.o_proj.weight", (hidden, heads * value), "out-in"),
    }
