"""The tables of FORMAT.md sections 6 and 8 as data."""

from __future__ import annotations

from typing import Final

from second_reader import limits
from second_reader.schema import (
    Array,
    Binary,
    Boolean,
    Choice,
    Field,
    Float,
    Integer,
    NamedBytes,
    OrNil,
    Record,
    String,
    Version,
)

NAME: Final = String(1, limits.MAX_NAME)
TEXT: Final = String(0, limits.MAX_TEXT)
DIGEST: Final = Binary(32)
DIMENSION: Final = Integer(1, limits.MAX_DIMENSION)
TOKEN: Final = Integer(0, limits.MAX_DIMENSION - 1)
CLASS: Final = Integer(0, limits.MAX_SHAPE_CLASSES - 1)
OFFSET: Final = Integer(0, limits.MAX_FILE_LENGTH)
ENCODING: Final = Choice(("f32", "w8", "w4g32", "w4g64"))
ROLE: Final = Choice(("qkv", "attend", "convolve", "out", "expert", "dense", "head"))
POSITIVE: Final = Float(may_be_zero=False)
NOT_NEGATIVE: Final = Float(may_be_zero=True)

LAYER: Final = Record(
    Field("attention", OrNil(CLASS), None),
    Field("experts", OrNil(CLASS), None),
    Field("dense", OrNil(CLASS), None),
    Field("convolution", OrNil(CLASS), None),
    Field("window", OrNil(DIMENSION), None),
)
ROTARY: Final = Record(
    Field("theta", POSITIVE),
    Field("width", OrNil(DIMENSION), None),
    Field("frequencies", Array(POSITIVE, 0, limits.MAX_FREQUENCIES), []),
    Field("scale", POSITIVE, 1.0),
)
LATENT: Final = Record(
    Field("rank", DIMENSION),
    Field("norm_epsilon", NOT_NEGATIVE),
    Field("query_rank", OrNil(DIMENSION), None),
)
ATTENTION: Final = Record(
    Field("heads", DIMENSION),
    Field("key_value_heads", DIMENSION),
    Field("head_dim", DIMENSION),
    Field("rotary", ROTARY),
    Field("qk_norm", Choice(("none", "full", "head")), "none"),
    Field("clip_qkv", OrNil(POSITIVE), None),
    Field("value_dim", OrNil(DIMENSION), None),
    Field("scale", OrNil(POSITIVE), None),
    Field("bias", Boolean(), False),
    Field("out_bias", Boolean(), False),
    Field("sinks", Boolean(), False),
    Field("latent", OrNil(LATENT), None),
)
CONVOLUTION: Final = Record(Field("taps", Integer(2, limits.MAX_TAPS)))
FAMILIES: Final = (
    "softmax-topk",
    "softmax-topk-renormalise",
    "sigmoid-topk",
    "sigmoid-topk-renormalise",
    "sparsemixer",
)
ROUTER: Final = Record(
    Field("family", Choice(FAMILIES)),
    Field("top_k", DIMENSION),
    Field("bias", Boolean(), False),
    Field("selection_bias", Boolean(), False),
    Field("groups", Integer(1, limits.MAX_EXPERTS), 1),
    Field("top_groups", Integer(1, limits.MAX_EXPERTS), 1),
    Field("group_score", Choice(("largest", "two-largest")), "largest"),
    Field("scale", POSITIVE, 1.0),
    Field("epsilon", NOT_NEGATIVE, 0.0),
    Field("tolerance", NOT_NEGATIVE, 0.0),
)
EXPERT_BLOCK: Final = Record(
    Field("experts", Integer(1, limits.MAX_EXPERTS)),
    Field("intermediate", DIMENSION),
    Field("router", ROUTER),
    Field("activation", Choice(("silu", "clamped-swiglu")), "silu"),
    Field("limit", OrNil(POSITIVE), None),
    Field("bias", Boolean(), False),
)
DENSE_BLOCK: Final = Record(Field("intermediate", DIMENSION), Field("share", Boolean(), False))
MODEL: Final = Record(
    Field("family", NAME),
    Field("hidden", DIMENSION),
    Field("vocabulary", DIMENSION),
    Field("context_length", DIMENSION),
    Field("norm_epsilon", NOT_NEGATIVE),
    Field("layers", Array(LAYER, 1, limits.MAX_LAYERS)),
    Field("attentions", Array(ATTENTION, 1, limits.MAX_SHAPE_CLASSES)),
    Field("expert_blocks", Array(EXPERT_BLOCK, 1, limits.MAX_SHAPE_CLASSES)),
    Field("tied_head", Boolean(), False),
    Field("begin_token", OrNil(TOKEN), None),
    Field("end_tokens", Array(TOKEN, 0, limits.MAX_END_TOKENS), []),
    Field("dense_blocks", Array(DENSE_BLOCK, 0, limits.MAX_SHAPE_CLASSES), []),
    Field("convolutions", Array(CONVOLUTION, 0, limits.MAX_SHAPE_CLASSES), []),
    Field("norm", Choice(("rms", "layer")), "rms"),
    Field("head_bias", Boolean(), False),
)
MATRIX: Final = Record(
    Field("name", NAME),
    Field("encoding", ENCODING),
    Field("rows", DIMENSION),
    Field("columns", DIMENSION),
)
TENSOR: Final = Record(
    Field("name", NAME),
    Field("dtype", Choice(("f32", "i8", "u8"))),
    Field("shape", Array(DIMENSION, 1, 2)),
    Field("offset", OFFSET),
)
LAYOUT: Final = Record(
    Field("payload_length", Integer(1, limits.MAX_RECORD_LENGTH)),
    Field("matrices", Array(MATRIX, 0, limits.MAX_TENSORS)),
    Field("tensors", Array(TENSOR, 1, limits.MAX_TENSORS)),
    Field("kind", Integer(1, 1), 1),
)
GRAPH: Final = Record(
    Field("section", Integer(0, 2**32 - 1)),
    Field("target", Choice(("portable",))),
    Field("role", ROLE),
    Field("shape_class", Integer(0, 1023)),
    Field("weights", Choice(("f32", "int8", "uint8"))),
    Field("activations", Choice(("f32", "dynamic-int8"))),
)
DEVICE_CONFIGURATION: Final = Record(
    Field("name", NAME),
    Field("arena_bytes", OFFSET),
    Field("group_size", Integer(1, limits.MAX_EXPERTS)),
    Field("prefetch_depth", Integer(0, limits.MAX_EXPERTS)),
    Field("lanes", Integer(1, limits.MAX_LANES), 2),
    Field("policy", Choice(("on-demand", "post-routing", "pre-routing", "resident")), "pre-routing"),
    Field("prompt_tokens", Integer(0, limits.MAX_DIMENSION), 0),
)
BINARY_GRAPH: Final = Record(
    Field("name", NAME),
    Field("role", ROLE),
    Field("shape_class", Integer(0, 1023)),
    Field("tokens", DIMENSION),
    Field("keys", Integer(0, limits.MAX_DIMENSION), 0),
    Field("encodings", Array(ENCODING, 0, limits.MAX_TENSORS), []),
)
BINARY: Final = Record(
    Field("section", Integer(0, 2**32 - 1)),
    Field("target", Choice(("htp",))),
    Field("soc_model", Integer(1, 2**32 - 1)),
    Field("architecture", Integer(1, 2**16 - 1)),
    Field("sdk", Version(limits.MAX_NAME)),
    Field("compiler", NAME),
    Field("graphs", Array(BINARY_GRAPH, 1, limits.MAX_BINARY_GRAPHS)),
    Field("options", TEXT, ""),
)
SOURCE: Final = Record(Field("name", TEXT), Field("length", OFFSET), Field("sha256", DIGEST))
PROVENANCE: Final = Record(
    Field("writer", NAME),
    Field("licence", TEXT, ""),
    Field("sources", Array(SOURCE, 0, limits.MAX_SOURCES), []),
)
MANIFEST: Final = Record(
    Field("name", NAME),
    Field("content_id", DIGEST),
    Field("model", MODEL),
    Field("layouts", Array(LAYOUT, 1, 4 * limits.MAX_SHAPE_CLASSES)),
    Field("graphs", Array(GRAPH, 1, limits.MAX_GRAPHS)),
    Field("device_configurations", Array(DEVICE_CONFIGURATION, 1, limits.MAX_DEVICE_CONFIGURATIONS)),
    Field("provenance", PROVENANCE),
    Field("binaries", Array(BINARY, 0, limits.MAX_BINARIES), []),
    Field("extensions", NamedBytes(NAME, limits.MAX_EXTENSIONS), []),
)
PREFETCH_LAYER: Final = Record(
    Field("layer", Integer(0, limits.MAX_LAYERS - 1)),
    Field("router", DIGEST),
    Field("weights", Binary()),
    Field("bias", Binary()),
    Field("confidence", Binary()),
    Field("thresholds", Binary()),
    Field("needed", Binary()),
    Field("target", Float(may_be_zero=False, most=1)),
)
PREFETCH_ROUTER: Final = Record(
    Field("model", DIGEST),
    Field("layers", Array(PREFETCH_LAYER, 1, limits.MAX_LAYERS)),
    Field("writer", NAME),
    Field("tokens", Integer(0, 2**48 - 1)),
    Field("sources", Array(SOURCE, 0, limits.MAX_SOURCES)),
    Field("overlap", Float(may_be_zero=True, most=1)),
    Field("extra", Float(may_be_zero=True, most=limits.MAX_EXPERTS)),
)
