"""Puts graphs compiled for accelerators into a package and takes them out, in place. FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import count

from msgspec.structs import replace

from estream_loader import Package
from estream_packer.editing import Changes, NewSection
from estream_packer.htp.targets import Target
from estream_spec.chips import Chip, chip_numbered
from estream_spec.constants import Codec, SectionType
from estream_spec.errors import PackError
from estream_spec.manifest import Binary, Manifest
from estream_spec.messagepack import encode


def compile_changes(package: Package, targets: Sequence[Target]) -> Changes:
    """What an edit does that puts binaries into a package, in place of those for the same chips.

    What is there already, bytes and all, is left alone; where that is everything, nothing is done.
    """
    binaries = {_chip(each): each for each in package.manifest.binaries}
    taken = {each.section for each in binaries.values()}
    free = (number for number in count() if number not in taken)
    sections = []
    for target in targets:
        old = binaries.get(target.chip)
        new = target.binary(next(free) if old is None else old.section)
        if new != old or not _holds(package, old, target.compiled.data):
            binaries[target.chip] = new
            sections.append(NewSection(type=SectionType.BINARY, id=new.section, data=target.compiled.data))
    return _changes(package, list(binaries.values()), sections)


def decompile_changes(package: Package, chips: Sequence[Chip]) -> Changes:
    """What an edit does that takes binaries out.

    Raises:
        PackError: the package has none for one of the chips.
    """
    binaries = {_chip(each): each for each in package.manifest.binaries}
    missing = [str(chip) for chip in chips if chip not in binaries]
    if missing:
        has = f"there are binaries for {', '.join(map(str, binaries))}" if binaries else "there are no binaries at all"
        raise PackError(f"no binary for {', '.join(missing)}", path=package.source.name, hint=has)
    return _changes(package, [binary for chip, binary in binaries.items() if chip not in chips], [])


def _changes(package: Package, binaries: Sequence[Binary], sections: Sequence[NewSection]) -> Changes:
    """What an edit does that makes these the binaries of a package, some in new sections."""
    old = package.manifest.binaries
    if not sections and tuple(binaries) == old:
        return Changes()
    manifest: Manifest = replace(package.manifest, binaries=tuple(binaries))
    stale = {(each.type, each.id) for each in sections} | {(SectionType.MANIFEST, 0)}
    stale |= {(SectionType.BINARY, each.section) for each in old if each not in binaries}
    remove = [entry for entry in package.container.entries if (entry.type, entry.id) in stale]
    return Changes(add=[*sections, NewSection(type=SectionType.MANIFEST, id=0, data=encode(manifest))], remove=remove)


def _holds(package: Package, binary: Binary, data: bytes) -> bool:
    """Whether the section of a binary holds just this data."""
    entry = package.container.section(SectionType.BINARY, binary.section)
    return entry.codec == Codec.NONE and entry.sha256 == sha256(data).digest()


def _chip(binary: Binary) -> Chip:
    return chip_numbered(binary.soc_model, binary.architecture)
