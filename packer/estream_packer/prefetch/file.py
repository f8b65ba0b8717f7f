"""A prefetch router on its way from its file into a package: held to the checkpoint before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from estream_packer.checkpoint import Checkpoint
from estream_packer.checkpoint.files import InputFile
from estream_packer.families import TensorSource
from estream_spec.limits import MAX_PREFETCH_ROUTER_LENGTH
from estream_spec.manifest import Provenance
from estream_spec.model import ModelDescription
from estream_spec.prefetch_router import (
    ROUTER_TENSORS,
    PrefetchRouter,
    check_prefetch_router,
    check_router,
    decode_prefetch_router,
)


class Subject(NamedTuple):
    """What a prefetch router is bound to, before there is a manifest."""

    model: ModelDescription
    provenance: Provenance


class PrefetchFile(NamedTuple):
    """A file that holds a prefetch router.

    Attributes:
        path: where it is.
        data: its bytes.
        router: what they mean.
    """

    path: Path
    data: bytes
    router: PrefetchRouter

    @property
    def digest(self) -> bytes:
        """SHA-256 of its bytes."""
        return sha256(self.data).digest()


def read_prefetch_file(path: Path) -> PrefetchFile:
    """Read a prefetch router.

    Raises:
        PackError: it cannot be read, or is longer than `MAX_PREFETCH_ROUTER_LENGTH` bytes.
        FormatError: it is none.
    """
    with InputFile(path) as file:
        data = file.read_all(MAX_PREFETCH_ROUTER_LENGTH)
    return PrefetchFile(path, data, decode_prefetch_router(data, str(path)))


def check_prefetch_file(
    file: PrefetchFile, subject: Subject, layers: Sequence[Mapping[str, TensorSource]], checkpoint: Checkpoint
) -> None:
    """Prove that a prefetch router was trained for just what is to be packed.

    Args:
        file: the prefetch router.
        subject: the model, and what it is made from.
        layers: where each layer's tensors come from, by the names they are stored under.
        checkpoint: where they are.

    Raises:
        FormatError: it is for another model, for other routers, or at fault.
        PackError: a tensor cannot be read.
    """
    check_prefetch_router(file.router, subject, str(file.path))
    for each in file.router.layers:
        sources = layers[each.layer]
        tensors = {name: sources[name].read(checkpoint) for name in ROUTER_TENSORS if name in sources}
        check_router(each, tensors, str(file.path))
