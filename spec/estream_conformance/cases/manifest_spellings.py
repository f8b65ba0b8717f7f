"""Values of the manifest in another spelling than the one they have. FORMAT.md section 6.1."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Values
from estream_conformance.case import refused
from estream_conformance.changes import Path, base_of, miswritten, put, refuse, spelled
from estream_conformance.kinds import with_convolution
from estream_conformance.messagepack import Raw, encode

HIDDEN: Final[Path] = ("model", "hidden")
CONTEXT: Final[Path] = ("model", "context_length")
THETA: Final[Path] = ("model", "attentions", 0, "rotary", "theta")
EPSILON: Final[Path] = ("model", "norm_epsilon")


def _spelled(rule: str, name: str, about: str, path: Path, data: bytes) -> None:
    refuse(rule, name, about, lambda: spelled(path, Raw(data)))


WIDTHS: Final = {
    "uint8": b"\xcc\1",
    "uint16": b"\xcd\0\1",
    "uint32": b"\xce\0\0\0\1",
    "uint64": b"\xcf\0\0\0\0\0\0\0\1",
    "int8": b"\xd0\1",
    "int16": b"\xd1\0\1",
    "int32": b"\xd2\0\0\0\1",
    "int64": b"\xd3\0\0\0\0\0\0\0\1",
}
for _width, _data in WIDTHS.items():
    _spelled("EMOE-MAN-003", f"one_as_{_width}", f"The integer 1 is written as {_width}.", HIDDEN, _data)

LARGER: Final = [
    (128, "int16", b"\xd1\0\x80"),
    (255, "uint16", b"\xcd\0\xff"),
    (32767, "int16", b"\xd1\x7f\xff"),
    (65535, "uint32", b"\xce\0\0\xff\xff"),
    (65536, "int32", b"\xd2\0\1\0\0"),
    (65536, "uint64", b"\xcf\0\0\0\0\0\1\0\0"),
]
for _value, _width, _data in LARGER:
    _spelled("EMOE-MAN-003", f"{_value}_as_{_width}", f"The integer {_value} is written as {_width}.", CONTEXT, _data)

FLOATS: Final[list[tuple[str, str, str, Path, bytes]]] = [
    ("EMOE-MAN-003", "theta_as_f32", "`theta` is 1.0 as a 32-bit float.", THETA, b"\xca" + struct.pack(">f", 1.0)),
    ("EMOE-MAN-003", "theta_as_1", "`theta` is the integer 1.", THETA, b"\1"),
    ("EMOE-MAN-003", "theta_as_greatest_integer", "`theta` is the integer 2^64 - 1.", THETA, b"\xcf" + b"\xff" * 8),
    ("EMOE-MAN-003", "norm_epsilon_as_f32", "`norm_epsilon` is 0.0 as a 32-bit float.", EPSILON, b"\xca\0\0\0\0"),
    ("EMOE-MAN-003", "norm_epsilon_as_0", "`norm_epsilon` is the integer 0.", EPSILON, b"\0"),
    ("EMOE-MAN-003", "theta_f32_infinity", "`theta` is infinite, as a 32-bit float.", THETA, b"\xca\x7f\x80\0\0"),
    ("EMOE-MAN-002", "theta_as_0", "`theta` is the integer 0, which is out of its range.", THETA, b"\0"),
    (
        "EMOE-MAN-002",
        "theta_as_f32_zero",
        "`theta` is 0.0 as a 32-bit float, out of its range.",
        THETA,
        b"\xca\0\0\0\0",
    ),
    ("EMOE-MAN-002", "theta_f32_nan", "`theta` is no number, as a 32-bit float.", THETA, b"\xca\x7f\xc0\0\0"),
    ("EMOE-MAN-002", "norm_epsilon_as_minus_1", "`norm_epsilon` is the integer -1.", EPSILON, b"\xff"),
    ("EMOE-MAN-002", "theta_as_least_integer", "`theta` is the integer -2^63.", THETA, b"\xd3\x80" + bytes(7)),
]
for _rule, _name, _about, _path, _data in FLOATS:
    _spelled(_rule, _name, _about, _path, _data)

INTEGERS: Final[list[tuple[str, str, Path, bytes]]] = [
    ("hidden_of_2_to_the_32_plus_1", "`hidden` is 2^32 + 1.", HIDDEN, b"\xcf\0\0\0\1\0\0\0\1"),
    ("hidden_of_2_to_the_63", "`hidden` is 2^63.", HIDDEN, b"\xcf\x80" + bytes(7)),
    ("hidden_of_2_to_the_64_less_1", "`hidden` is 2^64 - 1.", HIDDEN, b"\xcf" + b"\xff" * 8),
    ("hidden_of_minus_1", "`hidden` is -1.", HIDDEN, b"\xff"),
    ("hidden_of_minus_2_to_the_63", "`hidden` is -2^63.", HIDDEN, b"\xd3\x80" + bytes(7)),
    ("hidden_true", "`hidden` is true.", HIDDEN, b"\xc3"),
    ("hidden_ext", "`hidden` is an ext that holds a 1.", HIDDEN, b"\xd4\0\1"),
    (
        "arena_of_2_to_the_64_less_1",
        "`arena_bytes` is 2^64 - 1.",
        ("device_configurations", 0, "arena_bytes"),
        b"\xcf" + b"\xff" * 8,
    ),
    (
        "tensor_offset_of_2_to_the_64_less_128",
        "A tensor's offset is 2^64 - 128.",
        ("layouts", 0, "tensors", 0, "offset"),
        b"\xcf" + b"\xff" * 7 + b"\x80",
    ),
    (
        "payload_length_of_2_to_the_64_less_1",
        "`payload_length` is 2^64 - 1.",
        ("layouts", 0, "payload_length"),
        b"\xcf" + b"\xff" * 8,
    ),
    (
        "layer_attention_of_256",
        "A layer names attention 256, which is 0 in 8 bits.",
        ("model", "layers", 0, "attention"),
        b"\xcd\1\0",
    ),
    ("dimension_nil", "A dimension of a tensor is nil.", ("layouts", 0, "tensors", 0, "shape", 0), b"\xc0"),
    ("dimension_0", "A dimension of a tensor is 0.", ("layouts", 0, "tensors", 0, "shape", 0), b"\0"),
    (
        "dimension_float",
        "A dimension of a tensor is 1.0.",
        ("layouts", 0, "tensors", 0, "shape", 0),
        b"\xcb\x3f\xf0" + bytes(6),
    ),
    (
        "dimension_above_its_range",
        "A dimension of a tensor is 2^24 + 1.",
        ("layouts", 0, "tensors", 0, "shape", 0),
        b"\xce\1\0\0\1",
    ),
    ("end_token_nil", "An end token is nil.", ("model", "end_tokens"), b"\x91\xc0"),
    ("end_token_of_minus_1", "An end token is -1.", ("model", "end_tokens"), b"\x91\xff"),
    ("end_token_above_its_range", "An end token is 2^24.", ("model", "end_tokens"), b"\x91\xce\1\0\0\0"),
    ("layer_as_an_integer", "A layer is an integer.", ("model", "layers", 0), b"\0"),
    ("attention_nil", "An attention is nil.", ("model", "attentions", 0), b"\xc0"),
    (
        "graph_as_an_array",
        "A graph is an array of its values without keys.",
        ("graphs", 0),
        b"\x96\0\xa8portable\xa3qkv\0\xa3f32\xa3f32",
    ),
    ("norm_epsilon_nan", "`norm_epsilon` is not a number.", EPSILON, b"\xcb\x7f\xf8" + bytes(6)),
    ("theta_nan", "`theta` is not a number.", THETA, b"\xcb\x7f\xf8" + bytes(6)),
    ("theta_nan_with_sign", "`theta` is not a number, and its sign is set.", THETA, b"\xcb\xff\xf8" + bytes(6)),
    ("theta_signalling_nan", "`theta` is a signalling NaN.", THETA, b"\xcb\x7f\xf0" + bytes(5) + b"\1"),
    ("clip_qkv_nan", "`clip_qkv` is not a number.", ("model", "attentions", 0, "clip_qkv"), b"\xcb\x7f\xf8" + bytes(6)),
    ("theta_negative", "`theta` is -1.0.", THETA, b"\xcb\xbf\xf0" + bytes(6)),
    ("theta_minus_zero", "`theta` is -0.0.", THETA, b"\xcb\x80" + bytes(7)),
    (
        "clip_qkv_minus_infinity",
        "`clip_qkv` is minus infinity.",
        ("model", "attentions", 0, "clip_qkv"),
        b"\xcb\xff\xf0" + bytes(6),
    ),
    ("norm_epsilon_minus_infinity", "`norm_epsilon` is minus infinity.", EPSILON, b"\xcb\xff\xf0" + bytes(6)),
    ("tied_head_nil_ext", "`tied_head` is an ext without bytes.", ("model", "tied_head"), b"\xc7\0\0"),
]
for _name, _about, _path, _data in INTEGERS:
    _spelled("EMOE-MAN-002", _name, _about, _path, _data)

# Strings, byte strings, arrays and maps in a longer form


def _longer(name: str, about: str, path: Path, head: str) -> None:
    """The value at a path with another head: `{}` in `head` is its length in hexadecimal digits."""

    def change(manifest: Values) -> Any:
        holder: Any = manifest
        for step in path:
            holder = holder[step]
        raw = encode(holder)
        own = 2 if isinstance(holder, bytes) else 1
        again = Raw(bytes.fromhex(head.format(len(holder))) + raw[own:])
        if not path:
            return again
        put(manifest, path, again)
        return None

    refuse("EMOE-MAN-003", name, about, lambda: miswritten(change))


_longer("name_as_str8", "The name, of one character, is written as str8.", ("name",), "d9{:02x}")
_longer("name_as_str16", "The name, of one character, is written as str16.", ("name",), "da{:04x}")
_longer("name_as_str32", "The name, of one character, is written as str32.", ("name",), "db{:08x}")
_longer("choice_as_str8", "The role of a graph is written as str8.", ("graphs", 0, "role"), "d9{:02x}")
_longer("content_id_as_bin16", "`content_id` is written as bin16.", ("content_id",), "c5{:04x}")
_longer("content_id_as_bin32", "`content_id` is written as bin32.", ("content_id",), "c6{:08x}")
_longer("layers_as_array16", "The array of layers is written as array16.", ("model", "layers"), "dc{:04x}")
_longer("layers_as_array32", "The array of layers is written as array32.", ("model", "layers"), "dd{:08x}")
_longer("layer_as_map16", "A layer is written as map16.", ("model", "layers", 0), "de{:04x}")
_longer("layer_as_map32", "A layer is written as map32.", ("model", "layers", 0), "df{:08x}")
_longer("manifest_as_map16", "The manifest is written as map16.", (), "de{:04x}")
_longer("manifest_as_map32", "The manifest is written as map32.", (), "df{:08x}")


@refused("EMOE-MAN-003")
def key_as_str8() -> Sealed:
    """The first key of the manifest is written as str8."""
    return miswritten(lambda manifest: Raw(encode(manifest).replace(b"\xa4name", b"\xd9\4name", 1)))


@refused("EMOE-MAN-003")
def name_of_32_characters_as_str16() -> Sealed:
    """The name has 32 characters, for which str8 is the shortest form, and is written as str16."""
    return spelled(("name",), Raw(b"\xda\0\x20" + b"n" * 32))


# Defaults


def _respelled(path: Path, value: Any, make: Callable[[], Draft]) -> Sealed:
    return spelled(path, value, make())


ATTENTION: Final[Path] = ("model", "attentions", 0)
BLOCK: Final[Path] = ("model", "expert_blocks", 0)
LAYER: Final[Path] = ("model", "layers", 0)
ROUTER: Final[Path] = (*BLOCK, "router")

DEFAULTS: Final[list[tuple[str, Path, Any]]] = [
    ("binaries", ("binaries",), []),
    ("extensions", ("extensions",), {}),
    ("kind", ("layouts", 0, "kind"), 1),
    ("licence", ("provenance", "licence"), ""),
    ("sources", ("provenance", "sources"), []),
    ("tied_head", ("model", "tied_head"), False),
    ("begin_token", ("model", "begin_token"), None),
    ("end_tokens", ("model", "end_tokens"), []),
    ("dense_blocks", ("model", "dense_blocks"), []),
    ("convolutions", ("model", "convolutions"), []),
    ("norm", ("model", "norm"), "rms"),
    ("head_bias", ("model", "head_bias"), False),
    ("dense", (*LAYER, "dense"), None),
    ("convolution", (*LAYER, "convolution"), None),
    ("window", (*LAYER, "window"), None),
    ("qk_norm", (*ATTENTION, "qk_norm"), "none"),
    ("clip_qkv", (*ATTENTION, "clip_qkv"), None),
    ("value_dim", (*ATTENTION, "value_dim"), None),
    ("attention_scale", (*ATTENTION, "scale"), None),
    ("attention_bias", (*ATTENTION, "bias"), False),
    ("out_bias", (*ATTENTION, "out_bias"), False),
    ("sinks", (*ATTENTION, "sinks"), False),
    ("latent", (*ATTENTION, "latent"), None),
    ("width", (*ATTENTION, "rotary", "width"), None),
    ("frequencies", (*ATTENTION, "rotary", "frequencies"), []),
    ("rotary_scale", (*ATTENTION, "rotary", "scale"), 1.0),
    ("activation", (*BLOCK, "activation"), "silu"),
    ("limit", (*BLOCK, "limit"), None),
    ("expert_bias", (*BLOCK, "bias"), False),
    ("router_bias", (*ROUTER, "bias"), False),
    ("selection_bias", (*ROUTER, "selection_bias"), False),
    ("groups", (*ROUTER, "groups"), 1),
    ("top_groups", (*ROUTER, "top_groups"), 1),
    ("group_score", (*ROUTER, "group_score"), "largest"),
    ("router_scale", (*ROUTER, "scale"), 1.0),
    ("epsilon", (*ROUTER, "epsilon"), 0.0),
    ("tolerance", (*ROUTER, "tolerance"), 0.0),
    ("lanes", ("device_configurations", 0, "lanes"), 2),
    ("policy", ("device_configurations", 0, "policy"), "pre-routing"),
    ("prompt_tokens", ("device_configurations", 0, "prompt_tokens"), 0),
]


def _default(name: str, path: Path, value: Any) -> None:
    about = f"The key `{name}` is there though it has its default value."
    refuse("EMOE-MAN-003", f"{name}_at_its_default", about, lambda: spelled(path, value))


for _name, _path, _value in DEFAULTS:
    _default(_name, _path, _value)

RESPELLED: Final[list[tuple[str, str, Path, Any]]] = [
    ("epsilon_minus_zero", "`epsilon` is -0.0, which equals its default.", (*ROUTER, "epsilon"), -0.0),
    ("router_scale_as_integer_1", "`scale` of a router is the integer 1, its default.", (*ROUTER, "scale"), 1),
    ("share_at_its_default", "`share` is there though it is false.", ("model", "dense_blocks", 0, "share"), False),
    (
        "query_rank_at_its_default",
        "`query_rank` is there though it is nil.",
        (*ATTENTION, "latent", "query_rank"),
        None,
    ),
]
for _name, _about, _path, _value in RESPELLED:
    _struct = str(_path[-2] if isinstance(_path[-2], str) else _path[-3])
    _make, _base = base_of(_struct)
    refuse("EMOE-MAN-003", _name, _about, partial(_respelled, _path, _value, _make), base=_base)


@refused("EMOE-MAN-003")
def attention_nil_where_there_is_a_convolution() -> Sealed:
    """A layer without attention says so, which is the default."""
    return spelled(("model", "layers", 0, "attention"), None, with_convolution())
