"""All cases, by what they are about. Each function is one vector."""

from estream_conformance.cases import (
    manifest_keys,
    manifest_spellings,
    manifest_strings,
    manifest_values,
    manifests,
    sound,
    superblocks,
    twins,
)

__all__ = [
    "manifest_keys",
    "manifest_spellings",
    "manifest_strings",
    "manifest_values",
    "manifests",
    "sound",
    "superblocks",
    "twins",
]
