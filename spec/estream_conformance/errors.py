"""What the program says where it is asked for something that cannot be."""

from __future__ import annotations

from estream_spec.errors import EmoeError


class UsageError(EmoeError):
    """The command line, or a file it names, asks for what there is not."""

    slug = "usage"


class UnwritableError(EmoeError):
    """A vector's file cannot be written here."""

    slug = "unwritable"
