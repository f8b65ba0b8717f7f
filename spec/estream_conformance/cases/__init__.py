"""All cases, by what they are about. Each function is one vector."""

from estream_conformance.cases import (
    directories,
    extents,
    manifest_keys,
    manifest_spellings,
    manifest_strings,
    manifest_values,
    manifests,
    sections,
    sound,
    superblocks,
    twins,
)

__all__ = [
    "directories",
    "extents",
    "manifest_keys",
    "manifest_spellings",
    "manifest_strings",
    "manifest_values",
    "manifests",
    "sections",
    "sound",
    "superblocks",
    "twins",
]
