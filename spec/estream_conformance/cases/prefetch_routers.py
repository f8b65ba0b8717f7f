"""Prefetch routers: FORMAT.md sections 6.12 and 6.13, rules PRE and MAN inside of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Section, Values, edit
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import accept, put, refuse
from estream_conformance.files import hollow
from estream_conformance.frames import raw
from estream_conformance.kinds import changed
from estream_conformance.messagepack import encode
from estream_conformance.packages import draft, full, smallest
from estream_conformance.prefetching import (
    ONE,
    ROUTER_TENSORS,
    SOURCE,
    THREE,
    Change,
    floats,
    halves,
    holding,
    in_layer,
    one_layer,
    prefetch_layer,
    prefetch_router,
    router_digest,
    section,
    setting,
    three_layers,
    with_prefetch_router,
)
from estream_conformance.signing import asking, sign, with_signatures
from estream_spec.constants import FLAGS, PREFETCH_CONTEXT, SectionType
from estream_spec.limits import MAX_EXPERTS, MAX_PREFETCH_ROUTER_LENGTH


def mixed_model() -> Values:
    """A layer without experts, one whose router has a bias for choosing, and one whose scores have a bias."""
    router = {"family": "softmax-topk", "top_k": 2}
    return changed(
        hidden=2,
        layers=[{"attention": 0, "dense": 0}, {"attention": 0, "experts": 1}, {"attention": 0, "experts": 0}],
        expert_blocks=[
            {"experts": 3, "intermediate": 1, "router": {**router, "bias": True}},
            {"experts": 4, "intermediate": 1, "router": {**router, "selection_bias": True}},
        ],
        dense_blocks=[{"intermediate": 1}],
        norm="layer",
    )


def between_others(change: Change = lambda value: None) -> Sealed:
    """A package whose layers 1 and 2 have experts, and layer 0 has none, with a prefetch router."""
    return with_prefetch_router(draft(mixed_model()), change)


def digest_without(name: str, number: int) -> bytes:
    """The router digest of one of its layers without one of its tensors."""
    return router_digest(draft(mixed_model()), number, tuple(each for each in ROUTER_TENSORS if each != name))


def with_layers(change: Callable[[list[Values]], list[Values]]) -> Change:
    """The change to other layers."""
    return lambda values: values.update(layers=change(values["layers"]))


# Accepted.
@accepted(base="smallest")
def prefetch_router_of_one_layer() -> Sealed:
    """A prefetch router; the layer has one expert, so nothing is left to predict and there is one threshold."""
    return one_layer()


@accepted(base="full")
def prefetch_router_of_three_layers() -> Sealed:
    """A prefetch router for layers of several shape classes; the provenance names no tensors."""
    return three_layers()


@accepted()
def prefetch_router_of_layers_between_others() -> Sealed:
    """The first layer has no experts; the routers have biases of every kind."""
    return between_others()


@accepted(base=ONE)
def prefetch_router_before_all_sections() -> Sealed:
    """The prefetch router is the first section."""
    made = smallest()
    made.sections.insert(0, section(prefetch_router(made)))
    return made.seal()


@accepted("zstd", base=ONE)
def compressed_prefetch_router() -> Sealed:
    """The prefetch router is compressed."""
    made = smallest()
    added = section(prefetch_router(made))
    added.stored = raw(added.data or b"")
    made.sections.append(added)
    return made.seal()


@accepted(base=ONE)
def prefetch_router_appended() -> Sealed:
    """The prefetch router was added in place, to a package that had none."""
    return edit(smallest().seal(), [section(prefetch_router(smallest()))])


@accepted("signature", base=ONE)
def signed_prefetch_router() -> Made:
    """A package with a prefetch router is signed: the signature covers it."""
    made = smallest()
    made.sections.append(section(prefetch_router(made)))
    signature = sign(1, made.seal().file_id)
    return asking(with_signatures(made, signature), 1, signatures=(signature,))


@refused("EMOE-SIG-002", "signature", base="signed_prefetch_router")
def prefetch_router_added_to_a_signed_package() -> Made:
    """A package was signed before it got its prefetch router."""
    made = smallest()
    signature = sign(1, made.seal().file_id)
    made.sections.append(section(prefetch_router(made)))
    return asking(with_signatures(made, signature), 1)


def from_sources(*names: str) -> Draft:
    """The smallest package, made of sources of these names with digests of their own."""
    made = smallest()
    sources = [SOURCE | {"name": name, "sha256": bytes([number + 1]) * 32} for number, name in enumerate(names)]
    put(made.manifest, ("provenance", "sources"), sources)
    return made


def from_named(*names: str) -> Sealed:
    """The same, with a prefetch router."""
    return with_prefetch_router(from_sources(*names))


for _name, _about, _sources in (
    ("the_tensors_named", "The provenance names the tensors behind a document.", ("config.json", "tensors")),
    ("the_tensors_named_twice", "The provenance names tensors twice: the first ones count.", ("tensors", "tensors")),
    ("other_sources_named", "The provenance names documents and no tensors.", ("tensors.json", "Tensors", "")),
):
    accept(f"prefetch_router_with_{_name}", _about, partial(from_named, *_sources), base=ONE)

for _name, _about, _change in (
    ("sources", "Two texts are named that it was trained on.", setting("sources", [SOURCE, SOURCE | {"name": ""}])),
    ("most_tokens", "It was trained on as many tokens as can be said.", setting("tokens", 2**48 - 1)),
    ("every_expert_predicted", "Its maker found it sure, at a price.", setting("overlap", 1.0)),
    ("most_extra", "It predicted as many more experts as there can be.", setting("extra", float(MAX_EXPERTS))),
    ("no_overlap_below_0", "The overlap is -0.", setting("overlap", -0.0)),
    ("certainty_asked", "The target is 1, which no prediction reaches.", in_layer(0, "target", 1.0)),
    ("little_asked", "The target is the smallest number above 0.", in_layer(0, "target", 5e-324)),
    ("large_halves", "Weights are the largest halves, either way.", in_layer(0, "weights", halves(*[65504.0] * 68))),
    ("small_halves", "Weights are the smallest halves.", in_layer(0, "weights", b"\1\x80" * 68)),
    ("large_floats", "Biases are the largest floats, either way.", in_layer(0, "bias", b"\xff\xff\x7f\xff" * 2)),
    ("equal_thresholds", "Two thresholds are equal.", in_layer(0, "thresholds", floats(-1, -1))),
    ("thresholds_of_0", "The thresholds are 0 and -0, which is not less.", in_layer(0, "thresholds", floats(0, -0.0))),
    ("shares_of_0_and_1", "An expert was always needed, the other one never.", in_layer(0, "needed", floats(1, -0.0))),
):
    accept(f"prefetch_router_with_{_name}", _about, partial(three_layers, _change), base=THREE)


# What it is bound to.
def for_another(change: Callable[[Draft], Any], *sources: str) -> Sealed:
    """The smallest package, made of sources, that was changed behind its prefetch router's back."""
    made = from_sources(*sources) if sources else smallest()
    made.sections.append(section(prefetch_router(made)))
    change(made)
    return made.seal()


