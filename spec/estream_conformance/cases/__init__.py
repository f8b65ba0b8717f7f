"""All cases, by what they are about. Each function is one vector."""

from estream_conformance.cases import sound, superblocks

__all__ = ["sound", "superblocks"]
