"""The tensor names that most families share, as places. `{layer}` and `{expert}` stand for numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from estream_packer.families.places import ExpertSpelling, Group, Place, Places, Selection, matrix, vector
from estream_packer.families.weights import WeightMap
from estream_spec.model import ModelDescription

HEAD: Final = "lm_head.weight"
_PROJECTIONS: Final = "gate_proj", "up_proj", "down_proj"
"""Gate, up and down, as most families call them."""
W: Final = "w1", "w3", "w2"
"""Gate, up and down, as the first Mixtral calls them."""
_FUSED_SUFFIXES: Final = ("", ".weight")
"""Fused experts are parameters without a module, so most have no `.weight`; some tools add it."""


def weight_map(
    model: ModelDescription,
    layer: Callable[[ModelDescription, int], Places],
    experts: tuple[ExpertSpelling, ...] | None = None,
    spelled: Callable[[ModelDescription, int], tuple[Group, ...]] = lambda model, layer: (),
) -> WeightMap:
    """All tensors of a model whose embedding, final norm and head have the usual names.

    Args:
        model: the model.
        layer: tensors of a layer, given its number, that are not experts' and are spelled in one way.
        experts: the spellings of experts; None takes those that most families have.
        spelled: further tensors of a layer, in groups.
    """
    return WeightMap(
        model=model,
        embedding=embedding(model),
        layers=tuple(((layer(model, number),), *spelled(model, number)) for number in range(len(model.layers))),
        experts=expert_spellings(model) if experts is None else experts,
        final=final(model),
        tied_head=HEAD if model.tied_head else None,
    )


def embedding(model: ModelDescription, multiplier: float = 1.0) -> Place:
    """The embedding `[vocabulary, hidden]`, perhaps with rows that no token has."""
    shape = model.vocabulary, model.hidden
    return Place("model.embed_tokens.weight", shape, multiplier=multiplier, padded=True)


def final(model: ModelDescription, norm: str = "model.norm", multiplier: float = 1.0) -> dict[str, Place]:
    """What follows the last layer: the norm, times `multiplier`, and the head unless it is tied."""
    places = {f"final_norm{suffix}": replace(place, multiplier=multiplier) for suffix, place in _norm(model, norm)}
    if not model.tied_head:
        places["head"] = Place(HEAD, (model.vocabulary, model.hidden), "out-in", padded=True)
    if model.head_bias:
        places["head.bias"] = Place("lm_head.bias", (model.vocabulary,), padded=True)
    return places


def norms(
    model: ModelDescription, layer: int, first: str = "input_layernorm", second: str = "post_attention_layernorm"
) -> dict[str, Place]:
    """The two norms of a layer."""
    names = {"attention_norm": first, "expert_norm": second}
    return {
        f"{stored}{suffix}": place
        for stored, name in names.items()
        for suffix, place in _norm(model, f"model.layers.{layer}.{name}")
    }


def _norm(model: ModelDescription, name: str) -> list[tuple[str, Place]]:
    """The weight of a norm, and its bias where it has one, by what their stored names end in."""
    suffixes = [("", "weight")] if model.norm == "rms" else [("", "weight"), (".bias", "bias")]
    return [(suffix, vector(f"{name}.{end}", model.hidden)) for suffix, end in suffixes]


def attention(model: ModelDescription, layer: int, block: str = "self_attn", out: str = "o_proj") -> dict[str, Place]:
    """Queries, keys and values, the projection behind them, and the biases and norms that the description asks for.

    Args:
        model: the model.
        layer: a layer whose attention is not latent.
        block: what it calls its attention.
        out: what it calls the last projection.
    """
    shape, hidden, prefix = model.attention(layer), model.hidden, f"model.layers.{layer}.{block}"
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    projections = {
        "q": ("q_proj", queries, hidden, shape.bias),
        "k": ("k_proj", keys, hidden, shape.bias),
        "v": ("v_proj", shape.key_value_heads * shape.value_width, hidden, shape.bias),
        "o": (out, hidden, shape.heads * shape.value_width, shape.out_bias),
    }
    places = {}
    for stored, (name, outputs, inputs, biased) in projections.items():
        places[stored] = matrix(f"{prefix}.{name}.weight", outputs, inputs)
        if biased:
            places[f"{stored}.bias"] = vector(f"{prefix}.{name}.bias", outputs)
    if shape.qk_norm != "none":
        widths = (queries, keys) if shape.qk_norm == "full" else (shape.head_dim, shape.head_dim)
        for stored, width in zip(("q_norm", "k_norm"), widths, strict=True):
            places[stored] = vector(f"{prefix}.{stored}.weight", width)
    return places


def router(model: ModelDescription, layer: int, name: str = "mlp.gate") -> dict[str, Place]:
    """The router of a layer that has experts, and its bias where the description asks for one."""
    block, prefix = model.expert_block(layer), f"model.layers.{layer}.{name}"
    places = {"router": matrix(f"{prefix}.weight", block.experts, model.hidden)}
    if block.router.bias:
        places["router.bias"] = vector(f"{prefix}.bias", block.experts)
    return places


def dense(
    model: ModelDescription, layer: int, block: str = "mlp", names: tuple[str, str, str] = _PROJECTIONS
) -> dict[str, Place]:
    """The dense block of a layer that has one. Stored names begin with `dense_`.

    Args:
        model: the model.
        layer: the layer.
        block: what it calls the block.
        names: what it calls gate, up and down.
    """
    index = model.layers[layer].dense
    assert index is not None
    width = model.dense_blocks[index].intermediate
    places = _gated(f"model.layers.{layer}.{block}", model.hidden, width, names)
    return {f"dense_{stored}": place for stored, place in places.items()}


def _gated(prefix: str, hidden: int, intermediate: int, names: tuple[str, str, str]) -> dict[str, Place]:
    """Gate, up and down, whose names are `names` after `prefix`."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {
        "gate": matrix(gate, intermediate, hidden),
        "up": matrix(up, intermediate, hidden),
        "down": matrix(down, hidden, intermediate),
    }