def _digest(*parts: bytes) -> bytes:
    return sha256(b"".join(parts)).digest()


_DESCRIBED: Final = _digest(encode(smallest().model()))
for _name, _about, _build in (
    ("for_nothing", "The model digest is zeros.", partial(one_layer, setting("model", bytes(32)))),
    (
        "for_another_family",
        "The prefetch router is for a model of another family.",
        partial(for_another, lambda made: put(made.manifest, ("model", "family"), "g")),
    ),
    (
        "for_other_tensors",
        "The prefetch router is for a model of the same description, but of other tensors.",
        partial(
            for_another,
            lambda made: put(made.manifest, ("provenance", "sources", 1, "sha256"), bytes(32)),
            *("config.json", "tensors"),
        ),
    ),
    (
        "for_the_tensors_named_last",
        "The provenance names tensors twice, and the model digest is over the last ones.",
        partial(
            for_another,
            lambda made: made.manifest["provenance"]["sources"].reverse(),
            *("tensors", "tensors"),
        ),
    ),
    (
        "for_a_digest_without_context",
        "The preimage of the model digest lacks its context.",
        partial(one_layer, setting("model", _digest(_DESCRIBED, bytes(32)))),
    ),
    (
        "for_a_digest_without_tensors",
        "The preimage of the model digest lacks the 32 zero bytes that stand for no tensors.",
        partial(one_layer, setting("model", _digest(PREFETCH_CONTEXT, _DESCRIBED))),
    ),
    (
        "for_a_digest_over_the_description_itself",
        "The preimage of the model digest has the description in place of its digest.",
        partial(one_layer, setting("model", _digest(PREFETCH_CONTEXT, encode(smallest().model()), bytes(32)))),
    ),
):
    refuse("EMOE-PRE-002", f"prefetch_router_{_name}", _about, _build, base=ONE)

