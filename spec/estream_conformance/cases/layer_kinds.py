"""Layers of every kind: what their records and graphs are, and what attention cannot be. FORMAT.md sections 7 and 8."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from estream_conformance.builder import Sealed, Values
from estream_conformance.case import accepted, refused
from estream_conformance.cases.binaries import graph_of, with_binaries
from estream_conformance.cases.models import GREATEST, LEAST, NOTHING, PAST
from estream_conformance.changes import Path, accept, drop, put, refuse
from estream_conformance.kinds import (
    QUANTISED,
    changed,
    convolution,
    dense_layer,
    everything,
    latent,
    shared_block,
    with_attention,
    with_block,
)
from estream_conformance.packages import binary, draft, smallest_model
from estream_spec import limits
from estream_spec.constants import SectionType

LATENT: Final = "latent_attention"
CONVOLUTION: Final = "layer_with_a_convolution"
SHARED: Final = "layer_with_experts_and_a_dense_block"
DENSE: Final = "layers_without_experts"
EVERYTHING: Final = "layers_of_every_kind"


def _sealed(model: Values, encodings: dict[str, str] | None = None, activations: str = "f32") -> Sealed:
    return draft(model, encodings, activations=activations).seal()


def _window(tokens: int) -> Values:
    return changed(layers=[{"attention": 0, "experts": 0, "window": tokens}])


def _frequencies(count: int, head_dim: int = 0) -> Values:
    rotary = {"theta": 1.0, "frequencies": [1.0 / (1 + number) for number in range(count)]}
    return with_attention(head_dim=head_dim or 2 * count, rotary=rotary)


for _name, _about, _model in (
    (LATENT, "Keys and values are made from a narrow row.", latent()),
    ("latent_attention_of_narrow_queries", "Queries are made from a narrow row as well.", latent(query_rank=4)),
    ("latent_attention_of_rank_1", "The narrow row is one number.", latent(rank=1)),
    (CONVOLUTION, "The first layer has a convolution in place of attention.", convolution()),
    ("convolution_of_the_most_taps", "A convolution has 64 taps.", convolution(limits.MAX_TAPS)),
    (SHARED, "A layer has experts and a dense block.", shared_block()),
    ("dense_block_with_a_share", "What the dense block gives is multiplied by a share.", shared_block(share=True)),
    (DENSE, "The first and the last layer have a dense block in place of experts.", dense_layer()),
    ("window_of_1", "A token attends to itself alone.", _window(1)),
    ("window_of_the_most", "A token attends to 2^24 before it.", _window(limits.MAX_DIMENSION)),
    ("attention_with_sinks", "Each head has a sink.", with_attention(heads=3, sinks=True)),
    ("attention_with_biases", "Queries, keys and values have biases.", with_attention(heads=2, bias=True)),
    ("attention_with_an_output_bias", "The output projection has a bias.", with_attention(out_bias=True)),
    ("attention_of_normed_heads", "Each head is normalised.", with_attention(heads=2, qk_norm="head")),
    ("attention_of_wider_values", "Values are wider than keys.", with_attention(heads=2, value_dim=5)),
    ("attention_of_narrower_values", "Values are one number wide.", with_attention(value_dim=1)),
    ("scores_of_another_scale", "Scores have a scale of their own.", with_attention(scale=0.25)),
    ("two_of_three_numbers_rotated", "Heads are odd.", with_attention(head_dim=3, rotary={"theta": 1.0, "width": 2})),
    ("whole_head_rotated_by_name", "The rotated width is given.", with_attention(rotary={"theta": 1.0, "width": 2})),
    ("listed_frequencies", "Both frequencies of a head are listed.", _frequencies(2)),
    ("layer_norm", "The residual stream is normalised about its mean.", changed(norm="layer")),
    ("head_with_a_bias", "The head has a bias.", changed(head_bias=True)),
    ("tied_head_with_a_bias", "The head is the embedding, and has a bias.", changed(tied_head=True, head_bias=True)),
    ("experts_with_biases", "Experts have biases.", with_block(bias=True)),
    ("experts_that_are_clamped", "Experts are clamped.", with_block(activation="clamped-swiglu", limit=7.0)),
):
    accept(_name, _about, partial(_sealed, _model))
accept(
    EVERYTHING,
    "Five layers have every kind of block, and all biases.",
    partial(_sealed, everything()),
    committed=False,
)
accept(
    "layers_of_every_kind_quantised",
    "The same, all matrices quantised.",
    partial(_sealed, everything(), QUANTISED, "dynamic-int8"),
    base=EVERYTHING,
    committed=False,
)
accept(
    "frequencies_of_the_greatest_number",
    "4096 frequencies are listed.",
    partial(_sealed, _frequencies(limits.MAX_FREQUENCIES)),
    committed=False,
)


@accepted(base=DENSE)
def layouts_of_layers_without_experts_in_another_order() -> Sealed:
    """Layouts are numbered from the last: ranges of no records have number 0, and no layout for it."""
    made = draft(dense_layer())
    count = len(made.manifest["layouts"])
    content_id = made.content_id()
    made.manifest["layouts"].reverse()
    for ranges in made.tables.values():
        for one in ranges:
            one.layout = count - 1 - one.layout if one.payloads else 0
    assert made.content_id() == content_id
    return made.seal()


# Ranges of no records


def _empty(rule: str, name: str, about: str, number: int, **changes: int) -> None:
    """A package whose first and last layer have no experts, with fields of one of their ranges changed."""

    def build() -> Sealed:
        made = draft(dense_layer())
        made.tables[SectionType.EXPERTS][number].changes.update(changes)
        return made.seal()

    refuse(rule, name, about, build, base=DENSE)


_empty("EMOE-TAB-010", "empty_range_of_a_record_length", "A range of no records has a length.", 0, record_length=4096)
_empty("EMOE-TAB-010", "empty_range_of_another_layout", "A range of no records names layout 1.", 2, layout=1)
_empty("EMOE-TAB-010", "empty_range_of_no_layout", "A range of no records names no layout.", 0, layout=0xFFFFFFFF)
_empty("EMOE-TAB-009", "empty_range_late", "The first range, of no records, begins a page late.", 0, base=4096)
_empty("EMOE-TAB-009", "empty_range_at_0", "The last range, of no records, has base 0.", 2, base=0)
_empty("EMOE-TAB-008", "empty_range_of_the_longest_records", "It has 2^63 for a length.", 0, record_length=1 << 63)


@refused("EMOE-TAB-007", base=DENSE)
def record_of_a_layer_without_experts() -> Sealed:
    """The only expert's record belongs to the layer before, which has none."""
    made = draft(dense_layer())
    ranges = made.tables[SectionType.EXPERTS]
    ranges[0], ranges[1] = ranges[1], ranges[0]
    return made.seal()


