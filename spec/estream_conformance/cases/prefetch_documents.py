"""The bytes of a prefetch router: its magic and its document. FORMAT.md section 6.12, rules PRE-001 and MAN."""

from __future__ import annotations

import math
from functools import partial

from estream_conformance.changes import refuse
from estream_conformance.messagepack import Pairs, Raw, encode
from estream_conformance.packages import smallest
from estream_conformance.prefetching import (
    ONE,
    SOURCE,
    Change,
    halves,
    holding,
    in_layer,
    one_layer,
    prefetch_layer,
    prefetch_router,
    setting,
)
from estream_spec.constants import PREFETCH_MAGIC
from estream_spec.limits import MAX_EXPERTS, MAX_LAYERS, MAX_SOURCES


def without(key: str) -> Change:
    """The change that leaves a key out."""
    return lambda values: values.pop(key) and None


def without_in_layer(key: str) -> Change:
    """The change that leaves a key of the first layer out."""
    return lambda values: values["layers"][0].pop(key) and None


# The magic.
for _name, _about, _data in (
    ("of_one_byte", "is one byte of its magic", PREFETCH_MAGIC[:1]),
    ("of_7_bytes", "is its magic without the zero byte", PREFETCH_MAGIC[:7]),
    ("with_another_magic", "begins with the magic of a program", b"EMOEPRG\0" + encode(prefetch_router(smallest()))),
    ("with_magic_in_lower_case", "has its magic in lower case", b"emoepre\0" + encode(prefetch_router(smallest()))),
    ("with_a_space_in_its_magic", "has a space behind its magic's letters", b"EMOEPRE " + encode({})),
    ("without_magic", "has no magic", encode(prefetch_router(smallest()))),
):
    refuse(
        "EMOE-PRE-001", f"prefetch_router_{_name}", f"The prefetch router {_about}.", partial(holding, _data), base=ONE
    )

# The document.
for _name, _about, _tail in (
    ("nothing_behind_the_magic", "Nothing stands behind the magic.", b""),
    ("a_tag_that_is_none", "What stands behind the magic begins with a tag that is none.", b"\xc1"),
    ("two_values", "Two values stand behind the magic, both right.", encode(prefetch_router(smallest())) * 2),
    ("a_zero_byte_behind_it", "A zero byte follows its last value.", encode(prefetch_router(smallest())) + b"\0"),
    ("its_last_byte_missing", "Its last byte is missing.", encode(prefetch_router(smallest()))[:-1]),
):
    refuse("EMOE-MAN-001", f"prefetch_router_with_{_name}", _about, partial(holding, PREFETCH_MAGIC + _tail), base=ONE)

for _key in prefetch_router(smallest()):
    refuse(
        "EMOE-MAN-002",
        f"prefetch_router_without_{_key}",
        f"The prefetch router has no `{_key}`.",
        partial(one_layer, without(_key)),
        base=ONE,
    )
for _key in prefetch_layer(smallest(), 0):
    refuse(
        "EMOE-MAN-002",
        f"prefetch_layer_without_{_key}",
        f"A layer of the prefetch router has no `{_key}`.",
        partial(one_layer, without_in_layer(_key)),
        base=ONE,
    )
for _name, _change in {
    "router_that_is_an_array": lambda values: list(values.values()),
    "router_with_an_unknown_key": setting("hidden", 1),
    "router_with_a_model_of_31_bytes": setting("model", bytes(31)),
    "router_with_a_model_that_is_text": setting("model", "m" * 32),
    "router_of_no_layers": setting("layers", []),
    "router_of_more_layers_than_there_can_be": lambda values: values.update(layers=values["layers"] * (MAX_LAYERS + 1)),
    "router_without_a_writer_s_name": setting("writer", ""),
    "router_with_tokens_below_0": setting("tokens", -1),
    "router_with_too_many_tokens": setting("tokens", 2**48),
    "router_with_tokens_that_are_a_float": setting("tokens", 1.0),
    "router_with_more_sources_than_there_can_be": setting("sources", [SOURCE] * (MAX_SOURCES + 1)),
    "router_with_a_source_without_a_digest": setting("sources", [{"name": "a", "length": 1}]),
    "router_with_an_overlap_below_0": setting("overlap", -5e-324),
    "router_with_an_overlap_above_1": setting("overlap", math.nextafter(1, 2)),
    "router_with_an_overlap_that_is_no_number": setting("overlap", math.nan),
    "router_with_extra_below_0": setting("extra", -0.5),
    "router_with_extra_above_all_experts": setting("extra", math.nextafter(MAX_EXPERTS, MAX_EXPERTS + 1)),
    "router_with_endless_extra": setting("extra", math.inf),
    "layer_with_an_unknown_key": in_layer(0, "top_k", 1),
    "layer_of_a_number_below_0": in_layer(0, "layer", -1),
    "layer_of_a_number_beyond_all_layers": in_layer(0, "layer", MAX_LAYERS),
    "layer_with_a_router_of_33_bytes": in_layer(0, "router", bytes(33)),
    "layer_with_weights_that_are_numbers": in_layer(0, "weights", [0.5]),
    "layer_with_a_bias_that_is_nil": in_layer(0, "bias", None),
    "layer_with_needed_that_is_text": in_layer(0, "needed", "text"),
    "layer_with_a_target_of_0": in_layer(0, "target", 0.0),
    "layer_with_a_target_below_0": in_layer(0, "target", -0.5),
    "layer_with_a_target_above_1": in_layer(0, "target", math.nextafter(1, 2)),
    "layer_with_a_target_that_is_no_number": in_layer(0, "target", math.nan),
}.items():
    refuse(
        "EMOE-MAN-002",
        f"prefetch_{_name}",
        "A value of the prefetch router is not of its type, or out of its range.",
        partial(one_layer, _change),
        base=ONE,
        committed="more" not in _name,  # those are long
    )
for _name, _change in {
    "router_with_keys_in_another_order": lambda values: Pairs(reversed(values.items())),
    "router_with_a_key_twice": lambda values: Pairs([*values.items(), ("extra", 0.0)]),
    "router_with_tokens_in_two_bytes": setting("tokens", Raw(b"\xcc\0")),
    "router_with_an_overlap_in_four_bytes": setting("overlap", Raw(b"\xca\0\0\0\0")),
    "router_with_an_overlap_that_is_an_integer": setting("overlap", 1),
    "layer_with_weights_of_a_long_length": in_layer(0, "weights", Raw(b"\xc5\0\2" + halves(0.5))),
    "layer_with_a_target_that_is_an_integer": in_layer(0, "target", 1),
}.items():
    refuse(
        "EMOE-MAN-003",
        f"prefetch_{_name}",
        "The prefetch router is not in canonical encoding.",
        partial(one_layer, _change),
        base=ONE,
    )