for _name, _about, _layers in (
    ("without_its_first_layer", "lacks the first layer", lambda layers: layers[1:]),
    ("without_its_last_layer", "lacks the last layer", lambda layers: layers[:-1]),
    (
        "with_layers_in_another_order",
        "has the last two layers in the wrong order",
        lambda layers: [layers[0], *layers[:0:-1]],
    ),
    ("with_a_layer_twice", "has the last layer twice", lambda layers: [*layers, layers[-1]]),
    (
        "with_a_layer_in_place_of_another",
        "has the last layer in place of the one before",
        lambda layers: [layers[0], *layers[2:] * 2],
    ),
    ("with_a_layer_too_many", "has a layer that the model lacks", lambda layers: [*layers, layers[-1] | {"layer": 3}]),
):
    refuse(
        "EMOE-PRE-003",
        f"prefetch_router_{_name}",
        f"The prefetch router {_about}.",
        partial(three_layers, with_layers(_layers)),
        base=THREE,
    )


@refused("EMOE-PRE-003", base="prefetch_router_of_layers_between_others")
def prefetch_router_with_a_layer_without_experts() -> Sealed:
    """The prefetch router has a layer that has no experts."""
    return between_others(lambda values: values["layers"].insert(0, {**values["layers"][0], "layer": 0}))


# Arrays. The first layer has 34 numbers in a row, 2 experts and a `top_k` of 1.
_RIGHT: Final = prefetch_layer(full(), 0)
for _key in ("weights", "bias", "confidence", "thresholds", "needed"):
    _array: bytes = _RIGHT[_key]
    _width = 2 if _key == "weights" else 4
    for _name, _value in {
        "nothing": b"",
        "a_byte_less": _array[:-1],
        "a_byte_more": _array + b"\0",
        "a_number_less": _array[:-_width],
        "a_number_more": _array + _array[-_width:],
    }.items():
        refuse(
            "EMOE-PRE-004",
            f"prefetch_{_key}_of_{_name}",
            f"An array of the prefetch router has {_name.replace('_', ' ')} of what the model asks for.",
            partial(three_layers, in_layer(0, _key, _value)),
            base=THREE,
        )
    _sign = {"infinite": 0, "minus_infinite": 0x80, "not_a_number": 0, "minus_not_a_number": 0x80}
    for _name, _bit in _sign.items():
        _odd = "not" in _name
        _last = bytes([_odd, 0x7C | _bit]) if _width == 2 else bytes([_odd, 0, 0x80, 0x7F | _bit])
        for _place, _value in {"first": _last + _array[_width:], "last": _array[:-_width] + _last}.items():
            refuse(
                "EMOE-PRE-005",
                f"{_place}_of_prefetch_{_key}_is_{_name}",
                f"The {_place} number of `{_key}` of the prefetch router is not finite.",
                partial(three_layers, in_layer(0, _key, _value)),
                base=THREE,
            )
refuse(
    "EMOE-PRE-004",
    "prefetch_weights_of_four_bytes_each",
    "The weights of a prefetch router are f32.",
    partial(three_layers, in_layer(0, "weights", floats(*[0.5] * 68))),
    base=THREE,
)
refuse(
    "EMOE-PRE-004",
    "prefetch_arrays_of_another_shape_class",
    "A layer of the prefetch router has the arrays of a layer of another shape class.",
    partial(three_layers, lambda values: values["layers"][1].update({**values["layers"][0], "layer": 1})),
    base=THREE,
)
for _name, _values in {
    "a_little": (1, math.nextafter(1, 0) - 2**-24),
    "below_0": (0, -(2**-149)),
    "from_the_largest": (3.4e38, -3.4e38),
}.items():
    refuse(
        "EMOE-PRE-006",
        f"prefetch_thresholds_fall_{_name}",
        "A threshold of the prefetch router is below the one before it.",
        partial(three_layers, in_layer(0, "thresholds", floats(*_values))),
        base=THREE,
    )
