"""Keys of the manifest's structs, in the order of their tables. FORMAT.md sections 6 and 8."""

from __future__ import annotations

from typing import Final

from estream_conformance.builder import Values

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "": (
        "name",
        "content_id",
        "model",
        "layouts",
        "graphs",
        "device_configurations",
        "provenance",
        "binaries",
        "extensions",
    ),
    "layouts": ("payload_length", "matrices", "tensors", "kind"),
    "matrices": ("name", "encoding", "rows", "columns"),
    "tensors": ("name", "dtype", "shape", "offset"),
    "graphs": ("section", "target", "role", "shape_class", "weights", "activations"),
    "device_configurations": (
        "name",
        "arena_bytes",
        "group_size",
        "prefetch_depth",
        "lanes",
        "policy",
        "prompt_tokens",
    ),
    "provenance": ("writer", "licence", "sources"),
    "sources": ("name", "length", "sha256"),
    "binaries": ("section", "target", "soc_model", "architecture", "sdk", "compiler", "graphs", "options"),
    "binary_graphs": ("name", "role", "shape_class", "tokens", "keys", "encodings"),
    "model": (
        "family",
        "hidden",
        "vocabulary",
        "context_length",
        "norm_epsilon",
        "layers",
        "attentions",
        "expert_blocks",
        "tied_head",
        "begin_token",
        "end_tokens",
        "dense_blocks",
        "convolutions",
        "norm",
        "head_bias",
    ),
    "layers": ("attention", "experts", "dense", "convolution", "window"),
    "attentions": (
        "heads",
        "key_value_heads",
        "head_dim",
        "rotary",
        "qk_norm",
        "clip_qkv",
        "value_dim",
        "scale",
        "bias",
        "out_bias",
        "sinks",
        "latent",
    ),
    "rotary": ("theta", "width", "frequencies", "scale"),
    "latent": ("rank", "norm_epsilon", "query_rank"),
    "convolutions": ("taps",),
    "expert_blocks": ("experts", "intermediate", "router", "activation", "limit", "bias"),
    "dense_blocks": ("intermediate", "share"),
    "router": (
        "family",
        "top_k",
        "bias",
        "selection_bias",
        "groups",
        "top_groups",
        "group_score",
        "scale",
        "epsilon",
        "tolerance",
    ),
}
"""The keys of each struct, by the key whose value it is or, in an array, stands in."""


def in_order(struct: str, values: Values) -> Values:
    """A struct's values with its keys in order."""
    return {key: values[key] for key in KEYS[struct] if key in values}
