"""Making a record where the checkpoint is not open yet: in another process, perhaps on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Self

import numpy as np

from estream_packer.assemble import assemble
from estream_packer.checkpoint import Checkpoint, open_checkpoint
from estream_packer.families import TensorSource
from estream_packer.remote import Place
from estream_packer.writer import PackedRecord
from estream_spec import __version__
from estream_spec.errors import PackError
from estream_spec.manifest import RecordLayout
from estream_spec.weights import Floats

VERSIONS: Final = f"estream-pack {__version__} with numpy {np.__version__}"
"""What decides a record besides the checkpoint and the options."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint, and who is to read it.

    Attributes:
        folder: where it is.
        fingerprint: tells it from another one.
        versions: of the program that asks.
    """

    folder: Place
    fingerprint: bytes
    versions: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Where others find an open checkpoint."""
        folder = checkpoint.folder
        return cls(folder.absolute() if isinstance(folder, Path) else folder, checkpoint.fingerprint(), VERSIONS)


def make_record(
    origin: Origin,
    layout: RecordLayout,
    length: int,
    sources: Mapping[str, TensorSource],
    importance: Mapping[str, Floats],
) -> PackedRecord:
    """Make one record, as `assemble` does.

    Raises:
        PackError: this is another version than asked for, the checkpoint cannot be opened here or is another one here,
            or a tensor is refused.
    """
    return assemble(_opened(origin), layout, length, sources, importance)


_lock = Lock()
_open: dict[Origin, Checkpoint] = {}
"""The checkpoint this process used last. Records of one checkpoint follow each other by the thousand."""


def _opened(origin: Origin) -> Checkpoint:
    with _lock:
        if origin not in _open:
            checkpoint = _open_checked(origin)
            # One that is still read from is closed when its last reader lets it go.
            _open.clear()
            _open[origin] = checkpoint
        return _open[origin]


def _open_checked(origin: Origin) -> Checkpoint:
    if origin.versions != VERSIONS:
        raise PackError(f"a worker runs {VERSIONS}, expected {origin.versions}", hint="install the same everywhere")
    checkpoint = open_checkpoint(origin.folder)
    if checkpoint.fingerprint() != origin.fingerprint:
        checkpoint.close()
        hint = "put it where all workers see the very same files"
        raise PackError("a worker finds another checkpoint there", path=str(origin.folder), hint=hint)
    return checkpoint
