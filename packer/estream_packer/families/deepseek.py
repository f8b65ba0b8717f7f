"""DeepSeek-V2 and the DeepSeek-V3 family: latent attention, shared experts, and groups of experts that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from estream_packer.families import common, names
from estream_packer.families.config import LARGEST, Config
from estream_packer.families.places import Place, Places, Selection, halves, vector
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


def read_v2(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a DeepSeek-V2 configuration describes, and where its tensors lie. Raises as `olmoe.read` does."""
    keys = Config(config)
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    keys.only("mlp_bias", False)
    model = _describe(V2, keys, generation, first_dense=0, shared=2, router=_v2_router(keys))
    return names.weight_map(model, _layer)


def read_v3(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> WeightMap:
    """What a configuration of the DeepSeek-V3 family describes, and where its tensors lie.

    Layers behind the last one, which draft tokens, are left out. Raises as `olmoe.read` does.
    """
    keys = Config(config)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("rope_interleave", True)
    model = _describe(V3, keys, generation, first_dense=3, shared=1, router=_v3_router(keys))
    drafts = common.agreed(keys, "num_nextn_predict_layers", "num_mtp_layers")
    behind = range(len(model.layers), len(model.layers) + keys.integer(drafts, 0, limits.MAX_LAYERS, default=1))
    return replace(names.weight_map(model, _layer), skipped=tuple(f"model.layers.{layer}." for layer in behind))


def _describe(
    family: str, keys: Config, generation: Mapping[str, object] | None, *, first_dense: int, shared: int, router: Router
) -> ModelDescription:
    keys.only("attention_bias", False)
    keys.only("moe_layer_freq", 1)
    common.check_layers_alike(keys, None)
    count = common.layer_count(keys)
    dense = keys.integer("first_k_dense_replace", 0, count - 1, first_dense)
    experts, width = _experts(keys), common.width(keys, "moe_intermediate_size")
    blocks = [DenseBlock(intermediate=common.shared_width(keys, "n_shared_experts", shared, width))]
    if dense:
        blocks.append(DenseBlock(intermediate=common.width(keys, "intermediate_size")))
    with_experts = Layer(attention=0, experts=0, dense=0)
    return ModelDescription(
        **common.frame(family, keys, generation, epsilon=_NORM_EPSILON),
        layers=(Layer(attention=0, dense=1),) * dense + (with_experts,) * (count - dense),
        attentions=(_attention(keys),),
        expert_blocks=(ExpertBlock(experts=experts, intermediate=width, router=router),),
        dense_blocks=tuple(blocks),
    )


def _experts(keys: Config) -> int:
    return common.expert_count(keys, common.layer_count(keys), "n_routed_experts")


def _attention(keys: Config) -> Attention:
    heads = keys.integer("num_attention_heads", 1, limits.MAX_DIMENSION // 4)
    keys.only("num_key_value_heads", heads)
    widest = limits.MAX_DIMENSION // heads
    rotated = keys.integer("qk_rope_head_dim", 2, min(widest - 1, 2 * limits.MAX_FREQUENCIES))
    if rotated % 2:
        raise keys.refusal("qk_rope_head_dim", "an even number")
    head_dim = keys.integer("qk_nope_head_dim", 1, widest - rotated) + rotated
    settings = common.rotary(keys, _ROPE_THETA)
    scale = settings.score_multiplier
    return Attention(
        heads=heads,
        key_value_heads=heads,
        head_dim=head_dim,
        rotary=settings.rotary(head_dim, rotated),
        value_dim=keys.integer("v_head_dim", 1, widest),
        scale=None if scale == 1 else head_dim**-0.5 * scale,
        latent=Latent(
            rank=common.width(keys, "kv_lora_rank"),
            norm_epsilon=_LATENT_EPSILON,
            query_rank=_query_rank(keys),
        ),
    )


def _query_rank(keys: Config) -> int | None:
    """None where queries are not made from a narrow row, which null says and an absent key does not."""
    key = "q_lora_rank"
    return common.width(keys, key, _QUERY_RANK) if keys.has(key) or key not in keys.values else None


def _v2_router(keys: Config) -> Router:
    experts = _experts(keys)
    top_k = keys.integer("num_experts_per_tok", 1, experts)
    keys.only("topk_method", "greedy", "group_limited_greedy")
    grouped = keys.values.get("topk_method") == "group_limited_greedy"
    groups, chosen = _groups(keys, experts, top_k, None, None) if grouped else (1, 1)
    scale = keys.number("routed_scaling_factor", 0, LARGEST, 1.0)
    return Router(family="softmax-topk", top_k=top_k, groups=groups, top_groups=chosen, scale=scale)


def _v3_router(keys: Config) -> Router:
    experts = _experts(keys)
    top_k = keys.integer("num_experts_per_tok", 1, experts, default=8)
    groups, chosen = _groups(keys, experts, top_k, 8, 4)
    if groups > experts // 2 and groups > 1:
        raise keys.refusal("n_group", f"groups of two experts or more: there are {experts}")
    renormalise = keys.flag("norm_topk_prob", default=True)
    return Router(
        family="sigmoid-topk-renormalise" if renormalise else "sigmoid-topk",
        top_k=top_k,
        selection_bias=True,
        groups=groups,
        top_groups=chosen,
        group_score="largest" if groups == 1 else "two-largest",
        scale=keys.number("routed_scaling_factor", 0, LARGEST, 2.5),
        epsilon=_V3_EPSILON if renormalise else 0.0,
    )


def _groups(keys: Config, experts: int, top_k: int, groups: int | None, chosen: int | None) -> tuple[int, int]:
    """Groups of experts and how many of them are not left out, given what they are where neither is set."""
    count = keys.integer("n_group", 1, experts, groups)
    if experts % count:
        raise keys.refusal("n_group", f"a divisor of the {experts} experts")
    fewest = -(-top_k * count // experts)
    return count, keys.integer("topk_group", fewest, count, chosen)


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