@refused("EMOE-LAY-002", base=DENSE)
def layout_named_by_an_empty_range_alone() -> Sealed:
    """A layout is named by a range of no records, and by no other."""
    made = draft(dense_layer())
    layouts = made.manifest["layouts"]
    layouts.append({**layouts[0]})
    made.tables[SectionType.EXPERTS][0].changes["layout"] = len(layouts) - 1
    return made.seal()


# Weights other than the model asks for


def _without_weights(name: str, about: str, make: Callable[[], Values], path: Path, value: Any) -> None:
    def build() -> Sealed:
        made = draft(make())
        put(made.manifest, path, value)
        return made.seal()

    refuse("EMOE-LAY-005", name, about, build)


_make: Callable[[], Values]
_value: Any
ATTENTION: Final[Path] = ("model", "attentions", 0)
BLOCK: Final[Path] = ("model", "expert_blocks", 0)
for _key, _value in (
    *(("bias", True), ("out_bias", True), ("sinks", True), ("qk_norm", "head"), ("value_dim", 3)),
    ("latent", {"rank": 2, "norm_epsilon": 0.0}),
):
    _about = f"An attention has `{_key}`, but not the weights for it."
    _make = partial(with_attention, head_dim=4, rotary={"theta": 1.0, "width": 2})
    _without_weights(f"no_weights_for_{_key}", _about, _make, (*ATTENTION, _key), _value)
for _name, _about, _make, _path, _value in (
    ("layer_norms", "Norms have no biases.", smallest_model, ("model", "norm"), "layer"),
    ("head_bias", "The head has no bias.", smallest_model, ("model", "head_bias"), True),
    ("expert_biases", "Experts have no biases.", smallest_model, (*BLOCK, "bias"), True),
    ("router_bias", "The router has no bias.", smallest_model, (*BLOCK, "router", "bias"), True),
    ("selection_bias", "There is none for choosing.", smallest_model, (*BLOCK, "router", "selection_bias"), True),
    ("share", "The dense block has no share.", shared_block, ("model", "dense_blocks", 0, "share"), True),
    ("dense_block", "It is wider.", shared_block, ("model", "dense_blocks", 0, "intermediate"), 3),
    ("taps", "A convolution has a tap more.", convolution, ("model", "convolutions", 0, "taps"), 4),
    ("rank", "The narrow row is wider.", latent, (*ATTENTION, "latent", "rank"), 6),
    ("query_rank", "Queries have no narrow row.", latent, (*ATTENTION, "latent", "query_rank"), 2),
    ("rotated_width", "A rotated key is wider.", latent, (*ATTENTION, "rotary", "width"), 4),
):
    _without_weights(f"no_weights_for_{_name}", f"The model has other weights: {_about}", _make, _path, _value)


