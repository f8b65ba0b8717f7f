"""All cases, by what they are about. Each function is one vector."""

from estream_conformance.cases import manifest_values, sound, superblocks, twins

__all__ = ["manifest_values", "sound", "superblocks", "twins"]
