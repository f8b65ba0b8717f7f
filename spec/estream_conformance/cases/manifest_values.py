"""Each key of each struct of the manifest: missing, nil, of another type, out of range. FORMAT.md sections 6 and 8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from estream_conformance.builder import Sealed
from estream_conformance.case import accepted
from estream_conformance.changes import (
    NAMES,
    PLACES,
    SOURCE,
    base_of,
    drop,
    miswritten,
    refuse,
    spelled,
    value_at,
    with_binary,
    with_source,
)
from estream_conformance.packages import binary
from estream_spec import limits

RULE: Final = "EMOE-MAN-002"


@dataclass(frozen=True)
class Kind:
    """A type with its range.

    Attributes:
        other: a value of another type, and what it is.
        below: out of the range.
        above: out of the range at the other end.
        repeats: an array that is too long has so many elements like the first.
        nil: nil is in the range.
    """

    other: tuple[str, Any]
    below: Any = None
    above: Any = None
    repeats: int = 0
    nil: bool = False


def integer(least: int, most: int, *, nil: bool = False) -> Kind:
    """An integer of a range."""
    return Kind(("a float", 1.0), least - 1, most + 1, nil=nil)


def positive(*, nil: bool = False) -> Kind:
    """A float above 0."""
    return Kind(("a string", "8"), 0.0, nil=nil)


def choice(foreign: str) -> Kind:
    """One of some strings, of which `foreign` is none."""
    return Kind(("a byte string", b"f32"), above=foreign)


def array(least: int, most: int) -> Kind:
    """An array of so many elements."""
    return Kind(("a map", {}), [] if least else None, repeats=most + 1)


NAME: Final = Kind(("a byte string", b"n"), "", "n" * (limits.MAX_NAME + 1))
TEXT: Final = Kind(("a byte string", b"n"), above="n" * (limits.MAX_TEXT + 1))
DIGEST: Final = Kind(("a string", "d" * 32), bytes(31), bytes(33))
DIMENSION: Final = integer(1, limits.MAX_DIMENSION)
OFFSET: Final = integer(0, limits.MAX_FILE_LENGTH)
CLASS_OR_NIL: Final = integer(0, limits.MAX_SHAPE_CLASSES - 1, nil=True)
DIMENSION_OR_NIL: Final = integer(1, limits.MAX_DIMENSION, nil=True)
NOT_NEGATIVE: Final = Kind(("a string", "0"), -5e-324)
BOOLEAN: Final = Kind(("an integer", 0))
STRUCT: Final = Kind(("an array", []))

KINDS: Final[dict[str, dict[str, Kind]]] = {
    "": {
        "name": NAME,
        "content_id": DIGEST,
        "model": STRUCT,
        "layouts": array(1, 4 * limits.MAX_SHAPE_CLASSES),
        "graphs": array(1, limits.MAX_GRAPHS),
        "device_configurations": array(1, limits.MAX_DEVICE_CONFIGURATIONS),
        "provenance": STRUCT,
        "binaries": array(0, limits.MAX_BINARIES),
        "extensions": Kind(
            ("an array", ["a", b""]), above={f"{number:03}": b"" for number in range(limits.MAX_EXTENSIONS + 1)}
        ),
    },
    "layouts": {
        "payload_length": integer(1, limits.MAX_RECORD_LENGTH),
        "matrices": array(0, limits.MAX_TENSORS),
        "tensors": array(1, limits.MAX_TENSORS),
        "kind": integer(1, 1),
    },
    "matrices": {"name": NAME, "encoding": choice("w4g128"), "rows": DIMENSION, "columns": DIMENSION},
    "tensors": {"name": NAME, "dtype": choice("f16"), "shape": array(1, 2), "offset": OFFSET},
    "graphs": {
        "section": integer(0, (1 << 32) - 1),
        "target": choice("native"),
        "role": choice("moe"),
        "shape_class": integer(0, 1023),
        "weights": choice("int4"),
        "activations": choice("int8"),
    },
    "device_configurations": {
        "name": NAME,
        "arena_bytes": OFFSET,
        "group_size": integer(1, limits.MAX_EXPERTS),
        "prefetch_depth": integer(0, limits.MAX_EXPERTS),
        "lanes": integer(1, limits.MAX_LANES),
        "policy": choice("eager"),
        "prompt_tokens": integer(0, limits.MAX_DIMENSION),
    },
    "provenance": {"writer": NAME, "licence": TEXT, "sources": array(0, limits.MAX_SOURCES)},
    "sources": {"name": TEXT, "length": OFFSET, "sha256": DIGEST},
    "binaries": {
        "section": integer(0, (1 << 32) - 1),
        "target": choice("portable"),
        "soc_model": integer(1, (1 << 32) - 1),
        "architecture": integer(1, (1 << 16) - 1),
        "sdk": Kind(("an integer", 2), "", ".".join(["1" * 18] * 6 + ["1" * 15])),
        "compiler": NAME,
        "graphs": array(1, limits.MAX_BINARY_GRAPHS),
        "options": TEXT,
    },
    "binary_graphs": {
        "name": NAME,
        "role": choice("moe"),
        "shape_class": integer(0, 1023),
        "tokens": DIMENSION,
        "keys": integer(0, limits.MAX_DIMENSION),
        "encodings": array(0, limits.MAX_TENSORS),
    },
    "model": {
        "family": NAME,
        "hidden": DIMENSION,
        "vocabulary": DIMENSION,
        "context_length": DIMENSION,
        "norm_epsilon": NOT_NEGATIVE,
        "layers": array(1, limits.MAX_LAYERS),
        "attentions": array(1, limits.MAX_SHAPE_CLASSES),
        "expert_blocks": array(1, limits.MAX_SHAPE_CLASSES),
        "tied_head": BOOLEAN,
        "begin_token": integer(0, limits.MAX_DIMENSION - 1, nil=True),
        "end_tokens": array(0, limits.MAX_END_TOKENS),
        "dense_blocks": array(0, limits.MAX_SHAPE_CLASSES),
        "convolutions": array(0, limits.MAX_SHAPE_CLASSES),
        "norm": choice("batch"),
        "head_bias": BOOLEAN,
    },
    "layers": {
        **dict.fromkeys(("attention", "experts", "dense", "convolution"), CLASS_OR_NIL),
        "window": DIMENSION_OR_NIL,
    },
    "attentions": {
        "heads": DIMENSION,
        "key_value_heads": DIMENSION,
        "head_dim": DIMENSION,
        "rotary": STRUCT,
        "qk_norm": choice("heads"),
        "clip_qkv": positive(nil=True),
        "value_dim": DIMENSION_OR_NIL,
        "scale": positive(nil=True),
        "bias": BOOLEAN,
        "out_bias": BOOLEAN,
        "sinks": BOOLEAN,
        "latent": Kind(("an array", []), nil=True),
    },
    "rotary": {
        "theta": Kind(("a boolean", True), 0.0),
        "width": DIMENSION_OR_NIL,
        "frequencies": array(0, limits.MAX_FREQUENCIES),
        "scale": positive(),
    },
    "latent": {"rank": DIMENSION, "norm_epsilon": NOT_NEGATIVE, "query_rank": DIMENSION_OR_NIL},
    "convolutions": {"taps": integer(2, limits.MAX_TAPS)},
    "expert_blocks": {
        "experts": integer(1, limits.MAX_EXPERTS),
        "intermediate": DIMENSION,
        "router": STRUCT,
        "activation": choice("gelu"),
        "limit": positive(nil=True),
        "bias": BOOLEAN,
    },
    "dense_blocks": {"intermediate": DIMENSION, "share": BOOLEAN},
    "router": {
        "family": choice("sigmoid"),
        "top_k": DIMENSION,
        "bias": BOOLEAN,
        "selection_bias": BOOLEAN,
        "groups": integer(1, limits.MAX_EXPERTS),
        "top_groups": integer(1, limits.MAX_EXPERTS),
        "group_score": choice("mean"),
        "scale": positive(),
        "epsilon": NOT_NEGATIVE,
        "tolerance": NOT_NEGATIVE,
    },
}
"""Types and ranges, as the tables have them."""

REQUIRED: Final = {
    "": {"name", "content_id", "model", "layouts", "graphs", "device_configurations", "provenance"},
    "layouts": {"payload_length", "matrices", "tensors"},
    "device_configurations": {"name", "arena_bytes", "group_size", "prefetch_depth"},
    "provenance": {"writer"},
    "binaries": {"section", "target", "soc_model", "architecture", "sdk", "compiler", "graphs"},
    "binary_graphs": {"name", "role", "shape_class", "tokens"},
    "model": {
        *("family", "hidden", "vocabulary", "context_length", "norm_epsilon", "layers", "attentions", "expert_blocks")
    },
    "layers": set[str](),
    "attentions": {"heads", "key_value_heads", "head_dim", "rotary"},
    "rotary": {"theta"},
    "latent": {"rank", "norm_epsilon"},
    "expert_blocks": {"experts", "intermediate", "router"},
    "dense_blocks": {"intermediate"},
    "router": {"family", "top_k"},
}
"""Keys that must be there, of structs that have others."""
SAMPLES: Final[dict[str, Any]] = {
    "end_tokens": 0,
    "sources": SOURCE,
    "binaries": binary(0),
    "encodings": "f32",
    "frequencies": 1.0,
    "dense_blocks": {"intermediate": 1},
    "convolutions": {"taps": 2},
}
"""Elements of arrays that are empty in the smallest package."""


def _register(struct: str, key: str, kind: Kind) -> None:
    base, of = base_of(struct)
    path = (*PLACES[struct], key)
    own = NAMES.get(struct, struct)
    name, what = f"{own}_{key}", f"`{key}` of a {own}"

    def bad(suffix: str, about: str, value: Any, *, committed: bool = True) -> None:
        refuse(RULE, f"{name}_{suffix}", about, lambda: spelled(path, value, base()), base=of, committed=committed)

    if key in REQUIRED.get(struct, KINDS[struct]):
        refuse(
            RULE,
            f"{name}_missing",
            f"{what} is missing.",
            lambda: miswritten(lambda values: drop(values, path), base()),
            base=of,
        )
    if not kind.nil:
        bad("nil", f"{what} is nil.", None)
    bad(f"as_{kind.other[0].split(' ', 1)[1].replace(' ', '_')}", f"{what} is {kind.other[0]}.", kind.other[1])
    if kind.below is not None:
        bad("below_its_range", f"{what} is just below its range.", kind.below)
    if kind.above is not None:
        foreign = isinstance(kind.above, str) and kind.below is None and len(kind.above) < limits.MAX_NAME
        suffix, where = (
            ("of_no_known_value", "none of its values") if foreign else ("above_its_range", "just above its")
        )
        about = f"{what} is {where}." if foreign else f"{what} is {where} range."
        bad(suffix, about, kind.above)
    if kind.repeats:
        element = SAMPLES[key] if key in SAMPLES else value_at(base().manifest, path)[0]
        about = f"{what} has {kind.repeats} elements, one too many."
        bad("with_one_too_many", about, [element] * kind.repeats, committed=kind.repeats < 200)


for _struct, _keys in KINDS.items():
    for _key, _kind in _keys.items():
        _register(_struct, _key, _kind)


@accepted()
def one_source() -> Sealed:
    """The provenance names a source."""
    return with_source().seal()


@accepted()
def one_binary() -> Sealed:
    """There is a binary, with one graph."""
    return with_binary().seal()