for _name, _number in {
    "a_little_below_0": -(2**-149),
    "a_little_above_1": 1 + 2**-23,
    "a_percentage": 99.5,
}.items():
    for _at in (0, 1):
        _shares: list[float] = [0.25, 0.25]
        _shares[_at] = _number
        refuse(
            "EMOE-PRE-007",
            f"prefetch_share_{_at}_is_{_name}",
            f"Number {_at} of `needed` is out of its range.",
            partial(three_layers, in_layer(0, "needed", floats(*_shares))),
            base=THREE,
        )


# Routers.
for _name, _about, _router in (
    ("of_zeros", "The router digest is zeros.", bytes(32)),
    ("of_the_last_layer", "The router digest is that of another layer.", router_digest(full(), 2)),
    (
        "of_the_router_alone",
        "The router digest is over the router without the norm.",
        router_digest(full(), 0, ("router",)),
    ),
):
    refuse(
        "EMOE-PRE-008",
        f"prefetch_router_digest_{_name}",
        _about,
        partial(three_layers, in_layer(0, "router", _router)),
        "records",
        base=THREE,
    )
refuse(
    "EMOE-PRE-008",
    "prefetch_router_digest_of_the_last_layer_is_another",
    "The router digest of the last layer is another.",
    partial(three_layers, in_layer(2, "router", bytes(32))),
    "records",
    base=THREE,
)


@refused("EMOE-PRE-008", "records", base=THREE)
def prefetch_router_digest_in_another_order() -> Sealed:
    """The router digest is over the right tensors, the router before the norm; their numbers differ."""
    made = full()
    dense = made.tables[SectionType.DENSE][1]
    tensors = made.manifest["layouts"][dense.layout]["tensors"]
    start = next(each["offset"] for each in tensors if each["name"] == "router")
    dense.payloads[0][start : start + 4] = floats(7.0)
    return with_prefetch_router(made, in_layer(0, "router", router_digest(made, 0, ("router", "expert_norm"))))


for _left_out, _index in {"expert_norm.bias": 0, "router.bias": 1, "selection_bias": 0}.items():
    refuse(
        "EMOE-PRE-008",
        f"prefetch_router_digest_without_{_left_out.replace('.', '_')}",
        f"The router digest leaves `{_left_out}` out.",
        partial(between_others, in_layer(_index, "router", digest_without(_left_out, _index + 1))),
        "records",
        base="prefetch_router_of_layers_between_others",
    )


# Order.
def both(*changes: Change) -> Change:
    """Several changes."""

    def change(values: Values) -> None:
        for each in changes:
            each(values)

    return change


_SHORT = {key: in_layer(0, key, b"") for key in ("bias", "needed")}
_ENDLESS = in_layer(0, "weights", b"\0\x7c" * 68)
for _name, _about, _rule, _change in (
    (
        "model_before_layers",
        "is for another model and lacks its layers: the model is judged first",
        "002",
        both(setting("model", bytes(32)), lambda values: values["layers"].pop() and None),
    ),
    (
        "layers_before_lengths",
        "lacks its last layer, and the first one has no bias: which layers there are is judged first",
        "003",
        both(_SHORT["bias"], lambda values: values["layers"].pop() and None),
    ),
    (
        "lengths_before_numbers",
        "has weights that are not finite and no shares: all lengths of a layer are judged first",
        "004",
        both(_ENDLESS, _SHORT["needed"]),
    ),
    (
        "first_layer_before_second",
        "has a share above 1 in its first layer, and no bias in its second: all of a layer is judged first",
        "007",
        both(in_layer(0, "needed", floats(2, 0)), in_layer(1, "bias", b"")),
    ),
    (
        "finite_before_thresholds",
        "has thresholds that fall and a share that is not finite: that numbers are finite is judged first",
        "005",
        both(in_layer(0, "thresholds", floats(1, 0)), in_layer(0, "needed", floats(0, math.inf))),
    ),
    (
        "thresholds_before_shares",
        "has thresholds that fall and a share above 1: thresholds are judged first",
        "006",
        both(in_layer(0, "thresholds", floats(1, 0)), in_layer(0, "needed", floats(2, 0))),
    ),
    (
        "shares_before_router",
        "has a share above 1 and another router digest: the share is judged first",
        "007",
        both(in_layer(0, "needed", floats(2, 0)), in_layer(0, "router", bytes(32))),
    ),
):
    refuse(
        f"EMOE-PRE-{_rule}",
        f"prefetch_{_name}",
        f"The prefetch router {_about}.",
        partial(three_layers, _change),
        base=THREE,
    )


