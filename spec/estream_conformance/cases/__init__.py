"""All cases, by what they are about. Each function is one vector."""

from estream_conformance.cases import (
    codecs,
    directories,
    documents,
    extents,
    graphs,
    manifest_keys,
    manifest_spellings,
    manifest_strings,
    manifest_values,
    manifests,
    models,
    padding,
    sections,
    sound,
    superblocks,
    twins,
)

__all__ = [
    "codecs",
    "directories",
    "documents",
    "extents",
    "graphs",
    "manifest_keys",
    "manifest_spellings",
    "manifest_strings",
    "manifest_values",
    "manifests",
    "models",
    "padding",
    "sections",
    "sound",
    "superblocks",
    "twins",
]
