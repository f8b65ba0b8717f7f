"""Routers: families, groups, and numbers that only 32 bits make wrong. FORMAT.md section 8.9."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

from estream_conformance.builder import Sealed, Values
from estream_conformance.cases.models import GREATEST, LEAST, NOTHING, PAST
from estream_conformance.changes import accept, put, refuse
from estream_conformance.kinds import shared_block, with_router
from estream_conformance.packages import draft
from estream_spec import limits

FAMILIES: Final = (
    *("softmax-topk", "softmax-topk-renormalise", "sigmoid-topk", "sigmoid-topk-renormalise"),
    "sparsemixer",
)


def _router(experts: int = 4, **changes: Any) -> Sealed:
    return draft(with_router(experts, **changes)).seal()


def _accept(name: str, about: str, experts: int = 4, **changes: Any) -> None:
    accept(f"router_{name}", about, partial(_router, experts, **changes))


def _refuse(rule: str, name: str, about: str, experts: int = 4, **changes: Any) -> None:
    refuse(rule, f"router_{name}", about, partial(_router, experts, **changes))


MIXER: Final[Values] = {"family": "sparsemixer", "tolerance": 0.01}
for _family in FAMILIES:
    _accept(f"of_{_family.replace('-', '_')}", f"The family is `{_family}`.", family=_family)
_accept("with_a_bias", "Scores have a bias.", bias=True)
_accept("with_a_selection_bias", "Experts are chosen with a bias.", selection_bias=True)
_accept("with_both_biases", "Scores have a bias, and experts are chosen with another.", bias=True, selection_bias=True)
_accept("of_two_groups", "One of two groups is left out.", groups=2)
_accept("of_two_groups_that_both_stay", "Neither of two groups is left out.", groups=2, top_groups=2)
_accept("of_single_experts", "Every group is one expert, and two stay.", groups=4, top_groups=2)
_accept("of_groups_by_two", "Groups count by their two largest.", groups=2, group_score="two-largest")
_accept("of_one_group_by_two", "The only group, of one, counts by two.", 1, top_k=1, group_score="two-largest")
_accept("that_chooses_all_of_what_stays", "All six of two groups are chosen.", 9, groups=3, top_groups=2, top_k=6)
_accept("with_a_scale", "Weights are scaled.", scale=2.5)
_accept("with_an_epsilon", "The sum is a bit larger.", family="sigmoid-topk-renormalise", epsilon=1e-20)
_accept("with_an_epsilon_of_no_use", "Nothing is divided, and there is an epsilon.", epsilon=1e-6)
_accept("with_a_tolerance", "Near is within 2 %.", **MIXER)
_accept("that_mixes_all_with_a_scale", "All are chosen in turn, and scaled.", **MIXER, top_k=4, scale=0.5, bias=True)
accept(
    "router_of_the_most_groups",
    "Each of 4096 experts is a group, and all stay.",
    partial(_router, 4096, groups=limits.MAX_EXPERTS, top_groups=limits.MAX_EXPERTS),
    committed=False,
)
for _suffix, _value in (("greatest", GREATEST), ("least", LEAST)):
    _numbers: Values = {"scale": _value, "epsilon": _value, "tolerance": _value}
    _accept(f"of_{_suffix}_numbers", "Its numbers are extreme.", family="sparsemixer", **_numbers)
_accept("of_numbers_that_round_to_zero", "They are 0 as f32.", family="sparsemixer", epsilon=NOTHING, tolerance=NOTHING)

_refuse("EMOE-MOD-012", "of_groups_that_do_not_divide", "3 does not divide 4.", groups=3)
_refuse("EMOE-MOD-012", "of_more_groups_than_experts", "There are 8 groups of 4 experts.", groups=8)
_refuse("EMOE-MOD-012", "of_the_most_groups_of_few", "There are 4096 groups of 4 experts.", groups=limits.MAX_EXPERTS)
_refuse("EMOE-MOD-012", "of_more_groups_than_there_are", "Three of two stay.", groups=2, top_groups=3)
_refuse("EMOE-MOD-012", "of_two_of_one_group", "Two of one stay.", top_groups=2)
_refuse("EMOE-MOD-012", "of_groups_too_small", "Three of the two that stay are chosen.", groups=2, top_k=3)
_refuse("EMOE-MOD-012", "of_one_that_stays_and_two_chosen", "Two of one.", groups=4)
_refuse(
    "EMOE-MOD-012",
    "of_single_experts_by_two",
    "Groups of one expert count by two.",
    groups=4,
    top_groups=4,
    group_score="two-largest",
)
for _family in FAMILIES[:-1]:
    _name = f"of_{_family.replace('-', '_')}_with_a_tolerance"
    _refuse("EMOE-MOD-013", _name, "Nothing is near.", family=_family, tolerance=0.01)
_refuse("EMOE-MOD-013", "with_a_tolerance_that_rounds_to_zero", "It is not 0 as f64.", tolerance=NOTHING)
_refuse("EMOE-MOD-013", "that_mixes_groups", "It has groups.", **MIXER, groups=2, top_groups=2)
_refuse("EMOE-MOD-013", "that_mixes_with_a_selection_bias", "It has a bias.", **MIXER, selection_bias=True)
for _key in ("scale", "epsilon", "tolerance"):
    for _suffix, _value in (("infinite", math.inf), ("that_rounds_to_infinity", PAST)):
        _changes: Values = {"family": "sparsemixer", _key: _value}
        _refuse("EMOE-MOD-013", f"with_{_key}_{_suffix}", f"`{_key}` is infinite as f32.", **_changes)
_refuse("EMOE-MOD-013", "with_scale_that_rounds_to_zero", "`scale` is 0 as f32.", scale=NOTHING)

ALL_WRONG: Final[dict[str, Any]] = {"top_k": 5, "groups": 3, "scale": math.inf, "limit": 7.0, "dense": 1, "end": 1}
"""Faults of a model from `top_k` on, in the order in which they are judged."""


def _faults(first: int) -> Sealed:
    made = draft(shared_block())
    model = made.model()
    for key, value in list(ALL_WRONG.items())[first:]:
        match key:
            case "limit":
                put(made.manifest, ("model", "expert_blocks", 0, "limit"), value)
            case "dense":
                model["layers"][0]["dense"] = value
            case "end":
                put(made.manifest, ("model", "end_tokens"), [value])
            case _:
                put(made.manifest, ("model", "expert_blocks", 0, "router", key), value)
    return made.seal()


for _index, _rule in enumerate(("007", "012", "013", "014", "008", "009")):
    _about = f"A model breaks this rule and those behind it, {len(ALL_WRONG) - 1 - _index} in all."
    refuse(f"EMOE-MOD-{_rule}", f"block_faults_from_{_rule}_on", _about, partial(_faults, _index))


def _layer_without_experts_and(key: str) -> Sealed:
    made = draft(shared_block())
    made.model()["layers"][0] = {"experts": 0, "dense": 1 if key == "class" else 0}
    if key == "limit":
        put(made.manifest, ("model", "expert_blocks", 0, "limit"), 7.0)
    return made.seal()


refuse(
    "EMOE-MOD-014",
    "limit_and_layer_without_attention",
    "Experts are judged before layers.",
    partial(_layer_without_experts_and, "limit"),
)
refuse(
    "EMOE-MOD-015",
    "layer_without_attention_and_class_undefined",
    "Layers are judged before shape classes.",
    partial(_layer_without_experts_and, "class"),
)
