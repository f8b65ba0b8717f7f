"""What `inspect` says of a package's prefetch router."""

from __future__ import annotations

from msgspec import Struct

from estream_loader import Package
from estream_spec.constants import SectionType


class PrefetchSummary(Struct, frozen=True, kw_only=True):
    """A prefetch router in figures.

    Attributes:
        layers: how many it predicts for.
        tokens: of text it was trained on.
        overlap: share of needed experts that it predicted on text it had not seen, 0 to 1.
        extra: predicted experts beyond `top_k` on the same text, mean.
        writer: the program that trained it.
        sources: names of the files of that text.
        length: bytes, decoded.
    """

    layers: int
    tokens: int
    overlap: float
    extra: float
    writer: str
    sources: tuple[str, ...]
    length: int


def summarise_prefetch_router(package: Package) -> PrefetchSummary | None:
    """The prefetch router of a package, or None.

    Raises:
        FormatError: it is at fault, or for another model.
    """
    if (router := package.prefetch_router) is None:
        return None
    return PrefetchSummary(
        layers=len(router.layers),
        tokens=router.tokens,
        overlap=router.overlap,
        extra=router.extra,
        writer=router.writer,
        sources=tuple(source.name for source in router.sources),
        length=package.container.section(SectionType.PREFETCH_ROUTER).length,
    )
