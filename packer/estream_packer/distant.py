"""Making a record where the checkpoint is not open yet: in another process, perhaps on another machine."""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, Self

import numpy as np

from estream_packer.assemble import assemble
from estream_packer.checkpoint import Checkpoint, open_checkpoint
from estream_packer.families import TensorSource
from estream_packer.journal import StoppedError
from estream_packer.remote import Location
from estream_packer.writer import PackedRecord
from estream_spec import __version__
from estream_spec.errors import PackError
from estream_spec.manifest import RecordLayout
from estream_spec.weights import Floats

VERSIONS: Final = f"estream-pack {__version__} with numpy {np.__version__} on {platform.machine()}"
"""What decides a record besides the checkpoint and the options."""
SAME: Final = "put it where all workers see the very same files"
KEPT_OPEN: Final = 4
"""Checkpoints that a worker keeps open: more builds at a time than that share no cluster as a rule."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint, and who is to read it.

    Attributes:
        folder: where it is.
        fingerprint: tells it from another one.
        versions: of the program that asks.
    """

    folder: Location
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
        PackError: a tensor is refused.
        StoppedError: this is another version than asked for, or the checkpoint cannot be opened here or is another one.
    """
    return assemble(_opened(origin), layout, length, sources, importance)


_lock = Lock()
_open: OrderedDict[Origin, Checkpoint] = OrderedDict()
"""The checkpoints this process used last, the latest at the end."""


def let_go(origin: Origin) -> None:
    """Close a checkpoint that this process made records of, once nobody reads from it."""
    with _lock:
        _open.pop(origin, None)


def _opened(origin: Origin) -> Checkpoint:
    with _lock:
        if origin not in _open:
            _open[origin] = _open_checked(origin)
            if len(_open) > KEPT_OPEN:  # one that is still read from is closed when its last reader lets it go
                _open.popitem(last=False)
        _open.move_to_end(origin)
        return _open[origin]


def _open_checked(origin: Origin) -> Checkpoint:
    if origin.versions != VERSIONS:
        message = f"a worker runs {VERSIONS}, expected {origin.versions}"
        raise StoppedError(message, hint="install the same everywhere")
    try:
        checkpoint = open_checkpoint(origin.folder)
    except PackError as error:
        raise StoppedError(
            f"a worker cannot open the checkpoint: {error.message}", path=error.path, hint=SAME
        ) from None
    if checkpoint.fingerprint() != origin.fingerprint:
        checkpoint.close()
        raise StoppedError("a worker finds another checkpoint there", path=str(origin.folder), hint=SAME)
    return checkpoint