def _reordered(layout: Values, *names: str) -> None:
    """Exchange two tensors of one size."""
    first, second = (next(each for each in layout["tensors"] if each["name"] == name) for name in names)
    first["name"], second["name"] = second["name"], first["name"]


def _exchanged(model: Values, *names: str) -> Sealed:
    made = draft(model)
    layouts = made.manifest["layouts"]
    for layout in layouts:
        if names[0] in {each["name"] for each in layout["tensors"]}:
            _reordered(layout, *names)
    return made.seal()


for _model, _names in (
    (with_attention(bias=True), ("k.bias", "v.bias")),
    (with_attention(bias=True, qk_norm="full"), ("q_norm", "q.bias")),
    (with_attention(sinks=True), ("sinks", "expert_norm")),
    (changed(norm="layer"), ("attention_norm.bias", "expert_norm")),
    (shared_block(share=True), ("share", "expert_norm")),
    (convolution(), ("entry", "entry_gate")),
    (with_block(1, router={"family": "sigmoid-topk", "top_k": 1, "selection_bias": True}), ("selection_bias", "o")),
    (with_block(bias=True), ("gate.bias", "up.bias")),
):
    _about = f"The places of {_names[0]} and {_names[1]}, which are of one size, are exchanged."
    _name = "_and_".join(each.replace(".", "_") for each in _names)
    refuse("EMOE-LAY-005", f"{_name}_exchanged", _about, partial(_exchanged, _model, *_names))


# Attention


def _attention(rule: str, name: str, about: str, make: Callable[[], Values], **changes: Any) -> None:
    def build() -> Sealed:
        made = draft(make())
        for key, value in changes.items():
            path = (*ATTENTION, *key.split("__"))
            put(made.manifest, path, value)
            if value is None:
                drop(made.manifest, path)
        return made.seal()

    refuse(rule, name, about, build, base=LATENT if make is latent else "smallest")


for _key, _place, _rule in (
    ("latent_norm_epsilon", "latent__norm_epsilon", "EMOE-MOD-001"),
    ("rotary_scale", "rotary__scale", "EMOE-MOD-002"),
    ("score_scale", "scale", "EMOE-MOD-003"),
):
    _make = latent if _place.startswith("latent") else smallest_model
    for _suffix, _number in (("infinite", math.inf), ("that_rounds_to_infinity", PAST)):
        _attention(_rule, f"{_key}_{_suffix}", f"`{_key}` is infinite as f32.", _make, **{_place: _number})
    if _make is smallest_model:
        _attention(_rule, f"{_key}_that_rounds_to_zero", f"`{_key}` is 0 as f32.", _make, **{_place: NOTHING})
NOT_POSITIVE: Final = (("infinite", math.inf), ("that_rounds_to_infinity", PAST), ("that_rounds_to_zero", NOTHING))
four_wide = partial(with_attention, head_dim=4)
for _suffix, _number in NOT_POSITIVE:
    _about = f"The last of two frequencies is {_suffix.replace('_', ' ')}."
    _attention("EMOE-MOD-002", f"frequency_{_suffix}", _about, four_wide, rotary__frequencies=[1.0, _number])
for _suffix, _number in (("greatest", GREATEST), ("least", LEAST)):
    _rotary = {"theta": 1.0, "frequencies": [_number], "scale": _number}
    _model = with_attention(rotary=_rotary, scale=_number)
    accept(f"attention_of_{_suffix}_numbers", "Its numbers are extreme.", partial(_sealed, _model))

_attention("EMOE-MOD-005", "rotated_width_of_1", "One number is rotated.", smallest_model, rotary__width=1)
_attention("EMOE-MOD-005", "rotated_width_of_3", "3 of 6 numbers are rotated.", latent, rotary__width=3)
_attention("EMOE-MOD-005", "rotated_width_past_the_head", "4 of 2 are rotated.", smallest_model, rotary__width=4)
_attention(
    "EMOE-MOD-006",
    "values_too_wide",
    "Values of two heads are together 2^24 + 2 wide.",
    smallest_model,
    heads=2,
    key_value_heads=2,
    value_dim=(1 << 23) + 1,
)
_attention(
    "EMOE-MOD-006",
    "values_that_wrap_to_0",
    "Values are together 2^32 wide, which is 0 in 32 bits.",
    smallest_model,
    heads=1 << 16,
    value_dim=1 << 16,
)
for _count in (1, 3, 4):
    _about = f"{_count} frequencies are listed for 4 rotated numbers."
    _attention("EMOE-MOD-010", f"frequencies_{_count}_of_2", _about, four_wide, rotary__frequencies=[1.0] * _count)
