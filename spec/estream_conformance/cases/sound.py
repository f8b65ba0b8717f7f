"""Packages that every reader accepts."""

from __future__ import annotations

from estream_conformance import packages
from estream_conformance.builder import Sealed
from estream_conformance.case import accepted


@accepted(base=None)
def smallest() -> Sealed:
    """The smallest package: one layer, one expert, all weights f32."""
    return packages.smallest().seal()


@accepted(base=None)
def full() -> Sealed:
    """A package with every choice taken: quantised weights, several shape classes, both documents, extensions."""
    return packages.full().seal()