def expert_spellings(model: ModelDescription, block: str = "mlp.experts") -> tuple[ExpertSpelling, ...]:
    """Experts as most families spell them: each on its own, or all of a layer as a stack, with or without `.weight`."""
    prefix = f"model.layers.{{layer}}.{block}"
    return per_expert(model, prefix), *fused_spellings(model, prefix)


def per_expert(model: ModelDescription, prefix: str, names: tuple[str, str, str] = _PROJECTIONS) -> ExpertSpelling:
    """One matrix each, `[out, in]`: `prefix.7.gate_proj.weight`."""

    def places(layer: int, expert: int) -> Places:
        width = model.expert_block(layer).intermediate
        return _gated(f"{prefix.format(layer=layer)}.{expert}", model.hidden, width, names)

    return places


def fused_spellings(
    model: ModelDescription, prefix: str, gate_up: str = "gate_up_proj", down: str = "down_proj"
) -> tuple[ExpertSpelling, ...]:
    """Stacks `[experts, out, in]`, gate above up, with or without `.weight`."""
    ends = [(f"{prefix}.{gate_up}{suffix}", f"{prefix}.{down}{suffix}") for suffix in _FUSED_SUFFIXES]
    return tuple(fused(model, *end) for end in ends)


def fused(
    model: ModelDescription,
    gate_up: str,
    down: str,
    *,
    layout: Literal["out-in", "in-out"] = "out-in",
    interleaved: bool = False,
    biases: tuple[str, str] | None = None,
) -> ExpertSpelling:
    """All experts of a layer in two stacks.

    Args:
        model: the model.
        gate_up: name of the stack of gate and up, `[experts, 2 * intermediate, hidden]`, or transposed.
        down: name of the stack of down, `[experts, hidden, intermediate]`, or transposed.
        layout: of every matrix in both.
        interleaved: gate and up take turns in the output channels, gate first; else gate is the first half.
        biases: names of the stacks of biases, `[experts, 2 * intermediate]` and `[experts, hidden]`, which are stored
            as `gate.bias`, `up.bias` and `down.bias`; None where there are none.
    """

    def places(layer: int, expert: int) -> Places:
        block, hidden = model.expert_block(layer), model.hidden
        width = block.intermediate
        if interleaved:
            parts = {"gate": Selection(width, 2, (0,)), "up": Selection(width, 2, (1,))}
        else:
            parts = {"gate": Selection.span(0, width), "up": Selection.span(width, width)}

        def stack(name: str, outputs: int, inputs: int, part: Selection | None = None) -> Place:
            matrix_shape = (outputs, inputs) if layout == "out-in" else (inputs, outputs)
            return Place(name.format(layer=layer), (block.experts, *matrix_shape), layout, expert, part)

        found = {key: stack(gate_up, 2 * width, hidden, part) for key, part in parts.items()}
        found["down"] = stack(down, hidden, width)
        if biases is not None:
            both, last = (name.format(layer=layer) for name in biases)
            for key, part in parts.items():
                found[f"{key}.bias"] = Place(both, (block.experts, 2 * width), index=expert, outputs=part)
            found["down.bias"] = Place(last, (block.experts, hidden), index=expert)
        return found

    return places
