"""The model description: numbers that only 32 bits make wrong, heads, shape classes, tokens. FORMAT.md section 8."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Values
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, put, refuse, with_value
from estream_conformance.packages import draft, smallest, smallest_model
from estream_spec import limits

GREATEST: Final = 3.4028234663852886e38
"""The greatest f32."""
PAST: Final = 3.4028235677973366e38
"""Half-way from there to what the next one would be: rounded to even it is infinite."""
LEAST: Final = 2.0**-149
"""The least f32 above 0."""
NOTHING: Final = 2.0**-150
"""Half of it: rounded to even it is 0."""


def _number(key: str, value: float) -> Callable[[], Sealed]:
    def build() -> Sealed:
        model = smallest_model()
        holder = {"norm_epsilon": model, "theta": model["attentions"][0]["rotary"]}.get(key, model["attentions"][0])
        holder[key] = value
        return draft(model).seal()

    return build


TOO_LARGE: Final = [
    ("infinite", "is infinite", math.inf),
    ("of_1e39", "is 1e39, which is infinite as f32", 1e39),
    ("rounding_to_infinity", "is the least number that becomes infinite as f32", PAST),
    ("of_the_greatest_f64", "is the greatest f64", 1.7976931348623157e308),
]
TOO_SMALL: Final = [
    ("of_1e_50", "is 1e-50, which is 0 as f32", 1e-50),
    ("rounding_to_zero", "is 2^-150, which becomes 0 as f32", NOTHING),
    ("of_the_least_f64", "is the least f64 above 0", 5e-324),
]
FITTING: Final = [
    ("of_the_greatest_f32", "is the greatest f32", GREATEST),
    ("rounding_to_the_greatest_f32", "is the greatest f64 that is finite as f32", math.nextafter(PAST, 0)),
    ("of_the_least_f32", "is the least f32 above 0", LEAST),
    ("rounding_to_the_least_f32", "is the least f64 that is not 0 as f32", math.nextafter(NOTHING, 1)),
]
for _rule, _key in (("EMOE-MOD-001", "norm_epsilon"), ("EMOE-MOD-002", "theta"), ("EMOE-MOD-003", "clip_qkv")):
    _zero_is_right = _key == "norm_epsilon"
    for _name, _about, _value in TOO_LARGE if _zero_is_right else TOO_LARGE + TOO_SMALL:
        refuse(_rule, f"{_key}_{_name}", f"`{_key}` {_about}.", _number(_key, _value))
    for _name, _about, _value in FITTING + TOO_SMALL if _zero_is_right else FITTING:
        accept(f"{_key}_{_name}", f"`{_key}` {_about}.", _number(_key, _value))
accept("norm_epsilon_minus_zero", "`norm_epsilon` is -0.0, which is at least 0.", _number("norm_epsilon", -0.0))


def _attention(**changes: Any) -> Callable[[], Sealed]:
    """A package that is right for an attention of other numbers."""

    def build() -> Sealed:
        model = smallest_model()
        model["attentions"][0].update(changes)
        return draft(model).seal()

    return build


def _heads(heads: int, head_dim: int, key_value_heads: int = 1) -> Callable[[], Sealed]:
    """The smallest package with an attention too large to have its weights."""

    def build() -> Sealed:
        made = smallest()
        made.model()["attentions"][0].update(heads=heads, head_dim=head_dim, key_value_heads=key_value_heads)
        return made.seal()

    return build


accept("three_heads_of_three", "Three heads have three key and value heads.", _attention(heads=3, key_value_heads=3))
accept("three_heads_of_one", "Three heads share one.", _attention(heads=3, key_value_heads=1))
refuse("EMOE-MOD-004", "three_heads_of_two", "2 does not divide 3.", _attention(heads=3, key_value_heads=2))
refuse("EMOE-MOD-004", "two_heads_of_four", "4 does not divide 2.", _attention(heads=2, key_value_heads=4))
refuse(
    "EMOE-MOD-004",
    "one_head_of_the_most",
    "One head has 2^24 key and value heads.",
    _heads(1, 2, limits.MAX_DIMENSION),
)
refuse("EMOE-MOD-005", "head_dim_of_1", "A head is 1 wide, which is odd.", _attention(head_dim=1))
refuse("EMOE-MOD-005", "head_dim_of_3", "A head is 3 wide, which is odd.", _attention(head_dim=3))

TOO_WIDE: Final = [
    ("one_pair_over_the_limit", "Heads are together 2 wider than 2^24.", 8388609, 2),
    ("that_wrap_to_0", "Heads are together 2^32 wide, which is 0 in 32 bits.", 1 << 16, 1 << 16),
    ("that_wrap_to_4", "Heads are together 2^32 + 4 wide, which is 4 in 32 bits.", 3303821, 1300),
    ("of_2_to_the_31", "Heads are together 2^31 wide, which is negative in 32 bits.", 1 << 16, 1 << 15),
    ("of_the_most_both_ways", "There are 2^24 heads, each 2^24 wide.", 1 << 24, 1 << 24),
]
for _name, _about, _first, _second in TOO_WIDE:
    refuse("EMOE-MOD-006", f"heads_{_name}", _about, _heads(_first, _second))
refuse(
    "EMOE-LAY-005",
    "heads_at_the_limit",
    "Heads are together 2^24 wide, which they may be; but the weights are those of narrower ones.",
    _heads(1 << 22, 1 << 2),
)
refuse(
    "EMOE-LAY-005",
    "one_head_at_the_limit",
    "One head is 2^24 wide, which it may be; but the weights are those of a narrower one.",
    _heads(1, 1 << 24),
)


def _experts(experts: int, top_k: int) -> Callable[[], Sealed]:
    def build() -> Sealed:
        model = smallest_model()
        model["expert_blocks"][0]["experts"] = experts
        model["expert_blocks"][0]["router"]["top_k"] = top_k
        return draft(model).seal()

    return build


accept("top_k_of_all_experts", "Every token goes to all three experts.", _experts(3, 3))
accept("experts_of_the_greatest_number", "A layer has 4096 experts, all chosen.", _experts(4096, 4096), committed=False)
refuse("EMOE-MOD-007", "top_k_of_one_more", "A token goes to four of three experts.", _experts(3, 4))
refuse("EMOE-MOD-007", "top_k_of_the_most", "A token goes to 2^24 experts.", _experts(1, limits.MAX_DIMENSION))


# Shape classes


def _model(**changes: Any) -> Callable[[], Sealed]:
    """The smallest package with other values in its model description; the rest stays as it is."""

    def build() -> Sealed:
        made = smallest()
        for key, value in changes.items():
            put(made.manifest, ("model", key), value)
        return made.seal()

    return build


_ATTENTIONS = smallest_model()["attentions"]
_BLOCKS = smallest_model()["expert_blocks"]
UNUSED: Final[list[tuple[str, str, Values]]] = [
    ("attention_unused", "No layer uses the second attention.", {"attentions": _ATTENTIONS * 2}),
    ("attentions_of_the_most_unused", "No layer uses 63 of 64 attentions.", {"attentions": _ATTENTIONS * 64}),
    ("expert_block_unused", "No layer uses the second expert block.", {"expert_blocks": _BLOCKS * 2}),
    ("attention_undefined", "The layer names attention 1 of 1.", {"layers": [{"attention": 1, "experts": 0}]}),
    ("attention_undefined_by_far", "The layer names attention 63.", {"layers": [{"attention": 63, "experts": 0}]}),
    ("expert_block_undefined", "The layer names expert block 1 of 1.", {"layers": [{"attention": 0, "experts": 1}]}),
    ("dense_block_unused", "No layer uses the dense block.", {"dense_blocks": [{"intermediate": 1}]}),
    ("convolution_unused", "No layer uses the convolution.", {"convolutions": [{"taps": 2}]}),
    (
        "dense_block_undefined",
        "A layer names dense block 0, and there is none.",
        {"layers": [{"attention": 0, "experts": 0, "dense": 0}]},
    ),
    (
        "dense_block_undefined_beside_experts_of_its_number",
        "A layer names dense block 1, of one; there are two of experts.",
        {
            "layers": [{"attention": 0, "experts": 0, "dense": 0}, {"attention": 0, "experts": 1, "dense": 1}],
            "expert_blocks": _BLOCKS * 2,
            "dense_blocks": [{"intermediate": 1}],
        },
    ),
    (
        "convolution_undefined",
        "A layer names convolution 1 of 1.",
        {
            "layers": [{"attention": 0, "experts": 0}, {"experts": 0, "convolution": 1}],
            "convolutions": [{"taps": 2}],
        },
    ),
    (
        "attention_undefined_beside_a_right_one",
        "The first layer names attention 0, the second one attention 2 of 2.",
        {"attentions": _ATTENTIONS * 2, "layers": [{"attention": 0, "experts": 0}, {"attention": 2, "experts": 0}]},
    ),
]
for _name, _about, _changes in UNUSED:
    refuse("EMOE-MOD-008", _name, _about, _model(**_changes))


@accepted(committed=False)
def shape_classes_of_the_greatest_number() -> Sealed:
    """64 layers use 64 attentions, the last one first, and 64 expert blocks."""
    model = smallest_model()
    most = limits.MAX_SHAPE_CLASSES
    model["attentions"], model["expert_blocks"] = _ATTENTIONS * most, _BLOCKS * most
    model["layers"] = [{"attention": most - 1 - number, "experts": number} for number in range(most)]
    return draft(model).seal()


@accepted(committed=False)
def layers_of_the_greatest_number() -> Sealed:
    """There are 1024 layers, so 1026 ranges of dense records."""
    model = smallest_model()
    model["layers"] *= limits.MAX_LAYERS
    return draft(model).seal()


# Tokens


def _tokens(vocabulary: int, begin: int | None, ends: list[int]) -> Callable[[], Sealed]:
    def build() -> Sealed:
        model = {**smallest_model(), "vocabulary": vocabulary}
        if begin is not None:
            model["begin_token"] = begin
        if ends:
            model["end_tokens"] = ends
        return draft(model).seal()

    return build


accept("begin_token_of_the_last_row", "The begin token is the last one.", _tokens(3, 2, []))
accept("begin_token_0", "The begin token is 0, which is not the same as none.", _tokens(3, 0, []))
accept("end_tokens_of_the_greatest_number", "There are 64 end tokens, in no order.", _tokens(3, None, [2, 0] * 32))
MOST: Final = limits.MAX_DIMENSION - 1
refuse("EMOE-MOD-009", "begin_token_past_the_last_row", "The begin token is the first too high.", _tokens(3, 3, []))
refuse("EMOE-MOD-009", "begin_token_of_the_most", "The begin token is 2^24 - 1.", _tokens(3, MOST, []))
refuse("EMOE-MOD-009", "end_token_past_the_last_row", "The end token is the first too high.", _tokens(3, None, [3]))
refuse("EMOE-MOD-009", "end_token_too_high_in_between", "The second of three is too high.", _tokens(3, 2, [2, 3, 0]))
refuse("EMOE-MOD-009", "end_token_of_the_most", "The last of 64 is 2^24 - 1.", _tokens(3, None, [0] * 63 + [MOST]))


@refused("EMOE-LAY-005")
def vocabulary_at_the_limit() -> Sealed:
    """The vocabulary is 2^24, which it may be; but the weights are those of a smaller one."""
    return with_value(("model", "vocabulary"), limits.MAX_DIMENSION)


@refused("EMOE-LAY-005")
def hidden_at_the_limit() -> Sealed:
    """The residual stream is 2^24 wide, which it may be; but the weights are those of a narrower one."""
    return with_value(("model", "hidden"), limits.MAX_DIMENSION)


@refused("EMOE-LAY-005")
def intermediate_at_the_limit() -> Sealed:
    """An expert is 2^24 wide inside, which it may be; but the weights are those of a narrower one."""
    return with_value(("model", "expert_blocks", 0, "intermediate"), limits.MAX_DIMENSION)


# Which fault comes first


def _two_of_each() -> Draft:
    """The smallest package with a second layer, whose attention and experts are shape classes of their own."""
    model = smallest_model()
    for key in ("attentions", "expert_blocks"):
        model[key] += smallest_model()[key]
    model["layers"].append({"attention": 1, "experts": 1})
    return draft(model)


@accepted()
def two_shape_classes_of_each() -> Sealed:
    """Two layers have attentions and expert blocks of their own, which are alike."""
    return _two_of_each().seal()


def _both(rule: str, name: str, about: str, change: Callable[[Values], None]) -> None:
    def build() -> Sealed:
        made = _two_of_each()
        change(made.model())
        return made.seal()

    refuse(rule, name, about, build, base="two_shape_classes_of_each")


def _odd_then_infinite(model: Values) -> None:
    model["attentions"][0]["head_dim"] = 3
    model["attentions"][1]["rotary"]["theta"] = math.inf


def _infinite_and_odd(model: Values) -> None:
    model["attentions"][1].update(rotary={"theta": math.inf}, head_dim=3, key_value_heads=3, clip_qkv=math.inf)


def _epsilon_and_theta(model: Values) -> None:
    model["norm_epsilon"] = math.inf
    model["attentions"][0]["rotary"]["theta"] = math.inf


def _divided_and_odd(model: Values) -> None:
    model["attentions"][0].update(key_value_heads=3, head_dim=3)


def _odd_and_wide(model: Values) -> None:
    model["attentions"][0].update(heads=1 << 24, head_dim=3)


def _top_k_and_odd(model: Values) -> None:
    model["expert_blocks"][0]["router"]["top_k"] = 2
    model["attentions"][1]["head_dim"] = 3


def _top_k_and_unused(model: Values) -> None:
    model["expert_blocks"][1]["router"]["top_k"] = 2
    model["layers"][1]["attention"] = 0


def _unused_and_token(model: Values) -> None:
    model["layers"][1]["attention"] = 0
    put({"model": model}, ("model", "end_tokens"), [1])


_both(
    "EMOE-MOD-005",
    "head_odd_before_theta_infinite",
    "The first attention has an odd head and the second one an infinite `theta`: they are judged one by one.",
    _odd_then_infinite,
)
_both("EMOE-MOD-002", "attention_all_wrong", "An attention breaks every rule; `theta` comes first.", _infinite_and_odd)
_both("EMOE-MOD-001", "epsilon_and_theta_infinite", "`norm_epsilon` and `theta` are infinite.", _epsilon_and_theta)
_both("EMOE-MOD-004", "heads_not_divided_and_odd", "Heads are neither divided nor even.", _divided_and_odd)
_both("EMOE-MOD-005", "heads_odd_and_too_wide", "Heads are odd, and together too wide.", _odd_and_wide)
_both("EMOE-MOD-005", "top_k_too_high_and_heads_odd", "Attentions are judged before experts.", _top_k_and_odd)
_both("EMOE-MOD-007", "top_k_too_high_and_attention_unused", "`top_k` is judged before use.", _top_k_and_unused)
_both("EMOE-MOD-008", "attention_unused_and_token_too_high", "Use is judged before tokens.", _unused_and_token)


@refused("EMOE-MOD-007", base="two_shape_classes_of_each")
def top_k_too_high_in_the_second_block() -> Sealed:
    """The second block chooses two of one expert; for the first block, of two, that would do."""
    model = _two_of_each().model()
    model["expert_blocks"][0]["experts"] = 2
    model["expert_blocks"][1]["router"]["top_k"] = 2
    return draft(model).seal()