@refused("EMOE-SCH-001", base=ONE)
def program_before_prefetch_router() -> Sealed:
    """The prefetch router has no magic, and a program behind it none either: programs are judged first."""
    made = smallest()
    made.sections += [Section(SectionType.PREFETCH_ROUTER, b"none"), Section(SectionType.SCHEDULE, b"none")]
    return made.seal()


@refused("EMOE-PRE-007", "records", base=THREE)
def prefetch_router_before_records() -> Sealed:
    """A share of the prefetch router is above 1, and a record has another checksum: records come last."""
    made = full()
    made.tables[SectionType.DENSE][0].digests[0] = {"checksum": 0}
    return with_prefetch_router(made, in_layer(0, "needed", floats(2, 0)))


@refused("EMOE-REC-001", "records", base=THREE)
def records_before_router_digests() -> Sealed:
    """A router digest is another, and the last expert's record has another checksum: records are judged first."""
    made = full()
    made.tables[SectionType.EXPERTS][-1].digests[1] = {"checksum": 0}
    return with_prefetch_router(made, in_layer(0, "router", bytes(32)))


@refused("EMOE-PRE-008", "records", base=THREE)
def router_digests_before_content_id() -> Sealed:
    """A router digest is another, and so is the content id, which is judged last."""
    made = full()
    made.manifest["content_id"] = bytes(32)
    return with_prefetch_router(made, in_layer(0, "router", bytes(32)))


# The section.
@refused("EMOE-SEC-018", base=ONE)
def digest_of_prefetch_router() -> Sealed:
    """The digest of the prefetch router's section is another, and it has no magic: the digest is judged first."""
    return holding(b"none", sha256=bytes(32))


@refused("EMOE-SEC-019", "zstd", base="compressed_prefetch_router")
def frame_of_prefetch_router() -> Sealed:
    """A prefetch router is said to be compressed, but is no frame."""
    made = smallest()
    added = section(prefetch_router(made))
    added.stored = b"no frame"
    made.sections.append(added)
    return made.seal()


@refused("EMOE-SEC-013", base=ONE)
def prefetch_router_twice() -> Sealed:
    """There are two prefetch routers with id 0."""
    made = smallest()
    made.sections += [section(prefetch_router(made)) for _ in range(2)]
    return made.seal()


@refused("EMOE-SEC-016", base=ONE)
def second_prefetch_router_has_another_id() -> Sealed:
    """Beside the prefetch router with id 0 there is one with id 1."""
    made = smallest()
    made.sections += [section(prefetch_router(made), number) for number in range(2)]
    return made.seal()


def numbered(number: int) -> Sealed:
    """The smallest package, whose only prefetch router has an id of its own."""
    made = smallest()
    made.sections.append(section(prefetch_router(made), number))
    return made.seal()


for _id in (1, 2**32 - 1):
    refuse(
        "EMOE-SEC-016",
        f"prefetch_router_has_id_{_id}",
        f"The only prefetch router has the id {_id}.",
        partial(numbered, _id),
        base=ONE,
    )


def said_to_be_of(length: int) -> Made:
    """A package that begins with a prefetch router of so many bytes, compressed as well as is allowed: zeros."""
    stored = -(-length // 256)
    changes = {
        "flags": int(FLAGS[SectionType.PREFETCH_ROUTER]),
        "codec": 1,
        "id": 0,
        "length": length,
        "stored_length": stored,
    }
    return hollow(smallest(), -(-stored // 4096) * 4096, SectionType.PREFETCH_ROUTER, **changes)


refuse(
    "EMOE-SEC-011",
    "prefetch_router_a_byte_longer_than_it_may_be",
    "A prefetch router has a byte more than it may, once decoded.",
    partial(said_to_be_of, MAX_PREFETCH_ROUTER_LENGTH + 1),
    "zstd",
    base="compressed_prefetch_router",
)
refuse(
    "EMOE-SEC-018",
    "prefetch_router_as_long_as_it_may_be",
    "A prefetch router has as many bytes as it may, once decoded, more than other sections; its digest is another.",
    partial(said_to_be_of, MAX_PREFETCH_ROUTER_LENGTH),
    "zstd",
    base="compressed_prefetch_router",
)