_attention("EMOE-MOD-010", "frequencies_of_the_whole_head", "3 for 2.", latent, rotary__frequencies=[1.0] * 3)
_attention("EMOE-MOD-011", "latent_with_qk_norm", "It has `qk_norm`.", latent, qk_norm="head")
_attention("EMOE-MOD-011", "latent_with_clip_qkv", "It has `clip_qkv`.", latent, clip_qkv=1.0)
_attention("EMOE-MOD-011", "latent_with_bias", "It has `bias`.", latent, bias=True)
_attention("EMOE-MOD-011", "latent_of_shared_heads", "Two heads share keys.", latent, key_value_heads=1)
_attention("EMOE-MOD-011", "latent_of_rotated_heads", "Heads are rotated whole.", latent, rotary__width=6)
_attention("EMOE-MOD-011", "latent_of_heads_rotated_by_default", "They are rotated whole.", latent, rotary__width=None)

ALL_WRONG: Final[dict[str, Any]] = {
    "latent__norm_epsilon": math.inf,
    "rotary__theta": math.inf,
    "scale": math.inf,
    "key_value_heads": 3,
    "rotary__width": 5,
    "value_dim": 1 << 24,
    "rotary__frequencies": [1.0, 1.0],
    "bias": True,
}
"""Values that break the rules of an attention, in the order in which they are judged."""
for _index, _rule in enumerate(("001", "002", "003", "004", "005", "006", "010", "011")):
    _about = f"An attention breaks this rule and those behind it, {len(ALL_WRONG) - 1 - _index} in all."
    _rest = dict(list(ALL_WRONG.items())[_index:])
    _attention(f"EMOE-MOD-{_rule}", f"latent_faults_from_{_rule}_on", _about, latent, **_rest)


# Experts


def _clamped(limit: float | None) -> Values:
    changes: Values = {} if limit is None else {"limit": limit}
    return with_block(activation="clamped-swiglu", **changes)


for _suffix, _number in NOT_POSITIVE:
    _about = f"`limit` is {_suffix.replace('_', ' ')} as f32."
    refuse("EMOE-MOD-014", f"limit_{_suffix}", _about, partial(_sealed, _clamped(_number)))
refuse("EMOE-MOD-014", "limit_of_silu", "`limit` does not go with `silu`.", partial(_sealed, with_block(limit=7.0)))
refuse("EMOE-MOD-014", "limit_missing", "`clamped-swiglu` has no `limit`.", partial(_sealed, _clamped(None)))


# Layers


def _layers(name: str, about: str, make: Callable[[], Values], rule: str = "EMOE-MOD-015", **changes: Any) -> None:
    def build() -> Sealed:
        made = draft(make())
        layer = made.model()["layers"][0]
        made.model()["layers"][0] = {key: value for key, value in (layer | changes).items() if value is not None}
        return made.seal()

    refuse(rule, name, about, build)


_layers("layer_of_nothing", "A layer has no key.", smallest_model, attention=None, experts=None)
_layers("layer_without_attention", "A layer has experts alone.", smallest_model, attention=None)
_layers("layer_without_experts_or_dense_block", "A layer has attention alone.", smallest_model, experts=None)
_layers("layer_of_a_convolution_alone", "A layer has a convolution alone.", convolution, experts=None)


def _ordered(make: Callable[[], Values], layer: Values) -> Sealed:
    made = draft(make())
    made.model()["layers"][0] = layer
    return made.seal()


for _name, _about, _make, _layer in (
    (
        "layer_of_attention_and_convolution",
        "A layer has attention and a convolution.",
        convolution,
        {"attention": 0, "experts": 0, "convolution": 0},
    ),
    (
        "convolution_with_a_window",
        "A layer has a convolution and a window.",
        convolution,
        {"experts": 0, "convolution": 0, "window": 1},
    ),
    ("dense_block_alone", "A layer has a dense block alone.", shared_block, {"dense": 0}),
    (
        "layer_of_shape_class_that_is_none",
        "It has attention 1 of 1, and nothing else.",
        smallest_model,
        {"attention": 1},
    ),
):
    refuse("EMOE-MOD-015", _name, _about, partial(_ordered, _make, _layer))


# Binaries


def _latent_graph(count: int, query_rank: int | None = None) -> Sealed:
    model = latent() if query_rank is None else latent(query_rank=query_rank)
    graph = graph_of("qkv", encodings=["f32"] * count)
    return with_binaries(binary(0, graphs=[graph]), made=draft(model)).seal()


accept("binary_graph_of_latent_attention", "It has five matrices.", partial(_latent_graph, 5), base=LATENT)
accept("binary_graph_of_narrow_queries", "It has six matrices.", partial(_latent_graph, 6, 4), base=LATENT)
for _count in (3, 4, 6):
    refuse(
        "EMOE-BIN-003",
        f"binary_graph_of_latent_attention_with_{_count}_encodings",
        f"A binary's graph of latent attention, of five matrices, has {_count} encodings.",
        partial(_latent_graph, _count),
        base="binary_graph_of_latent_attention",
    )
